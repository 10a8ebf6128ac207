"""Which blocks of timm's are run joined: plain ones, with nothing that listens; the others as they were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import small_hf, small_vit
from timm.layers import DropPath
from timm.layers.layer_scale import LayerScale
from timm.models.vision_transformer import ResPostBlock
from torch import nn

from situs.backbones import block, create_backbone
from situs.backbones.base import Backbone
from situs.backbones.block import Stream, fused_parts
from situs.backbones.timm.mlp import use_compiled_gelu

Change = Callable[[Any], object]


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a compiled step on a GPU."""
    monkeypatch.setattr(block, "takes_kernels", lambda _: True)


def made(name: str = "vit_tiny_patch16_224", **more: Any) -> Backbone:
    torch.manual_seed(0)
    args = {"depth": 2, "embed_dim": 16, "num_heads": 2}
    backbone = create_backbone(name, img_size=16, patch_size=4, model_args=args, **more)
    use_compiled_gelu(backbone)
    return backbone.train()


def stream_of(backbone: Backbone) -> Stream:
    return backbone.assemble(backbone.embed(torch.randn(3, 3, 16, 16)), backbone.positions())


@pytest.mark.parametrize("keys", [None, 5])
def test_a_plain_vit_gives_what_it_gave(keys: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = made(drop_path=0.5)
    stream, results = stream_of(backbone), []
    for takes in (False, True):
        monkeypatch.setattr(block, "takes_kernels", lambda _, takes=takes: takes)
        torch.manual_seed(7)
        z = backbone.run_layers(stream, keys)
        inside = [p for p in backbone.model.blocks.parameters() if p.requires_grad]
        results.append([z, *torch.autograd.grad(z.square().sum(), inside, retain_graph=True)])
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() <= 1e-4 * one.norm() + 1e-6


def fused(backbone: Backbone, stream: Stream) -> bool:
    return fused_parts(backbone.parts(), stream) is not None


def hooked(part: nn.Module) -> None:
    part.register_forward_hook(lambda *_: None)


CHANGES: dict[str, Change] = {
    "a hook on a block": lambda blocks: hooked(blocks[1]),
    "a hook on a norm": lambda blocks: hooked(blocks[0].norm2),
    "a hook on a layer": lambda blocks: hooked(blocks[0].attn.proj),
    "a hook on a GELU": lambda blocks: hooked(blocks[1].mlp.act),
    "a hook on a dropout": lambda blocks: hooked(blocks[1].attn.proj_drop),
    "a hook on a drop path": lambda blocks: hooked(blocks[0].drop_path2),
    "a layer of another kind": lambda blocks: setattr(blocks[1].mlp, "fc2", nn.Sequential(blocks[1].mlp.fc2)),
    "a norm without a shift": lambda blocks: setattr(blocks[1], "norm2", nn.LayerNorm(16, bias=False)),
    "a norm without both": lambda blocks: setattr(blocks[1], "norm1", nn.LayerNorm(16, elementwise_affine=False)),
    "a scale": lambda blocks: setattr(blocks[0], "ls1", LayerScale(16)),
    "dropout": lambda blocks: setattr(blocks[0].mlp.drop2, "p", 0.1),
    "dropout of attention": lambda blocks: setattr(blocks[0].attn.attn_drop, "p", 0.1),
    "a norm of queries": lambda blocks: setattr(blocks[0].attn, "q_norm", nn.LayerNorm(8)),
    "an MLP of another kind": lambda blocks: setattr(blocks[0], "mlp", nn.Identity()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_others_are_left_alone(change: Change) -> None:
    backbone = made()
    stream = stream_of(backbone)
    assert fused(backbone, stream)
    change(backbone.model.blocks)
    assert not fused(backbone, stream)


@pytest.mark.parametrize("kind", ["norms behind", "three layers", "rotation"])
def test_so_are_other_blocks(kind: str) -> None:
    if kind == "three layers":
        shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        backbone = small_hf("ViTModel", image_size=16, patch_size=4, **shape)
    elif kind == "rotation":
        backbone = made("vit_small_patch16_rope_224")
    else:
        backbone = small_vit(model_args={"block_fn": ResPostBlock})
    assert not fused(backbone, stream_of(backbone))


def test_so_are_masks_and_whoever_taps() -> None:
    backbone = made()
    stream = stream_of(backbone)
    assert not fused(backbone, replace(stream, mask=torch.ones(3, 17, dtype=torch.bool)))
    seen: list[int] = []
    backbone.run_layers(stream, None, (lambda depth, _: seen.append(depth),))
    assert seen == [1, 2]


@torch.no_grad()
def test_what_waits_for_the_call_of_a_block_is_called_and_gone_afterwards() -> None:
    """FSDP gathers a block's weights in a hook before its call, and frees them in one behind it."""
    backbone = made().eval()
    stream, layer = stream_of(backbone), backbone.model.blocks[1]
    expected, seen = backbone.run_layers(stream, None), []
    before = layer.register_forward_pre_hook(lambda *_: seen.append("before"))
    layer.register_forward_hook(lambda *_: seen.append("behind"))
    torch.testing.assert_close(backbone.run_layers(stream, None), expected, rtol=1e-5, atol=1e-6)
    assert seen == ["before", "behind"] and "forward" not in vars(layer)
    before.remove()

    def fails(*_: Any) -> None:
        raise RuntimeError("no memory")

    layer.register_forward_pre_hook(lambda *_: None)
    layer.mlp.register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="no memory"):
        backbone.run_layers(stream, None)
    assert "forward" not in vars(layer)


@pytest.mark.parametrize(("rate", "training", "drawn"), [(0.0, True, False), (0.5, False, False), (0.5, True, True)])
def test_a_drop_path_draws_only_where_it_drops(rate: float, training: bool, drawn: bool) -> None:
    backbone = made()
    backbone.model.blocks[0].drop_path2 = DropPath(rate)
    stream = stream_of(backbone.train(training))
    before = torch.get_rng_state()
    parts = fused_parts(backbone.parts(), stream)
    assert parts is not None
    scales = [scale for part in parts for scale in (part.scale1, part.scale2)]
    assert [scale is not None for scale in scales] == [False, drawn, False, False]
    assert torch.equal(torch.get_rng_state(), before) is not drawn
    if drawn:
        assert scales[1].shape == (3,) and set(scales[1].tolist()) <= {0.0, 2.0}  # type: ignore[union-attr]
