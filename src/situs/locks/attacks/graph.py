"""Matching the channels of two sides by their correlations: the steps of the attack with samples (SPEC §6).

A side is a Gram matrix over D channels; `correlation_rows` makes it a table that does not depend on the channels'
scales. A permutation q (locked channel i is clear channel q[i]) is good if two locked channels correlate as their clear
ones do. The search goes from a soft assignment, started by a hint on single channels, to a hard one
(`graduated_assignment`, `hard_assignment`). `agreement` scores the result without the true key. `refined_assignment`
combines many pairs of tables at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from situs.core.permutation import identity
from situs.locks.attacks.match import assign

BALANCE = 10
"""Iterations of Sinkhorn's algorithm."""

CUT = 60.0
"""Logits are clipped this far below their row's largest, so nothing underflows."""

MAX_ROUNDS = 50
"""Rounds of hard assignment at most; a few suffice."""

REFINE = 6
"""Rounds of the refinement."""


def correlations(gram: Tensor) -> Tensor:
    """G_ij / √(G_ii G_jj), [D, D]: a Gram matrix without the channels' scales."""
    scale = gram.diagonal().clamp_min(1e-30).rsqrt()
    return gram * scale[:, None] * scale[None, :]


def root_correlations(gram: Tensor) -> Tensor:
    """The square root of the correlation matrix: trained weights read a stream's strong directions less than
    proportionally."""
    values, vectors = torch.linalg.eigh(correlations(gram).double())
    return ((vectors * values.clamp_min(0).sqrt()) @ vectors.T).float()


def correlation_rows(gram: Tensor) -> Tensor:
    """Correlations of a Gram matrix [D, D] without its diagonal, each row centred and of unit length."""
    return centred_rows(correlations(gram))


def centred_rows(table: Tensor) -> Tensor:
    """A table without its diagonal, each row centred and of unit length."""
    table = table.clone().fill_diagonal_(0.0)
    return unit_rows(table - table.mean(dim=1, keepdim=True))


def unit_rows(table: Tensor) -> Tensor:
    """Rows of unit length; a row of zeros stays."""
    return table / table.norm(dim=1, keepdim=True).clamp_min(1e-30)


def normal_scores(values: Tensor) -> Tensor:
    """The normal quantiles of the ranks of a vector [D]."""
    order = values.argsort(stable=True).argsort()
    return torch.special.ndtri((order.double() + 0.5) / values.numel())


def score_distance(ours: Tensor, theirs: Tensor) -> Tensor:
    """[D, D]: minus the squared distance of the normal scores of two vectors [D]."""
    return -(normal_scores(ours).float()[:, None] - normal_scores(theirs).float()[None, :]).square()


def likelihood_ratio(ours: Tensor, theirs: Tensor, correlation: float) -> Tensor:
    """[D, D]: log-likelihood ratio of pairs of normal scores, correlated against independent."""
    x, y = normal_scores(ours).float()[:, None], normal_scores(theirs).float()[None, :]
    r = correlation
    return (2 * r * x * y - r * r * (x * x + y * y)) / (2 * (1 - r * r))


def zscore(table: Tensor) -> Tensor:
    """Rows standardised to mean 0 and variance 1, then columns."""
    for dim in (1, 0):
        table = table - table.mean(dim=dim, keepdim=True)
        table = table / table.std(dim=dim, keepdim=True, correction=0).clamp_min(1e-30)
    return table


def sinkhorn(logits: Tensor) -> Tensor:
    """exp(logits) [D, D] scaled so that rows and columns sum to 1, columns exactly.

    After clipping, the scales stay within float64, so one vector for rows and one for columns suffice.
    """
    kernel = (logits - logits.max(dim=1, keepdim=True).values).clamp_min(-CUT).exp().double()
    columns = kernel.new_ones(kernel.shape[1])
    rows = columns
    for _ in range(BALANCE):
        rows = 1 / (kernel @ columns)
        columns = 1 / (kernel.T @ rows)
    return (rows[:, None] * kernel * columns).float()


@dataclass(frozen=True)
class Schedule:
    """A graduated assignment from soft to hard. start: the hint's first weight; steps: (temperature, hint's weight)."""

    start: float
    steps: tuple[tuple[float, float], ...]


def short_schedule(temperature: float) -> Schedule:
    """12 steps from `temperature` to .05, for a hint −(difference of scores)² whose weight falls from 3 to .1."""
    steps = zip(_falling(temperature, 0.05, 12), _falling(3.0, 0.1, 12), strict=True)
    return Schedule(1 / temperature, tuple((heat, weight / heat) for heat, weight in steps))


def long_schedule(temperature: float) -> Schedule:
    """40 steps from `temperature` to .05, for a hint in log-likelihoods whose weight falls from 2 to .5."""
    return Schedule(1.0, tuple(zip(_falling(temperature, 0.05, 40), _falling(2.0, 0.5, 40), strict=True)))


def _falling(first: float, last: float, count: int) -> list[float]:
    return [first * (last / first) ** (step / (count - 1)) for step in range(count)]


def graduated_assignment(a: Tensor, b: Tensor, hint: Tensor, schedule: Schedule) -> Tensor:
    """q [D] by graduated assignment of the tables a (locked) and b (clear), started from `hint` [D, D]."""
    place = sinkhorn(schedule.start * hint)
    for heat, weight in schedule.steps:
        place = sinkhorn(zscore(a @ place @ b.T) / heat + weight * hint)
    return assign(place)


def hard_assignment(a: Tensor, b: Tensor, q: Tensor) -> Tensor:
    """q after rounds that assign every channel by its correlations with the others as placed by q, until none moves."""
    for _ in range(MAX_ROUNDS):
        before, q = q, assign(a @ b[:, q].T)
        if torch.equal(before, q):
            break
    return q


def agreement(a: Tensor, b: Tensor, q: Tensor) -> float:
    """J(q) = mean_i Σ_k a[i, k] b[q[i], q[k]]: how well the two tables agree; it needs no key."""
    return float((a * b[q][:, q]).sum(dim=1).mean())


def refined_assignment(ours: Sequence[Tensor], theirs: Sequence[Tensor], hint: Tensor, q: Tensor) -> Tensor:
    """q after rounds in which every pair of tables votes, weighted by its agreement with the current q."""
    place = torch.zeros_like(hint)
    every = identity(len(q))
    place[every, q] = 1.0
    hinted = zscore(hint)
    for _ in range(REFINE):
        total = float(hinted[every, q].mean()) * hinted
        for a in ours:
            moved = a @ place
            for b in theirs:
                vote = zscore(moved @ b.T)
                total = total + float(vote[every, q].mean()) * vote
        q = assign(total)
        place = place / 2
        place[every, q] += 0.5
    return q
