"""Matching the channels of two sides by how they go together: the steps of the attack with samples (SPEC §6).

A side is a Gram matrix over D channels. `rows` makes it a table of correlations that no scale of a channel moves; a
permutation q (locked channel i is clear channel q[i]) is good where two locked channels go together as their clear ones
do. The search starts softly, from a hint at single channels, and hardens (`graduated`, `settled`); `agreement` tells
good ends from bad ones without the truth; `refined` weighs many pairs of tables against each other at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from situs.core.permutation import identity
from situs.locks.attacks.match import assign

BALANCE = 10
"""Rounds of Sinkhorn's balancing."""

CUT = 60.0
"""Entries so far below their row's largest count as this far: nothing underflows."""

SETTLE = 50
"""Hard rounds at most; they stand after a few."""

REFINE = 6
"""Rounds of the refinement."""


def correlations(gram: Tensor) -> Tensor:
    """G_ij / √(G_ii G_jj), [D, D]: what is left of a Gram matrix when no channel has a scale."""
    scale = gram.diagonal().clamp_min(1e-30).rsqrt()
    return gram * scale[:, None] * scale[None, :]


def root(gram: Tensor) -> Tensor:
    """The square root of the correlation matrix: trained weights read a stream's strong directions less than in
    proportion."""
    values, vectors = torch.linalg.eigh(correlations(gram).double())
    return ((vectors * values.clamp_min(0).sqrt()) @ vectors.T).float()


def rows(gram: Tensor) -> Tensor:
    """Correlations of a Gram matrix [D, D] without its diagonal, each row centred and of unit length."""
    return centred(correlations(gram))


def centred(table: Tensor) -> Tensor:
    """A table without its diagonal, each row centred and of unit length."""
    table = table.clone().fill_diagonal_(0.0)
    return unit(table - table.mean(dim=1, keepdim=True))


def unit(table: Tensor) -> Tensor:
    """Rows of unit length; a row of zeros stays."""
    return table / table.norm(dim=1, keepdim=True).clamp_min(1e-30)


def normal_scores(values: Tensor) -> Tensor:
    """A vector [D] by its order alone: the normal quantiles of its ranks."""
    order = values.argsort(stable=True).argsort()
    return torch.special.ndtri((order.double() + 0.5) / values.numel())


def alike(ours: Tensor, theirs: Tensor) -> Tensor:
    """[D, D]: minus the squared distance of the normal scores of two vectors [D]."""
    return -(normal_scores(ours).float()[:, None] - normal_scores(theirs).float()[None, :]).square()


def likely(ours: Tensor, theirs: Tensor, correlation: float) -> Tensor:
    """[D, D]: log-likelihood ratio of a pair of normal scores, as correlated so against not at all."""
    x, y = normal_scores(ours).float()[:, None], normal_scores(theirs).float()[None, :]
    r = correlation
    return (2 * r * x * y - r * r * (x * x + y * y)) / (2 * (1 - r * r))


def zscore(table: Tensor) -> Tensor:
    """Rows of mean 0 and variance 1, then columns so."""
    for dim in (1, 0):
        table = table - table.mean(dim=dim, keepdim=True)
        table = table / table.std(dim=dim, keepdim=True, correction=0).clamp_min(1e-30)
    return table


def sinkhorn(logits: Tensor) -> Tensor:
    """exp(logits) [D, D] with rows and columns balanced to sums of 1; columns come last.

    After the cut no scale of a row or column leaves the range of float64, so the two vectors of scales do for all.
    """
    kernel = (logits - logits.max(dim=1, keepdim=True).values).clamp_min(-CUT).exp().double()
    down = kernel.new_ones(kernel.shape[1])
    across = down
    for _ in range(BALANCE):
        across = 1 / (kernel @ down)
        down = 1 / (kernel.T @ across)
    return (across[:, None] * kernel * down).float()


@dataclass(frozen=True)
class Schedule:
    """How a graduated assignment goes from soft to hard: what the hint weighs at first, and heat and weight by step."""

    start: float
    steps: tuple[tuple[float, float], ...]


def hasty(warmth: float) -> Schedule:
    """12 steps from `warmth` to .05, for a hint −(difference of scores)²; its weight falls from 3 to .1."""
    heats = _falling(warmth, 0.05, 12)
    weights = _falling(3.0, 0.1, 12)
    return Schedule(1 / warmth, tuple((heat, weight / heat) for heat, weight in zip(heats, weights, strict=True)))


def patient(warmth: float) -> Schedule:
    """40 steps from `warmth` to .05, for a hint in units of likelihood; its weight falls from 2 to .5."""
    return Schedule(1.0, tuple(zip(_falling(warmth, 0.05, 40), _falling(2.0, 0.5, 40), strict=True)))


def _falling(first: float, last: float, count: int) -> list[float]:
    return [first * (last / first) ** (step / (count - 1)) for step in range(count)]


def graduated(a: Tensor, b: Tensor, hint: Tensor, schedule: Schedule) -> Tensor:
    """q [D] by graduated assignment of the tables a (locked) and b (clear), from a soft `hint` [D, D] at first."""
    place = sinkhorn(schedule.start * hint)
    for heat, weight in schedule.steps:
        place = sinkhorn(zscore(a @ place @ b.T) / heat + weight * hint)
    return assign(place)


def settled(a: Tensor, b: Tensor, q: Tensor) -> Tensor:
    """q after hard rounds: every channel goes where it agrees best with where the others are, until none moves."""
    for _ in range(SETTLE):
        before, q = q, assign(a @ b[:, q].T)
        if torch.equal(before, q):
            break
    return q


def agreement(a: Tensor, b: Tensor, q: Tensor) -> float:
    """J(q) = mean_i Σ_k a[i, k] b[q[i], q[k]]: how well the two tables agree. It needs no truth."""
    return float((a * b[q][:, q]).sum(dim=1).mean())


def refined(ours: Sequence[Tensor], theirs: Sequence[Tensor], hint: Tensor, q: Tensor) -> Tensor:
    """q after rounds in which every pair of tables votes, each by how much it agrees with the q that stands."""
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
