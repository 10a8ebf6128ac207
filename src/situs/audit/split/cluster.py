"""The attacker whose copy of the embedding is old, or who has none: tokens cluster by place before they are named.

Over many samples the tokens of one place share its position vector. Clustering them, one token of each sample in each
cluster, needs no embedding at all; the clusters' centres are then matched with the public position vectors, which a
fine-tuning moves far less than it takes to mix up places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from situs.errors import SitusError

ROUNDS = 12
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
        raise SitusError("one sample has no rows that recur: clustering needs two or more")
    fixed, rest = recurring(seen, prefix)
    tokens = seen.gather(1, rest[..., None].expand(-1, -1, width))  # [n, N, D]
    whiten = _whitener((tokens - tokens.mean(dim=(0, 1))).flatten(0, 1))
    centres = tokens[0].clone()
    of = torch.empty(count, rows - prefix, dtype=torch.long)
    for number, sample in enumerate(tokens):  # running means, sample by sample
        of[number] = _assign(sample, centres, whiten)
        centres[of[number]] += (sample - centres[of[number]]) / (number + 1)
    found, centres, within = settle(list(tokens), list(of), rows - prefix)
    of = torch.stack(found)
    every = torch.empty(count, rows, dtype=torch.long)
    every.scatter_(1, fixed, torch.arange(prefix).expand(count, -1))
    every.scatter_(1, rest, of + prefix)
    first = seen.gather(1, fixed[..., None].expand(-1, -1, width)).mean(dim=0)
    return Clusters(every, torch.cat([first, centres]), within)


def settle(batches: list[Tensor], of: list[Tensor], places: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """(the cluster of each token, the centres [N, D], the covariance within [D, D]) of batches [B · N, D], by turns.

    of: where each starts. A batch has B tokens in each cluster, as many as samples that are in it.
    """
    tokens = torch.cat(batches)
    centres = _means(tokens, torch.cat(of), places)
    within = torch.empty(0)
    for _ in range(ROUNDS):
        left = tokens - centres[torch.cat(of)]
        within = left.T @ left / len(left)
        whiten = _whitener_of(within)
        before, of = of, [_assign(batch, centres, whiten) for batch in batches]
        centres = _means(tokens, torch.cat(of), places)
        if all(map(torch.equal, before, of)):
            break
    return of, centres, within


def _means(tokens: Tensor, of: Tensor, places: int) -> Tensor:
    sums = tokens.new_zeros(places, tokens.shape[1]).index_add_(0, of, tokens)
    return sums / of.bincount(minlength=places)[:, None].clamp(min=1)


def name_clusters(found: Clusters, places: Tensor, prefix: int) -> Tensor:
    """The row of the stream that each row sent is, [n, R]: centres matched with the public places [N, D].

    Both are centred first: a drift that moves all places alike tells nothing of their order.
    """
    centres = found.centres[prefix:]
    ours, theirs = centres - centres.mean(dim=0), places - places.mean(dim=0)
    name = _assign(ours, theirs, _whitener_of(found.within))
    return torch.cat([torch.arange(prefix), prefix + name])[found.of]


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


def _assign(tokens: Tensor, centres: Tensor, whiten: Tensor) -> Tensor:
    """[B · N]: the centre of each token, each taken B times."""
    cost = torch.cdist(tokens @ whiten, centres @ whiten).square()
    chosen = linear_sum_assignment(cost.repeat(1, len(tokens) // len(centres)).numpy())[1]
    return torch.from_numpy(chosen) % len(centres)
