"""`situs info` says what a model is, what it refuses and why."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from situs.backbones import create_backbone
from situs.backbones.base import CAPABILITIES
from situs.cli.main import main


def printed_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["info", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_facts_of_a_plain_vit(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed_json(capsys, "vit_tiny_patch16_224")
    assert shown["facts"] == {
        "class": "timm.models.vision_transformer.VisionTransformer",
        "tokens": 196,
        "grid": [14, 14],
        "width": 192,
        "depth": 12,
        "prefix_tokens": 1,
        "position": ["table"],
        "parameters": 5_717_416,  # what timm's own results table gives, 5.72 M
    }
    assert {each["name"]: each["holds"] for each in shown["capabilities"]} == dict.fromkeys(CAPABILITIES, True)


def test_sizes_are_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    one = printed_json(capsys, "vit_tiny_patch16_224", "--img-size", "160,224", "--in-chans", "1")
    assert (one["facts"]["tokens"], one["facts"]["grid"]) == (140, [10, 14])
    two = printed_json(capsys, "vit_tiny_patch16_224", "--img-size", "32", "--patch-size", "4")
    assert (two["facts"]["tokens"], two["facts"]["grid"]) == (64, [8, 8])


def test_text_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "vit_tiny_patch16_224"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "vit_tiny_patch16_224"
    for line in ("grid 14 × 14", "parameters 5,717,416", "position table", "It can do", "Locks that apply"):
        assert line in lines


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("swin_tiny_patch4_window7_224", {"depths": [1, 1], "embed_dim": 12, "num_heads": [1, 2]}),
        ("test_resnet", {}),
    ],
)
def test_refusals_come_with_their_reason(name: str, shape: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with torch.device("meta"):
        refusals = create_backbone(name, model_args=shape).refusals
    assert refusals
    flags = [word for key, value in shape.items() for word in (f"--model-args.{key}", json.dumps(value))]
    shown = printed_json(capsys, name, *flags)
    assert {each["name"]: each["reason"] for each in shown["capabilities"] if not each["holds"]} == refusals
    rows = next(each for each in shown["locks"] if each["name"] == "rows")
    assert (rows["holds"], rows["reason"]) == (False, refusals["rows"])


def test_no_values_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from situs.models import describe

    devices, real = set(), describe.describe
    monkeypatch.setattr(
        describe, "describe", lambda b: devices.update(p.device.type for p in b.model.parameters()) or real(b)
    )
    assert main(["info", "vit_base_patch16_224", "--json"]) == 0
    assert devices == {"meta"}
    assert torch.zeros(1).device.type == "cpu"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["nosuchmodel"], "'nosuchmodel'"),
        (["vit_tny_patch16_224"], "vit_tiny_patch16_224"),
        (["vit_tiny_patch16_224", "--patch-size", "7", "--img-size", "30"], "7"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("situs: ")
    assert printed.err.count("\n") == 1
    assert named in printed.err
