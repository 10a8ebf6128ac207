"""What a wrapped timm model says of itself is what timm's own forward does: grids, depths, heads, and each stage."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from builders import small_swin, small_vit
from timm.models.eva import Eva
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from situs.backbones import Backbone, create_backbone
from situs.backbones.timm.blocks import read_block
from situs.errors import SitusError


def swin(size: tuple[int, int] = (32, 48), depths: tuple[int, ...] = (1, 2)) -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"depths": depths, "heads": (2, 3, 4)[: len(depths)], "model_args": {"window_size": 4}}
    return small_swin(size, **shape).double().eval()


def images(backbone: Backbone) -> Tensor:
    assert backbone.input.shape is not None
    return torch.randn(2, 3, *backbone.input.shape, dtype=torch.float64)


@torch.no_grad()
def test_taps_on_stages_see_their_grids() -> None:
    backbone = swin()
    stream = backbone.assemble(backbone.embed(images(backbone)), backbone.positions())
    seen: list[tuple[int, Tensor]] = []
    last = backbone.run_layers(stream, None, (lambda number, z: seen.append((number, z)),))
    assert [(number, tuple(z.shape[1:])) for number, z in seen] == [(1, (96, 12)), (2, (24, 24)), (3, (24, 24))]
    assert torch.equal(last, backbone.run_layers(stream, None)) and torch.equal(last, seen[-1][1])


@pytest.mark.parametrize(
    ("size", "depths"), [((32, 48), (1, 2)), ((28, 28), (1, 1, 1)), ((20, 52), (2, 1, 1)), ((16, 16), (1,))]
)
@torch.no_grad()
def test_a_stage_halves_the_grid_as_timm_does(size: tuple[int, int], depths: tuple[int, ...]) -> None:
    """Sides that are odd are rounded up: their merges are padded."""
    backbone = swin(size, depths)
    z, grids = backbone.model.patch_embed(images(backbone)), []
    for stage in backbone.model.layers:
        z = stage(z)
        grids.append(tuple(z.shape[1:]))
    assert (*backbone.out_grid, backbone.out_dim) == grids[-1]
    assert [level.block for level in backbone.levels()] == [sum(depths[: n + 1]) for n in range(len(depths))]
    for (high, wide, dim), level in zip(grids, backbone.levels(), strict=True):
        assert (dim, high, wide) == (level.dim, *(-(-side // 2**level.halved) for side in backbone.grid))
    assert backbone.encode(backbone.embed(images(backbone))).patches.shape[1:] == (grids[-1][0] * grids[-1][1], dim)


def test_swin_has_positions_for_its_own_grid_alone() -> None:
    backbone = swin()
    assert backbone.positions(backbone.grid).rigid == backbone.positions().rigid != ""
    high, wide = backbone.grid
    with pytest.raises(SitusError, match=rf"no positions for a grid of {wide}x{high}: its windows and their masks"):
        backbone.positions((wide, high))


@pytest.mark.parametrize("make", [swin, lambda: small_vit(depth=3), lambda: small_vit(name="beit_base_patch16_224")])
def test_every_weight_between_embedding_and_last_norm_is_of_one_block(make: Any) -> None:
    backbone = make()
    blocks = [[id(weight) for part in parts for weight in part.parameters()] for parts in backbone.block_modules()]
    stages, order = getattr(backbone.model, "layers", None), list(backbone.model.blocks) if make is not swin else []
    for stage in stages or ():
        order += [stage.downsample, *stage.blocks]
    assert len(blocks) == backbone.depth == len(backbone.layers())
    held = [weight for block in blocks for weight in block]
    assert held == [id(weight) for part in order for weight in part.parameters()]  # in the order of the stream


class Seen(nn.Module):
    """Keeps what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        return x


HEADS: dict[str, tuple[dict[str, Any], str]] = {
    "token": ({}, "CLS token"),
    "mean": ({"class_token": False, "global_pool": "avg"}, "mean of the patches"),
    "max": ({"class_token": False, "global_pool": "max", "fc_norm": False}, "maximum over the patches"),
    "map": ({"class_token": False, "global_pool": "map"}, "patches pooled by 'map'"),
    "distilled": ({"name": "deit_tiny_distilled_patch16_224"}, "mean of the CLS and distillation tokens"),
}


