"""Who stands in whose image: linear in what attention gave, held against the truth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from victims import HEADS, hugging_face, odd, vit

from situs.audit.attacks.solver import Tokens
from situs.audit.attacks.tokens import images
from situs.audit.attacks.tokens.block import Block
from situs.audit.attacks.tokens.images import agree, make_images, read_heads, same_image
from situs.audit.attacks.tokens.search import Roots
from situs.core.tokens import patchify

BATCH = 4


def sharp(times: float = 8) -> Block:
    """A block whose tokens look where they will, so that what attention gives those of one image is not alike."""
    backbone = vit()
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            if "blocks.0.attn.qkv.weight" in name:
                parameter.mul_(times)
    return Block(backbone.requires_grad_(False))


@torch.no_grad()
def scene(block: Block) -> tuple[Roots, torch.Tensor, torch.Tensor]:
    """True tokens in any order, each one's image, and the patches; nothing tells the images apart by colour."""
    chance = torch.Generator().manual_seed(2)
    patches = patchify(torch.randn(BATCH, 3, 16, 16, generator=chance, dtype=torch.float64), (4, 4))
    m, o = (part[:, len(block.prefix) :].flatten(0, 1) for part in block.middle(patches))
    x, order = patches.flatten(0, 1), torch.randperm(BATCH * 16, generator=chance)
    tokens = Tokens(x, o, x @ block.weight.T + block.base.repeat(BATCH, 1), m).at(order)
    place, owner = torch.arange(16).repeat(BATCH)[order], torch.arange(BATCH).repeat_interleave(16)[order]
    return Roots(place, tokens, torch.ones(len(x)).double(), torch.full((16,), BATCH)), owner, patches


@pytest.mark.parametrize("make", [vit, hugging_face, lambda: odd(qkv_bias=False)])
def test_the_heads_are_found_by_trying(make: Any) -> None:
    heads = read_heads(Block(make().requires_grad_(False)))
    assert heads is not None and heads.count == HEADS


def test_attention_of_another_kind_is_told() -> None:
    block = Block(odd(qk_norm=True).requires_grad_(False))
    assert read_heads(block) is None
    assert same_image(block, scene(block)[0], BATCH) is None


@torch.no_grad()
def test_without_anything_missing_it_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MISSED", 1e-8)
    block = sharp(4)
    roots, owner, _ = scene(block)
    links = same_image(block, roots, BATCH)
    assert links is not None
    torch.testing.assert_close(links, (owner[:, None] == owner[None]).double(), rtol=0, atol=1e-3)


@pytest.mark.thin(2)
@torch.no_grad()
@pytest.mark.parametrize("lost", [0, 6])
def test_images_come_together_though_what_attention_gave_is_not_alike(lost: int) -> None:
    block = sharp()
    roots, _, patches = scene(block)
    keep = torch.arange(lost, len(roots.place))
    fewer = Roots(roots.place[keep], roots.tokens.at(keep), roots.fit[keep], roots.wanted)
    found, proved = make_images(block, fewer, BATCH)
    same = (found[:, None] - patches[None]).norm(dim=-1) < 1e-9
    assert sorted(same.sum(dim=-1).argmax(dim=1).tolist()) == list(range(BATCH))  # each image is one of them
    assert int(proved.sum()) == BATCH * 16 - lost == int((same.any(dim=1) & proved).sum())
    assert int((same.sum(dim=-1).amax(dim=1)).sum()) == BATCH * 16 - lost
    if not lost:
        assert agree(block, found, roots.tokens)


@torch.no_grad()
def test_places_that_share_their_equations_may_be_of_one_image() -> None:
    block = sharp()
    roots, owner, _ = scene(block)
    loose = Roots(torch.zeros_like(roots.place), roots.tokens, roots.fit, torch.tensor([BATCH * 16] + [0] * 15))
    links = same_image(block, loose, BATCH)
    assert links is not None
    own = torch.stack([links[:, owner == image].mean(dim=1) for image in range(BATCH)], dim=1)
    assert torch.equal(own.argmax(dim=1), owner)
