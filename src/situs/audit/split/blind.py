"""Attacks without an embedding, or with an old one: rows that share a place, the layout of places, equal samples.

Over many samples the tokens of one place share its position vector. Clustering them, one token of each sample in each
cluster, needs no embedding at all; the clusters' centres are then matched with the public position vectors, which
fine-tuning moves far less than it takes to confuse places.

Without any embedding the clusters are laid out on the grid, up to its symmetries: neighbouring patches show similar
content, and their position vectors are similar. Distances along the graph of the most similar clusters, drawn in the
plane (Isomap), give a first layout. It is then improved until the similarity of clusters depends on their distance as
it does on average in the layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment, quadratic_assignment
from scipy.sparse.csgraph import shortest_path
from scipy.spatial import KDTree
from torch import Tensor

from situs.errors import SitusError

CLUSTERINGS = 12
_RIDGE = 1e-9


@dataclass(frozen=True)
class Clusters:
    """of: [n, R], the cluster of each row, the recurring rows' first (0 to p - 1). centres: [R, D]. within: [D, D]."""

    of: Tensor
    centres: Tensor
    within: Tensor


def cluster_rows(seen: Tensor, prefix: int) -> Clusters:
    """Clusters the rows of samples [n, R, D] by place; the p rows that recur in every sample are the prefix tokens."""
    count, rows, width = seen.shape
    if count < 2:
        raise SitusError("clustering needs two or more samples")
    fixed, rest = recurring(seen, prefix)
    tokens = seen.gather(1, rest[..., None].expand(-1, -1, width))  # [n, N, D]
    whiten = _whitener((tokens - tokens.mean(dim=(0, 1))).flatten(0, 1))
    centres = tokens[0].clone()
    of = torch.empty(count, rows - prefix, dtype=torch.long)
    for number, sample in enumerate(tokens):  # running means, sample by sample
        of[number] = _assign_rows(sample, centres, whiten)
        centres[of[number]] += (sample - centres[of[number]]) / (number + 1)
    assigned, centres, within = refine_clusters(list(tokens), list(of), rows - prefix)
    of = torch.stack(assigned)
    every = torch.empty(count, rows, dtype=torch.long)
    every.scatter_(1, fixed, torch.arange(prefix).expand(count, -1))
    every.scatter_(1, rest, of + prefix)
    first = seen.gather(1, fixed[..., None].expand(-1, -1, width)).mean(dim=0)
    return Clusters(every, torch.cat([first, centres]), within)


