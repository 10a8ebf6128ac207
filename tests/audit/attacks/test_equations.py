"""Linear systems solved, with what was lost of them left out, and judged by what is left over."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from situs.audit.attacks.equations import judge, solve_pixels, svd, whiten


@given(st.integers(2, 12), st.integers(0, 6), st.integers(1, 9), st.integers(1, 3))
def test_a_consistent_system_is_solved(n: int, spare: int, k: int, batch: int) -> None:
    chance = torch.Generator().manual_seed(n * 100 + k)
    table = torch.randn(batch, n, n + 4 + spare, generator=chance, dtype=torch.float64)
    patches = torch.randn(batch, n, k, generator=chance, dtype=torch.float64)
    found = solve_pixels(table.mT @ patches, table, torch.float64)
    torch.testing.assert_close(found.patches, patches, rtol=1e-7, atol=1e-7)
    assert found.rank.tolist() == [n] * batch
    torch.testing.assert_close(found.condition, torch.linalg.cond(table))
    assert float(found.residual.max()) < 1e-10


def test_more_patches_than_channels_give_the_solution_of_least_norm() -> None:
    chance = torch.Generator().manual_seed(0)
    table = torch.randn(1, 9, 5, generator=chance, dtype=torch.float64)
    weight = torch.randn(1, 5, 4, generator=chance, dtype=torch.float64)
    found = solve_pixels(weight, table, torch.float64)
    torch.testing.assert_close(found.patches, torch.linalg.pinv(table.mT) @ weight)
    assert int(found.rank) == 5
    assert float(found.condition) == float("inf")


def test_noise_is_damped_and_not_amplified() -> None:
    """With noise as large as the gradients the estimate shrinks to the mean image; least squares would explode."""
    chance = torch.Generator().manual_seed(0)
    table = torch.randn(1, 20, 40, generator=chance, dtype=torch.float64)
    table[:, -5:] *= 1e-3
    patches = torch.randn(1, 20, 6, generator=chance, dtype=torch.float64)
    for sigma in (1e-2, 0.1, 1.0):
        g = table + sigma * torch.randn(table.shape, generator=chance, dtype=torch.float64)
        w = table.mT @ patches + sigma * torch.randn(1, 40, 6, generator=chance, dtype=torch.float64)
        ridge = (solve_pixels(w, g, torch.float64, sigma).patches - patches).norm()
        plain = (torch.linalg.pinv(g.mT) @ w - patches).norm()
        assert ridge < plain
        assert ridge < 1.1 * patches.norm()
    assert int(solve_pixels(w, g, torch.float64, 1.0).rank) < 20


@given(st.integers(0, 10_000))
def test_lost_entries_leave_the_others_to_solve_with(seed: int) -> None:
    """By least squares on each column with the equations that it has left, which is slow and plain."""
    chance = torch.Generator().manual_seed(seed)
    table = torch.randn(2, 4, 14, generator=chance, dtype=torch.float64)
    weight = table.mT @ torch.randn(2, 4, 5, generator=chance, dtype=torch.float64)
    weight[torch.rand(weight.shape, generator=chance) < 0.2] = torch.nan
    table[1, 2, 3] = torch.inf
    found = solve_pixels(weight, table, torch.float64)
    for b in range(2):
        whole = table[b].isfinite().all(dim=0)
        for k in range(5):
            kept = whole & weight[b, :, k].isfinite()
            plain = torch.linalg.pinv(table[b][:, kept].T) @ weight[b, kept, k]
            assert int(kept.sum()) < 5 or torch.allclose(found.patches[b, :, k], plain, rtol=1e-6, atol=1e-6)
    assert found.patches.isfinite().all()


def test_a_column_without_equations_comes_out_grey_and_does_not_fit() -> None:
    chance = torch.Generator().manual_seed(0)
    table = torch.randn(1, 4, 12, generator=chance, dtype=torch.float64)
    weight = table.mT @ torch.randn(1, 4, 3, generator=chance, dtype=torch.float64)
    weight[..., 1] = torch.nan
    found = solve_pixels(weight, table, torch.float64)
    assert not found.patches[..., 1].any()
    assert found.rank.tolist() == [0]
    assert found.fits.tolist() == [False]


def test_columns_that_lost_different_equations_are_off_together_as_their_equations_are() -> None:
    """Errors are summed over all columns: those of one must not make up for those of another."""
    chance = torch.Generator().manual_seed(0)
    table = torch.randn(1, 4, 12, generator=chance, dtype=torch.float64)
    weight = table.mT @ torch.randn(1, 4, 6, generator=chance, dtype=torch.float64)
    weight += 0.01 * torch.randn(weight.shape, generator=chance, dtype=torch.float64)
    weight[0, 2, :2], weight[0, 7, 2:4] = torch.nan, torch.inf
    found = solve_pixels(weight, table, torch.float64, 0.01)
    left = size = allowed = 0.0
    for columns in (slice(0, 2), slice(2, 4), slice(4, 6)):
        white, right = whiten(weight[..., columns], table, torch.float64, 0.01)
        own = solve_pixels(weight[..., columns], table, torch.float64, 0.01)
        left += float((right - white.mT @ found.patches[..., columns]).square().sum())
        size += float(right.square().sum())
        allowed += float(own.expected) ** 2 * float(right.square().sum())
    assert float(found.residual) == pytest.approx((left / size) ** 0.5)
    assert float(found.expected) == pytest.approx((allowed / size) ** 0.5)
    assert found.fits.tolist() == [True]
    weight[0, 5, 5] += 1.0  # one equation of one column is wrong
    assert solve_pixels(weight, table, torch.float64, 0.01).fits.tolist() == [False]


@pytest.mark.parametrize("sigma", [1e-4, 1e-2, 1.0])
def test_the_residual_is_the_one_expected(sigma: float) -> None:
    """Pixels of variance 1 and noise as stated: over many systems the two agree, and with 5 times the noise they do
    not, unless noise is all there is."""
    chance = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=chance, dtype=torch.float64)

    table, patches = noise(50, 8, 20), noise(50, 8, 6)
    for times, agrees in ((1, True), (5, False)):
        g = table + times * sigma * noise(*table.shape)
        w = table.mT @ patches + times * sigma * noise(50, 20, 6)
        found = solve_pixels(w, g, torch.float64, sigma)
        ratio = found.residual / found.expected
        assert (0.6 < float(ratio.mean()) < 1.1) is agrees
        assert sigma == 1 or agrees is bool(found.fits.any())
        assert not agrees or found.fits.all()


def test_equations_that_are_none_do_not_fit() -> None:
    chance = torch.Generator().manual_seed(0)
    table = torch.randn(3, 8, 20, generator=chance)
    weight = torch.randn(3, 20, 6, generator=chance)
    found = solve_pixels(weight, table)
    assert not found.fits.any()
    assert float(found.residual.min()) > 0.3
    assert float(found.expected.max()) < 1e-5


def test_as_many_unknowns_as_equations_prove_nothing() -> None:
    chance = torch.Generator().manual_seed(0)
    weight = torch.randn(1, 8, 6, generator=chance)
    for n, fits in ((7, False), (8, False), (9, False)):
        assert solve_pixels(weight, torch.randn(1, n, 8, generator=chance)).fits.tolist() == [fits]
    for n, fits in ((7, False), (6, True)):  # of two to spare one may be a layer norm's, which holds whatever X is
        table = torch.randn(1, n, 8, generator=chance)
        right = table.mT @ torch.randn(1, n, 6, generator=chance)
        assert solve_pixels(right, table).fits.tolist() == [fits]


def test_a_solution_of_ones_own_is_judged() -> None:
    chance = torch.Generator().manual_seed(0)
    table, patches = torch.randn(2, 8, 20, generator=chance), torch.randn(2, 8, 6, generator=chance)
    white, right = whiten(table.mT @ patches, table)
    assert judge(white, right, patches.double()).fits.tolist() == [True, True]
    patches[1, 3, 2] += 1e-4
    assert judge(white, right, patches.double()).fits.tolist() == [True, False]


def test_the_parts_of_a_matrix_of_any_rank_are_found() -> None:
    chance = torch.Generator().manual_seed(0)
    for rank in (0, 1, 3, 5):
        matrix = torch.randn(7, rank, generator=chance, dtype=torch.float64)
        matrix = matrix @ torch.randn(rank, 5, generator=chance, dtype=torch.float64)
        u, s, v = svd(matrix)
        torch.testing.assert_close(u @ torch.diag(s) @ v, matrix)
        assert int((s > 1e-9).sum()) == rank
        assert svd(matrix, full=True)[0].shape == (7, 7)
    constant = torch.full((64, 49), 0.7, dtype=torch.float64) * torch.arange(1.0, 65).unsqueeze(1).double()
    assert float(svd(constant)[1][1]) < 1e-9


def test_singular_vectors_where_the_quicker_algorithm_does_not_converge(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(7, 4, dtype=torch.float64)
    expected = torch.linalg.svdvals(matrix)

    def fails(*_: object, **__: object) -> None:
        raise np.linalg.LinAlgError("SVD did not converge")

    monkeypatch.setattr("numpy.linalg.svd", fails)
    for full in (False, True):
        u, values, v = svd(matrix, full=full)
        torch.testing.assert_close(values, expected)
        torch.testing.assert_close(u[:, :4] * values @ v, matrix)
        assert u.shape == (7, 7 if full else 4)
