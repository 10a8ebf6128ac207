"""Linear readers of a patch's place from its features, at every depth, fitted in closed form.

One pass over half of the images gathers two sums per depth: of the features at each place, and of their products. They
give two readers: ridge regression to (row, column), and linear discriminant analysis with the places as classes. The
ridge is chosen by two-fold cross-validation, from the same sums. A second pass tests the readers on the other images.
Three conditions separate where the knowledge comes from:

    as it is              the model as it was trained
    positions removed     from the content of the patches alone
    patches shuffled      from the positions alone: they stay, under patches in random order
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from situs.backbones.base import Backbone
from situs.core.permutation import random_permutation
from situs.core.position import coordinates
from situs.core.random import uniform
from situs.core.tokens import take
from situs.data.batch import Batch
from situs.errors import SitusError
from situs.measure.features import Layer, patch_layers

OWN, REMOVED, SHUFFLED = "as it is", "positions removed", "patches shuffled"


@dataclass(frozen=True)
class Probed:
    """Readings by condition, each in the model's order. fitted, tested: images."""

    readings: dict[str, list[PlaceReading]]
    fitted: int
    tested: int


def conditions_of(backbone: Backbone, positions: bool) -> tuple[str, ...]:
    """The conditions of a model: one without positions, or trained without them, has nothing to remove."""
    return (OWN, REMOVED, SHUFFLED) if positions and backbone.positions().kinds else (OWN,)


@torch.no_grad()
def probe_places(backbone: Backbone, batches: Iterable[Batch], *, positions: bool = True, seed: int = 0) -> Probed:
    """Reads places from the features of a model in eval mode. batches: iterated twice, in the same order.

    Every other image fits the readers, the others test them. positions: False for a model trained without them.
    """
    backbone.require("tokens")
    if backbone.num_tokens < 2:
        raise SitusError(f"{backbone.name}: has one patch, so there are no places to distinguish", field="img_size")
    halves: dict[Key, tuple[Sums, Sums]] = {}

    def fit(first: int, key: Key, layer: Layer) -> None:
        pair = halves.setdefault(key, (Sums(layer.grid), Sums(layer.grid)))
        for which, half in enumerate(pair):
            half.add(layer.patches[(which - first) % 2 :: 2])

    _walk(backbone, batches, 0, positions, seed, fit)
    readers = {key: Reader(*pair) for key, pair in halves.items()}
    _walk(backbone, batches, 1, positions, seed, lambda _, key, layer: readers[key].read(layer.patches))
    if not readers or not all(reader.images for reader in readers.values()):
        reason = "reading places needs at least two samples: one to fit, one to test"
        raise SitusError(reason, field=("count", "data"))
    readings: dict[str, list[PlaceReading]] = {}
    for (condition, depth), reader in readers.items():
        readings.setdefault(condition, []).append(reader.reading(depth))
    fitted, tested = (sum(half.images for half in next(iter(halves.values()))), next(iter(readers.values())).images)
    return Probed(readings, fitted, tested)


Key = tuple[str, str]
"""Condition and depth."""


def _walk(
    backbone: Backbone,
    batches: Iterable[Batch],
    part: int,
    positions: bool,
    seed: int,
    see: Callable[[int, Key, Layer], None],
) -> None:
    """Calls `see` with every depth of images part, part + 2, … under each condition, and the number of the first."""
    conditions = conditions_of(backbone, positions)
    passed = used = 0
    for batch in batches:
        chosen = slice((part - passed) % 2, None, 2)
        passed += len(batch.ids)
        ids = batch.ids[chosen]
        if not len(ids):
            continue
        tokens = backbone.embed(batch.inputs[chosen])
        for condition in conditions:
            inputs = tokens
            if condition == SHUFFLED:
                noise = uniform(seed, 0, ids, "audit.positions", (tokens.shape[1],))
                inputs = take(tokens, random_permutation(noise))
            places = backbone.positions() if positions and condition != REMOVED else None
            patch_layers(backbone, inputs, places, lambda layer, n=used, c=condition: see(n, (c, layer.depth), layer))
        used += len(ids)


# --- the readers ----------------------------------------------------------------------------------------------------
# With the features x at place n of image b, both readers follow from P_n = Σ_b x and Q = Σ x xᵀ.


RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
"""Candidates to add to the diagonal of the features' correlation matrix, whose diagonal is 1."""
MIDDLE = 1e-2
"""The ridge where there is no second half to choose it on."""


@dataclass(frozen=True)
class PlaceReading:
    """Scores of the readers at one depth, on images that they were not fitted on.

    error: mean absolute error in patches, mean of row and column. r2: of the regression, mean of the axes. right: share
    of patches whose exact place is predicted. blind_*: of a guess without features. ridge: the one that was chosen.
    """

    depth: str
    grid: tuple[int, ...]
    error: float
    r2: float
    right: float
    blind_error: float
    blind_right: float
    ridge: float

    @property
    def left(self) -> float:
        """The error over that of a blind guess: 0 is perfect, 1 is no better."""
        return self.error / self.blind_error


