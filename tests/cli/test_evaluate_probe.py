"""`situs evaluate probe`: both kinds, before and after, and one sentence for what cannot be probed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from situs.cli.main import main


def test_positions_before_and_after(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(trained.mp3), "--after", str(trained.one), "--device", "cpu", "--out", str(tmp_path)]
    assert main(["evaluate", "probe", *words]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "probe-position.html")
    numbers = json.loads((tmp_path / "probe-position.json").read_text())
    assert list(numbers["models"]) == ["mp3", "one"]
    for found in numbers["models"].values():
        assert (found["patches"], found["train_images"], len(found["tried"])) == (15 * 3, 24, 5)
        assert 0 <= found["accuracy"] <= 1
        assert found["weight_decay"] in {each["weight_decay"] for each in found["tried"]}
    assert "no positions" in numbers["models"]["mp3"]["unknown"]
    assert "zero vector" in numbers["models"]["one"]["unknown"]
    page = (tmp_path / "probe-position.html").read_text()
    assert "(val)" in page.partition("How the numbers were measured")[2]
    assert page.count("<img") == 2
    assert "For one, the share of right predictions is" in page


def test_classes(trained: Any, tmp_path: Path) -> None:
    words = [str(trained.mp3), "--kind", "class", "--train-count", "20", "--device", "cpu", "--out", str(tmp_path)]
    assert main(["evaluate", "probe", *words]) == 0
    found = json.loads((tmp_path / "probe-class.json").read_text())["models"]["mp3"]
    assert (found["count"], found["train_images"], len(found["tried"])) == (15, 20, 5)
    assert found["accuracy"] > 0.6  # three greys far apart
    assert "dark" not in found
    assert (tmp_path / "probe-class-classes.png").is_file()


def test_mistakes_are_one_sentence(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat = tmp_path / "flat"
    for split in ("train", "val"):
        (flat / split).mkdir(parents=True)
        for number in range(4):
            image = trained.data / split / "dark" / f"{number}.png"
            (flat / split / f"{number}.png").write_bytes(image.read_bytes())
    (tmp_path / "empty").mkdir()
    resnet = ["test_resnet", "--weights", "random", "--img-size", "8", "--data", str(trained.data)]
    for words, said in (
        (resnet, "it is a convolutional network and has no tokens"),
        ([*resnet, "--kind", "class"], "it is a convolutional network and has no tokens"),
        ([str(trained.mp3), "--kind", "class", "--data", str(flat)], "has no labels to compare with (--data)"),
        ([str(trained.mp3), "--data", str(tmp_path / "empty")], "empty"),
        ([str(trained.mp3), "--split", "train"], "evaluate on val or test (--split)"),
        ([str(trained.mp3), "--pool", "cls"], "pool=cls: applies only to class, not to position (--pool)"),
        ([str(trained.mp3), "--kind", "class", "--void", "0"], "applies only to segments, not to class (--void)"),
        ([str(trained.mp3), "--train-count", "0"], "train_count=0: must be >= 1 (--train-count)"),
    ):
        assert main(["evaluate", "probe", *words, "--device", "cpu", "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
