"""Reading places off vectors: against plain least squares, and what must and must not be readable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.model_selection import KFold

from situs.backbones import create_backbone
from situs.core.position import sincos
from situs.errors import SitusError
from situs.measure.position.vectors import decode_places, reference_tables, tables_of


def noise(count: int, dim: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dim", [5, 60])  # fewer and more channels than places to fit
def test_against_the_pseudo_inverse(dim: int) -> None:
    grid, rows = (5, 8), noise(40, dim)
    found = decode_places(rows, grid, seed=3)
    x = rows.numpy()
    y = np.array([[i, i // 8, i % 8] for i in range(40)], dtype=float)
    errors, blind, folds = np.empty_like(y), np.empty_like(y), []
    for fit, held in KFold(5, shuffle=True, random_state=3).split(x):
        mx, my = x[fit].mean(axis=0), y[fit].mean(axis=0)
        weights = np.linalg.pinv(x[fit] - mx, rcond=1e-10) @ (y[fit] - my)
        errors[held] = np.abs((x[held] - mx) @ weights + my - y[held])
        blind[held] = np.abs(my - y[held])
        folds.append((errors[held][:, 0].mean(), errors[held][:, 1:].mean()))
    one, two = np.array(folds).T
    assert found.one == pytest.approx((one.mean(), one.std()), rel=1e-8)
    assert found.two == pytest.approx((two.mean(), two.std()), rel=1e-8)
    assert (found.rows, found.columns) == pytest.approx(tuple(errors[:, 1:].mean(axis=0)), rel=1e-8)
    assert (found.chance_one, found.chance_two) == pytest.approx((blind[:, 0].mean(), blind[:, 1:].mean()))
    assert (found.folds, found.fitted) == (5, 32)


@given(st.integers(2, 5), st.integers(2, 7), st.integers(2, 30), st.integers(0, 99))
def test_index_error_is_w_rows_and_a_column(h: int, w: int, dim: int, seed: int) -> None:
    """What settles the units of the paper's Table 8: least squares is linear in what it predicts."""
    if h * w < 5:
        return
    found = decode_places(noise(h * w, dim, seed), (h, w), seed=seed)
    place = np.stack(np.divmod(np.arange(h * w), w), axis=-1)
    away = found.guesses - place
    folds = KFold(5, shuffle=True, random_state=seed).split(place)
    means = [np.abs(away[held] @ [w, 1]).mean() for _, held in folds]
    assert found.one.mean == pytest.approx(np.mean(means), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("grid", [(14, 14), (7, 7), (6, 11)])
def test_sincos_is_read_and_a_random_table_is_not(grid: tuple[int, int]) -> None:
    count = grid[0] * grid[1]
    known, random = (decode_places(table, grid) for table in reference_tables(count, grid, 64).values())
    assert known.two.mean < 0.05
    assert known.exact == 1.0
    assert random.two.mean > 0.9 * random.chance_two
    assert random.exact < 0.1
    assert known.left < 0.05 < 0.9 < random.left


def test_rows_that_are_out_of_order_are_read_no_better_than_the_vectors_allow() -> None:
    """A shuffled sin-cos table knows nothing of the grid: the reader does not see the answers."""
    order = torch.randperm(196, generator=torch.Generator().manual_seed(0))
    assert decode_places(sincos((14, 14), 64)[order], (14, 14)).left > 0.9


@given(st.integers(0, 20))
def test_affine_maps_of_the_vectors_change_nothing(seed: int) -> None:
    rows, grid = noise(48, 6, seed) + 2, (6, 8)
    turn = torch.linalg.qr(noise(6, 6, seed + 1))[0] * torch.linspace(1, 3, 6)
    straight, moved = decode_places(rows, grid), decode_places(rows @ turn + 5.0, grid)
    assert moved.two.mean == pytest.approx(straight.two.mean, rel=1e-6)


def test_seed_chooses_the_folds() -> None:
    rows = noise(49, 8)
    assert decode_places(rows, (7, 7), seed=1).one == decode_places(rows, (7, 7), seed=1).one
    assert decode_places(rows, (7, 7), seed=1).one != decode_places(rows, (7, 7), seed=2).one


def test_fewer_places_than_folds_are_each_a_fold() -> None:
    found = decode_places(sincos((2, 2), 8), (2, 2))
    assert (found.folds, found.fitted) == (4, 3)
    with pytest.raises(SitusError, match=r"folds=1: "):
        decode_places(noise(9, 3), (3, 3), folds=1)


@pytest.mark.shared_data
@pytest.mark.slow
def test_real_dinov2_is_read_within_half_a_patch(shared_data: Path) -> None:
    weights = shared_data / "weights" / "vit_small_patch14_dinov2_fp16.safetensors"
    (table,) = tables_of(create_backbone("vit_small_patch14_dinov2", weights=weights))
    assert (table.grid, table.rows.shape) == ((37, 37), (1369, 384))
    found = decode_places(table.rows, table.grid)
    assert found.two.mean < 0.5
    assert found.two.mean == pytest.approx(0.319, abs=0.02)
    assert found.one.mean / found.two.mean == pytest.approx(37 * 2 * 0.7 / 1.7, rel=0.05)  # rows are read better
