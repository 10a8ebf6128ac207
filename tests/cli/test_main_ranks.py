"""Evaluations under torchrun: two ranks share the images, and come to the numbers of one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from launch import torchrun

from situs.cli.main import SHARED, main, quiet_torch, run_on_ranks

if TYPE_CHECKING:
    from conftest import Trained


def same(found: Any, expected: Any) -> None:
    """Equal, but for the last digits of numbers that batches of another size were summed to."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            same(found[key], expected[key])
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)  # distances of features that are nearly equal
    else:
        assert found == expected


def on_two_ranks(file: Path) -> str:
    """What two gloo ranks print over the command lines in the file."""
    script = Path(__file__).with_name("evaluate_ranks.py")
    return torchrun(script, file)[0]


@pytest.mark.slow
def test_two_ranks_count_each_image_once(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--count 7 and batches of 4 leave a last batch of three: one rank takes two of them, the other one."""
    lines = {
        "knn": f"evaluate knn {trained.one} --count 7 --train-count 11 --k 3 --batch 4 --device cpu --out OUT",
        "accuracy": f"evaluate accuracy {trained.one} --device cpu --batch 4 --out OUT",
        "consistency": f"evaluate consistency {trained.one} --count 7 --batch 4 --ratios 0,.5 --device cpu --out OUT",
        "ensemble": f"evaluate accuracy {trained.one} {trained.two} --count 7 --batch 4 --device cpu --out OUT",
        "position": f"evaluate position {trained.mp3} --count 7 --batch 5 --device cpu --out OUT",
    }
    one, two = tmp_path / "one", tmp_path / "two"
    for line in lines.values():
        assert main(line.replace("OUT", str(one)).split()) == 0
    alone = capsys.readouterr().out
    file = tmp_path / "lines.txt"
    file.write_text("\n".join(line.replace("OUT", str(two)) for line in lines.values()))
    printed = on_two_ranks(file)
    assert printed.count("7 images") == alone.count("7 images") == 4  # the first rank alone speaks
    assert printed.count(".html") == alone.count(".html") == 5
    for name in lines:
        found, expected = (json.loads((folder / f"{name}.json").read_text()) for folder in (two, one))
        same(found, expected)
    assert json.loads((two / "accuracy.json").read_text())["count"] == 15
    assert [row["count"] for row in json.loads((two / "consistency.json").read_text())["rows"]] == [7] * 4
    assert json.loads((two / "ensemble.json").read_text())["together"]["count"] == 7


def test_torch_is_told_to_be_quiet_on_ranks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCH_CPP_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    quiet_torch()
    assert "TORCH_CPP_LOG_LEVEL" not in os.environ
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    quiet_torch()
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "ERROR"
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    quiet_torch()
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "INFO"  # the user's own


def test_a_verb_that_is_not_shared_is_the_first_rank_s(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "features" not in SHARED
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert run_on_ranks("features", lambda: pytest.fail("is not this rank's work")) == 0
    monkeypatch.setenv("RANK", "0")
    assert run_on_ranks("features", lambda: len({"RANK", "WORLD_SIZE"} & os.environ.keys()) or 5) == 5


def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert run_on_ranks("evaluate accuracy", lambda: print("heard")) == 0
    monkeypatch.setenv("RANK", "0")
    assert run_on_ranks("evaluate accuracy", lambda: print("spoken") or 3) == 3
    assert capsys.readouterr().out == "spoken\n"
