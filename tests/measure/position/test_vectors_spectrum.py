from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.decomposition import PCA

from situs.measure.position.vectors import Spectrum, spectrum


def table(count: int, dim: int, seed: int = 0) -> torch.Tensor:
    scales = torch.logspace(0, -2, dim, dtype=torch.float64)
    noise = torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return noise * scales + 3.0  # the mean is large, so that forgetting to take it off shows


@pytest.mark.parametrize(("count", "dim"), [(49, 12), (12, 49), (9, 9)])
def test_explained_variance_is_scikit_learn_s(count: int, dim: int) -> None:
    rows = table(count, dim)
    found = spectrum(rows)
    expected = PCA().fit(rows.numpy()).explained_variance_ratio_
    np.testing.assert_allclose(found.explained, expected, rtol=1e-9, atol=1e-14)
    assert found.explained_by(3) == pytest.approx(expected[:3].sum(), rel=1e-12)


@pytest.mark.parametrize(("count", "dim"), [(49, 12), (12, 49)])
def test_energy_is_definition_1_of_the_table_as_it_is(count: int, dim: int) -> None:
    """Σσ(PV)²/Σσ(P)² with V the first n right singular vectors, by projecting; the mean stays."""
    rows = table(count, dim).numpy()
    found = spectrum(torch.from_numpy(rows))
    directions = np.linalg.svd(rows)[2]
    for n in (1, 2, 5, 12):
        projected = rows @ directions[:n].T
        assert found.energy[n - 1] == pytest.approx((projected**2).sum() / (rows**2).sum(), rel=1e-10)


def test_by_hand() -> None:
    found = spectrum(torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, -1.0]], dtype=torch.float64))
    assert found.explained == pytest.approx((0.8, 0.2))
    assert found.energy == pytest.approx((0.8, 1.0))
    assert (found.components_for(0.8), found.components_for(0.81), found.components_for(1.0)) == (1, 2, 2)


def test_components_for_more_than_there_is() -> None:
    assert Spectrum((0.5, 0.3), (0.5, 0.8)).components_for(0.99) == 2


@given(st.integers(2, 9), st.integers(1, 9), st.integers(0, 99))
def test_shares_fall_and_sum_to_one_whatever_turns_the_table(count: int, dim: int, seed: int) -> None:
    rows = table(count, dim, seed)
    turn = torch.linalg.qr(torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed)).double())[0]
    found, turned = spectrum(rows), spectrum(rows @ turn * 7.0)
    assert sum(found.explained) == pytest.approx(1.0)
    assert list(found.explained) == sorted(found.explained, reverse=True)
    assert found.energy[-1] == pytest.approx(1.0)
    assert turned.explained == pytest.approx(found.explained, abs=1e-9)
    assert turned.energy == pytest.approx(found.energy, abs=1e-9)
