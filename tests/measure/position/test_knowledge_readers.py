"""Where a model's knowledge of place comes from, on models that were made to know."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from builders import small_swin, small_vit
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from situs.backbones import create_backbone
from situs.backbones.base import Backbone
from situs.core.position import coordinates
from situs.data.batch import Batch
from situs.errors import SitusError
from situs.measure.features import Layer, patch_layers
from situs.measure.position.knowledge import (
    OWN,
    REMOVED,
    RIDGES,
    SHUFFLED,
    PlaceReading,
    Reader,
    Sums,
    choose_ridge,
    conditions_of,
    moments,
    probe_places,
    regress,
    squared_error,
)

N = 12


def make(name: str = "vit_tiny_patch16_224", std: float = 2.0, **more: Any) -> Backbone:
    torch.manual_seed(0)
    settings = {"img_size": (12, 16), "width": 24, "heads": 3, **more}
    found = small_vit(name=name, **settings).double().eval()
    if name.startswith("vit_tiny"):
        with torch.no_grad():
            found.model.pos_embed.normal_(std=std)
    return found


def batches(count: int, sizes: int = 7, *, bright: bool = False) -> list[Batch]:
    """Noise; bright: patches whose brightness grows with their place, so that contents alone tell it."""
    images = torch.randn(count, 3, 12, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if bright:
        ramp = torch.arange(N, dtype=torch.float64).reshape(3, 4)
        images = images + 2 * ramp.repeat_interleave(4, 0).repeat_interleave(4, 1)
    ids = torch.arange(count)
    return [Batch(part, which) for part, which in zip(images.split(sizes), ids.split(sizes), strict=True)]


def ends(found: Any) -> dict[str, tuple[PlaceReading, PlaceReading]]:
    return {condition: (readings[0], readings[-1]) for condition, readings in found.readings.items()}


def test_positions_alone() -> None:
    """A strong table under noise: known as it is and under shuffled patches, gone with the positions."""
    found = probe_places(make(), batches(60))
    assert (found.fitted, found.tested) == (30, 30)
    assert [each.depth for each in found.readings[OWN]] == ["embedding", "1", "2", "norm"]
    for condition, known in ((OWN, True), (SHUFFLED, True), (REMOVED, False)):
        for reading in found.readings[condition]:
            assert (reading.right > 0.95) == known, (condition, reading)
            assert (reading.right < 3 / N) == (not known), (condition, reading)
            assert (reading.left < 0.8) == known, (condition, reading)


def test_contents_alone() -> None:
    """A weak table under patches that show their place: shuffling takes it away, removing the positions does not."""
    found = ends(probe_places(make(std=1e-3), batches(60, bright=True)))
    assert found[OWN][0].right > 0.8
    assert found[REMOVED][0].right == pytest.approx(found[OWN][0].right, abs=0.05)
    assert found[SHUFFLED][0].right < 3 / N


def test_embedding_slowly() -> None:
    """Images 0, 2, 4 … fit, in halves of every other; 1, 3, 5 … are read; whatever the batches."""
    backbone = make(std=0.3)
    found, again = (probe_places(backbone, batches(21, size)).readings[OWN] for size in (5, 8))
    images = torch.cat([batch.inputs for batch in batches(21)])
    with torch.no_grad():
        layers: list[Layer] = []
        patch_layers(backbone, backbone.embed(images), backbone.positions(), layers.append)
    for reading, same, layer in zip(found, again, layers, strict=True):
        halves = [Sums(layer.grid), Sums(layer.grid)]
        for half, start in zip(halves, (0, 2), strict=True):
            half.add(layer.patches[start::4])
        reader = Reader(*halves)
        reader.read(layer.patches[1::2])
        expected = reader.reading(layer.depth)
        assert reading.ridge == expected.ridge
        assert (reading.error, reading.right) == pytest.approx((expected.error, expected.right), rel=1e-9)
        assert (same.error, same.right) == pytest.approx((expected.error, expected.right), rel=1e-9)


def test_model_trained_without_positions_has_one_condition() -> None:
    backbone = make()
    assert conditions_of(backbone, True) == (OWN, REMOVED, SHUFFLED)
    assert conditions_of(backbone, False) == (OWN,)
    found = probe_places(backbone, batches(40), positions=False)
    assert list(found.readings) == [OWN]
    assert found.readings[OWN][-1].right < 3 / N  # its strong table was left out


def test_relative_bias_and_windows_are_read_from_their_features() -> None:
    relative = make("vit_relpos_small_patch16_224", img_size=(32, 48), patch_size=16)
    sets = [Batch(torch.randn(8, 3, 32, 48).double(), torch.arange(8))]
    assert list(probe_places(relative, sets).readings) == [OWN, REMOVED, SHUFFLED]
    torch.manual_seed(0)
    swin = small_swin((32, 48), depths=(1, 2), heads=(2, 3), model_args={"window_size": 4}).double().eval()
    found = probe_places(swin, sets).readings
    assert list(found) == [OWN]
    assert [(each.depth, each.grid) for each in found[OWN]] == [("embedding", (8, 12)), ("norm", (4, 6))]


def test_one_image_and_a_convolution_are_refused() -> None:
    for sets in ([], batches(1)):
        with pytest.raises(SitusError, match="at least two samples"):
            probe_places(make(), sets)
    with pytest.raises(SitusError, match="has no tokens"):
        probe_places(create_backbone("test_resnet").eval(), batches(2))


# --- readers --------------------------------------------------------------------------------------------------------


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


@settings(max_examples=8)
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


def test_features_that_are_no_numbers_hide_nothing() -> None:
    broken = make()
    with torch.no_grad():
        broken.model.blocks[1].mlp.fc1.bias[0] = torch.nan
    with pytest.raises(SitusError, match="contain NaN"):
        probe_places(broken, batches(8))


def test_one_patch_has_no_place() -> None:
    with pytest.raises(SitusError, match="one patch"):
        probe_places(make(img_size=4), [Batch(batches(2)[0].inputs[..., :4, :4], torch.arange(2))])


@pytest.mark.parametrize("grid", [(4,), (2, 2, 1)])
def test_places_on_a_line_and_in_a_volume(grid: tuple[int, ...]) -> None:
    found, x = Sums(grid), torch.eye(4, dtype=torch.float64).expand(5, 4, 4)
    x = x + 0.01 * torch.randn(5, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found.add(x)
    reader = Reader(found, Sums(grid))
    reader.read(x)
    assert reader.reading("1").right == 1.0 and reader.reading("1").r2 > 0.9


def test_a_row_of_places_reads_its_one_axis() -> None:
    found = Sums((1, 4))
    x = torch.arange(4.0).double()[None, :, None] + 0.01 * torch.randn(5, 4, 1, dtype=torch.float64)
    found.add(x)
    reader = Reader(found, Sums((1, 4)))
    reader.read(x)
    assert reader.reading("1").r2 > 0.99


def test_the_ridges_rise_by_equal_factors_and_the_middle_is_one_of_them() -> None:
    factors = [b / a for a, b in pairwise(RIDGES)]
    assert factors == pytest.approx([factors[0]] * len(factors)) and factors[0] > 1
    alone = Reader(sums(features(4)), Sums(GRID))
    assert alone.ridge in RIDGES  # where there is no second half to choose it on
