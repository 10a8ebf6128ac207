"""`situs bench cost` from the command line, on a model of nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from situs.cli.main import main

WORDS = ["--model", "vit_tiny_patch16_224", "--img-size", "8", "--patch-size", "4", "--model-args.depth", "1",
         "--batch", "2", "--batches", "2,3", "--img-sizes", "8", "--depths", "1", "--patch-sizes", "4,3",
         "--warmup", "1", "--steps", "1", "--repeats", "1", "--device", "cpu"]  # fmt: skip


def test_every_point_is_drawn_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cost.json").touch()
    assert main(["bench", "cost", "supervised", *WORDS, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "cost.html and .json are there, and what this finds replaces them" in printed.err
    assert "situs: patches of 3 pixels do not fill the images and are left out" in printed.err
    found = json.loads((tmp_path / "cost.json").read_text())
    assert [point["value"] for point in found["axes"]["batch"]] == [2, 3]
    two, three = found["axes"]["batch"]
    assert three["predicted_ms"] == pytest.approx(two["ms"] * three["flops"] / two["flops"])
    pictures = sorted(path.stem for path in tmp_path.glob("*.png"))
    assert pictures == ["cost-batch", "cost-depth", "cost-image-size", "cost-patches"]


def test_a_mistake_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cost", "supervised", "--depths", "0"]) == 2
    assert capsys.readouterr().err == "situs: depths[0]=0: must be >= 1 (--depths)\n"
