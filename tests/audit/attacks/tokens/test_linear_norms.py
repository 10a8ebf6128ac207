"""The directions of a norm's outputs, how many equations a span behind it gives, and the worse of two misfits."""

from __future__ import annotations

import pytest
import torch

from situs.audit.attacks.solver import Group, Norm, Span
from situs.audit.attacks.tokens.linear import Counts, Misfit, _equations, _residuals, _space

DIM = 10


def chance(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("centred", [True, False])
def test_directions_and_equations_are_the_ranks_of_real_outputs(centred: bool, biased: bool) -> None:
    """A token may be moved along an equation's null space, and in size; a bias makes its deviation one more unknown."""
    norm = Norm(chance(DIM), chance(DIM, seed=1) if biased else None, 1e-6, centred)
    outputs = norm.apply(chance(5 * DIM, DIM, seed=2))
    assert _space(norm, DIM) == int(torch.linalg.matrix_rank(outputs))
    for rank in (3, _space(norm, DIM) - 1):
        span = Span(chance(20, rank, seed=3) @ outputs[:rank], rank)
        rows = Group(norm, span).rows(torch.eye(DIM, dtype=torch.float64))
        rank_of_rows = int(torch.linalg.matrix_rank(rows, rtol=1e-9))
        assert _equations(norm, DIM, rank) == rank_of_rows - biased
    assert _equations(norm, DIM, DIM) == _equations(norm, DIM, DIM + 3) == 0


def test_the_noise_of_an_earlier_span_is_expected_behind_the_norm() -> None:
    """By draws: what is added to a patch outside its span, with the norm's unequal weights and the span's behind it."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    inputs, embedding, size = drawn(3, 30), drawn(60, 30), torch.logspace(-1, 1, 30).double()
    norm = Norm(torch.logspace(1, -2, 60).double() * drawn(60).sign(), None, 1e-6)
    patches = Span(drawn(50, 3) @ (inputs * size), 3)
    patches.noise = torch.tensor(1e-4).double()
    x = inputs[:1] * size
    behind = Span(drawn(80, 2) @ torch.cat([norm.apply(x @ embedding.T), drawn(1, 60)]), 2, forward=0.0)
    behind.noise = torch.zeros(()).double()
    found = _residuals(norm, behind, x @ embedding.T, [(patches, x, embedding), (None, x, embedding)])
    assert found is not None and float(found[0]) < 1e-10
    added = patches.outside(float(patches.deviation(x)) * drawn(3000, 30)) / patches.column
    moved = behind.residual(norm.apply((x + added) @ embedding.T))
    assert float(found[1]) == pytest.approx(float(moved.square().mean().sqrt()), rel=0.1)


def test_the_larger_of_two_misfits_counts_and_no_number_is_none() -> None:
    first, second = torch.tensor([1.0, 0.2, torch.nan, 0.0]), torch.tensor([0.5, 0.6, 0.1, 0.0])
    found = Misfit(first, torch.tensor([0.5, 0.1, 1.0, 1.0]), second, torch.tensor([0.5, 0.2, 1.0, 1.0]))
    torch.testing.assert_close(found.worst, torch.tensor([2.0, 3.0, torch.inf, 0.0]))
    torch.testing.assert_close(found.share[[0, 1, 3]], torch.tensor([1.0, 0.6, 0.0]))


@pytest.mark.parametrize(
    ("structural", "general", "open_", "said"),
    [
        (-2, -1, 0, ""),
        (3, 2, 3, "linear equations leave 3 directions of each token open, because combinations of other tokens"),
        (2, 2, 2, "linear equations leave 2 directions"),
        (2, 4, 4, "each token has 4 more unknowns than linear equations"),
    ],
)
def test_open_directions_have_the_reason_that_leaves_most(structural: int, general: int, open_: int, said: str) -> None:
    counts = Counts(1, 2, 3, 4, 5, 7, True, True, "", structural, general, 0.0)
    assert counts.open == open_ and counts.reason.startswith(said) and bool(counts.reason) is bool(said)
