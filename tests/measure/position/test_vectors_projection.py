from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from situs.core.position import sincos
from situs.errors import SitusError
from situs.measure.position import vectors
from situs.measure.position.vectors import principal, similarities, spread_places, umap_points


def test_principal_components_by_eigenvectors() -> None:
    rows = np.random.default_rng(0).normal(size=(20, 6)) * [5, 4, 3, 2, 1, 0.5] + 10
    found = principal(torch.from_numpy(rows))
    centred = rows - rows.mean(axis=0)
    values, vectors = np.linalg.eigh(centred.T @ centred)
    expected = centred @ vectors[:, ::-1][:, :3]
    assert found.points.shape == (20, 3)
    np.testing.assert_allclose(np.abs(found.points), np.abs(expected), rtol=1e-8)  # a direction has no sign
    np.testing.assert_allclose(found.shares, values[::-1][:3] / values.sum(), rtol=1e-10)


def test_components_that_do_not_exist_are_zero() -> None:
    found = principal(torch.tensor([[0.0, 1.0], [2.0, 3.0], [5.0, 1.0]]))
    assert found.points.shape == (3, 3)
    assert (found.points[:, 2] == 0).all()
    assert found.shares[2] == 0.0
    assert sum(found.shares) == pytest.approx(1.0)


def test_projection_of_half_precision_and_same_bytes_twice() -> None:
    rows = sincos((4, 5), 16).half()
    assert np.array_equal(principal(rows).points, principal(rows).points)


def test_similarities_slowly() -> None:
    rows = torch.randn(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 3
    places = torch.tensor([6, 0, 3])
    found = similarities(rows, places)
    centred = rows.numpy() - rows.numpy().mean(axis=0)
    for k, place in enumerate(places.tolist()):
        for other in range(7):
            a, b = centred[place], centred[other]
            assert float(found[k, other]) == pytest.approx(a @ b / np.sqrt((a @ a) * (b @ b)), abs=1e-12)


def test_similarity_of_a_vector_that_is_the_mean_is_zero_and_no_nan() -> None:
    found = similarities(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]]), torch.arange(3))
    assert torch.isfinite(found).all()
    assert float(found[2].abs().max()) == 0.0


@given(st.tuples(st.integers(1, 40), st.integers(1, 40)))
def test_spread_places_are_on_the_grid_and_evenly_apart(grid: tuple[int, int]) -> None:
    rows, columns, chosen = spread_places(grid)
    assert chosen.tolist() == [row * grid[1] + column for row in rows for column in columns]
    for count, shown in zip(grid, (rows, columns), strict=True):
        assert len(shown) == min(count, 5)
        assert len(set(shown)) == len(shown)
        assert all(0 <= place < count for place in shown)
        steps = np.diff(shown)
        assert steps.size == 0 or steps.max() - steps.min() <= 1
    assert spread_places((37, 7))[:2] == ([3, 11, 18, 25, 33], [0, 2, 3, 4, 6])


def test_umap_that_is_missing_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "has_umap", lambda: False)
    with pytest.raises(SitusError, match=r"UMAP picture needs the package 'umap-learn': pip install 'situs\[umap\]'"):
        umap_points(torch.randn(12, 4))


def test_umap_of_too_few_places() -> None:
    with pytest.raises(SitusError, match=r"UMAP needs at least 10 .* 9"):
        umap_points(torch.randn(9, 4))


def test_umap_is_asked_for_a_fixed_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    class Umap:
        def __init__(self, **settings: Any) -> None:
            asked.update(settings)

        def fit_transform(self, rows: np.ndarray) -> np.ndarray:
            return rows[:, :2].astype(np.float32)

    monkeypatch.setitem(sys.modules, "umap", types.SimpleNamespace(UMAP=Umap))
    monkeypatch.setattr(vectors, "has_umap", lambda: True)
    rows = torch.randn(12, 4)
    points = umap_points(rows, seed=7)
    assert asked == {"n_components": 2, "n_neighbors": 11, "random_state": 7, "n_jobs": 1}
    assert points.dtype == np.float64
    np.testing.assert_allclose(points, rows[:, :2].double().numpy(), rtol=1e-6)


def test_umap_itself_keeps_neighbours() -> None:
    pytest.importorskip("umap")
    points = umap_points(sincos((7, 7), 32))
    sheet = points.reshape(7, 7, 2)
    near = np.linalg.norm(np.diff(sheet, axis=1), axis=-1).mean()
    far = np.linalg.norm(points[:, None] - points[None], axis=-1).mean()
    assert near < far / 2
