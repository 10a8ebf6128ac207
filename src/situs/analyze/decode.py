"""Reading a place off its vector by a linear map (MJP: appendix C.1, Table 8).

Units are whole places: 1-D errors count places in reading order, 0 to N - 1; 2-D errors count patches, the mean of
both axes. The paper does not say its own, but its figures settle them: least squares is linear in what it predicts, so
the error of the index is w · e_row + e_column, some w = 14 times the mean of the axes where both are read equally well.
Table 8 has 12.4, 13.5 and 9.7 times. With axes scaled to [0, 1] it would be about 180 times, with their sum about 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from situs.core.position import coordinates
from situs.limits import check_value

if TYPE_CHECKING:
    from numpy.typing import NDArray

FOLDS = 5


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
