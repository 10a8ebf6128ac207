"""The order of tokens by attention: where positions are in it, and where they are not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from victims import vit

from situs.audit.attacks.tokens.block import Block
from situs.audit.attacks.tokens.images import order_by_attention
from situs.core.tokens import patchify

ROTARY = partial(vit, name="vit_small_patch16_rope_224", size=12)


def scene(backbone: Any) -> tuple[Block, torch.Tensor, torch.Tensor]:
    """The block, and patches with what attention gave them, in their right order."""
    x = torch.rand(1, 3, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    block = Block(backbone.requires_grad_(False))
    patches = patchify(x, (4, 4))
    return block, patches[0], block.middle(patches)[1][0, len(block.prefix) :]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["rotary", "relative"])
def test_a_shift_and_exchanged_patches_are_put_right(kind: str) -> None:
    backbone = ROTARY() if kind == "rotary" else vit(size=12, positions="relative")
    if kind == "relative":
        for name, parameter in backbone.named_parameters():
            if "rel" in name:
                parameter.normal_(std=1.0)
    block, patches, o = scene(backbone)
    start = torch.arange(9).view(3, 3).roll(1, 0).flatten()
    start[[0, 4]] = start[[4, 0]]
    found = order_by_attention(block, patches[start], o[start])
    assert found.proved and start[found.at].tolist() == list(range(9))


@torch.no_grad()
def test_what_proves_no_order_is_said() -> None:
    block, patches, o = scene(vit(size=12, positions="none"))
    start = torch.arange(9).flip(0)
    assert not order_by_attention(block, patches[start], o[start]).proved  # no place is in it
    block, patches, o = scene(ROTARY())
    noise = torch.randn(o.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert not order_by_attention(block, patches, o + noise).proved
    assert not order_by_attention(block, patches, o, lambda: True).proved
