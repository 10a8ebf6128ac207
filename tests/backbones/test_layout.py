"""The roles and depths of tensors, against timm's own rule for layer decay and against names read by eye."""

from __future__ import annotations

from typing import Any, cast

import pytest
import timm
from builders import small_hf, small_vit
from timm.models._manipulate import group_with_matcher
from torch import nn

from situs.backbones import Backbone, create_backbone
from situs.backbones.timm.plain import plain_vit
from situs.errors import SitusError

SMALL = {"depth": 3, "embed_dim": 24, "num_heads": 3}
TIMM = {
    "vit_tiny_patch16_224": (32, SMALL),
    "deit_tiny_distilled_patch16_224": (32, SMALL),
    "eva02_tiny_patch14_224": (28, SMALL),
    "vit_relpos_small_patch16_224": (32, SMALL),
    "swin_tiny_patch4_window7_224": (56, {"embed_dim": 8, "depths": (1, 2), "num_heads": (1, 2)}),
}


@pytest.mark.parametrize("name", [name for name in TIMM if not name.startswith("swin")])
def test_depths_are_those_of_timms_own_layer_decay(name: str) -> None:
    size, arguments = TIMM[name]
    backbone = create_backbone(name, img_size=size, model_args=arguments)
    model = timm.create_model(name, img_size=size, **arguments)
    numbers = group_with_matcher(model.named_parameters(), model.group_matcher(coarse=False), reverse=True)
    roles = {name: role.depth for name, role in backbone.roles().items()}
    behind = {parameter for parameter in numbers if roles[f"model.{parameter}"] == backbone.depth + 1}
    # timm counts the norm behind the blocks with the last of them, or with the head.
    assert {parameter.partition(".")[0] for parameter in behind} <= {"norm", "fc_norm", "head", "head_dist"}
    for parameter in numbers.keys() - behind:
        assert roles[f"model.{parameter}"] == numbers[parameter], parameter


def parts(backbone: Backbone, part: str) -> set[str]:
    return {name.removeprefix("model.") for name, role in backbone.roles().items() if role.part == part}


@pytest.mark.parametrize("name", TIMM)
def test_every_tensor_has_a_role_and_every_block_its_attention(name: str) -> None:
    size, arguments = TIMM[name]
    backbone = create_backbone(name, img_size=size, model_args=arguments)
    assert set(backbone.roles()) == set(backbone.state_dict())
    assert not parts(backbone, "unknown")
    assert {role.depth for role in backbone.roles().values() if role.part == "qkv"} == set(range(1, backbone.depth + 1))
    assert len(backbone.block_modules()) == backbone.depth


def test_a_merge_belongs_to_the_block_behind_it_and_the_table_stands_before_all() -> None:
    size, arguments = TIMM["swin_tiny_patch4_window7_224"]
    backbone = create_backbone("swin_tiny_patch4_window7_224", img_size=size, model_args=arguments, positions="learned")
    roles = backbone.roles()
    assert roles["table"] == ("table", 0)
    assert roles["model.layers.1.downsample.reduction.weight"] == ("block", 2)
    assert roles["model.layers.1.blocks.0.attn.relative_position_bias_table"] == ("position", 2)
    assert roles["model.layers.1.blocks.1.mlp.fc1.weight"] == ("block", 3)
    assert {roles[f"model.{name}"].depth for name in ("norm.weight", "head.fc.weight")} == {4}


def test_positions_and_prefix_tokens_of_timm() -> None:
    backbone = small_vit(32, name="deit_tiny_distilled_patch16_224", depth=3, width=24, heads=3, patch_size=None)
    assert (parts(backbone, "table"), parts(backbone, "prefix")) == ({"pos_embed"}, {"cls_token", "dist_token"})
    relative = small_vit(32, name="vit_relpos_small_patch16_224", depth=3, width=24, heads=3, patch_size=None)
    assert not parts(relative, "table")
    assert {name.split(".")[3] for name in parts(relative, "position")} == {"rel_pos"}


