"""The first block taken apart: every piece against hooks in the model itself."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import ParallelThingsBlock
from torch import nn
from victims import LEARNED, WIDTH, vit

from situs.audit.adapter import adapt
from situs.audit.attacks.tokens.block import Block, NoBlockError, read_block, read_norm
from situs.core.tokens import patchify


def block_of(backbone: Any) -> Block:
    with torch.no_grad():
        return Block(backbone.requires_grad_(False))


@pytest.mark.parametrize("name", LEARNED)
def test_pieces_are_what_the_models_own_layers_get(name: str) -> None:
    backbone = LEARNED[name]()
    block = block_of(backbone)
    own = dict(backbone.named_parameters())
    layers = [*block.layers.qkv, block.layers.proj, *block.layers.fc1, block.layers.fc2]
    seen: dict[str, torch.Tensor] = {}
    for path, module in backbone.named_modules():
        if f"{path}.weight" in layers:
            module.register_forward_pre_hook(lambda _, args, name=f"{path}.weight": seen.update({name: args[0]}))
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        stream = backbone.assemble(backbone.embed(x), backbone.positions())
        backbone.blocks(stream)
        given = dict(seen)
        p = backbone.num_prefix
        z = patchify(x, (4, 4)) @ block.weight.T + block.base
        z = z if block.norm0 is None else block.norm0.apply(z)
        torch.testing.assert_close(stream.z[:, p:], z)
        torch.testing.assert_close(stream.z[:, :p], block.prefix.expand(2, -1, -1))
        missing = [each for each in block.layers.qkv if each not in given]
        assert not missing or all(own[each].shape[0] % 3 == 0 for each in missing)  # timm's own is run by slices
        o = given.get(block.layers.proj)
        m, mixed = block.middle(patchify(x, (4, 4)))
        if o is not None:
            torch.testing.assert_close(mixed, o)
        torch.testing.assert_close(m, stream.z + mixed @ block.into + block.shift)
        for each in block.layers.fc1:
            torch.testing.assert_close(block.norm2.apply(m), given[each])
        torch.testing.assert_close(block.late(m), given[block.layers.fc2])
        norm = next(m for path, m in backbone.named_modules() if path.endswith(("norm1", "layernorm_before")))
        torch.testing.assert_close(block.norm1.apply(stream.z), norm(stream.z))


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-2])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_is_read_from_what_it_does(kind: Any, eps: float) -> None:
    torch.manual_seed(0)
    module = kind(24, eps=eps).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    found = read_norm(module, 24)
    assert found.centred == (kind is nn.LayerNorm) and found.biased == (kind is nn.LayerNorm)
    assert found.eps == pytest.approx(eps, rel=1e-4)
    for size in (1e-4, 1.0, 1e3):
        z = size * torch.randn(5, 24, dtype=torch.float64)
        torch.testing.assert_close(found.apply(z), module(z), rtol=1e-5, atol=1e-7)


def test_what_is_no_norm_is_refused() -> None:
    with pytest.raises(NoBlockError, match="neither a layer norm nor an RMS norm"):
        read_norm(nn.Sequential(nn.LayerNorm(24), nn.Tanh()).double(), 24)
    with pytest.raises(NoBlockError, match="neither a layer norm nor an RMS norm"):
        read_norm(nn.GroupNorm(4, 24).double(), 24)


def test_norms_behind_are_told() -> None:
    with pytest.raises(NoBlockError, match=r"lacks a norm before|neither a layer norm"):
        block_of(vit(name="vit_relpos_small_patch16_rpn_224"))


@pytest.mark.parametrize("norms", ["alike", "apart"])
def test_attentions_side_by_side_are_no_attention_and_mlp(norms: str) -> None:
    torch.manual_seed(0)
    shape = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
    model = timm.create_model("vit_tiny_patch16_224", block_fn=ParallelThingsBlock, **shape)
    for module in model.modules() if norms == "apart" else ():
        if isinstance(module, nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
    said = read_block(adapt(model, 16).double().requires_grad_(False))
    assert isinstance(said, str), said
    assert "mixes tokens" in said or "cannot be run separately" in said


class Twice(nn.Module):
    """An image and its mirror through one patch embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.table = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.randn(16, WIDTH))
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 192, 0.0, "gelu", batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.patch(x) + (self.patch(x.flip(-1)) if self.mirrored else 0)
        return self.head(self.block(seen.flatten(2).transpose(1, 2) + self.table).mean(dim=1))

    mirrored = True


def test_a_block_that_is_given_more_of_an_image_than_one_product_is_none() -> None:
    """What solves its equations is the image with its mirror, which proves nothing of the image."""
    model = adapt(Twice(), 16).double().requires_grad_(False)
    said = read_block(model)
    assert isinstance(said, str) and "another path" in said
    model.model.mirrored = False
    assert isinstance(read_block(model), Block)


def test_a_model_that_does_not_run_in_parts_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = adapt(vit().model, 16).double().requires_grad_(False)
    assert isinstance(read_block(backbone), Block)
    attend = backbone.model.blocks[0].attn.forward

    def only_images(x: torch.Tensor, **options: Any) -> torch.Tensor:
        if len(x) != 1:
            raise ValueError("one image at a time")
        return attend(x, **options)

    monkeypatch.setattr(backbone.model.blocks[0].attn, "forward", only_images)
    assert read_block(backbone) == "the model's first block cannot be run separately (ValueError: one image at a time)"