@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_what_the_head_reads_is_what_timms_last_layer_is_given(head: str) -> None:
    arguments, words = HEADS[head]
    name = arguments.get("name", "vit_tiny_patch16_224")
    shape = {key: value for key, value in arguments.items() if key != "name"}
    torch.manual_seed(0)
    backbone = small_vit(name=name, num_classes=5, model_args=shape).double().eval()
    x, seen = images(backbone), Seen()
    pooled, logits = backbone.read_pixels(x)
    torch.testing.assert_close(logits, backbone.model(x), rtol=0, atol=1e-12)
    assert backbone.head_input == words
    model: Any = backbone.model
    if head == "distilled":
        (one, two), _ = model.forward_features(x)[:, :2].unbind(1), None
        torch.testing.assert_close(pooled, (one + two) / 2, rtol=0, atol=1e-12)
        return
    model.head = seen
    model(x)
    torch.testing.assert_close(pooled, seen.last, rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_convolutional_network_counts_its_stages_and_reads_any_size() -> None:
    backbone = create_backbone("resnet26", num_classes=5, model_args={"channels": (8, 16, 16, 24)}).eval()
    stages = [name for name, _ in backbone.model.named_children() if name.startswith("layer")]
    assert (backbone.depth, backbone.dim, backbone.input.channels) == (len(stages), 24 * 4, 3)
    assert backbone.head_input == "mean of the last feature map"
    for side in (32, 40):
        x = torch.randn(2, 3, side, side)
        pooled, logits = backbone.read_pixels(x)
        torch.testing.assert_close(pooled, backbone.model.forward_features(x).mean((2, 3)))
        torch.testing.assert_close(logits, backbone(x))


@torch.no_grad()
@pytest.mark.parametrize("size", [(16, 24), (40, 8), (16, 16)])
def test_an_image_of_another_size_has_its_own_grid(size: tuple[int, int]) -> None:
    backbone = small_vit((16, 16), patch_size=8).double().eval()
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    tokens, positions, grid = backbone.embed_sized(x)
    assert grid == (size[0] // 8, size[1] // 8)
    stem = backbone.model.patch_embed
    torch.testing.assert_close(tokens, stem.norm(stem.proj(x).flatten(2).mT))
    assert torch.isfinite(backbone.assemble(tokens, positions).z).all()
    if size != (16, 16):  # any size is for `embed_sized` alone
        with pytest.raises(SitusError, match=r"images must have the shape \[B, 3, 16, 16\]"):
            backbone.embed(x)


def test_a_block_whose_class_fsdp_made_is_read_as_what_it_was() -> None:
    block = small_vit().model.blocks[0]
    plain = read_block(block)
    block.__class__ = type("FSDPBlock", (FSDPModule, type(block)), {})  # as fully_shard does
    sharded = read_block(block)
    assert (sharded.form, sharded.norm1, sharded.mlp.up) == (plain.form, plain.norm1, plain.mlp.up)
    assert sharded.attention.heads == plain.attention.heads == 2


@pytest.mark.skipif("num_kv_heads" not in inspect.signature(Eva).parameters, reason="timm has no shared keys yet")
@pytest.mark.parametrize("keys", [1, 2])
@torch.no_grad()
def test_heads_that_share_their_keys_give_timms_own_features(keys: int) -> None:
    torch.manual_seed(0)
    shape = {"num_kv_heads": keys, "attn_type": "rope", "qkv_fused": False, "qk_norm": True}
    backbone = small_vit((12, 16), name="eva02_tiny_patch14_224", width=32, heads=4, model_args=shape).double().eval()
    for parameter in backbone.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    assert {part.attention.shared for part in backbone.parts()} == {4 // keys}
    x = images(backbone)
    features = backbone.encode(backbone.embed(x), backbone.positions())
    torch.testing.assert_close(features.patches, backbone.model.forward_features(x)[:, 1:], rtol=0, atol=1e-10)
