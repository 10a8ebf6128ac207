"""`situs info` says what a model is, what it refuses and why."""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from builders import small_swin
from transformers import BertConfig

from situs.backbones import create_backbone
from situs.backbones.base import CAPABILITIES
from situs.cli import info
from situs.cli.main import main
from situs.errors import SitusError
from situs.methods import create_method

SMALL = {"vit": {"depth": 1}, "swin": {"depths": (1, 1, 1, 1), "embed_dim": 24}}


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


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "resnet50"])
def test_refusals_come_with_their_reason(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with torch.device("meta"):
        refusals = create_backbone(name).refusals
    assert refusals
    shown = printed_json(capsys, name)
    assert {each["name"]: each["reason"] for each in shown["capabilities"] if not each["holds"]} == refusals
    rows = next(each for each in shown["locks"] if each["name"] == "rows")
    assert (rows["holds"], rows["reason"]) == (False, refusals["rows"])


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("bert", {"droppos", "mae", "mjp", "mp3", "supervised"}),
        ("resnet18", {"droppos", "mae", "mjp", "mp3"}),
        ("vit_tiny_patch16_224", set()),
        ("swin_tiny_patch4_window7_224", {"droppos", "mae", "mjp", "mp3"}),
        ("vit_small_patch16_rope_224", {"mjp"}),
    ],
)
def test_a_method_applies_where_it_can_be_made_with_its_defaults(name: str, refused: set[str]) -> None:
    with torch.device("meta"):
        backbone = create_backbone(BertConfig(num_hidden_layers=1) if name == "bert" else name)
    verdicts = {each.name: each for each in info.describe(backbone).methods}
    assert {method for method, verdict in verdicts.items() if not verdict.holds} == refused
    for method, verdict in verdicts.items():
        if verdict.holds:
            small = next((sizes for kind, sizes in SMALL.items() if name.startswith(kind)), {})
            assert create_method(method, create_backbone(name, model_args=small)).backbone.name == name
            continue
        if name == "bert":  # from Python a method may learn from words; the command line reads images
            assert verdict.reason == backbone.refusals["images"]
            continue
        with pytest.raises(SitusError) as caught, torch.device("meta"):
            create_method(method, backbone)
        assert verdict.reason in str(caught.value)
    if name == "resnet18":
        assert "choose unknown=False, dal='none'" in verdicts["mjp"].reason


def test_a_verdict_leaves_the_backbone_as_it_was() -> None:
    backbone = small_swin(448, depths=(1, 1, 1, 1), heads=(1, 1, 1, 1), positions="sincos")
    before = [block.dynamic_mask for stage in backbone.model.layers for block in stage.blocks]
    assert {each.name: each.holds for each in info.describe(backbone).methods}["droppos"]
    assert [block.dynamic_mask for stage in backbone.model.layers for block in stage.blocks] == before


def test_methods_are_judged_by_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    class Needy:
        needs = ("tokens", "context")
        Config = dict

        def __init__(self, backbone: Any, config: Any) -> None:
            raise RuntimeError("a tensor without values has none")

    class Modest(Needy):
        needs = ()

    monkeypatch.setattr(info, "_methods", lambda: {"needy": Needy, "modest": Modest})
    backbone = create_backbone("resnet50")
    about = "Cross entropy: the baseline."
    module = ModuleType("a_method_for_tests", f"\n{about}\n\nAnd more about it.\n")
    monkeypatch.setitem(sys.modules, "a_method_for_tests", module)
    Needy.__module__ = Modest.__module__ = "a_method_for_tests"
    needy, modest = info.describe(backbone).methods
    assert needy == info.Verdict("needy", about, False, backbone.refusals["context"])
    assert modest == info.Verdict("modest", about, True)


def test_no_values_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = set()
    describe = info.describe
    monkeypatch.setattr(
        info, "describe", lambda b: devices.update(p.device.type for p in b.model.parameters()) or describe(b)
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
