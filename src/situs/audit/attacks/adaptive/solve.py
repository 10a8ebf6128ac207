"""Along Z: every patch, shown and hidden, token by token, from the first block's gradients.

The input of a layer lies in the row space of its gradient. Two of the first block's layers are linear in the unknowns:
o lies in the span of the attention's last layer, and norm(z + A o + b) in that of the MLP's first. Together they leave
a token a family of as many dimensions as Z has (`family_of`), without the other tokens: attention is not computed, it
is eliminated. Adding differences of hidden tokens stays in a family, which is why nothing linear can do better. The
MLP's activation is not linear: a token's a = late(m) must lie in the row space of the last layer's gradient, some
thousand equations for a handful of unknowns (`search`).

The hidden tokens share E_unk, so they are the m roots of the same equations. Functionals that vanish on the known roots
and on the shown tokens exclude these: dividing residuals by them leaves only the other roots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from situs.audit.attacks import solver
from situs.audit.attacks.adaptive.algebra import Partly, Smoothness, smoothest
from situs.audit.attacks.patchembed.equations import svd
from situs.audit.attacks.solver import Activation, Descent, Flat, Group, Range, Tokens, blur
from situs.audit.attacks.spans import SOLVED, TELLING, Norm, Span
from situs.audit.attacks.tokens.block import Block
from situs.audit.deadline import Deadline
from situs.audit.defences import Gradients
from situs.audit.stem import Stem, table_rows

# ---------------------------------------------------------------------------------------------------------------------
# The first block of a model (`tokens.block`) in a step that hides places: no attention is computed.
#
#     m = z + A o + b          the stream between attention and MLP: z the token, o the attention's output
#     h = norm(m)              input of the MLP's first layer
#     a = late(m)              input of its last layer
#
# Tokens whose places are hidden have E_unk instead of their row of the table.


class FirstBlock:
    """block: the first block, or the reason why it cannot be read. hidden: [N] bool. unknown: E_unk, [D].

    reason: None, or why the block's tokens cannot be solved for; the other fields are then missing.
    """

    proj: Span
    fc1: Span
    fc2: Span
    norm: Norm

    def __init__(self, block: Block | str, stem: Stem, upload: Gradients, hidden: Tensor, unknown: Tensor) -> None:
        self.reason = block if isinstance(block, str) else None
        if isinstance(block, str):
            return
        self.block, self.weight, self.into, self.shift = block, block.weight, block.into, block.shift
        self.norm, self.tokens = block.norm2, block.places + len(block.prefix)
        table = table_rows(dict(block.backbone.named_parameters())[stem.table], stem)
        self.base = torch.where(hidden.unsqueeze(-1), block.base - table + unknown.to(table), block.base)
        self.reason = self._read(upload)

    def embed(self, patches: Tensor) -> Tensor:
        """z of the image's patch tokens [N, D] for patches [N, K], hidden ones with E_unk."""
        return patches @ self.weight.T + self.base

    def late(self, m: Tensor) -> Tensor:
        """The input [..., H] of the MLP's last layer for streams m [..., D]."""
        return self.block.late(m)

    def middle(self, patches: Tensor) -> Tensor:
        """m of the image's patch tokens [N, D], by the model's own attention."""
        tokens = self.embed(patches) - self.block.base
        return self.block.through(tokens.unsqueeze(0))[0][0, len(self.block.prefix) :]

    def _read(self, upload: Gradients) -> str | None:
        """Reads the spans; gives the reason where that fails."""
        layers = self.block.layers
        if self.block.norm0 is not None:
            return "a norm stands before its first block"
        for role, name in (("proj", layers.proj), ("fc1", next(iter(layers.fc1))), ("fc2", layers.fc2)):
            if name not in upload or not Span.exists(upload[name], self.tokens):
                return f"the gradient of {name} has no directions beside those of {self.tokens} tokens, or is not sent"
            setattr(self, role, Span(upload[name], self.tokens))
        return None


