"""One image by linear equations alone: exact in float64, and judged without the truth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from victims import LEARNED, vit

from situs.audit.attacks.solver import SOLVED, Tokens
from situs.audit.attacks.tokens.block import Block
from situs.audit.attacks.tokens.linear import Equations, Spans, count, misfit, read_spans, solve
from situs.audit.client import victim_gradients
from situs.audit.defences import Step
from situs.core.tokens import patchify


def scene(backbone: Any, noise: float = 0.0) -> tuple[Block, Any, Spans, torch.Tensor]:
    x = torch.randn(1, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    upload = victim_gradients(backbone, x, torch.tensor([1]), step=Step(dtype=torch.float64))
    chance = torch.Generator().manual_seed(2)
    for name, g in upload.items():
        upload[name] = g * (1 + noise * torch.randn(g.shape, generator=chance, dtype=torch.float64))
    with torch.no_grad():
        block = Block(backbone.requires_grad_(False))
        counts = count(block, 1)
    return block, counts, read_spans(block, upload, counts), patchify(x, (4, 4))[0]


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", LEARNED)
def test_pixels_are_exact_in_float64(name: str) -> None:
    block, counts, spans, patches = scene(LEARNED[name]())
    assert counts.open == 0
    with torch.no_grad():
        found = solve(block, spans, counts)
        torch.testing.assert_close(found.x, patches, rtol=1e-6, atol=1e-6)
        tokens = patches @ block.weight.T + block.base
        tokens = tokens if block.norm0 is None else block.norm0.apply(tokens)
        torch.testing.assert_close(found.z, tokens, rtol=1e-6, atol=1e-6)
        m, o = block.middle(patches.unsqueeze(0))
        first = block.backbone.num_prefix
        torch.testing.assert_close(found.m, m[0, first:], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.o, o[0, first:], rtol=1e-4, atol=1e-5)
        assert float(misfit(block, spans, found).worst.max()) < SOLVED


def test_the_deviation_of_a_norm_before_the_block_is_known_where_no_bias_shows_it() -> None:
    """Norms and an attention without bias say nothing of it: it follows from the patch."""
    backbone = LEARNED["norms before it without bias"]()
    with torch.no_grad():
        attention = backbone.model.blocks[0].attn
        attention.qkv.bias.zero_(), attention.proj.bias.zero_()
    block, counts, spans, patches = scene(backbone)
    with torch.no_grad():
        assert not bool(block.shift.any()) and not bool(Equations(block, spans).scales.any())
        found = solve(block, spans, counts)
        torch.testing.assert_close(found.x, patches, rtol=1e-6, atol=1e-6)
        m, o = block.middle(patches.unsqueeze(0))
        torch.testing.assert_close(found.m, m[0, block.backbone.num_prefix :], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.o, o[0, block.backbone.num_prefix :], rtol=1e-4, atol=1e-5)


def test_rounding_is_expected_where_it_is_and_others_do_not_fit() -> None:
    block, counts, spans, patches = scene(vit(), noise=1e-5)
    with torch.no_grad():
        found = solve(block, spans, counts)
        told = misfit(block, spans, found)
        assert 0.2 < float(told.worst.median()) < 2  # as large as it is expected
        assert 1e-6 < float((found.x - patches).square().mean().sqrt()) < 0.05
        wrong = torch.randn_like(found.x)
        away = (wrong - found.x) @ block.weight.T
        other = misfit(block, spans, Tokens(wrong, found.o, found.z + away, found.m + away))
        assert float(other.worst.min()) > 10 * SOLVED
        moved = misfit(block, spans, found.at(torch.arange(len(patches)).roll(1)))
        torch.testing.assert_close(moved.worst, told.worst.roll(1))


@torch.no_grad()
def test_norms_divide_by_the_deviations_that_their_tokens_have() -> None:
    """As unknowns of their own the deviations err: the tokens are then off by more than rounding explains."""
    backbone = vit()
    for name, parameter in backbone.named_parameters():
        if name.endswith(("norm1.bias", "norm2.bias")):
            parameter.normal_(std=1.0, generator=torch.Generator().manual_seed(7))
    with torch.enable_grad():
        block, _, spans, patches = scene(backbone, noise=1e-5)
    equations = Equations(block, spans)
    family = equations.family(0)
    free = family.tokens(torch.arange(16), torch.zeros(16, 0, dtype=torch.float64))
    tied = equations.tied(free)
    assert float(misfit(block, spans, tied).worst.max()) < SOLVED
    assert misfit(block, spans, tied).worst.square().mean() < misfit(block, spans, free).worst.square().mean()
    errors = [float((found.x - patches).square().mean().sqrt()) for found in (tied, free)]
    assert errors[0] < errors[1]
    # Least squares in all unknowns, by another's code: no step makes the sum of squares smaller.
    y = torch.cat([tied.x @ equations.x.T, tied.o @ equations.o.T], dim=1)

    def squares(content: torch.Tensor) -> torch.Tensor:
        made = torch.stack([*content[:, : len(equations.x)] @ equations.z + equations.base])
        m = made + content[:, len(equations.x) :] @ equations.mixing + block.shift
        parts = [
            (span.outside(norm.apply(z) * norm.size(z) * span.column)).square().sum(dim=1)
            for norm, span, z in ((block.norm1, spans.qkv, made), (block.norm2, spans.fc1, m))
            if span is not None
        ]
        return torch.stack(parts).sum(dim=0)

    chance = torch.Generator().manual_seed(4)
    for _ in range(5):
        step = 1e-3 * y * torch.randn(y.shape, generator=chance, dtype=torch.float64)
        there, back = squares(y + step) - squares(y), squares(y - step) - squares(y)
        assert bool((there + back > 0).all()) and bool(((there - back).abs() < 0.05 * (there + back)).all())
