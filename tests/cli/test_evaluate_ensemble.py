"""`situs evaluate accuracy`: two runs that were trained with different normalisations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from situs.cli.main import main
from situs.train.assemble import make_eval_loader
from situs.train.run import load_run


def slow_mean(trained: Any) -> float:
    """The share right of the mean probability, each run seeing its own images."""
    answers = []
    for path in (trained.one, trained.two):
        loaded = load_run(path)
        [*batches] = make_eval_loader(loaded.config)
        with torch.no_grad():
            answers.append(torch.cat([loaded.method.backbone(batch.inputs).softmax(-1) for batch in batches]))
    labels = torch.tensor([0] * 5 + [1] * 5 + [2] * 5)
    return float((sum(answers).argmax(-1) == labels).double().mean())


def test_two_runs(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "look"
    out = folder / "ensemble.json"
    assert main(["evaluate", "accuracy", str(trained.one), str(trained.two), "--out", str(folder)]) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert rows == ["data", "top-1,", "one", "two", "together", "Together", str(folder / "ensemble.html")]
    assert sorted(path.suffix for path in folder.iterdir()) == [".html", ".json", ".png", ".png"]
    assert "one model is right on" in (folder / "ensemble.html").read_text()
    assert "(val)" in (folder / "ensemble.html").read_text().partition("How this page was made")[2]
    found = json.loads(out.read_text())
    assert found["together"]["top1"] == slow_mean(trained)
    assert (found["average"], list(found["alone"])) == ("softmax", ["one", "two"])
    for name in ("one", "two"):
        single = tmp_path / name
        assert main(["evaluate", "accuracy", str(getattr(trained, name)), "--out", str(single)]) == 0
        assert json.loads((single / "accuracy.json").read_text())["top1"] == found["alone"][name]["top1"]
    words = [str(trained.one), str(trained.two), "--average", "logits", "--out", str(folder)]
    assert main(["evaluate", "accuracy", *words]) == 0
    assert json.loads(out.read_text())["together"]["loss"] != found["together"]["loss"]


def test_mistakes_are_one_sentence(trained: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (
            [str(trained.one), "--average", "logits"],
            "average=logits: applies only to several models, not to a classifier",
        ),
        (
            [str(trained.one), "--mode", "whole"],
            "mode=whole: applies only to a segmentation, not to a classifier (--mode)",
        ),
        ([str(trained.one), str(trained.one)], "one: is named twice"),
        ([str(trained.one), str(trained.mp3)], "no trained classifier"),
    ):
        assert main(["evaluate", "accuracy", *words]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith("situs: ")
        assert printed.count("\n") == 1
        assert said in printed
