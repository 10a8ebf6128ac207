"""`situs audit gradients`: table, files, gate, and what it says of a model that no attack fits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from situs.cli.main import main

NAME = "test_vit"  # timm's own tiny model for tests: 160 pixels in patches of 16, 64 channels


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import numpy as np
    from PIL import Image

    folder = tmp_path_factory.mktemp("photographs")
    chance = np.random.default_rng(0)
    for number in range(3):
        Image.fromarray(chance.integers(0, 256, (70, 64, 3), dtype="uint8")).save(folder / f"{number}.png")
    return folder


def test_table_page_and_file(photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "audit"
    words = ["audit", "gradients", NAME, "--images", str(photographs), "--img-size", "64", "--out", str(out)]
    assert main([*words, "--count", "2"]) == 0
    shown = capsys.readouterr().out
    assert "none: 2 of 2 images recovered exactly from one step (best attack patchembed" in shown
    assert "model.pos_embed is not sent" in shown
    told = json.loads((out / "gradients.json").read_text())
    assert {(p["attack"], p["applies"]) for p in told["pairs"]} >= {("patchembed", True), ("patchembed", False)}
    assert len(told["pairs"]) == 8
    assert len(told["pairs"][0]["images"]) == 2
    page = (out / "report.html").read_text()
    assert page.index("Threat model") < page.index("Verdict") < page.index("What would reduce the leak")
    assert str(photographs.parent) not in page + json.dumps(told)


def test_the_gate_in_a_shell_script(photographs: Path, tmp_path: Path) -> None:
    verb = f"{sys.executable} -m situs audit gradients {NAME} --images {photographs} --img-size 64 --count 1"
    script = f"{verb} --attack patchembed --defence $1 --fail-above psnr=20 --out {tmp_path}/audit"
    for defence, status in (("none", 3), ("no-pe-gradient", 0)):
        command = ["sh", "-c", script, "sh", defence]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
    assert (tmp_path / "audit" / "report.html").is_file()


@pytest.mark.parametrize(
    ("model", "reason"), [("resnet18", "convolutional"), ("vit_relpos_small_patch16_224", "bias between pairs")]
)
def test_a_model_without_an_attack(
    model: str, reason: str, photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["audit", "gradients", model, "--images", str(photographs), "--count", "1", "--out", str(tmp_path)]
    assert main([*words, "--fail-above", "psnr=20"]) == 0
    shown = capsys.readouterr().out
    assert reason in shown
    assert "No attack of this audit applies" in shown
    assert reason in (tmp_path / "report.html").read_text()
    assert [p["applies"] for p in json.loads((tmp_path / "gradients.json").read_text())["pairs"]] == [False] * 8


def test_a_run_and_its_labels(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["audit", "gradients", str(trained.one), "--images", str(trained.data), "--count", "3"]
    assert main([*words, "--attack", "patchembed", "--defence", "none", "--out", str(tmp_path)]) == 0
    assert "3 of 3 images recovered exactly" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--attack", "magic"], "matching, patchembed"),
        (["--defence", "fog"], "no-pe-gradient"),
        (["--fail-above", "beauty=3", "--count", "1", "--img-size", "64"], "psnr"),
        (["--count", "0"], "--count"),
        (["--lpips", "absent.safetensors"], "no such file"),
    ],
)
def test_mistakes(
    words: list[str], said: str, photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", "gradients", NAME, "--images", str(photographs), "--out", str(tmp_path), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_wrong_lpips_file(photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    save_file({"lin0.weight": torch.ones(1)}, tmp_path / "w.safetensors")
    words = ["audit", "gradients", NAME, "--images", str(photographs), "--lpips", str(tmp_path / "w.safetensors")]
    assert main(words) == 2
    assert "sha256" in capsys.readouterr().err
