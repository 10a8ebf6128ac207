"""Every backbone family through the same demands, in float64, at a rectangular size, against timm's own forward.

The slow reference for contexts and subsets is timm's own model with `scaled_dot_product_attention` replaced by one
that shuts out the keys that are not in the context: nothing of `situs.backbones.block` takes part in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from situs.backbones import create_backbone
from situs.backbones.base import CAPABILITIES, Backbone, join
from situs.backbones.timm.backbone import FAMILIES
from situs.core.tokens import take
from situs.errors import SitusError

SMALL: dict[str, Any] = {"depth": 2, "embed_dim": 32, "num_heads": 4}
EXAMPLES: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": dict(img_size=(64, 96), model_args=SMALL),
    "vit_small_patch16_224": dict(img_size=(16, 24), patch_size=4, in_chans=1, model_args=SMALL),
    "deit_tiny_distilled_patch16_224": dict(img_size=(64, 96), model_args=SMALL),
    "deit3_small_patch16_224": dict(img_size=(64, 96), model_args=SMALL),
    "vit_base_patch16_reg4_gap_256": dict(img_size=(64, 48), model_args=SMALL),
    "vit_small_patch14_reg4_dinov2": dict(img_size=(56, 84), model_args=SMALL),
    "vit_base_patch16_clip_224": dict(img_size=(64, 48), model_args=SMALL),
    "vit_base_patch16_siglip_224": dict(img_size=(64, 48), model_args=SMALL),
    "eva02_tiny_patch14_224": dict(img_size=(56, 84), model_args=SMALL),
    "vit_small_patch16_rope_224": dict(img_size=(64, 96), model_args=SMALL),
    "vit_small_patch16_rope_ape_224": dict(img_size=(64, 96), model_args=SMALL),
    "vit_small_patch16_rope_mixed_224": dict(img_size=(64, 96), model_args=SMALL),
    "vit_small_patch16_rope_mixed_ape_224": dict(img_size=(64, 96), model_args=SMALL),
    "vit_small_patch16_dinov3": dict(img_size=(64, 96), model_args=SMALL),
    "vit_relpos_small_patch16_224": dict(img_size=(64, 96), model_args=SMALL),
    "vit_relpos_base_patch16_clsgap_224": dict(img_size=(64, 48), model_args=SMALL),
    "vit_srelpos_small_patch16_224": dict(img_size=(64, 96), model_args=SMALL),
    "vit_relpos_small_patch16_rpn_224": dict(img_size=(64, 96), model_args=SMALL),
    "beit_base_patch16_224": dict(img_size=(64, 96), model_args=SMALL),
    "beitv2_base_patch16_224": dict(img_size=(64, 48), model_args={**SMALL, "use_shared_rel_pos_bias": True}),
    "swin_tiny_patch4_window7_224": dict(
        img_size=(64, 96), positions="learned", model_args={"depths": (1, 1, 2, 1), "embed_dim": 24}
    ),
    "swinv2_tiny_window8_256": dict(
        img_size=(64, 96),
        positions="learned",
        model_args={"depths": (1, 1, 2, 1), "embed_dim": 24, "window_size": (2, 3)},
    ),
    "resnet26": dict(model_args={"layers": (1, 2, 1, 1), "channels": (8, 16, 16, 24)}),
}
TOLERANCE = 1e-10
FLAT = [name for name in EXAMPLES if not name.startswith(("swin", "resnet"))]
ROTARY = [name for name in EXAMPLES if "rope" in name or "eva02" in name or "dinov3" in name]


def make(name: str) -> Backbone:
    return deepcopy(made_once(name))


@cache
def made_once(name: str) -> Backbone:
    torch.manual_seed(0)
    backbone = create_backbone(name, **EXAMPLES[name]).double().eval()
    if name.startswith("vit") and "mixed" in name:
        backbone.model.rope.float()  # timm computes mixed frequencies in float32 whatever the model's type
    for parameter in backbone.parameters():
        if parameter.dim() <= 2:  # biases, norms, layer scales and bias tables must all matter
            nn.init.normal_(parameter, std=0.2)
    return backbone


def images(backbone: Any, batch: int = 2) -> Tensor:
    torch.manual_seed(1)
    size = (64, 64) if backbone.num_tokens == 0 else backbone.input.shape
    return torch.randn(batch, backbone.input.channels, *size, dtype=torch.float64)


@contextmanager
def only_keys(visible: Tensor) -> Iterator[None]:
    """timm's own attention with all keys shut out but `visible` [B, S]."""
    kept = torch.nn.functional.scaled_dot_product_attention

    def masked(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **rest: Any) -> Tensor:
        logits = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        logits = logits if attn_mask is None else logits + attn_mask
        return logits.masked_fill(~visible[:, None, None, :], float("-inf")).softmax(-1) @ v

    torch.nn.functional.scaled_dot_product_attention = masked
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = kept


