"""What the vectors of a table of positions hold: its spectrum, its places in the plane, and what can be read off.

Spectrum: how many directions the table fills (MJP: Definition 1, Table 6, Figure 4). Reading a place off its vector by
a linear map (MJP: appendix C.1, Table 8): units are whole places. 1-D errors count places in reading order, 0 to N - 1;
2-D errors count patches, the mean of both axes. The paper does not say its own, but its figures settle them: least
squares is linear in what it predicts, so the error of the index is w · e_row + e_column, some w = 14 times the mean of
the axes where both are read equally well. Table 8 has 12.4, 13.5 and 9.7 times. With axes scaled to [0, 1] it would be
about 180 times, with their sum about 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from situs.core.position import coordinates
from situs.errors import SitusError, missing_extra
from situs.limits import check_value

if TYPE_CHECKING:
    from numpy.typing import NDArray

FOLDS = 5
NEIGHBOURS = 15
"""UMAP's own default; fewer where there are fewer places."""
FEWEST = 10
"""Below so many places UMAP's graph has nothing to lay out."""


@dataclass(frozen=True)
class Spectrum:
    """Shares of a table P [N, D], one for each of its min(N, D) directions, the largest first.

    explained: of the variance, by principal component (σᵢ² of the centred P over their sum), not accumulated. energy:
    of Σσ² that the first n singular values of P as it is hold, accumulated.
    """

    explained: tuple[float, ...]
    energy: tuple[float, ...]

    def explained_by(self, count: int) -> float:
        """The share of the variance that the first `count` components explain (Table 6)."""
        return sum(self.explained[:count])

    def components_for(self, share: float) -> int:
        """How many components explain at least `share` of the variance."""
        total = 0.0
        for count, part in enumerate(self.explained, start=1):
            total += part
            if total >= share - 1e-12:
                return count
        return len(self.explained)


def spectrum(table: Tensor) -> Spectrum:
    """The spectrum of a table [N, D] of patch places; a prefix token's own row belongs to no place and stays out.

    Definition 1 gives Σσ(PV)²/Σσ(P)². Table 6 speaks of PCA, which centres P; Figure 4 of the singular values of P,
    which does not: each is taken as it says.
    """
    explained = _squares(table - table.mean(dim=0))
    energy = _squares(table)
    return Spectrum(tuple(explained.tolist()), tuple(energy.cumsum(0).tolist()))


def _squares(table: Tensor) -> Tensor:
    """The squared singular values, as shares of their sum."""
    values = torch.linalg.svdvals(table.double()).square()
    return values / values.sum()


class Spread(NamedTuple):
    """A mean over folds and the standard deviation of the folds around it."""

    mean: float
    std: float


@dataclass(frozen=True)
class Decoded:
    """What a linear map reads off the vectors of places it was not fitted on.

    one: mean absolute error of the index (Table 8's 1D). two: of (row, column), mean of both. rows, columns: of each.
    chance_one, chance_two: of the mean place of the other folds, which knows nothing. folds: how many. fitted: places
    a map is fitted on. exact: share of places whose guess, rounded, is right. guesses: [N, 2].
    """

    one: Spread
    two: Spread
    rows: float
    columns: float
    chance_one: float
    chance_two: float
    folds: int
    fitted: int
    exact: float
    guesses: NDArray[np.float64]

    @property
    def left(self) -> float:
        """The error as a share of one who knows nothing: 0 is certain, 1 is no better."""
        return self.two.mean / self.chance_two


