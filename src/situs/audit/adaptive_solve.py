"""Along Z: every patch, shown and hidden, from the row spaces of the first block's gradients.

Two moves take turns. `together` is a Gauss-Newton step over all patches at once, with smoothness as a prior that fades
as the residuals do, and with little weight on tokens that do not fit. `alone` lets each token look for its own
solution while the others stand still: shown tokens that do not fit try from many places, and hidden ones are found as
the roots that many starts run into, because E_unk makes them all solutions of the same equations.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.autograd.forward_ad as forward
from torch import Tensor

from situs.audit.adaptive_algebra import Partly, Smoothness, conjugate, smoothest
from situs.audit.adaptive_spans import FirstBlock
from situs.audit.watch import Watch

SOLVED = 100.0
"""χ² per number below which a token fits; the search ends when all do. Noise alone gives 1 to 10, a wrong patch makes
thousands."""

ABREAST = {"cpu": 2048, "cuda": 16384}
"""Tokens that run side by side on a kind of device."""

MARGIN = 12.0
"""A point is a root if its surprise is within this of the best one's: points that lead nowhere have thousands."""


@dataclass(frozen=True)
class Effort:
    """How long the attacker tries: cycles of both moves, rounds of each, conjugate gradients in a round, starts
    of hidden and of ill-fitting shown patches, and cycles without progress that it bears."""

    cycles: int = 24
    together: int = 5
    gradients: int = 40
    alone: int = 12
    starts: int = 96
    retries: int = 16
    idle: int = 8


class Found(NamedTuple):
    """theta [N, r], and the χ² per number of each token, [N]."""

    theta: Tensor
    fit: Tensor


def solve_directions(
    block: FirstBlock, partly: Partly, grid: tuple[int, int], size: tuple[int, int], effort: Effort, watch: Watch
) -> Found:
    """θ of every patch; the order of the hidden ones among their places means nothing."""
    with warnings.catch_warnings():
        # torch scripts some of its forward derivatives, and warns of its own scripts.
        warnings.filterwarnings("ignore", message=".*torch.jit.script", category=FutureWarning)
        return _solve(block, partly, grid, size, effort, watch)


def _solve(
    block: FirstBlock, partly: Partly, grid: tuple[int, int], size: tuple[int, int], effort: Effort, watch: Watch
) -> Found:
    hidden, chance = partly.hidden, torch.Generator().manual_seed(0)
    values = partly.base.shape[1]
    theta = smoothest(partly, Smoothness(torch.zeros_like(hidden), grid, size, values))
    smooth = Smoothness(hidden, grid, size, values)
    best = Found(theta, torch.full_like(partly.base[:, 0], torch.inf))
    if not block.spans or not len(partly.z):
        return best
    idle, least = 0, float("inf")
    for cycle in range(effort.cycles):
        theta = together(block, partly, smooth, theta, effort)
        theta = alone(block, partly, smooth, theta, effort, chance)
        inputs = block.inputs(partly.patches(theta))
        fit, error = block.fit(inputs), block.error(inputs)
        watch.say(f"adaptive-mjp: cycle {cycle + 1}, {int((fit < SOLVED).sum())} of {len(fit)} patches fit")
        idle = 0 if error < least else idle + 1
        if idle == 0:
            best, least = Found(theta, fit), error
        if float(fit.max()) < SOLVED or idle >= effort.idle or watch.over():
            break
    return best


# --- all patches at once ------------------------------------------------------------------------------------------


def together(block: FirstBlock, partly: Partly, smooth: Smoothness, theta: Tensor, effort: Effort) -> Tensor:
    """Gauss-Newton rounds on all θ: residuals weighted by their variance, plus a prior on neighbouring pixels."""
    damping = 1e-3
    z = partly.z
    for number in range(effort.together):
        inputs = block.inputs(partly.patches(theta))
        weights = {}
        for name, span in block.spans.items():
            excess = span.excess(inputs[name])
            size = (inputs[name] * span.column).square().mean(dim=-1)
            # A token's own excess in its variance: those that do not fit are not allowed to bend the others.
            weights[name] = (span.variance(inputs[name], excess.median().sqrt()) + excess * size).rsqrt()

        def residuals(at: Tensor, weights: Mapping[str, Tensor] = weights) -> Tensor:
            return block.residuals(block.inputs(partly.patches(at)), weights)

        with torch.enable_grad():
            free = theta.clone().requires_grad_()
            out = residuals(free)
        here, energy = out.detach(), smooth.energy(partly.patches(theta))
        cost = here.square().sum()
        prior = cost / here.numel() * smooth.count / energy
        slope = _pull(out, free, here) + prior * smooth.gradient(partly.patches(theta)) @ z.T
        step = _newton_step(residuals, out, free, theta, slope, prior, smooth, z, damping, effort.gradients)
        total, better = cost + prior * energy, False
        for _ in range(6):
            moved = theta + step
            after = residuals(moved).square().sum() + prior * smooth.energy(partly.patches(moved))
            better = bool(after < total)
            if better:
                break
            step, damping = step * 0.3, damping * 5
        if not better:
            break
        theta, damping = theta + step, max(damping * 0.1, 1e-12)
        if number and float(1 - after / total) < 1e-2:
            break
    return theta