class Sums:
    """Over images of one depth: places P [N, D] and products Q [D, D], float64 on the features' device."""

    def __init__(self, grid: tuple[int, ...]) -> None:
        self.grid, self.images = grid, 0
        self.places = self.products = torch.zeros((), dtype=torch.float64)

    def add(self, features: Tensor) -> None:
        """features: [B, N, D]."""
        x = features.double()
        flat = x.flatten(0, 1)
        self.places, self.products = self.places + x.sum(dim=0), self.products + flat.T @ flat
        self.images += len(features)

    def __add__(self, other: Sums) -> Sums:
        both = Sums(self.grid)
        both.images = self.images + other.images
        both.places, both.products = self.places + other.places, self.products + other.products
        return both


class Moments(NamedTuple):
    """mean, scale: of each channel, [D]. total: their correlations, [D, D]. means: of each place, as scores [N, D]."""

    mean: Tensor
    scale: Tensor
    total: Tensor
    means: Tensor


def moments(sums: Sums) -> Moments:
    """The statistics that both readers need."""
    means = sums.places / sums.images
    mean = means.mean(dim=0)
    covariance = sums.products / (sums.images * len(means)) - torch.outer(mean, mean)
    scale = covariance.diagonal().clamp(min=0).sqrt()
    # A channel that hardly varies is rounding error: an infinite scale removes it.
    scale = torch.where(scale > 1e-7 * (scale.max() + mean.abs()), scale, torch.inf)
    return Moments(mean, scale, covariance / torch.outer(scale, scale), (means - mean) / scale)


def regress(stats: Moments, targets: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Ridge regression of the places' targets [N, sides]: weights A [D, sides] and offset b, so that ŷ = x A + b."""
    centre = targets.mean(dim=0)
    weights = _solve(stats.total, stats.means.T @ (targets - centre) / len(targets), ridge)
    weights = weights / stats.scale[:, None]
    return weights, centre - stats.mean @ weights


def squared_error(sums: Sums, targets: Tensor, weights: Tensor, offset: Tensor) -> Tensor:
    """Σ ‖x A + b - y‖² over images, from their sums alone."""
    residual = offset - targets
    cross = ((sums.places @ weights) * residual).sum()
    return (weights * (sums.products @ weights)).sum() + 2 * cross + sums.images * residual.square().sum()


def choose_ridge(first: Sums, second: Sums, targets: Tensor) -> float:
    """The one of `RIDGES` with the lowest error of each half under a regression on the other half."""
    if not (first.images and second.images):
        return MIDDLE
    pairs = [(moments(a), b) for a, b in ((first, second), (second, first))]
    errors = [sum(squared_error(b, targets, *regress(a, targets, r)) for a, b in pairs) for r in RIDGES]
    return RIDGES[int(torch.stack(errors).argmin())]  # pyright: ignore[reportArgumentType]


class Reader:
    """Both readers of one depth, and their scores so far on other images."""

    def __init__(self, first: Sums, second: Sums) -> None:
        both = first + second if second.images else first
        self.grid = both.grid
        self.targets = coordinates(both.grid, both.places.device).double()
        self.ridge = choose_ridge(first, second, self.targets)
        stats = moments(both)
        self.mean, self.scale = stats.mean, stats.scale
        self.weights, self.offset = regress(stats, self.targets, self.ridge)
        within = stats.total - stats.means.T @ stats.means / len(self.targets)
        self.scores = _solve(within, stats.means.T, self.ridge)
        self.bias = -0.5 * (stats.means * self.scores.T).sum(dim=1)
        sides = self.targets.shape[1]
        self.tally = torch.zeros(2 + sides, dtype=torch.float64, device=self.targets.device)  # |e|, e² by axis, right
        self.images = 0

    def read(self, features: Tensor) -> None:
        """features: [B, N, D] of other images."""
        x = features.double()
        errors = x @ self.weights + self.offset - self.targets
        named = ((x - self.mean) / self.scale @ self.scores + self.bias).argmax(dim=-1)
        right = (named == torch.arange(named.shape[1], device=named.device)).sum()
        squares = errors.square().sum(dim=(0, 1))
        self.tally += torch.stack([errors.abs().mean(dim=-1).sum(), *squares, right.double()])
        self.images += len(features)

    def reading(self, depth: str) -> PlaceReading:
        """The scores so far."""
        error, *squares, right = (self.tally / (self.images * len(self.targets))).tolist()
        if not math.isfinite(error):
            raise SitusError(f"{depth}: its features hold NaN or infinite numbers, so no place can be read from them")
        away = self.targets - self.targets.mean(dim=0)
        spread = away.square().mean(dim=0).tolist()
        # An axis with one place has no variance: it is left out of the mean.
        shares = [1 - square / all_ for square, all_ in zip(squares, spread, strict=True) if all_ > 0]
        blind = float(away.abs().mean())
        r2 = sum(shares) / len(shares)
        return PlaceReading(depth, self.grid, error, r2, right, blind, 1 / len(away), self.ridge)


def _solve(matrix: Tensor, right: Tensor, ridge: float) -> Tensor:
    """(matrix + ridge · 1)⁻¹ right, for a positive semidefinite matrix (up to rounding)."""
    eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    return torch.linalg.solve(matrix + ridge * eye, right)
