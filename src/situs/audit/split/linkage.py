"""The attacker who knows nothing: is this the sample that was sent before? And what do several sendings add up to?

A fresh order of rows at every step hides no statistic that the order does not touch: the mean and spread of each
channel, its quantiles, the sorted lengths of the tokens. Tokens that a batch exchanges lose their sample, but they
keep their company: the batches that a sample is in are others in every epoch, and its tokens alone are in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from scipy.optimize import linear_sum_assignment
from scipy.spatial import KDTree
from torch import Tensor

QUANTILES = 9
DIRECTIONS = 12
"""Of the token space, along which one and the same token is looked for."""


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


def company(sendings: Sequence[Tensor], size: int) -> Tensor:
    """[n, R]: a number for each token of the first sending; tokens have the same one that were always in one batch.

    sendings: [n, R, D] each, the same samples in other batches of `size` that follow each other, tokens exchanged
    within each.
    """
    count, rows, _ = sendings[0].shape
    tokens = sendings[0].flatten(0, 1)
    centre = tokens.mean(dim=0)
    axes = torch.linalg.eigh((tokens - centre).T @ (tokens - centre)).eigenvectors[:, -DIRECTIONS:]
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
