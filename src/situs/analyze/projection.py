"""Position vectors where a person can see them: principal components, UMAP, and how alike two places are."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from situs.errors import SitusError, missing_extra

if TYPE_CHECKING:
    from numpy.typing import NDArray

NEIGHBOURS = 15
"""UMAP's own default; fewer where there are fewer places."""
FEWEST = 10
"""Below so many places UMAP's graph has nothing to lay out."""


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


def umap_points(table: Tensor, *, neighbours: int = NEIGHBOURS, seed: int = 0) -> NDArray[np.float64]:
    """The places of a table [N, D] laid out in the plane by UMAP, [N, 2]: near ones near, far ones anywhere."""
    rows = table.double().cpu().numpy()
    if len(rows) < FEWEST:
        raise SitusError(f"UMAP of {len(rows)} places: needs at least {FEWEST}")
    if not has_umap():
        raise missing_extra("umap-learn", "umap", "the UMAP picture")
    from umap import UMAP  # pyright: ignore[reportMissingImports]

    # One thread: a seed fixes the layout only then, and UMAP warns where more are asked for.
    layout = UMAP(n_components=2, n_neighbors=min(neighbours, len(rows) - 1), random_state=seed, n_jobs=1)
    return np.asarray(layout.fit_transform(rows), dtype=np.float64)


def similarities(table: Tensor, places: Tensor) -> Tensor:
    """Cosine of the angle between the vectors of `places` [k] and of every place, [k, N]; the mean vector is taken off.

    Without that a vector common to all places, which tells none from another, makes everything look alike.
    """
    centred = table - table.mean(dim=0)
    unit = centred / centred.norm(dim=1, keepdim=True).clamp(min=1e-30)
    return unit[places] @ unit.T


def spread_places(grid: tuple[int, ...], most: int = 5) -> tuple[list[int], list[int]]:
    """Rows and columns, at most `most` of each, at equal distances over the grid: those a page has room to show."""
    return _spread(grid[0], most), _spread(grid[1], most)


def _spread(count: int, most: int) -> list[int]:
    shown = min(count, most)
    # The middle of each of `shown` equal parts, so that borders weigh no more than the rest.
    return torch.arange(shown).add(0.5).mul(count / shown).floor().long().tolist()