def _pull(out: Tensor, free: Tensor, v: Tensor) -> Tensor:
    """J^T v of the graph that made `out` from `free`."""
    return torch.autograd.grad(out, free, v, retain_graph=True)[0]


def _push(function: Callable[[Tensor], Tensor], at: Tensor, v: Tensor) -> Tensor:
    """J v by forward differentiation."""
    with forward.dual_level():
        tangent = forward.unpack_dual(function(forward.make_dual(at, v))).tangent
    assert tangent is not None
    return tangent


def _newton_step(
    residuals: Callable[[Tensor], Tensor],
    out: Tensor,
    free: Tensor,
    theta: Tensor,
    slope: Tensor,
    prior: Tensor,
    smooth: Smoothness,
    z: Tensor,
    damping: float,
    rounds: int,
) -> Tensor:
    """The damped Gauss-Newton step by conjugate gradients: no Jacobian is ever held."""

    def curvature(v: Tensor) -> Tensor:
        return _pull(out, free, _push(residuals, theta, v)) + prior * smooth.gradient(v @ z) @ z.T

    probe = torch.randn(theta.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(theta.device)
    scale = damping * (probe * curvature(probe)).sum() / probe.square().sum()
    return conjugate(lambda v: curvature(v) + scale * v, -slope, rounds, 1e-5)


# --- each token alone ---------------------------------------------------------------------------------------------


def alone(
    block: FirstBlock, partly: Partly, smooth: Smoothness, theta: Tensor, effort: Effort, chance: torch.Generator
) -> Tensor:
    """θ after each token looked for its own solution among several starts; hidden places hold the roots found."""
    hidden = partly.hidden
    patches = partly.patches(theta)
    inputs = block.inputs(patches)
    levels, before = block.levels(inputs), block.surprise(inputs, block.levels(inputs))
    shown = (~hidden).nonzero()[:, 0]
    misfits = shown[_outliers(before[shown])]
    pool = theta[shown] if len(shown) else theta
    usual = before[hidden][~_outliers(before[hidden])]
    held = theta[hidden][before[hidden] <= usual.max()]

    owner = torch.cat([shown, misfits, misfits.repeat_interleave(effort.retries)])
    likely = smoothest(partly, smooth, theta, _flags(misfits, len(hidden)))[misfits]
    again = _draw(pool, len(misfits) * effort.retries, chance)
    fresh = _elsewhere(pool, held, effort.starts, chance)
    starts = torch.cat([theta[shown], likely, again, theta[hidden], fresh])
    some = hidden.nonzero()[:1, 0]
    places = torch.cat([owner, some.expand(len(starts) - len(owner))])
    at, surprise = _search(block, partly, patches, places, starts, levels, effort.alone)
    moved = theta.clone()
    for place in shown.tolist():
        mine = (owner == place).nonzero()[:, 0]
        moved[place] = at[mine[surprise[mine].argmin()]]
    roots, surprise = at[len(owner) :], surprise[len(owner) :]
    fits = surprise < surprise.min() + MARGIN
    found = _distinct(roots[fits], surprise[fits], int(hidden.sum()), 0.005 * float(pool.std(0).norm()))
    while len(found) < int(hidden.sum()):
        found = _one_more(block, partly, moved, found, _draw(pool, int(hidden.sum()) - len(found) + 7, chance), levels)
    moved[hidden] = found
    return moved


def _draw(pool: Tensor, count: int, chance: torch.Generator) -> Tensor:
    """Rows of the pool, chosen at random."""
    return pool[torch.randint(len(pool), (count,), generator=chance).to(pool.device)]


def _elsewhere(pool: Tensor, found: Tensor, count: int, chance: torch.Generator) -> Tensor:
    """Starts for roots that are still lacking: rows of the pool, every other one drawn out across the roots found.

    The m hidden patches are affinely independent, so those that lack lie off the flat through those found.
    """
    starts = _draw(pool, count, chance)
    if len(found) > 1:
        centre = found.mean(dim=0)
        flat = torch.linalg.svd(found[1:] - found[0], full_matrices=False)[2]
        off = starts - centre
        off = off - (off @ flat.T) @ flat
        stretch = 1 + 3 * torch.rand(count, 1, generator=chance, dtype=torch.float64).to(pool.device)
        odd = torch.arange(count, device=pool.device).unsqueeze(-1) % 2 == 1
        starts = torch.where(odd, centre + stretch * off, starts)
    return starts


def _one_more(
    block: FirstBlock, partly: Partly, theta: Tensor, found: Tensor, fresh: Tensor, levels: Mapping[str, Tensor]
) -> Tensor:
    """The roots and one more, as fits best: a new start, or a copy of a root where the algebra says that m - 1
    directions were not needed, as with equal hidden patches."""
    lacking = int(partly.hidden.sum()) - len(found)
    equal = int(partly.hidden.sum()) - 1 - len(partly.z)
    trials = []
    for candidate in torch.cat([found, fresh]) if lacking <= equal else fresh:
        guess = theta.clone()
        guess[partly.hidden] = torch.cat([found, candidate.unsqueeze(0), fresh[: lacking - 1]])
        surprise = block.surprise(block.inputs(partly.patches(guess)), levels)
        trials.append((float(surprise.median()), candidate))
    return torch.cat([found, min(trials, key=lambda trial: trial[0])[1].unsqueeze(0)])


def _outliers(surprise: Tensor) -> Tensor:
    """Tokens that fit far worse than the median one, [T] bool."""
    if not len(surprise):
        return surprise.bool()
    middle = surprise.median()
    return surprise > middle + 5 * (surprise - middle).abs().median() + 0.5


def _flags(places: Tensor, count: int) -> Tensor:
    flags = torch.zeros(count, dtype=torch.bool, device=places.device)
    flags[places] = True
    return flags


def _distinct(points: Tensor, surprise: Tensor, most: int, apart: float) -> Tensor:
    """The most likely points that are farther than `apart` from each other, at most `most` of them."""
    chosen: list[int] = []
    far = torch.cdist(points, points) > apart
    for index in surprise.argsort().tolist():
        if bool(far[index, chosen].all()):
            chosen.append(index)
        if len(chosen) == most:
            break
    return points[chosen]


def _search(
    block: FirstBlock,
    partly: Partly,
    patches: Tensor,
    places: Tensor,
    theta: Tensor,
    levels: Mapping[str, Tensor],
    rounds: int,
) -> tuple[Tensor, Tensor]:
    """Levenberg-Marquardt for many tokens at once, each with its own r unknowns: θ [Q, r] and surprise [Q].

    places: [Q], whose base and row of the table a token has. patches: [N, K], the image they look at.
    """
    base, rows = partly.base[places], block.table[places]

    def inputs_at(at: Tensor) -> dict[str, Tensor]:
        return block.inputs(patches, (base + at @ partly.z, rows))

    damping = torch.full_like(theta[:, 0], 1e-3)
    inputs = inputs_at(theta)
    surprise = block.surprise(inputs, levels)
    for _ in range(rounds):
        weights = {n: s.variance(inputs[n], levels[n]).rsqrt() for n, s in block.spans.items()}
        here = block.residuals(inputs, weights)
        jacobian = _jacobian(block, partly, patches, places, theta, weights)
        normal, slope = jacobian.mT @ jacobian, (jacobian.mT @ here.unsqueeze(-1)).squeeze(-1)
        diagonal = normal.diagonal(dim1=1, dim2=2)
        origin, before, done = theta, surprise, torch.zeros_like(damping, dtype=torch.bool)
        for _ in range(3):
            bend = damping.unsqueeze(-1) * (diagonal + 1e-3 * diagonal.mean(dim=1, keepdim=True)) + 1e-14
            step = torch.linalg.solve(normal + torch.diag_embed(bend), slope)
            moved = torch.where(done.unsqueeze(-1), theta, origin - step)
            after = inputs_at(moved)
            likelihood = block.surprise(after, levels)
            better = likelihood < surprise
            theta = torch.where(better.unsqueeze(-1), moved, theta)
            surprise = torch.where(better, likelihood, surprise)
            inputs = {n: torch.where(better.unsqueeze(-1), after[n], inputs[n]) for n in inputs}
            done = done | better
            damping = torch.where(done, torch.where(better, damping * 0.2, damping), damping * 6).clamp(1e-8, 1e8)
            if float(done.double().mean()) > 0.7:
                break
        if float((before - surprise).max()) < 1e-3:
            break
    return theta, surprise


def _jacobian(
    block: FirstBlock, partly: Partly, patches: Tensor, places: Tensor, theta: Tensor, weights: Mapping[str, Tensor]
) -> Tensor:
    """The derivative of each token's residuals by its own θ, [Q, R, r].

    Tokens do not look at each other, so as many copies of all of them as fit run side by side, one for each axis.
    """
    count, width = theta.shape
    side = max(1, ABREAST.get(theta.device.type, 2048) // max(count, 1))
    found = []
    for axes in torch.eye(width, dtype=theta.dtype, device=theta.device).split(side):
        copies = len(axes)
        owners = places.repeat(copies)
        scaled = {name: weight.repeat(copies) for name, weight in weights.items()}

        def function(at: Tensor, owners: Tensor = owners, scaled: Mapping[str, Tensor] = scaled) -> Tensor:
            queries = partly.base[owners] + at @ partly.z, block.table[owners]
            return block.residuals(block.inputs(patches, queries), scaled)

        tangent = _push(function, theta.repeat(copies, 1), axes.repeat_interleave(count, dim=0))
        found.append(tangent.view(copies, count, -1))
    return torch.cat(found).movedim(0, -1)
