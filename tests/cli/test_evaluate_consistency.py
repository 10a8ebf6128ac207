"""`situs evaluate consistency`: numbers, page and pictures of a run; wrong inputs are one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from situs.cli.main import main


def test_a_run_gives_table_page_and_numbers(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", "consistency", str(trained.one), "--ratios", "0,.5,1", "--out", str(tmp_path)]
    assert main([*words, "--device", "cpu", "--batch", "4"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == str(tmp_path / "consistency.html")
    assert "15 images" in printed
    numbers = json.loads((tmp_path / "consistency.json").read_text())
    assert numbers["feature"] == "CLS token"
    assert "zero vector" in numbers["unknown"]
    rows = numbers["rows"]
    assert [(row["ratio"], row["masked"], row["told"]) for row in rows] == [
        (ratio, masked, told) for ratio, masked in ((0.0, 0), (0.5, 2), (1.0, 4)) for told in (True, False)
    ]
    assert rows[0]["consistency"] == 1.0
    assert rows[0]["top1"] == rows[1]["top1"]
    page = (tmp_path / "consistency.html").read_text()
    assert "(val)" in page.partition("How this page was made")[2]
    assert "With 50 % of the patches shuffled and the mask hidden from the model" in page
    assert page.count("<img") == 3
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        f"consistency-{name}.png" for name in ("images", "norms", "shares")
    ]


def test_mistakes_are_one_sentence(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    cases = {
        ("no trained classifier",): [str(trained.mp3)],
        ("no trained classifier",) * 2: ["test_vit", "--weights", "random"],
        (str(empty), "--data"): [str(trained.one), "--data", str(empty)],
        ("--weights",): [str(empty)],
        ("ratios=1.5: must be in [0, 1]", "--ratios"): [str(trained.one), "--ratios", "1.5"],
    }
    for said, words in cases.items():
        assert main(["evaluate", "consistency", *words, "--device", "cpu", "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert all(part in error for part in said), error
    assert not (tmp_path / "out").exists()


def test_images_without_labels_have_no_top1(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, image in enumerate(sorted((trained.data / "val").rglob("*.png"))):
        (flat / f"{number}.png").write_bytes(image.read_bytes())
    words = ["evaluate", "consistency", str(trained.one), "--data", str(flat), "--split", "train", "--ratios", "0.5"]
    assert main([*words, "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    numbers = json.loads((tmp_path / "out" / "consistency.json").read_text())
    assert numbers["no_top1_why"] == "the data has no labels"
    assert [row["top1"] for row in numbers["rows"]] == [None, None]
    assert "There is no top-1" in (tmp_path / "out" / "consistency.html").read_text()
