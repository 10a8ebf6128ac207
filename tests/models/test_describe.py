"""Which methods apply to a model: those that can be made over it with their defaults, and why not the others."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from builders import small_hf, small_swin
from transformers import BertConfig

from situs.backbones import create_backbone
from situs.backbones.shapes import shapes_alone
from situs.errors import SitusError
from situs.methods import METHODS, create_method
from situs.models import describe
from situs.results import show

SMALL = {"vit": {"depth": 1, "embed_dim": 24, "num_heads": 2}, "swin": {"depths": (1, 1, 1, 1), "embed_dim": 24}}


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("bert", {"detection", "droppos-official", "language", "mae", "mjp-official", "part", "segmentation"}),
        ("test_resnet", {*METHODS} - {"supervised"}),
        ("vit_tiny_patch16_224", {"language"}),
        ("swin_tiny_patch4_window7_224", {*METHODS} - {"detection", "segmentation", "supervised"}),
        ("vit_small_patch16_rope_224", {"language", "mjp", "mjp-official"}),
    ],
)
def test_a_method_applies_where_it_can_be_made_with_its_defaults(name: str, refused: set[str]) -> None:
    with shapes_alone():
        backbone = create_backbone(BertConfig(num_hidden_layers=1) if name == "bert" else name)
    verdicts = {each.name: each for each in describe.describe(backbone).methods}
    assert {method for method, verdict in verdicts.items() if not verdict.holds} == refused
    for method, verdict in verdicts.items():
        if verdict.holds:
            if name == "bert":  # whose backbone is no name
                assert create_method(method, create_backbone(BertConfig(num_hidden_layers=1, hidden_size=12))).config
                continue
            small = next((sizes for kind, sizes in SMALL.items() if name.startswith(kind)), {})
            with shapes_alone():
                made = create_method(method, create_backbone(name, model_args=small), classes=2)
            assert made.backbone.name == name
            continue
        if name == "bert" and method != "language":  # from Python a method may learn from words
            assert verdict.reason == backbone.refusals["images"]
            continue
        with pytest.raises(SitusError) as caught, torch.device("meta"):
            create_method(method, backbone, classes=2)
        assert verdict.reason in str(caught.value)
    if name == "test_resnet":
        assert "choose unknown=False, dal='none'" in verdicts["mjp"].reason


def test_words_need_no_images_where_a_method_reads_text() -> None:
    backbone = small_hf("BertModel", num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16)
    assert describe._method(backbone, "mp3").holds
    pixels = describe._method(backbone, "mae")
    assert not pixels.holds and backbone.refusals["images"] in pixels.reason


def test_what_cannot_be_built_over_one_patch_says_why() -> None:
    with shapes_alone():
        backbone = create_backbone("vit_tiny_patch16_224", img_size=16)
    verdicts = {each.name: each for each in describe.describe(backbone).methods}
    assert {name for name, each in verdicts.items() if not each.holds} == {
        *("droppos", "droppos-official", "language", "mae", "mjp-official", "part")
    }
    reason = (
        "mask_ratio=0.75: out of 1 patch, at least one patch must be hidden, and at least one patch must stay visible"
    )
    assert verdicts["mae"].reason == reason
    assert verdicts["droppos"].reason.startswith(
        "position_mask_ratio=0.75: is so small that no position of the 1 visible patch"
    )


def test_a_verdict_leaves_the_backbone_as_it_was() -> None:
    backbone = small_swin(448, depths=(1, 1, 1, 1), heads=(1, 1, 1, 1), positions="sincos")
    before = [block.dynamic_mask for stage in backbone.model.layers for block in stage.blocks]
    assert {each.name: each.holds for each in describe.describe(backbone).methods}["droppos"]
    assert [block.dynamic_mask for stage in backbone.model.layers for block in stage.blocks] == before


def test_people_read_sizes_lists_and_numbers_in_words() -> None:
    info = describe.describe(small_swin(64, positions="sincos"))
    facts, can, methods, locks = info.tables()
    shown = {name: show(value) for name, value in facts.rows}
    assert facts.title == info.model and set(shown) == {name.replace("_", " ") for name in info.facts}
    height, width = info.facts["grid"]
    assert shown["grid"] == f"{height} × {width}" and shown["output grid"] == f"{height // 2} × {width // 2}"
    assert shown["position"] == "table"
    assert shown["parameters"] == f"{info.facts['parameters']:,}"
    for table, verdicts in ((can, info.capabilities), (methods, info.methods), (locks, info.locks)):
        assert table.rows == [(each.name, each.holds, each.reason or each.about) for each in verdicts]
    several = replace(info, facts={"position": ["table", "rope"], "size": (3, 4)}).tables()[0]
    assert several.rows == [("position", "table + rope"), ("size", "3 × 4")]
    without = {name: show(value) for name, value in describe.describe(create_backbone("test_resnet")).tables()[0].rows}
    assert (without["position"], without["tokens"]) == ("none added", "0")


def test_methods_are_judged_by_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    class Needy:
        needs, needs_targets = ("tokens", "context"), ()
        Config = dict

        def __init__(self, backbone: Any, config: Any) -> None:
            raise RuntimeError("a tensor without values has none")

    class Modest(Needy):
        needs = ()

    monkeypatch.setattr(describe, "METHODS", {"needy": Needy, "modest": Modest})
    backbone = create_backbone("test_resnet")
    about = "Cross entropy: the baseline."
    module = ModuleType("a_method_for_tests", f"\n{about}\n\nAnd more about it.\n")
    monkeypatch.setitem(sys.modules, "a_method_for_tests", module)
    Needy.__module__ = Modest.__module__ = "a_method_for_tests"
    needy, modest = describe.describe(backbone).methods
    assert needy == describe.Verdict("needy", about, False, backbone.refusals["context"])
    assert modest == describe.Verdict("modest", about, True)