def decode_places(table: Tensor, grid: tuple[int, ...], *, folds: int = FOLDS, seed: int = 0) -> Decoded:
    """Cross-validated least squares from the vectors [N, D] to the index and to (row, column).

    The folds are shuffled; where the places are fewer than the folds asked for, each is a fold of its own. With fewer
    places than channels the map of least norm is taken, as scikit-learn does.
    """
    from sklearn.linear_model import LinearRegression
    from sklearn.model_selection import KFold

    vectors = table.double().cpu().numpy()
    check_value("folds", folds, ">= 2")
    folds = min(folds, len(vectors))
    places = coordinates(grid).double().numpy()
    index = np.arange(len(vectors), dtype=np.float64)
    targets = np.column_stack([index, places])
    guesses, middles, members = np.empty_like(targets), np.empty_like(targets), []
    for fitted, held in KFold(folds, shuffle=True, random_state=seed).split(vectors):
        guesses[held] = LinearRegression().fit(vectors[fitted], targets[fitted]).predict(vectors[held])
        middles[held] = targets[fitted].mean(axis=0)
        members.append(held)
    errors, chance = np.abs(guesses - targets), np.abs(middles - targets).mean(axis=0)
    right = (np.rint(guesses[:, 1:]) == places).all(axis=1)
    return Decoded(
        one=_over(errors[:, 0], members),
        two=_over(errors[:, 1:].mean(axis=1), members),
        rows=float(errors[:, 1].mean()),
        columns=float(errors[:, 2].mean()),
        chance_one=float(chance[0]),
        chance_two=float(chance[1:].mean()),
        folds=folds,
        fitted=min(len(vectors) - len(held) for held in members),
        exact=float(right.mean()),
        guesses=guesses[:, 1:],
    )


def _over(errors: NDArray[np.float64], members: list[NDArray[np.intp]]) -> Spread:
    """Mean and deviation of the folds' own means."""
    means = [float(errors[held].mean()) for held in members]
    return Spread(float(np.mean(means)), float(np.std(means)))


class Components(NamedTuple):
    """points: [N, k], the places along the k largest principal components. shares: of the variance, [k]."""

    points: NDArray[np.float64]
    shares: tuple[float, ...]


def principal(table: Tensor, count: int = 3) -> Components:
    """The places of a table [N, D] in its `count` largest principal components; those that do not exist are 0."""
    from sklearn.decomposition import PCA

    rows = table.double().cpu().numpy()
    held = min(count, *rows.shape)
    pca = PCA(n_components=held, svd_solver="full")
    points = pca.fit_transform(rows)
    missing = count - held
    shares = (*pca.explained_variance_ratio_.tolist(), *(0.0,) * missing)
    return Components(np.pad(points, ((0, 0), (0, missing))), shares)


def has_umap() -> bool:
    """Whether the extra [umap] is installed."""
    return find_spec("umap") is not None


def umap_points(table: Tensor, *, seed: int = 0) -> NDArray[np.float64]:
    """The places of a table [N, D] laid out in the plane by UMAP, [N, 2]: near ones near, far ones anywhere."""
    rows = table.double().cpu().numpy()
    if len(rows) < FEWEST:
        raise SitusError(f"UMAP of {len(rows)} places: needs at least {FEWEST}")
    if not has_umap():
        raise missing_extra("umap-learn", "umap", "the UMAP picture")
    from umap import UMAP  # pyright: ignore[reportMissingImports]

    # One thread: a seed fixes the layout only then, and UMAP warns where more are asked for.
    layout = UMAP(n_components=2, n_neighbors=min(NEIGHBOURS, len(rows) - 1), random_state=seed, n_jobs=1)
    return np.asarray(layout.fit_transform(rows), dtype=np.float64)


def similarities(table: Tensor, places: Tensor) -> Tensor:
    """Cosine of the angle between the vectors of `places` [k] and of every place, [k, N]; the mean vector is taken off.

    Without that a vector common to all places, which tells none from another, makes everything look alike.
    """
    centred = table - table.mean(dim=0)
    unit = centred / centred.norm(dim=1, keepdim=True).clamp(min=1e-30)
    return unit[places] @ unit.T


def spread_places(grid: tuple[int, ...]) -> tuple[list[int], list[int], Tensor]:
    """Rows and columns, at most five of each, at equal distances over the grid, and the places where they meet.

    They stand in the middle of equal parts, so that borders weigh no more than the rest.
    """
    rows, columns = (torch.arange(n := min(5, side)).add(0.5).mul(side / n).floor().long() for side in grid)
    return rows.tolist(), columns.tolist(), (rows[:, None] * grid[1] + columns).flatten()
