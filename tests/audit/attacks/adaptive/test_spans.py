"""Row spaces of gradients: what sticks out is what noise explains."""

from __future__ import annotations

import pytest
import torch

from situs.audit.attacks.adaptive.spans import FORWARD, Span


def test_noise_of_known_size_is_found_and_explains_the_residual() -> None:
    """Tokens of very different strength: the residual of each is what `expected` says."""
    chance = torch.Generator().manual_seed(0)
    h = torch.randn(12, 60, generator=chance, dtype=torch.float64)
    delta = torch.randn(90, 12, generator=chance, dtype=torch.float64) * torch.logspace(0, -3, 12).double()
    clean = delta @ h
    sizes = clean.square().mean(1, keepdim=True).sqrt()
    squares, strong = [], torch.zeros(12, dtype=torch.bool)
    for _ in range(20):
        g = clean + 1e-6 * sizes * torch.randn(90, 60, generator=chance, dtype=torch.float64)
        span = Span(g, 12)
        assert float(span.noise / span.column.square().mean().sqrt()) == pytest.approx(1e-6, rel=0.2)
        squares.append((span.residual(h) / span.expected(h)).square())
        strong = span.expected(h) < 1.5 * FORWARD  # these are exact here, and no victim's forward pass is
    mean = torch.stack(squares).mean(0)
    assert ((mean > 0.6) & (mean < 1.6) | strong).all()
    assert (mean[strong] < 1.6).all()


def test_exact_inputs_stick_out_by_nothing_and_others_do() -> None:
    h, delta = torch.randn(5, 20, dtype=torch.float64), torch.randn(30, 5, dtype=torch.float64)
    span = Span(delta @ h, 5)
    assert float(span.residual(h).max()) < 1e-12
    assert float(span.residual(3 * h[:1] - 2 * h[1:2])) < 1e-12
    assert float(span.residual(torch.randn(50, 20, dtype=torch.float64)).min()) > 0.3


def test_a_full_row_space_says_nothing() -> None:
    assert Span.exists(torch.randn(30, 30), 29)
    assert not Span.exists(torch.randn(30, 30), 30)
    assert not Span.exists(torch.zeros(30, 30), 5)
    assert not Span.exists(torch.full((30, 30), torch.inf), 5)
