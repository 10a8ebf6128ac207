"""What is counted beforehand, against ranks and null spaces of real gradients in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from victims import LEARNED, vit

from situs.audit.attacks.tokens.block import Block
from situs.audit.attacks.tokens.linear import count, family_of, read_spans, table_rank
from situs.audit.client import victim_gradients
from situs.audit.defences import Step

CASES: dict[str, tuple[Any, int]] = {
    **{name: (make, 1) for name, make in LEARNED.items()},
    "learned, batch 2": (vit, 2),
    "a norm before, batch 2": (LEARNED["a norm before the first block"], 2),
    "sin-cos": (partial(vit, positions="sincos"), 1),
    "no table": (partial(vit, positions="none"), 1),
    "no table, batch 2": (partial(vit, positions="none"), 2),
    "rotary": (partial(vit, name="vit_small_patch16_rope_224"), 1),
    "relative": (partial(vit, positions="relative"), 1),
    "more patches than equations": (partial(vit, size=24, width=64), 1),
    "2 local steps": (partial(vit, width=128), 1),
    "2 local steps, batch 2": (partial(vit, width=192), 2),
}


TWINS = ("no CLS", "ReLU, no qkv bias", "norms before it without bias", "a norm before, batch 2", "no table")
"""Cases whose every count another case has too."""


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in TWINS)) for name in CASES])
def test_ranks_and_open_directions_are_those_of_real_gradients(name: str) -> None:
    make, batch = CASES[name]
    backbone, steps = make(), int(name[0]) if "local" in name else 1
    size = backbone.input.shape[0]
    x = torch.randn(batch, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    step = Step(dtype=torch.float64, local_steps=steps, lr=0.1)
    upload = victim_gradients(backbone, x, torch.arange(batch), step=step)
    with torch.no_grad():
        block = Block(backbone.requires_grad_(False))
        counts = count(block, batch, times=steps)
    assert counts.full == ""

    def rank(*names: str) -> int:
        values = torch.linalg.svdvals(torch.cat([upload[each].flatten(1) for each in names]))
        return int((values > (1e-10 if steps == 1 else 3e-15) * values[0]).sum())

    layers = block.layers
    found = [rank(block.stem.weight), rank(*layers.qkv), rank(layers.proj), rank(*layers.fc1), rank(layers.fc2)]
    assert found == [counts.x, counts.qkv, counts.proj, counts.fc1, counts.fc2]
    family = family_of(block, read_spans(block, upload, counts), counts.open)
    small = int((family.values < 1e-8 * family.values[0]).sum())
    unknowns = counts.x + counts.proj + block.norm2.biased + (counts.informs and block.norm1.biased)
    unknowns += block.norm0 is not None and bool(block.shift.any())
    assert small + unknowns - len(family.values) == counts.open
    assert bool(counts.reason) == (counts.open > 0)


def test_more_tokens_than_the_weights_have_directions_span_these() -> None:
    """Those of patches, places and prefix tokens, and of the biases of both norms."""
    backbone, x = LEARNED["a norm before the first block"](), torch.randn(5, 3, 16, 16, dtype=torch.float64)
    upload = victim_gradients(backbone, x, torch.arange(5), step=Step(dtype=torch.float64))
    with torch.no_grad():
        block = Block(backbone.requires_grad_(False))
        counts = count(block, 5)
    joined = torch.cat([upload[name] for name in block.layers.qkv])
    assert counts.qkv == int(torch.linalg.matrix_rank(joined, rtol=1e-10)) == 48 + 16 + 1 + 2 and not counts.informs


@torch.no_grad()
@pytest.mark.parametrize(("patches", "expected"), [(48, 3), (16, 16)])
def test_the_table_adds_what_directions_of_patches_do_not_have(patches: int, expected: int) -> None:
    """As many directions as a patch has values are those of the embedding; fewer depend on the images."""
    backbone = vit()
    embedding = backbone.model.patch_embed.proj
    inside = torch.randn(16, 48, dtype=torch.float64) @ embedding.weight.flatten(1).T
    inside[:3] = torch.randn(3, 96, dtype=torch.float64)
    backbone.model.pos_embed[0, 1:] = inside - embedding.bias
    block = Block(backbone.requires_grad_(False))
    both = torch.cat([block.weight, block.base.T], dim=1)
    assert int(torch.linalg.matrix_rank(block.base)) == 16 and int(torch.linalg.matrix_rank(both)) == 48 + 3
    assert table_rank(block, patches) == expected
    assert table_rank(block, 48, block.base[3:]) == 0 and table_rank(block, 16, block.base[3:]) == 13


@torch.no_grad()
def test_the_table_adds_nothing_where_patches_fill_all_channels() -> None:
    block = Block(vit(width=32).requires_grad_(False))
    assert [table_rank(block, patches) for patches in (30, 31, 32, 40)] == [2, 1, 0, 0]


def test_as_many_tokens_as_channels_say_nothing() -> None:
    with torch.no_grad():
        block = Block(vit(size=24, width=32).requires_grad_(False))
        assert "there are at least as many tokens (37) as channels (32)" in count(block, 1).full
        assert count(Block(vit(size=20, width=32).requires_grad_(False)), 1).full == ""