ENCODER = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
WORDS = {"vocab_size": 31, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("kind", "entries", "table", "first"),
    [
        (
            "ViTForImageClassification",
            {**ENCODER, "image_size": 16, "patch_size": 4},
            {"vit.embeddings.position_embeddings"},
            "vit.layers.0.attention.q_proj.weight",
        ),
        (
            "BertForSequenceClassification",
            {**ENCODER, **WORDS, "max_position_embeddings": 16},
            {"bert.embeddings.position_embeddings.weight"},
            "bert.encoder.layer.0.attention.self.query.weight",
        ),
        (
            "GPT2LMHeadModel",
            {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 16, **WORDS},
            {"transformer.wpe.weight"},
            "transformer.h.0.attn.c_attn.weight",
        ),
        (
            "LlamaForCausalLM",
            {**ENCODER, **WORDS, "max_position_embeddings": 16},
            set(),
            "model.layers.0.self_attn.q_proj.weight",
        ),
    ],
)
def test_layout_of_hugging_face_models(kind: str, entries: dict, table: set[str], first: str) -> None:
    backbone = small_hf(kind, **entries)
    roles = backbone.roles()
    assert set(roles) == set(backbone.state_dict())
    assert not parts(backbone, "unknown")
    assert parts(backbone, "table") == table
    assert roles[f"model.{first}"] == ("qkv", 1)
    assert roles[f"model.{first.replace('.0.', '.1.')}"] == ("qkv", 2)
    embedding = f"model.{first.partition('.')[0]}."
    assert {role.depth for name, role in roles.items() if name.startswith(f"{embedding}emb")} <= {0}
    outside = {role for name, role in roles.items() if not name.startswith(embedding)}
    assert outside == {("head", 3)}


# --- groups: that the function stays under their keys is held by tests/locks/test_groups.py -------------------------

HF = {
    "ViTForImageClassification": {**ENCODER, "image_size": 16, "patch_size": 4},
    "Dinov2Model": {**ENCODER, "image_size": 16, "patch_size": 4, "mlp_ratio": 2},
    "BertForSequenceClassification": {**ENCODER, **WORDS, "max_position_embeddings": 16},
    "GPT2LMHeadModel": {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 16, **WORDS},
    "LlamaForCausalLM": {**ENCODER, **WORDS, "max_position_embeddings": 16},
}


def made(name: str) -> Backbone:
    if name in HF:
        return small_hf(name, **HF[name])
    size, arguments = TIMM[name]
    return create_backbone(name, img_size=size, model_args=arguments)


@pytest.mark.parametrize("name", [*TIMM, *HF])
def test_every_tensor_of_a_block_is_in_groups_that_fit_it(name: str) -> None:
    """A matrix reads the stream or writes to it, on one axis; its other axis is inside the block."""
    backbone = made(name)
    state = {key.removeprefix("model."): value for key, value in backbone.state_dict().items()}
    axes: dict[str, list[tuple[str, int]]] = {}
    for group in backbone.groups():
        for member in group.members:
            axes.setdefault(member.tensor, []).append((group.kind, member.axis))
            stretch = state[member.tensor].shape[member.axis] - member.start
            length = stretch if member.length is None else member.length
            assert length == member.outer * group.size * member.inner <= stretch
    inside = {key.removeprefix("model.") for key, role in backbone.roles().items() if role.part in ("qkv", "block")}
    assert inside <= axes.keys()
    for tensor in inside - {key for key in inside if "downsample" in key}:  # a merge reads one stream, writes another
        residual = {axis for kind, axis in axes[tensor] if kind == "residual"}
        inner = {axis for kind, axis in axes[tensor] if kind != "residual"}
        assert residual | inner == set(range(state[tensor].dim())) and not residual & inner, tensor
        assert len(residual) == 1 or state[tensor].dim() == 1, tensor


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("vit_tiny_patch16_224", ["blocks.0.heads", "blocks.1.heads", "blocks.2.heads"]),
        ("vit_relpos_small_patch16_224", ["blocks.0.heads", "blocks.1.heads", "blocks.2.heads"]),
        ("vit_srelpos_small_patch16_224", ["heads"]),  # one bias table for all layers: one order of their heads
    ],
)
def test_heads_have_an_order_a_layer_unless_all_layers_share_a_table(name: str, heads: list[str]) -> None:
    backbone = create_backbone(name, img_size=32, model_args=SMALL)
    found = [group for group in backbone.groups() if group.kind == "heads"]
    assert [group.name for group in found] == heads
    assert {group.size for group in found} == {3}
    relative = {member.tensor for group in found for member in group.members if "rel_pos" in member.tensor}
    assert bool(relative) is ("relpos" in name)