# ---------------------------------------------------------------------------------------------------------------------
# One token from many starts: Levenberg-Marquardt within the family that the linear equations leave.
#
# A token's a = late(m) must lie in the row space of the gradient of the MLP's last layer. Where its residual is no more
# than noise explains, and noise explains little, the token is proved.


SHARP = 3e-3
"""A token proves nothing if noise alone moves it by more than this share of `Trial.loud`: where the MLP is nearly
linear (a gate that is still shut), every token of the family fits."""

DOUBTFUL = SOLVED * (1 + SOLVED)
"""Up to this fit noise explains a token, though nothing proves it: a guess, but better than smoothness."""


@dataclass(frozen=True)
class Effort:
    """How long the attacker tries: rounds for the shown and for the hidden patches, steps of a search, starts of
    hidden patches in a round and of each shown patch that does not fit yet."""

    rounds: int = 12
    steps: int = 24
    starts: int = 48
    retries: int = 6
    loose: int = 16
    """Weak directions that are searched, at most."""


class TokenFit(NamedTuple):
    """θ of each token, or φ of its family, [N, ·]; and its fit [N]: the ratio of its residual to what noise explains,
    infinite where it was not tried."""

    at: Tensor
    fit: Tensor

    def solved(self, among: Tensor) -> Tensor:
        """Which of these places fit."""
        return among[self.fit[among] <= SOLVED]


class Family(NamedTuple):
    """The tokens that the linear equations allow: m = fixed + φ along, θ = start + φ turn, for φ [f] of each token."""

    fixed: Tensor
    along: Tensor
    start: Tensor
    turn: Tensor

    def theta(self, places: Tensor, phi: Tensor) -> Tensor:
        return self.start[places] + phi @ self.turn

    def phi(self, places: Tensor, theta: Tensor) -> Tensor:
        """The φ whose θ is nearest."""
        return (theta - self.start[places]) @ torch.linalg.pinv(self.turn)

    def streams(self, places: Tensor, phi: Tensor) -> Tensor:
        return self.fixed[places] + phi @ self.along


@dataclass(frozen=True)
class Trial:
    """The constants of the search for the tokens of one image. loud: a size of θ that no picture reaches."""

    block: FirstBlock
    family: Family
    partly: Partly
    loud: float
    effort: Effort
    deadline: Deadline
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    @property
    def hidden(self) -> Tensor:
        """The hidden places, [m]."""
        return self.partly.hidden.nonzero()[:, 0]

    @property
    def shown(self) -> Tensor:
        """The shown places, [N - m]."""
        return (~self.partly.hidden).nonzero()[:, 0]

    @property
    def everywhere(self) -> Tensor:
        return torch.arange(len(self.partly.base), device=self.partly.base.device)

    @cached_property
    def activation(self) -> Activation:
        return Activation(self.block.block)

    def descent(self, functionals: Tensor | None = None) -> Descent:
        """The search for roots within the family."""
        fixed, along = (Tokens(m[:, :0], m[:, :0], torch.zeros_like(m), m) for m in self.family[:2])
        family, no_pixels = solver.Family(fixed, along, along.m[:0, 0]), Range(fixed.x[0], fixed.x[0])
        return Descent(self.activation, family, self.block.fc2, no_pixels, functionals=functionals)