def refine_clusters(batches: list[Tensor], of: list[Tensor], places: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """(the cluster of each token, the centres [N, D], the covariance within [D, D]) of batches [B · N, D], as k-means.

    of: the clusters to start from. A batch has B tokens in each cluster, one of each of its samples.
    """
    tokens = torch.cat(batches)
    centres = _means(tokens, torch.cat(of), places)
    within = torch.empty(0)
    for _ in range(CLUSTERINGS):
        left = tokens - centres[torch.cat(of)]
        within = left.T @ left / len(left)
        whiten = _whitener_of(within)
        before, of = of, [_assign_rows(batch, centres, whiten) for batch in batches]
        centres = _means(tokens, torch.cat(of), places)
        if all(map(torch.equal, before, of)):
            break
    return of, centres, within


def _means(tokens: Tensor, of: Tensor, places: int) -> Tensor:
    sums = tokens.new_zeros(places, tokens.shape[1]).index_add_(0, of, tokens)
    return sums / of.bincount()[:, None]


def name_clusters(clusters: Clusters, places: Tensor, prefix: int) -> Tensor:
    """The row of the stream that each row sent is, [n, R]: centres matched with the public places [N, D].

    Both are centred first: a drift that moves all places alike tells nothing of their order.
    """
    centres = clusters.centres[prefix:]
    ours, theirs = centres - centres.mean(dim=0), places - places.mean(dim=0)
    name = _assign_rows(ours, theirs, _whitener_of(clusters.within))
    return torch.cat([torch.arange(prefix), prefix + name])[clusters.of]


def recurring(seen: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """(which rows [n, p] are nearest to one of every other sample, the other rows [n, R - p])."""
    count, rows, _ = seen.shape
    if not prefix:
        return torch.empty(count, 0, dtype=torch.long), torch.arange(rows).expand(count, -1)
    first = seen[0]
    nearest = torch.stack([torch.cdist(first, other).amin(dim=1) for other in seen[1:]]).mean(dim=0)
    fixed = first[nearest.topk(prefix, largest=False).indices]
    chosen = torch.stack(
        [torch.from_numpy(linear_sum_assignment(torch.cdist(fixed, sample).numpy())[1]) for sample in seen]
    )
    others = torch.ones(count, rows, dtype=torch.bool).scatter_(1, chosen, value=False)
    return chosen, others.nonzero()[:, 1].view(count, rows - prefix)


def _whitener(centred: Tensor) -> Tensor:
    return _whitener_of(centred.T @ centred / len(centred))


def _whitener_of(covariance: Tensor) -> Tensor:
    """A, [D, D], with A Aᵀ the inverse of the covariance."""
    values, vectors = torch.linalg.eigh(covariance)  # tokens may lie in few directions, where no inverse would be exact
    return vectors / (values.clamp(min=0) + _RIDGE * values.mean()).sqrt()


def _assign_rows(tokens: Tensor, centres: Tensor, whiten: Tensor) -> Tensor:
    """[B · N]: the centre of each token, each taken B times."""
    cost = torch.cdist(tokens @ whiten, centres @ whiten).square()
    chosen = linear_sum_assignment(cost.repeat(1, len(tokens) // len(centres)).numpy())[1]
    return torch.from_numpy(chosen) % len(centres)


DIRECTIONS = 4
NEIGHBOURS = (5, 6, 8)
ANGLES = 30
"""Turns of the drawing, over a quarter of the circle, that are tried against the grid."""
POLISHINGS = 40
KEPT = (0.9, 0.7, 0.5, 0.3)
"""How much of the layout so far a round starts from."""


def lay_out(seen: Tensor, clusters: Clusters, prefix: int) -> Tensor:
    """The place on a square grid of each cluster, [N], up to the grid's eight symmetries.

    seen: [n, R, D], the samples that `found` came from.
    """
    centres = clusters.centres[prefix:]
    side = round(len(centres) ** 0.5)
    if side * side != len(centres):
        raise SitusError(f"this attack needs a square grid, but there are {len(centres)} positions")
    tables = [
        _standard_pairs(_content(seen, clusters, prefix)),
        _standard_pairs(-torch.cdist(centres, centres)),
    ]
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


def _content(seen: Tensor, clusters: Clusters, prefix: int) -> Tensor:
    """[N, N]: how alike the contents of two places are over the samples, along the directions images differ in most."""
    count, _, width = seen.shape
    ordered = torch.empty_like(seen).scatter_(1, clusters.of[..., None].expand_as(seen), seen)[:, prefix:]
    content = ordered - clusters.centres[prefix:]
    means = content.mean(dim=1)
    within = clusters.within + 1e-9 * clusters.within.diagonal().mean() * torch.eye(width, dtype=seen.dtype)
    factor = torch.linalg.cholesky(within)
    half = torch.linalg.solve_triangular(factor, means.T @ means / count, upper=False)
    whole = torch.linalg.solve_triangular(factor, half.T, upper=False)
    axes = torch.linalg.eigh((whole + whole.T) / 2).eigenvectors[:, -DIRECTIONS:]
    along = content @ torch.linalg.solve_triangular(factor.T, axes, upper=True)  # [n, N, 4]
    unit = (along - along.mean(dim=0)) / along.std(dim=0).clamp(min=1e-12)
    return torch.einsum("nak,nbk->ab", unit, unit) / (count * DIRECTIONS)


def _standard_pairs(values: Tensor) -> Tensor:
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
    return (sums / distance.bincount(minlength=len(sums)))[apart]


def _misfit(place: Tensor, tables: list[Tensor], apart: Tensor) -> float:
    off = ~torch.eye(len(place), dtype=torch.bool)
    left = [(table - _profile(place, table, apart)[place][:, place])[off].square().mean() for table in tables]
    return float(torch.stack(left).sum())


def _polished(place: Tensor, tables: list[Tensor], apart: Tensor) -> Tensor:
    """Moves clusters until their similarity fits their distance: a quadratic assignment in each round.

    A round starts from the layout so far, blurred more or less, and uses its profile.
    """
    best, least = place, _misfit(place, tables, apart)
    alike = torch.stack(tables).sum(dim=0).fill_diagonal_(0).numpy()
    for _ in range(POLISHINGS):
        before = best
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
        for candidate in map(torch.from_numpy, rounds):
            if (misfit := _misfit(candidate, tables, apart)) < least:
                best, least = candidate, misfit
        if best is before:
            break
    return best


def _swapped(place: NDArray[np.int64], alike: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.int64]:
    """Exchanges two clusters as long as some exchange makes the layout fit better, the best one first."""
    place = place.copy()
    for _ in range(10 * len(place)):
        laid = wanted[place][:, place]
        cross = alike @ laid
        diagonal = np.diag(cross)
        gain = cross + cross.T - diagonal[:, None] - diagonal + 2 * alike * laid
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
    return torch.stack([image.flatten() for view in turned for image in (view, view.T)])


QUANTILES = 9
COMPARED = 12
"""Directions of the token space by which the same token is found in another sending."""


def fingerprints(seen: Tensor) -> Tensor:
    """[n, F] of samples [n, R, D]: what no order of rows changes, each in units of its spread over samples."""
    at = torch.linspace(0.05, 0.95, QUANTILES, dtype=seen.dtype)
    parts = [
        seen.mean(dim=1),
        seen.std(dim=1),
        *seen.quantile(at, dim=1),
        seen.norm(dim=-1).sort(dim=1).values,
    ]
    return torch.cat([_standard(part) / part.shape[1] ** 0.5 for part in parts], dim=1)


def _standard(values: Tensor) -> Tensor:
    return (values - values.mean(dim=0)) / values.std(dim=0).clamp(min=1e-12)


def link(earlier: Tensor, later: Tensor) -> Tensor:
    """[n]: for each sample of `later` [n, R, D], the one of `earlier` [m, R, D] that it most resembles."""
    both = fingerprints(torch.cat([earlier, later]))
    return torch.cdist(both[len(earlier) :], both[: len(earlier)]).argmin(dim=1)


def co_occurrence(sendings: Sequence[Tensor], size: int) -> Tensor:
    """[n, R]: a group number for each token of the first sending; tokens of a group were always in the same batch.

    sendings: [n, R, D] each, the same samples in other batches of `size` that follow each other, tokens exchanged
    within each.
    """
    count, rows, _ = sendings[0].shape
    tokens = sendings[0].flatten(0, 1)
    centre = tokens.mean(dim=0)
    axes = torch.linalg.eigh((tokens - centre).T @ (tokens - centre)).eigenvectors[:, -COMPARED:]
    batch = torch.arange(count * rows) // (size * rows)
    known, seen = [batch], ((tokens - centre) @ axes).numpy()
    for other in sendings[1:]:
        _, where = KDTree(((other.flatten(0, 1) - centre) @ axes).numpy()).query(seen)
        known.append(batch[torch.from_numpy(where)])
    return torch.stack(known, dim=1).unique(dim=0, return_inverse=True)[1].view(count, rows)


def found_again(group: Tensor, sample: Tensor) -> float:
    """The share of samples of whose tokens most are in one group, and are most of it. group, sample: [M]."""
    table = torch.zeros(int(group.max()) + 1, int(sample.max()) + 1)
    table.index_put_((group, sample), torch.ones(len(group)), accumulate=True)
    most = (2 * table > table.sum(dim=0)) & (2 * table > table.sum(dim=1, keepdim=True))
    return float(most.any(dim=0).double().mean())


def average(sendings: Tensor) -> Tensor:
    """Of one sample sent k times [k, R, D], rows in any order each time: the mean of each row, in the first's order."""
    total = sendings[0].clone()
    for count, other in enumerate(sendings[1:], start=2):
        rows, chosen = linear_sum_assignment(torch.cdist(total / (count - 1), other).square().numpy())
        total[torch.from_numpy(rows)] += other[torch.from_numpy(chosen)]
    return total / len(sendings)
