"""How a verb ends: on the terminal and in files, by the same words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from situs.cli.main import main
from situs.cli.result import present
from situs.measure.knn import LayerAccuracy, LayerKnn
from situs.results import Origin, Provenance


def test_a_result_is_printed_published_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def result(identity: str) -> LayerKnn:
        made = Provenance({"data": "val"}, (Origin("mp3", identity),), ("2 left out", "2 left out"))
        return LayerKnn(
            (LayerAccuracy(1, "mean", 0.5, 0.5),), 8, 4, None, 3, None, torch.eye(2), ("a", "b"), provenance=made
        )

    present(result("1"), tmp_path)
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "val, 4 images, k = 3 of 8, equal weights",
        "  after block  mean of the patches, %  balanced, %",
        "  1            50.00                   50.00",
        "",
        result("1").summary().sentence,
        str(tmp_path / "knn.html"),
    ]
    assert printed.err == "situs: 2 left out\n"
    present(result("2"), tmp_path)
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == str(tmp_path / "mp3" / "knn.html")
    said = f"situs: {tmp_path / 'knn.html'} shows another model and was kept, so the new page is in {tmp_path / 'mp3'}"
    assert printed.err.splitlines()[-1] == said


def test_two_models_looked_at_by_default_keep_a_page_each(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for run in (trained.one, trained.two, trained.one):
        assert main(["evaluate", "accuracy", str(run), "--device", "cpu"]) == 0
    assert "<title>one: accuracy</title>" in (tmp_path / "results" / "accuracy.html").read_text()
    assert "<title>two: accuracy</title>" in (tmp_path / "results" / "two" / "accuracy.html").read_text()
    assert sorted(path.name for path in (tmp_path / "results").iterdir() if path.is_dir()) == ["two"]