def search(trial: Trial, places: Tensor, phi: Tensor, functionals: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """φ [Q, f] at the end of the search of each token from φ [Q, f], and its fit [Q]. places: [Q], of the families.
    functionals: as in `Descent`."""
    minimum = trial.descent(functionals).run(places, phi, trial.effort.steps, trial.deadline.over)
    return minimum.phi, _fit(trial, places, minimum.phi)


def _fit(trial: Trial, places: Tensor, phi: Tensor) -> Tensor:
    """The ratio of residuals to what noise explains, [Q]; infinite for what is no picture."""
    span = trial.block.fc2
    late = trial.block.late(trial.family.streams(places, phi))
    residual, expected = span.residual(late), span.expected(late)
    picture = trial.family.theta(places, phi).norm(dim=1) <= trial.loud
    fit = (residual / expected).nan_to_num(torch.inf)
    # A residual that proves nothing is no fit, but keeps its rank among the others that do not fit (`DOUBTFUL`).
    moved = expected * blur(trial.descent().run(places, phi, 0).normal, trial.family.turn, span)
    proves = (residual <= TELLING) & (moved <= SHARP * trial.loud)
    return torch.where(picture, torch.where(proves, fit, SOLVED * (1 + fit)), torch.inf)


# --- all patches of an image -----------------------------------------------------------------------------------------


LOUD = 3.0
"""θ longer than this many times a patch of pixels ±1, or the largest patch of the smoothest image, is no picture:
normalised pixels do not reach that far."""

WEAK = 1e-2
"""Equations weaker than this share of the strongest are left out, and their direction is searched."""

COPIED = 1e-3
"""A copy counts as proved if the solved tokens' streams come out with at most this relative error, smaller by `NEARER`
than with any other root in its place."""

NEARER = 3.0

PASSES = 3
"""Rounds of choosing each copy anew beside the others."""

APART = 1e-3
"""Distance from which two roots are different, as a share of the patches' spread."""


def solve_directions(
    block: FirstBlock, partly: Partly, grid: tuple[int, ...], size: tuple[int, int], effort: Effort, deadline: Deadline
) -> TokenFit:
    """θ of every patch; the hidden ones are in any order among their places."""
    count, values = partly.base.shape
    theta = smoothest(partly, Smoothness(torch.zeros_like(partly.hidden), grid, size, values))
    if not len(partly.z):
        return TokenFit(theta, theta.new_zeros(count))
    untried = theta.new_full((count,), torch.inf)
    if block.reason is not None:
        return TokenFit(theta, untried)
    loud = LOUD * max(values**0.5, float(partly.patches(theta).norm(dim=1).max()))
    trial = Trial(block, family_of(block, partly, effort.loose), partly, loud, effort, deadline)
    smooth = Smoothness(partly.hidden, grid, size, values)
    start = TokenFit(trial.family.phi(trial.everywhere, theta), untried)
    solution = solve_hidden(trial, solve_shown(trial, smooth, start))
    wrong = solution.fit > DOUBTFUL
    theta = torch.where(wrong.unsqueeze(-1), theta, trial.family.theta(trial.everywhere, solution.at))
    return TokenFit(smoothest(partly, smooth, theta, wrong), solution.fit)


def family_of(block: FirstBlock, partly: Partly, loose: int = Effort.loose) -> Family:
    """The tokens that stay possible when attention is eliminated.

    The unknowns of a token are θ [r], its o as coordinates c in the span of the attention's last layer, and the
    deviation s that its norm divides by. norm(m) = w (m - mean) / s + β lies in the span of the MLP's first layer, so
    w (m - mean) + s β does, which is linear in all three; its solutions are a flat along which θ is free.
    """
    norm, width, group = block.norm, block.into.shape[1], Group(block.norm, block.fc1)
    mixing = (block.proj.inside / block.proj.column) @ block.into  # [T, D]: c -> A o
    streams = torch.cat([partly.z @ block.weight.T, mixing])
    # Theory says how many equations are independent (without β all are centred, the span too); the weakest of those
    # are left out and their directions searched.
    independent = min(block.tokens + norm.biased, width - block.tokens - (norm.centred and not norm.biased))

    def rank(values: Tensor) -> int:
        return min(independent, max(int((values > WEAK * values[0]).sum()), independent - loose))

    flat = Flat(group.rows(streams), rank)
    known = block.embed(partly.base) + block.shift
    solution = flat.least(group(known))
    r, u = len(partly.z), len(streams)
    return Family(known + solution[:, :u] @ streams, flat.free[:, :u] @ streams, solution[:, :r], flat.free[:, :r])


# --- shown patches ------------------------------------------------------------------------------------------------


def solve_shown(trial: Trial, smooth: Smoothness, start: TokenFit) -> TokenFit:
    """Each shown token by itself: from the smoothest image, then from the smoothest one beside the solved patches and
    from patches like those. TokenFit holds φ."""
    family, effort, shown = trial.family, trial.effort, trial.shown
    phi, fit = start.at.clone(), start.fit.clone()
    for number in range(effort.rounds):
        lacking = shown[fit[shown] > SOLVED]
        if not len(lacking) or (number and trial.deadline.over()):
            break
        places, starts = lacking, phi[lacking]
        if number:
            theta = family.theta(trial.everywhere, phi)
            free = torch.zeros_like(trial.partly.hidden).scatter(0, lacking, True)
            pool = theta[TokenFit(phi, fit).solved(shown)]
            places = lacking.repeat(1 + effort.retries)
            others = _like(pool if len(pool) > 1 else theta[shown], len(places) - len(lacking), trial.generator)
            starts = family.phi(places, torch.cat([smoothest(trial.partly, smooth, theta, free)[lacking], others]))
        at, fits = search(trial, places, starts)
        best = fits.view(-1, len(lacking)).min(dim=0)
        better = best.values < fit[lacking]
        chosen = at.view(-1, len(lacking), at.shape[1])[best.indices, torch.arange(len(lacking), device=at.device)]
        phi[lacking[better]], fit[lacking[better]] = chosen[better], best.values[better]
        solved = len(TokenFit(phi, fit).solved(shown))
        trial.deadline.say(f"adaptive-mjp: round {number + 1}, {solved} of {len(shown)} shown fit")
    return TokenFit(phi, fit)


def _like(pool: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Starts [count, r]: half of them rows of the pool, half drawn from a normal distribution twice as wide."""
    rows = pool[torch.randint(len(pool), (count - count // 2,), generator=generator).to(pool.device)]
    away = pool - pool.mean(dim=0)
    mix = torch.randn(count // 2, len(pool), generator=generator, dtype=torch.float64).to(pool.device)
    return torch.cat([rows, pool.mean(dim=0) + 2 * mix @ away / len(pool) ** 0.5])


# --- hidden patches -----------------------------------------------------------------------------------------------


def solve_hidden(trial: Trial, shown: TokenFit) -> TokenFit:
    """The roots that many starts run into, put at the hidden places in any order. shown: from `solve_shown`."""
    block, family, hidden = trial.block, trial.family, trial.hidden
    one, solved = hidden[:1], shown.solved(trial.shown)
    pool = _pool(trial, shown)
    apart = APART * float((pool - pool.mean(dim=0)).norm(dim=1).median())
    known = block.late(family.streams(solved, shown.at[solved]))
    roots = ends = TokenFit(shown.at[:0], shown.fit[:0])
    for number in range(trial.effort.rounds):
        if len(roots.at) == len(hidden) or trial.deadline.over():
            break
        places = one.expand(trial.effort.starts)
        excluded = torch.cat([known, block.late(family.streams(one.expand(len(roots.at)), roots.at))])
        starts = family.phi(places, _like(pool, len(places), trial.generator))
        ends = TokenFit(*search(trial, places, starts, _functionals(block, excluded)))
        fits = ends.fit <= SOLVED
        if fits.any():
            # Without functionals an end that they only kept beside a root slides back into it.
            roots = _with_others(trial, roots, TokenFit(*search(trial, places[fits], ends.at[fits])), SOLVED, apart)
        trial.deadline.say(f"adaptive-mjp: round {number + 1}, {len(roots.at)} of {len(hidden)} hidden found")
    phi, fit = shown.at.clone(), shown.fit.clone()
    # Any of the hidden places stands for all: their bases and rows of the table are the same. An end without proof that
    # noise explains is a better guess than none.
    every = _with_others(trial, roots, _unproven(ends), DOUBTFUL, apart)
    phi[hidden[: len(every.at)]], fit[hidden[: len(every.at)]] = every
    return _copied(trial, TokenFit(phi, fit), len(roots.at))


def _unproven(ends: TokenFit) -> TokenFit:
    """Ends that fit but are no roots: functionals kept them beside one, and they prove nothing."""
    return TokenFit(ends.at, torch.where(ends.fit <= SOLVED, SOLVED * (1 + ends.fit), ends.fit))


def _with_others(trial: Trial, roots: TokenFit, ends: TokenFit, most: float, apart: float) -> TokenFit:
    """The roots, and the ends that fit up to `most` and are `apart` from all before: m at most."""
    one = trial.hidden[:1]
    for index in ends.fit.argsort().tolist():
        away = (trial.family.theta(one, roots.at) - trial.family.theta(one, ends.at[index])).norm(dim=1)
        if ends.fit[index] <= most and len(roots.at) < len(trial.hidden) and bool((away > apart).all()):
            roots = TokenFit(*(torch.cat([old, new[index : index + 1]]) for old, new in zip(roots, ends, strict=True)))
    return roots


def _pool(trial: Trial, shown: TokenFit) -> Tensor:
    """θ of patches like the hidden ones, [·, r]: the shown ones; where there are none, noise of as much energy as
    normalised pixels have."""
    solved = shown.solved(trial.shown)
    among = solved if len(solved) > 1 else trial.shown
    if len(among) > 1:
        return trial.family.theta(among, shown.at[among])
    r, values = trial.partly.z.shape
    noise = torch.randn(trial.effort.starts, r, generator=trial.generator, dtype=torch.float64)
    return noise.to(trial.partly.z) * (values / r) ** 0.5


def _functionals(block: FirstBlock, excluded: Tensor) -> Tensor:
    """A basis of the functionals on the last layer's span that vanish on excluded inputs [k, H]: [T - k, T]."""
    inside = (excluded * block.fc2.column) @ block.fc2.inside.T
    if not len(inside):
        return torch.eye(block.tokens).to(inside)
    inside = inside / inside.norm(dim=1, keepdim=True)
    return svd(inside, full=True)[2][min(len(inside), block.tokens - 1) :]


def _copied(trial: Trial, tokens: TokenFit, count: int) -> TokenFit:
    """Equal hidden patches are one root. Which root is there twice shows in the attention that it draws: the copies are
    those with which the block's own forward pass gives the solved tokens their streams.

    count: of the roots. Z is as wide as the number of different hidden patches, less one: with fewer roots some are
    missing, and no copy is right.
    """
    family, solved = trial.family, tokens.solved(trial.shown)
    roots, lacking = trial.hidden[:count], trial.hidden[count:]
    if count <= len(trial.partly.z) or not len(lacking) or not len(solved):
        return tokens
    phi, fit = tokens.at.clone(), tokens.fit.clone()
    truth = family.streams(solved, phi[solved])
    phi[lacking], fit[lacking] = phi[roots[0]].clone(), DOUBTFUL

    def errors(place: int) -> Tensor:
        """Relative errors of the streams with each root at a place, [roots]."""
        relative, attempt = [], phi.clone()
        for root in roots.tolist():
            attempt[place] = phi[root]
            middle = trial.block.middle(trial.partly.patches(family.theta(trial.everywhere, attempt)))
            relative.append((middle[solved] - truth).norm() / truth.norm())
        return torch.stack(relative)

    for _ in range(PASSES):
        before = phi.clone()
        for place in lacking.tolist():
            if trial.deadline.over():
                return TokenFit(phi, fit)
            phi[place] = phi[roots[errors(place).argmin()]].clone()
        if torch.equal(before, phi):
            break
    for place in lacking.tolist():
        off = errors(place).sort().values
        if off[0] < COPIED and bool((off[1:] > NEARER * off[0]).all()):
            fit[place] = fit[roots].max()
    return TokenFit(phi, fit)
