"""Row spaces of gradients, by exact laws in float64 and by noise of a known size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from situs.audit.attacks.solver import FORWARD, Norm, Span, rank_of


def test_noise_of_known_size_is_found_and_explains_the_residual() -> None:
    """Tokens of very different strength: the residual of each is what `expected` says."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(12, 60, generator=generator, dtype=torch.float64)
    delta = torch.randn(90, 12, generator=generator, dtype=torch.float64) * torch.logspace(0, -3, 12).double()
    clean = delta @ h
    sizes = clean.square().mean(1, keepdim=True).sqrt()
    squares, strong = [], torch.zeros(12, dtype=torch.bool)
    for _ in range(20):
        g = clean + 1e-6 * sizes * torch.randn(90, 60, generator=generator, dtype=torch.float64)
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


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(20, 40), st.integers(20, 40), st.sampled_from([0.0, 1e-9, 1e-6, 1e-3]))
def test_the_rank_is_found_without_being_told(tokens: int, rows: int, columns: int, noise: float) -> None:
    generator = torch.Generator().manual_seed(tokens + 100 * rows + 7 * columns)
    h, delta, off = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((tokens, columns), (rows, tokens), (rows, columns))
    )
    span = Span(delta @ h * (1 + noise * off))  # as rounding errs: in proportion to each number
    assert span.rank == tokens
    assert bool(span.holds(h).all()) or noise == 1e-3
    assert not bool(span.holds(off).any())


def test_noise_alone_has_no_rank_and_a_direction_of_zeros_is_none() -> None:
    noise = torch.randn(60, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert rank_of(torch.linalg.svdvals(noise), 60, 60) == 0
    # Inputs of a layer norm without a bias are centred: one direction of the gradient is 0, and that is no step.
    centred = noise - noise.mean(dim=1, keepdim=True)
    assert rank_of(torch.linalg.svdvals(centred), 60, 60) == 0
    few = torch.randn(60, 5, dtype=torch.float64) @ centred[:5]
    assert rank_of(torch.linalg.svdvals(few), 60, 60) == 5


def test_even_noise_is_judged_in_its_own_units() -> None:
    """Channels of very different size and one noise for all: dividing by their sizes would blow it up."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(8, 50, generator=generator, dtype=torch.float64) * torch.logspace(0, -2, 50).double()
    clean = torch.randn(70, 8, generator=generator, dtype=torch.float64) @ h
    g = clean + 1e-4 * torch.randn(70, 50, generator=generator, dtype=torch.float64)
    even, scaled = Span(g, 8, even=True), Span(g, 8)
    assert float(even.noise) == pytest.approx(1e-4, rel=0.1)
    assert float(even.residual(h).mean()) < float(scaled.residual(h).mean())
    assert bool(even.holds(h).all())


@pytest.mark.parametrize("kind", ["layer norm", "layer norm without bias", "rms norm"])
def test_the_form_of_a_norm_lies_in_the_span_with_one_scale(kind: str) -> None:
    """form(z) + s · bias is s times what the norm gives, to the last digit; and undone it is z up to mean and scale."""
    generator = torch.Generator().manual_seed(0)
    z, weight, bias = (torch.randn(*n, generator=generator, dtype=torch.float64) for n in ((6, 24), (24,), (24,)))
    if kind == "rms norm":
        module: nn.Module = nn.RMSNorm(24, eps=1e-5, dtype=torch.float64)
        norm, added = Norm(weight, None, 1e-5, centred=False), None
    else:
        module = nn.LayerNorm(24, eps=1e-6, dtype=torch.float64, bias="without" not in kind)
        added = None if "without" in kind else bias
        norm = Norm(weight, added, 1e-6)
    with torch.no_grad():
        module.weight.copy_(weight)
        if added is not None:
            module.bias.copy_(added)
        out = module(z)
    assert norm.biased == (added is not None)
    left = norm.form(z) + (0.0 if added is None else norm.size(z) * added)
    torch.testing.assert_close(left, norm.size(z) * out, rtol=1e-12, atol=1e-12)
    gradient = torch.randn(40, 6, generator=generator, dtype=torch.float64) @ out
    assert float(Span(gradient).residual(left).max()) < 1e-10


def test_directions_that_are_noise_alone_do_not_speak_for_the_others() -> None:
    """Blank patches: fewer directions than tokens. Wrong inputs have much in the spare ones, real ones have nothing."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(5, 60, generator=generator, dtype=torch.float64)
    g = torch.randn(90, 5, generator=generator, dtype=torch.float64) @ h
    span = Span(g + 1e-7 * torch.randn(g.shape, generator=generator, dtype=torch.float64), 12)
    assert float(span.expected(torch.randn(9, 60, generator=generator, dtype=torch.float64)).median()) > 1e-2
    assert float(span.expected(h).max()) < 1e-5
    # The input of another layer moves as far as predicted: draws of noise through a matrix.
    matrix, into = (torch.randn(*n, generator=generator, dtype=torch.float64) for n in ((40, 60), (40,)))
    away = []
    for _ in range(200):
        noisy = Span(g + 1e-4 * torch.randn(g.shape, generator=generator, dtype=torch.float64), 5, even=True)
        away.append((noisy.outside(h) @ matrix.T * into).norm(dim=1).square())
    predicted = noisy.deviation(h) * noisy.gain(matrix, into.abs())
    torch.testing.assert_close(torch.stack(away).mean(dim=0).sqrt(), predicted, rtol=0.15, atol=0)