def random_index(backbone: Backbone, count: int) -> Tensor:
    torch.manual_seed(2)
    return torch.stack([torch.randperm(backbone.num_tokens)[:count] for _ in range(2)])


def visible_keys(backbone: Backbone, index: Tensor) -> Tensor:
    visible = torch.zeros(2, backbone.num_prefix + backbone.num_tokens, dtype=torch.bool)
    visible[:, : backbone.num_prefix] = True
    return visible.scatter(1, index + backbone.num_prefix, True)


def error(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max()) if a.numel() else 0.0


def test_every_family_has_an_example() -> None:
    assert {type(create_backbone(name, **EXAMPLES[name]).model) for name in EXAMPLES} == set(FAMILIES)


@pytest.mark.parametrize("name", EXAMPLES)
@torch.no_grad()
def test_forward_is_the_models_own(name: str) -> None:
    backbone = make(name)
    x = images(backbone)
    own = backbone.model(x)
    if name.startswith("swin"):  # the absolute table is ours alone: timm's own forward is the one without it
        assert error(backbone(x), own) > 1e-6
        assert error(backbone.head(backbone.encode(backbone.embed(x), None)), own) < TOLERANCE
    else:
        assert error(backbone(x), own) < TOLERANCE
    if backbone.num_tokens:
        places = None if name.startswith("swin") else backbone.positions()
        features = backbone.encode(backbone.embed(x), places)
        own = backbone.model.forward_features(x)
        assert error(join(features), own.flatten(1, 2) if own.dim() == 4 else own) < TOLERANCE
        assert features.prefix.shape[1] == backbone.num_prefix
        assert features.patches.shape[1] == backbone.out_grid[0] * backbone.out_grid[1]


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "resnet26"])
def test_the_parts_of_a_block_say_of_heads_and_rotation_what_the_model_does(name: str) -> None:
    backbone = made_once(name)
    for block, layer in zip(backbone.parts(), backbone.layers(), strict=True):
        attention, heads = block.attention, layer.attn.num_heads
        assert (attention.heads, attention.shared, attention.by_head) == (heads, 1, False)
        assert attention.rotary is (backbone.positions().rotary is not None)
        for tensor, axis, at in attention.tables:
            own = tensor if at is None else tensor.select(*at)
            assert own.shape[axis if at is None or axis < at[0] else axis - 1] == heads


