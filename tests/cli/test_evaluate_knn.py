"""`situs evaluate knn`: a curve over the layers, and one sentence for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from situs.cli.main import main


def test_a_run_gives_a_row_for_each_layer(
    outline: Any, trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(trained.mp3), "--k", "5", "--train-count", "20", "--device", "cpu", "--out", str(tmp_path)]
    assert main(["evaluate", "knn", *words]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == str(tmp_path / "knn.html")
    assert "15 images, k = 5 of 20" in printed
    numbers = json.loads((tmp_path / "knn.json").read_text())
    layers = [(row["pool"], row["layer"]) for row in numbers["rows"]]
    assert layers == [("cls", 1), ("cls", 2), ("mean", 1), ("mean", 2)]
    assert (numbers["bank"], numbers["count"], numbers["temperature"]) == (20, 15, 0.07)
    assert max(row["accuracy"] for row in numbers["rows"]) > 0.6  # three greys far apart
    assert (tmp_path / "knn-layers.png").is_file()
    assert main(["evaluate", "knn", *words, "--temperature", "None"]) == 0
    assert json.loads((tmp_path / "knn.json").read_text())["temperature"] is None
    assert "equal weights" in (tmp_path / "knn.html").read_text()
    assert outline((tmp_path / "knn.html").read_text()) == [
        "First screen, 1 figure",
        "Numbers, 2 rows",
        "Class by class, 3 rows",
        "What the numbers mean, 1 text",
        "How this page was made, facts",
    ]
    assert "(val)" in (tmp_path / "knn.html").read_text().partition("How this page was made")[2]


def test_mistakes_are_one_sentence(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    rest = ["--train-count", "12", "--device", "cpu", "--out", str(tmp_path / "o")]
    for words, said in (
        ([str(trained.mp3), "--k", "20"], "k=20: must be in [1, 12]"),
        ([str(trained.mp3), "--split", "train"], "evaluate on val or test (--split)"),
        ([str(trained.mp3), "--data", str(tmp_path / "empty")], "empty"),
        (["test_resnet", "--weights", "random", "--data", str(trained.data)], "has no tokens"),
    ):
        assert main(["evaluate", "knn", *words, *rest]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