def test_a_model_without_blocks_has_no_groups() -> None:
    from situs.errors import SitusError

    backbone = create_backbone("test_resnet")
    assert backbone.block_modules() == []
    assert {role.depth for role in backbone.roles().values()} == {1}
    with pytest.raises(SitusError, match="convolutional network"):
        backbone.groups()


def test_a_norm_in_the_place_of_a_layer_scale_moves_with_the_stream_and_is_no_plain_vit() -> None:
    backbone = small_vit(28, depth=1)
    block: Any = cast("Any", backbone.model).blocks[0]
    block.ls1 = nn.LayerNorm(block.norm1.weight.numel())
    stream = next(group for group in backbone.groups() if "blocks.0.norm1.weight" in {m.tensor for m in group.members})
    assert {"blocks.0.ls1.weight", "blocks.0.ls1.bias"} <= {member.tensor for member in stream.members}
    with pytest.raises(SitusError, match="LayerNorm replaces the LayerScale"):
        plain_vit(backbone)
    block.ls1 = nn.BatchNorm1d(4)
    with pytest.raises(SitusError, match="BatchNorm1d"):
        backbone.groups()


def test_a_layer_of_another_class_is_refused_by_its_name() -> None:
    backbone = small_vit()
    model: Any = backbone.model
    model.blocks[1].mlp.fc2 = nn.Sequential(model.blocks[1].mlp.fc2)
    with pytest.raises(SitusError) as caught:
        backbone.groups()
    assert str(caught.value) == (
        "blocks.1.mlp.fc2 is a Sequential, but Situs supports only these classes here: Linear, Conv1D"
    )


TEXT: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "vocab_size": 40,
    "max_position_embeddings": 12,
}
INNER: dict[str, tuple[str, dict[str, Any], dict[str, tuple[int, set[str]]]]] = {
    "two of two queries": (
        "LlamaModel",
        {"num_key_value_heads": 2},
        {"heads": (2, {*"qkvo"}), "queries": (2, {*"qo"}), "value": (4, {*"vo"})},
    ),
    "one of four queries": (
        "LlamaModel",
        {"num_key_value_heads": 1},
        {"queries": (4, {*"qo"}), "value": (4, {*"vo"})},
    ),
    "four of one query": (
        "LlamaModel",
        {"num_key_value_heads": 4},
        {"heads": (4, {*"qkvo"}), "value": (4, {*"vo"})},
    ),
    "by head": (
        "GPTNeoXModel",
        {},
        {"heads": (4, {"query_key_value", "dense"}), "value": (4, {"query_key_value", "dense"})},
    ),
    "a single head": ("GPTNeoXModel", {"num_attention_heads": 1}, {"value": (16, {"query_key_value", "dense"})}),
    "without rotation": (
        "BertModel",
        {},
        {
            "heads": (4, {"query", "key", "value", "dense"}),
            "value": (4, {"value", "dense"}),
            "query": (4, {"query", "key"}),
        },
    ),
    "a single head without rotation": (
        "BertModel",
        {"num_attention_heads": 1},
        {"value": (16, {"value", "dense"}), "query": (16, {"query", "key"})},
    ),
}
"""Heads of keys -> the groups inside an attention: how many entries, and the layers that they move."""


@pytest.mark.parametrize("case", INNER)
def test_every_order_inside_an_attention_is_a_group(case: str) -> None:
    kind, entries, wanted = INNER[case]
    groups = {group.name.removeprefix("blocks.0."): group for group in small_hf(kind, **TEXT | entries).groups()}
    found = {
        name: (group.size, {member.tensor.split(".")[-2].removesuffix("_proj") for member in group.members})
        for name, group in groups.items()
        if name not in ("residual", "mlp")
    }
    assert found == wanted
    assert (groups["residual"].size, groups["mlp"].size) == (16, 24)
    own = {
        "query_key_value": {"attention.query_key_value.weight"},
        "q": {"self_attn.q_proj.weight", "self_attn.o_proj.weight"},
    }
    stream = {member.tensor.split(".", 2)[-1] for member in groups["residual"].members}
    for layer, tensors in own.items():
        if any(layer in layers for _, layers in wanted.values()):
            assert tensors <= stream