@pytest.mark.parametrize("name", FLAT)
@torch.no_grad()
def test_context_equals_a_masked_full_attention(name: str) -> None:
    backbone = make(name)
    x = images(backbone)
    context = random_index(backbone, backbone.num_tokens // 3)
    ours = backbone.encode(backbone.embed(x), backbone.positions(), context=context)
    with only_keys(visible_keys(backbone, context)):
        reference = backbone.model.forward_features(x)
    assert error(join(ours), reference) < TOLERANCE


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch14_reg4_dinov2"])
@torch.no_grad()
def test_a_shared_or_leading_context_means_the_same(name: str) -> None:
    backbone = make(name)
    tokens = backbone.embed(images(backbone))
    places = backbone.positions()
    first = torch.arange(5)
    by_count = backbone.encode(tokens, places, context=5)
    assert error(join(backbone.encode(tokens, places, context=first)), join(by_count)) < TOLERANCE
    assert error(join(backbone.encode(tokens, places, context=first.expand(2, -1))), join(by_count)) < TOLERANCE
    everything = backbone.encode(tokens, places, context=torch.arange(backbone.num_tokens))
    assert error(join(everything), join(backbone.encode(tokens, places))) < TOLERANCE


@pytest.mark.parametrize("name", FLAT)
@torch.no_grad()
def test_a_subset_keeps_its_own_places(name: str) -> None:
    """Running on a subset equals the whole sequence in which the others are seen by nobody."""
    backbone = make(name)
    x = images(backbone)
    index = random_index(backbone, backbone.num_tokens // 2)
    assert error(backbone.embed_at(x, index), take(backbone.embed(x), index)) < TOLERANCE
    ours = backbone.encode(backbone.embed_at(x, index), backbone.positions().take(index))
    with only_keys(visible_keys(backbone, index)):
        reference = backbone.model.forward_features(x)
    p = backbone.num_prefix
    assert error(ours.prefix, reference[:, :p]) < TOLERANCE
    assert error(ours.patches, take(reference[:, p:], index)) < TOLERANCE


@pytest.mark.parametrize("name", FLAT)
@torch.no_grad()
def test_blocks_are_row_equivariant(name: str) -> None:
    backbone = make(name)
    stream = backbone.assemble(backbone.embed(images(backbone)), backbone.positions())
    order = random_index(backbone, backbone.num_tokens)
    moved = backbone.blocks(stream.take(order)).z
    plain = backbone.blocks(stream)
    assert error(moved, replace(plain, rotary=None, bias=None).take(order).z) < TOLERANCE
    if backbone.positions().rotary is not None or backbone.positions().bias is not None:
        wrong = replace(stream.take(order), rotary=stream.rotary, bias=stream.bias)
        assert error(backbone.blocks(wrong).z, moved) > 1e-6  # the places must move with the rows


@pytest.mark.parametrize("name", FLAT)
@torch.no_grad()
def test_without_positions_order_means_nothing(name: str) -> None:
    backbone = make(name)
    tokens = backbone.embed(images(backbone))
    order = random_index(backbone, backbone.num_tokens)
    moved = backbone.encode(take(tokens, order), None)
    plain = backbone.encode(tokens, None)
    assert error(moved.prefix, plain.prefix) < TOLERANCE
    assert error(moved.patches, take(plain.patches, order)) < TOLERANCE


@pytest.mark.parametrize("name", ROTARY)
@torch.no_grad()
def test_a_forgotten_token_is_not_token_zero(name: str) -> None:
    """All tokens alike: only their places differ. The forgotten one must not pass for the top-left patch."""
    backbone = make(name)
    tokens = backbone.embed(images(backbone))[:, :1].expand(-1, backbone.num_tokens, -1)
    where = torch.zeros(2, backbone.num_tokens, dtype=torch.bool)
    where[:, 5] = True
    unknown = 0.3 * torch.randn(backbone.dim, dtype=torch.float64)
    features = backbone.encode(tokens, backbone.positions().forget(where, unknown))
    assert error(features.patches[:, 5], features.patches[:, 0]) > 1e-3


@pytest.mark.parametrize("name", FLAT)
@torch.no_grad()
def test_forgotten_tokens_may_be_swapped(name: str) -> None:
    """Tokens that forgot their places carry none: exchanging their contents only exchanges their outputs."""
    backbone = make(name)
    tokens = backbone.embed(images(backbone))
    where = torch.zeros(2, backbone.num_tokens, dtype=torch.bool)
    where[:, [2, 7]] = True
    places = backbone.positions().forget(where, 0.3 * torch.randn(backbone.dim, dtype=torch.float64))
    swap = torch.arange(backbone.num_tokens)
    swap[[2, 7]] = swap[[7, 2]]
    plain = backbone.encode(tokens, places)
    swapped = backbone.encode(tokens[:, swap], places)
    assert error(swapped.patches, plain.patches[:, swap]) < TOLERANCE
    assert error(swapped.prefix, plain.prefix) < TOLERANCE
    kept = backbone.encode(tokens[:, swap], backbone.positions())
    assert error(kept.patches, backbone.encode(tokens, backbone.positions()).patches[:, swap]) > 1e-6


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    backbone = make(name)
    backbone(images(backbone)).square().mean().backward()
    silent = {n for n, p in backbone.named_parameters() if p.requires_grad and p.grad is None}
    own = create_backbone(name, **EXAMPLES[name]).double()
    if "mixed" in name:
        own.model.rope.float()
    own.model(images(own)).square().mean().backward()
    assert silent == {f"model.{n}" for n, p in own.model.named_parameters() if p.requires_grad and p.grad is None}


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "resnet26"])
def test_refusals_are_sentences(name: str) -> None:
    backbone = make(name)
    assert set(backbone.refusals) <= set(CAPABILITIES)
    with pytest.raises(SitusError, match=f"{name} does not support"):
        backbone.require("context")
    if backbone.num_tokens:
        with pytest.raises(SitusError, match="its window"):
            backbone.positions().take(torch.arange(4))
        with pytest.raises(SitusError, match="its window"):
            backbone.encode(backbone.embed(images(backbone)), backbone.positions(), context=torch.arange(4))
    else:
        with pytest.raises(SitusError, match="no tokens"):
            backbone.embed(images(backbone))


@pytest.mark.parametrize("name", FLAT)
def test_erased_positions_are_no_positions_but_for_the_kinds_that_stay(name: str) -> None:
    backbone = make(name)
    x = torch.randn(1, backbone.input.channels, *backbone.input.shape, dtype=torch.float64)
    kinds, tokens = backbone.positions().kinds, backbone.embed(x)
    blind = backbone.encode(tokens, None).patches
    assert not torch.allclose(backbone.encode(tokens, backbone.positions()).patches, blind, rtol=0, atol=1e-6)
    remaining = backbone.erase_positions()
    assert remaining == tuple(kind for kind in kinds if kind == "rotary")
    erased = backbone.encode(tokens, backbone.positions()).patches
    assert torch.allclose(erased, blind, rtol=0, atol=TOLERANCE) == (not remaining)
