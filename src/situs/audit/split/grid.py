"""The attacker who knows nothing of the embedding: where the clusters lie on the grid, up to its symmetries.

Patches that touch show alike things, and position vectors of neighbours are alike. Distances along the graph of the
most alike clusters, drawn in the plane, give a first layout; it is then polished until clusters are as alike as
clusters that far apart are in the layout itself.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment, quadratic_assignment
from scipy.sparse.csgraph import shortest_path
from torch import Tensor

from situs.audit.split.cluster import Clusters
from situs.errors import SitusError

DIRECTIONS = 4
NEIGHBOURS = (5, 6, 8)
ANGLES = 30
"""Turns of the drawing, over a quarter of the circle, that are tried against the grid."""
ROUNDS = 40
KEPT = (0.9, 0.7, 0.5, 0.3)
"""How much of the layout so far a round starts from."""


def lay_out(seen: Tensor, found: Clusters, prefix: int) -> Tensor:
    """The place on a square grid of each cluster, [N], up to the grid's eight symmetries.

    seen: [n, R, D], the samples that `found` came from.
    """
    centres = found.centres[prefix:]
    side = round(len(centres) ** 0.5)
    if side * side != len(centres):
        raise SitusError(f"{len(centres)} places are no square: only a square grid is laid out")
    tables = [_standard(_content(seen, found, prefix)), _standard(-torch.cdist(centres, centres))]
    cells = torch.cartesian_prod(torch.arange(side), torch.arange(side)).double()
    apart = (torch.cdist(cells, cells).square()).round().long()  # squared distances of cells: whole numbers
    endings = []
    for alike in (tables[0] + tables[1], *tables):
        for neighbours in NEIGHBOURS:
            drawn = _draw(alike, neighbours)
            if drawn is None:
                continue
            starts = (_onto(drawn, turn * math.pi / 2 / ANGLES, cells) for turn in range(ANGLES))
            start = min(starts, key=lambda place: _misfit(place, tables, apart))
            endings.append(_polished(start, tables, apart))
    if not endings:
        return torch.arange(len(centres))
    return min(endings, key=lambda place: _misfit(place, tables, apart))


def _content(seen: Tensor, found: Clusters, prefix: int) -> Tensor:
    """[N, N]: how alike the contents of two places are over the samples, along the directions images differ in most."""
    count, _, width = seen.shape
    ordered = torch.empty_like(seen).scatter_(1, found.of[..., None].expand_as(seen), seen)[:, prefix:]
    content = ordered - found.centres[prefix:]
    means = content.mean(dim=1)
    within = found.within + 1e-9 * found.within.diagonal().mean() * torch.eye(width, dtype=seen.dtype)
    factor = torch.linalg.cholesky(within)
    half = torch.linalg.solve_triangular(factor, means.T @ means / count, upper=False)
    whole = torch.linalg.solve_triangular(factor, half.T, upper=False)
    axes = torch.linalg.eigh((whole + whole.T) / 2).eigenvectors[:, -DIRECTIONS:]
    along = content @ torch.linalg.solve_triangular(factor.T, axes, upper=True)  # [n, N, 4]
    unit = (along - along.mean(dim=0)) / along.std(dim=0).clamp(min=1e-12)
    return torch.einsum("nak,nbk->ab", unit, unit) / (count * DIRECTIONS)


def _standard(values: Tensor) -> Tensor:
    off = ~torch.eye(len(values), dtype=torch.bool)
    return (values - values[off].mean()) / values[off].std()


def _draw(alike: Tensor, neighbours: int) -> Tensor | None:
    """[N, 2]: the clusters in the plane, by the distances along their graph (Isomap); None where it falls apart."""
    count = len(alike)
    alike = alike.clone().fill_diagonal_(-torch.inf)
    near = torch.zeros_like(alike, dtype=torch.bool).scatter_(1, alike.topk(neighbours, dim=1).indices, value=True)
    lengths = torch.where(near | near.T, alike.max() - alike + 0.1, 0.0)
    walk = torch.from_numpy(shortest_path(lengths.numpy(), directed=False))
    if not walk.isfinite().all():
        return None
    middle = torch.eye(count, dtype=walk.dtype) - 1 / count
    values, vectors = torch.linalg.eigh(-0.5 * middle @ walk.square() @ middle)
    return vectors[:, -2:] * values[-2:].clamp(min=0).sqrt()


def _onto(drawn: Tensor, angle: float, cells: Tensor) -> Tensor:
    """The cell of each cluster when the drawing is turned and stretched over the grid."""
    sine, cosine = math.sin(angle), math.cos(angle)
    turned = drawn @ torch.tensor([[cosine, -sine], [sine, cosine]], dtype=drawn.dtype)
    low, high = turned.quantile(0.02, dim=0), turned.quantile(0.98, dim=0)
    return _assign(torch.cdist((turned - low) / (high - low).clamp(min=1e-12) * cells.max(), cells).square())


def _profile(place: Tensor, table: Tensor, apart: Tensor) -> Tensor:
    """[N, N] over cells: how alike clusters that far apart are, on the average of a layout."""
    distance = apart[place][:, place].flatten()
    sums = torch.zeros(int(apart.max()) + 1, dtype=table.dtype).index_add_(0, distance, table.flatten())
    return (sums / distance.bincount(minlength=len(sums)).clamp(min=1))[apart]


def _misfit(place: Tensor, tables: list[Tensor], apart: Tensor) -> float:
    off = ~torch.eye(len(place), dtype=torch.bool)
    left = [(table - _profile(place, table, apart)[place][:, place])[off].square().mean() for table in tables]
    return float(torch.stack(left).sum())


def _polished(place: Tensor, tables: list[Tensor], apart: Tensor) -> Tensor:
    """Moves clusters until they are as alike to each other as their distances say: a quadratic assignment a round.

    A round starts from the layout so far, blurred more or less; the profile is that of the layout so far.
    """
    best, least = place, _misfit(place, tables, apart)
    alike = torch.stack(tables).sum(dim=0).fill_diagonal_(0).numpy()
    for _ in range(ROUNDS):
        before = least
        wanted = torch.stack([_profile(best, table, apart) for table in tables]).sum(dim=0).fill_diagonal_(0).numpy()
        start = torch.nn.functional.one_hot(best, len(best)).double().numpy()
        rounds = [
            quadratic_assignment(
                alike,
                wanted,
                method="faq",
                options={
                    "maximize": True,
                    "P0": kept * start + (1 - kept) / len(best),
                    "rng": np.random.default_rng(0),
                },
            ).col_ind
            for kept in KEPT
        ]
        rounds.append(_swapped(best.numpy(), alike, wanted))
        for each in map(torch.from_numpy, rounds):
            if (misfit := _misfit(each, tables, apart)) < least:
                best, least = each, misfit
        if least >= before - 1e-9:
            break
    return best


def _swapped(place: NDArray[np.int64], alike: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.int64]:
    """Exchanges two clusters as long as some exchange makes the layout fit better, the best one first."""
    place = place.copy()
    for _ in range(10 * len(place)):
        laid = wanted[place][:, place]
        cross = alike @ laid
        own = np.diag(cross)
        gain = cross + cross.T - own[:, None] - own + 2 * alike * laid
        one, other = np.unravel_index(gain.argmax(), gain.shape)
        if gain[one, other] <= 1e-9:
            break
        place[[one, other]] = place[[other, one]]
    return place


def _assign(cost: Tensor) -> Tensor:
    return torch.from_numpy(linear_sum_assignment(cost.numpy())[1])


def symmetries(side: int) -> Tensor:
    """[8, N]: where each place of a square goes under its symmetries."""
    square = torch.arange(side * side).view(side, side)
    turned = [torch.rot90(square, k) for k in range(4)]
    return torch.stack([each.flatten() for view in turned for each in (view, view.T)])
