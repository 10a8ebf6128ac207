"""`situs info --like`: the exit status, the table, the JSON and the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from builders import small_vit
from safetensors.torch import save_file

from situs.audit.attacks.crafted import craft
from situs.cli.main import main

SHAPE = ["--img-size", "16", "--patch-size", "4", "--model-args", '{"depth": 3, "embed_dim": 96, "num_heads": 2}']


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    honest = small_vit(depth=3, width=96, num_classes=1000)
    for name, model in {"honest": honest, "crafted": craft(honest)}.items():
        save_file(model.model.state_dict(), folder / f"{name}.safetensors")
    return {name: f"vit_tiny_patch16_224={folder / name}.safetensors" for name in ("honest", "crafted")}


def test_chosen_weights_end_with_3_and_others_with_0(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", files["crafted"], "--like", files["honest"], *SHAPE, "--out", str(tmp_path)]) == 3
    text = capsys.readouterr().out
    assert "noticed: its weights look crafted" in text and "parallel neurons" in text
    assert "look crafted" in (tmp_path / "chosen.html").read_text()
    assert json.loads((tmp_path / "chosen.json").read_text())["noticed"] is True
    assert main(["info", files["honest"], "--like", "random", *SHAPE, "--out", "none", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["noticed"], shown["like"], shown["status"]) == (False, None, 0) and 0 <= shown["score"] <= 1


def test_mistakes_are_one_sentence(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    for words, reason in (
        ([files["honest"], "--like", "random", "--verify"], "give only one of them"),
        ([files["honest"], "--like", "no/such/model"], "no/such/model"),
        (["vit_tiny_patch16_224", "--like", "random"], "set weights to a file"),
        (
            [files["honest"], "--like", "random", "--steps", "1"],
            "--steps applies only with --verify; leave --steps out",
        ),
    ):
        assert main(["info", *words, *SHAPE]) == 2
        error = capsys.readouterr().err
        assert reason in error and len(error.splitlines()) == 1
