"""Readers in closed form against scikit-learn's, and the choice of the ridge against trying each one out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from situs.audit.position.reader import RIDGES, Reader, Sums, choose_ridge, moments, regress, squared_error
from situs.core.position import coordinates

GRID = (3, 4)
PLACES = coordinates(GRID).double()


def features(images: int, dim: int = 7, seed: int = 0, strength: float = 1.0) -> Tensor:
    """[images, 12, dim]: a vector of the place, noise, a large common offset, channels of very different size."""
    generator = torch.Generator().manual_seed(seed)
    told = torch.randn(12, dim, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    noise = torch.randn(images, 12, dim, generator=generator, dtype=torch.float64)
    return (strength * told + noise) * torch.logspace(-2, 2, dim, dtype=torch.float64) + 50.0


def sums(x: Tensor) -> Sums:
    found = Sums(GRID)
    for part in x.split(3):
        found.add(part)
    return found


def flat(x: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features [images * 12, dim], their (row, column), their place."""
    images = len(x)
    return x.flatten(0, 1).numpy(), PLACES.repeat(images, 1).numpy(), np.tile(np.arange(12), images)


@pytest.mark.parametrize("ridge", [1e-4, 1e-1, 10.0])
def test_regression_is_scikit_learn_s_ridge(ridge: float) -> None:
    x, other = features(10), features(4, seed=1)
    weights, offset = regress(moments(sums(x)), PLACES, ridge)
    rows, targets, _ = flat(x)
    scaler = StandardScaler().fit(rows)
    peer = Ridge(alpha=ridge * len(rows)).fit(scaler.transform(rows), targets)
    expected = peer.predict(scaler.transform(flat(other)[0]))
    np.testing.assert_allclose((other @ weights + offset).flatten(0, 1).numpy(), expected, atol=1e-8)
    error = squared_error(sums(other), PLACES, weights, offset)
    assert float(error) == pytest.approx(((expected - flat(other)[1]) ** 2).sum(), rel=1e-8)


def test_named_places_are_those_of_scikit_learn_s_discriminant() -> None:
    x, other = features(40), features(30, seed=1)
    reader = Reader(sums(x), Sums(GRID))  # without a second half the ridge is small
    rows, _, labels = flat(x)
    scaler = StandardScaler().fit(rows)
    # scikit-learn has no ridge but shrinks towards the mean variance: the same matrix up to a factor.
    within = np.mean([np.cov(scaler.transform(rows)[labels == n].T, bias=True) for n in range(12)], axis=0)
    size = np.trace(within) / len(within)
    shrinkage = (reader.ridge / size) / (1 + reader.ridge / size)
    peer = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=None, covariance_estimator=_Shrunk(shrinkage))
    peer.fit(scaler.transform(rows), labels)
    scores = scaler.transform(flat(other)[0]) @ reader.scores.numpy() + reader.bias.numpy()
    assert (scores.argmax(axis=1) == peer.predict(scaler.transform(flat(other)[0]))).mean() > 0.98
    reader.read(other)
    assert reader.reading("1").right == pytest.approx((scores.argmax(axis=1) == flat(other)[2]).mean())


class _Shrunk:
    """A covariance estimator with a ridge, as scikit-learn takes one."""

    def __init__(self, shrinkage: float) -> None:
        self.shrinkage = shrinkage

    def fit(self, x: np.ndarray) -> _Shrunk:
        plain = np.cov(x.T, bias=True)
        size = np.trace(plain) / len(plain)
        self.covariance_ = (1 - self.shrinkage) * plain + self.shrinkage * size * np.eye(len(plain))
        return self


def test_reading_slowly() -> None:
    x, other = features(10), features(6, seed=1)
    reader = Reader(sums(x[::2]), sums(x[1::2]))
    for part in other.split(4):
        reader.read(part)
    found = reader.reading("3")
    away = (other @ reader.weights + reader.offset - PLACES).numpy()
    assert found.error == pytest.approx(np.abs(away).mean())
    variances = PLACES.numpy().var(axis=0)
    assert found.r2 == pytest.approx(np.mean([1 - (away[..., k] ** 2).mean() / variances[k] for k in range(2)]))
    assert (found.depth, found.grid, found.blind_right) == ("3", GRID, 1 / 12)
    assert found.blind_error == pytest.approx(np.abs(PLACES.numpy() - PLACES.numpy().mean(axis=0)).mean())


@settings(max_examples=20)
@given(st.integers(0, 30), st.sampled_from([0.0, 0.3, 3.0]))
def test_ridge_is_the_one_that_reads_the_other_half_best(seed: int, strength: float) -> None:
    halves = features(4, seed=seed, strength=strength), features(3, seed=seed + 100, strength=strength)
    errors = []
    for ridge in RIDGES:
        total = 0.0
        for a, b in (halves, halves[::-1]):
            rows, targets, _ = flat(a)
            scaler = StandardScaler().fit(rows)
            peer = Ridge(alpha=ridge * len(rows)).fit(scaler.transform(rows), targets)
            total += ((peer.predict(scaler.transform(flat(b)[0])) - flat(b)[1]) ** 2).sum()
        errors.append(total)
    assert choose_ridge(sums(halves[0]), sums(halves[1]), PLACES) == RIDGES[int(np.argmin(errors))]


def test_nothing_to_read_is_read_no_worse_than_blindly() -> None:
    reader = Reader(sums(features(20, dim=30, strength=0.0)), sums(features(20, dim=30, seed=1, strength=0.0)))
    reader.read(features(200, dim=30, seed=2, strength=0.0))
    found = reader.reading("1")
    assert found.error == pytest.approx(found.blind_error, rel=0.03)
    assert abs(found.r2) < 0.05
    assert found.right == pytest.approx(1 / 12, abs=4 * (1 / 12 * 11 / 12 / 2400) ** 0.5)
    assert found.left == pytest.approx(1.0, rel=0.03)


def test_constant_channels_change_nothing() -> None:
    x, other = features(10), features(6, seed=1)
    dead = torch.tensor([0.0, 1e3], dtype=torch.float64)
    readings = []
    for wide in (False, True):
        with_dead = [
            torch.cat([part, dead.expand(*part.shape[:2], 2)], dim=-1) if wide else part for part in (x, other)
        ]
        reader = Reader(sums(with_dead[0][::2]), sums(with_dead[0][1::2]))
        reader.read(with_dead[1])
        readings.append(reader.reading("1"))
    assert readings[1].error == pytest.approx(readings[0].error, rel=1e-9)
    assert readings[1].right == readings[0].right


def test_a_row_of_places_reads_its_one_axis() -> None:
    found = Sums((1, 4))
    x = torch.arange(4.0).double()[None, :, None] + 0.01 * torch.randn(5, 4, 1, dtype=torch.float64)
    found.add(x)
    reader = Reader(found, Sums((1, 4)))
    reader.read(x)
    assert reader.reading("1").r2 > 0.99
