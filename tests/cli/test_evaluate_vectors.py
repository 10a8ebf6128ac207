"""`situs evaluate position --kind vectors`: one model or several, from runs, exports and names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from situs.cli.main import main

RELPOS = ["vit_relpos_small_patch16_224", "--weights", "random", "--model-args.depth", "1"]


def test_two_runs_side_by_side(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "look"
    assert (
        main(["evaluate", "position", "--kind", "vectors", str(trained.one), str(trained.mp3), "--out", str(out)]) == 0
    )
    printed = capsys.readouterr().out
    assert printed.rstrip().splitlines()[-1].startswith(str(out / "positions.html"))
    numbers = json.loads((out / "positions.json").read_text())
    one, mp3 = numbers["models"]
    assert (one["name"], one["kind"], one["grid"], one["note"]) == ("one", "learned table", [2, 2], None)
    assert "training" in mp3["note"] and "position vectors" in mp3["note"]
    assert one["regression"]["folds"] == 4  # as many as there are places
    assert [each["name"] for each in numbers["references"]] == ["sin-cos (reference)", "random (reference)"]
    pictures = {path.name for path in out.glob("*.png")}
    assert {"positions-pca-2d.png", "positions-pca-3d-2.png", "positions-energy.png"} <= pictures
    page = (out / "positions.html").read_text()
    assert mp3["note"] in page
    assert str(tmp_path) not in page


@pytest.mark.usefixtures("undrawn")
def test_a_name_carries_its_weights(tmp_path: Path) -> None:
    from situs.backbones import create_backbone

    name = "test_vit"
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    backbone = create_backbone(name, img_size=64)
    for number, file in enumerate(files):
        state = {key: value.contiguous() for key, value in backbone.model.state_dict().items()}
        state["pos_embed"] = state["pos_embed"] + number * backbone.model.pos_embed.detach().roll(1, 1)
        save_file(state, file)
    words = [f"{name}={files[0]}", name, "--weights", str(files[1]), "--img-size", "64", "--out", str(tmp_path / "o")]
    assert main(["evaluate", "position", "--kind", "vectors", *words]) == 0
    models = json.loads((tmp_path / "o" / "positions.json").read_text())["models"]
    assert [model["name"] for model in models] == [name, f"{name} (b.safetensors)"]
    assert models[0]["explained_variance"] != models[1]["explained_variance"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "MODEL…: must be given"),
        (RELPOS, "biases between pairs of tokens, so no position has a vector; `situs evaluate attention`"),
        (["test_resnet", "--weights", "random"], "it is a convolutional network and has no tokens"),
        (
            ["vit_tiny_patch16_224"],
            "is neither a run nor an export; if you mean the timm model of this name, set weights",
        ),
        (["runs/gone"], "situs: runs/gone: no such run, export or file (MODEL…)\n"),
        (["vit_tiny_patch16_224=random", "--folds", "1"], "folds=1: "),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "position", "--kind", "vectors", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_the_same_model_twice_cannot_be_told_apart(trained: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "position", "--kind", "vectors", *[str(trained.one)] * 3]) == 2
    assert "one: is named twice" in capsys.readouterr().err
