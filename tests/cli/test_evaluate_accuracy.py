"""`situs evaluate accuracy`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from situs.cli.main import main
from situs.train.run import load_run, make_eval_loader


def slow_accuracy(run: Path) -> float:
    loaded = load_run(run)
    right = count = 0
    for batch in make_eval_loader(loaded.config, batch=4):
        for image, label in zip(batch.images, batch.labels, strict=True):  # type: ignore[arg-type]
            with torch.no_grad():
                right += int(loaded.method.backbone(image[None]).argmax() == label)
            count += 1
    assert count == 15
    return right / count


def test_of_a_run_and_of_its_export(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "a.json"
    assert main(["evaluate", "accuracy", str(trained.one), "--batch", "4", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "data (val), 15 images"
    written = json.loads(out.read_text())
    assert written["top1"] == slow_accuracy(trained.one)
    assert (written["top5"], written["count"], written["ema"], written["step"]) == (1.0, 15, True, 6)
    assert f"{100 * written['top1']:.2f} %" in lines[2]
    assert str(trained.data.parent) not in out.read_text()

    assert main(["export", str(trained.one), "--to", str(tmp_path / "x")]) == 0
    words = ["--data", str(trained.data), "--out", str(tmp_path / "b.json")]
    assert main(["evaluate", "accuracy", str(tmp_path / "x"), *words]) == 0
    again = json.loads((tmp_path / "b.json").read_text())
    assert (again["top1"], again["count"]) == (written["top1"], 15)
    assert again["loss"] == pytest.approx(written["loss"], rel=1e-5)


def test_mistakes_are_one_sentence(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    for split in ("train", "val"):
        for old, new in (("dark", "noir"), ("light", "clair"), ("middle", "gris")):
            (other / split / new).mkdir(parents=True)
            (other / split / new / "0.png").write_bytes((trained.data / split / old / "0.png").read_bytes())
    for words, said in (
        ([str(trained.mp3)], "no trained classifier"),
        ([str(trained.one), "--data", str(other)], "'dark' there is 'clair' here"),
        ([str(trained.one), "--data", str(trained.data / "val" / "dark")], "split"),
        ([str(trained.one), "--out", "/proc/none/a.json"], "could not be written"),
    ):
        assert main(["evaluate", "accuracy", *words]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith("situs: ")
        assert printed.count("\n") == 1
        assert said in printed
