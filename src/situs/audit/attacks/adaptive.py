"""The attack on MJP by an informed attacker: the mask, the shown patches, the hidden patches, and then their order.

1. Rows of ∂l/∂E_pos that are all zero, or only the noise that a defence adds, are the hidden places. DAL changes only
   the rows of shown places, and its gradient is known: it is subtracted.
2. Algebra gives every patch up to m - 1 directions that all patches share (`algebra`).
3. The row spaces of the first block's gradients give the rest, for shown and hidden patches alike (`solve`), as long
   as there are fewer tokens than channels.
4. The gradients do not depend on the order of the hidden patches, but their borders do: `ordering` solves the puzzle.

Where no row is zero, nothing is hidden and `patchembed` is all that is needed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from situs.audit.attacks import solver
from situs.audit.attacks.base import Attack, Fact, Knowledge, Ready, Recovery, Refused, known_numbers
from situs.audit.attacks.equations import conjugate, judge, solve_pixels, svd, whiten
from situs.audit.attacks.ordering import order_hidden
from situs.audit.attacks.patchembed import PatchEmbedding, patch_rows, see_through
from situs.audit.attacks.solver import (
    SOLVED,
    TELLING,
    Activation,
    Descent,
    Flat,
    Group,
    Range,
    Span,
    Tokens,
    blur,
)
from situs.audit.attacks.tokens.block import Block, first_matrices, read_block
from situs.audit.client import hidden_places
from situs.audit.deadline import Deadline
from situs.audit.defences import UNKNOWN, Gradients
from situs.audit.stem import Stem, flat_weight, require_stem, table_rows
from situs.backbones.base import Backbone
from situs.core.tokens import patchify, unpatchify
from situs.methods.base import Method
from situs.methods.measured import HidesPlaces
from situs.methods.mp3 import MP3

# ---------------------------------------------------------------------------------------------------------------------
# What algebra alone gives from the gradients of an MJP step with one image: all but a few directions of each patch.
#
# The tokens of shown patches got their own row of the table, so their gradients G_u are in the upload. Hidden patches
# share E_unk, so only the sum of their gradients is there. With ∂W = G_u^T X_u + G_h^T X_h:
#
# - Outside the span of G_u only hidden patches are left, so the row space of that part of ∂W is the span of the m
#   hidden patches, and the same part of ∂E_unk gives the affine hull in it that all m lie on: a + span(Z), m - 1 wide.
# - Across Z every patch is then known exactly: the hidden ones are a, the shown ones solve G_u^T X_u = ∂W - ∂E_unk a^T.
#
# N × (m - 1) numbers stay open: how far each patch goes along Z. With one hidden patch there are none.


class Partly(NamedTuple):
    """patches = base + θ Z for some θ [N, r]: base [N, K], across Z; Z [r, K], orthonormal; hidden [N] bool."""

    base: Tensor
    z: Tensor
    hidden: Tensor

    def patches(self, theta: Tensor) -> Tensor:
        """The patches [N, K] for θ [N, r]."""
        return self.base + theta @ self.z


def separate(
    rows: Tensor,
    weight: Tensor,
    unknown: Tensor | None,
    hidden: Tensor,
    sent: torch.dtype = torch.float32,
    sigma: float = 0.0,
) -> Partly:
    """The part of each patch that is known exactly, and the open directions Z. All in float64.

    rows: ∂l/∂E_pos on the patch rows without the gradient of a loss on the table itself, [N, D]. weight: ∂l/∂W, [D, K].
    unknown: ∂l/∂E_unk, [D], or None where it is not sent (Z is then one direction wider). hidden: [N] bool. sent and
    sigma: as in `solve_pixels`.
    """
    rows, weight = rows.double(), weight.double()
    shown = rows[~hidden]
    count = int(hidden.sum())
    spread = _deviation(shown, weight, sent, sigma)
    # Each equation (channel) divided by its error's deviation: what then exceeds 1 is no noise.
    basis = svd(shown / spread)[2]
    rest = _outside(weight / spread.unsqueeze(-1), basis)
    _, values, directions = svd(rest)
    free = max(rest.shape[0] - basis.shape[0], 1)
    noise = max(4 * (free**0.5 + rest.shape[1] ** 0.5), 1e-13 * float(values.max()))
    rank = int((values[:count] > noise).sum())
    span = directions[:rank]
    anchor, z = weight.new_zeros(weight.shape[1]), span
    if unknown is not None and rank:
        total = unknown.double()
        inside = _outside((total / spread).unsqueeze(-1), basis)
        normal = torch.linalg.pinv(rest @ span.T) @ inside
        # With more hidden patches than pixels in a patch no hyperplane goes through all of them.
        if float((rest @ span.T @ normal - inside).norm()) < 1e-2 * float(inside.norm()):
            normal = normal[:, 0]
            anchor = normal @ span / (normal @ normal)
            z = svd(normal.unsqueeze(0), full=True)[2][1:] @ span  # across it
            weight = weight - torch.outer(total, anchor)
    across = weight - (weight @ z.T) @ z
    base = anchor.expand(len(rows), -1).clone()
    if len(shown):
        base[~hidden] = solve_pixels(across.unsqueeze(0), shown.unsqueeze(0), sent, sigma).patches[0]
        base[~hidden] -= (base[~hidden] @ z.T) @ z
    return Partly(base, z, hidden)


def _deviation(shown: Tensor, weight: Tensor, sent: torch.dtype, sigma: float) -> Tensor:
    """The deviation of equation d's error, [D]: rounding in proportion to each number, and noise that was added."""
    relative = weight.square().mean(dim=-1) + shown.square().sum(dim=-2)
    variance = (torch.finfo(sent).eps / 2) ** 2 * relative + (1 + len(shown)) * sigma**2
    least = 1e-12 * variance.max() + torch.finfo(torch.float64).tiny
    return variance.clamp(min=float(least)).sqrt()


def _outside(columns: Tensor, basis: Tensor) -> Tensor:
    """The part of columns [D, ·] outside the span of an orthonormal basis [k, D]."""
    return columns - basis.T @ (basis @ columns)


# --- neighbouring pixels are alike: a first guess of θ ------------------------------------------------------------


class Smoothness:
    """The sum of squared differences of neighbouring pixels, as a quadratic form on patches [N, K].

    Pairs between a hidden place and another place do not count: the patch there is not known. size: of a patch.
    """

    def __init__(self, hidden: Tensor, grid: tuple[int, ...], size: tuple[int, int], values: int) -> None:
        self.grid, self.size = grid, size
        owner = torch.arange(len(hidden), device=hidden.device, dtype=torch.float64)
        owner = unpatchify(owner.view(1, -1, 1).expand(-1, -1, values).contiguous(), grid, size)[0].long()
        covered = hidden[owner]
        self.pairs = []
        for dim in (-1, -2):
            n = owner.shape[dim] - 1
            same = owner.narrow(dim, 0, n) == owner.narrow(dim, 1, n)
            self.pairs.append((same | ~(covered.narrow(dim, 0, n) | covered.narrow(dim, 1, n))).double())

    def gradient(self, patches: Tensor) -> Tensor:
        """Half its derivative, [N, K]: linear in the patches."""
        image = unpatchify(patches.unsqueeze(0), self.grid, self.size)[0]
        out = torch.zeros_like(image)
        for dim, pair in zip((-1, -2), self.pairs, strict=True):
            step = pair * image.diff(dim=dim)
            out.narrow(dim, 0, step.shape[dim]).sub_(step)
            out.narrow(dim, 1, step.shape[dim]).add_(step)
        return patchify(out.unsqueeze(0), self.size)[0]


def smoothest(partly: Partly, smooth: Smoothness, theta: Tensor | None = None, free: Tensor | None = None) -> Tensor:
    """θ [N, r] of the smoothest image; with `free` [N] bool, only those patches move and the others stay at `theta`."""
    z = partly.z
    theta = z.new_zeros(len(partly.base), len(z)) if theta is None else theta
    move = torch.ones_like(partly.hidden) if free is None else free
    keep = move.unsqueeze(-1).to(z.dtype)

    def apply(step: Tensor) -> Tensor:
        return keep * (smooth.gradient((keep * step) @ z) @ z.T) + 1e-4 * step

    start = keep * (smooth.gradient(partly.patches(theta)) @ z.T)
    return theta + keep * conjugate(apply, -start, 200, 1e-10)


# ---------------------------------------------------------------------------------------------------------------------
# Along Z: every patch, shown and hidden, token by token, from the first block's gradients.
#
# The input of a layer lies in the row space of its gradient. Two of the first block's layers are linear in the
# unknowns: o lies in the span of the attention's last layer, and norm(z + A o + b) in that of the MLP's first. Together
# they leave a token a family of as many dimensions as Z has (`family_of`), without the other tokens: attention is not
# computed, it is eliminated. Adding differences of hidden tokens stays in a family, which is why nothing linear can do
# better. The MLP's activation is not linear: a token's a = late(m) must lie in the row space of the last layer's
# gradient, some thousand equations for a handful of unknowns (`search`).
#
# The hidden tokens share E_unk, so they are the m roots of the same equations. Functionals that vanish on the known
# roots and on the shown tokens exclude these: dividing residuals by them leaves only the other roots.


# ---------------------------------------------------------------------------------------------------------------------
# The first block of a model (`tokens.block`) in a step that hides places: no attention is computed.
#
#     m = z + A o + b          the stream between attention and MLP: z the token, o the attention's output
#     h = norm(m)              input of the MLP's first layer
#     a = late(m)              input of its last layer
#
# Tokens whose places are hidden have E_unk instead of their row of the table.


@dataclass(frozen=True)
class FirstBlock:
    """plain: the block as in any step. base [N, D]: what is added to E x, hidden places with E_unk. proj, fc1, fc2: the
    spans of the gradients of the attention's last, the MLP's first and its last layer."""

    plain: Block
    base: Tensor
    proj: Span
    fc1: Span
    fc2: Span

    @property
    def tokens(self) -> int:
        """N and the prefix tokens."""
        return self.plain.places + len(self.plain.prefix)

    def embed(self, patches: Tensor) -> Tensor:
        """z of the image's patch tokens [N, D] for patches [N, K], hidden ones with E_unk."""
        return patches @ self.plain.weight.T + self.base

    def middle(self, patches: Tensor) -> Tensor:
        """m of the image's patch tokens [N, D], by the model's own attention."""
        tokens = self.embed(patches) - self.plain.base
        return self.plain.through(tokens.unsqueeze(0))[0][0, len(self.plain.prefix) :]


def first_block(block: Block | str, stem: Stem, upload: Gradients, hidden: Tensor, unknown: Tensor) -> FirstBlock | str:
    """The first block with the spans of an upload, or why its tokens cannot be solved for. block: as `read_block` gives
    it. hidden: [N] bool. unknown: E_unk, [D]."""
    if isinstance(block, str):
        return block
    if block.norm0 is not None:
        return "a norm precedes the model's first block"
    spans, tokens = list[Span](), block.places + len(block.prefix)
    for name in (block.layers.proj, next(iter(block.layers.fc1)), block.layers.fc2):
        if name not in upload:
            return f"the gradient of {name} is not sent"
        if not Span.exists(upload[name], tokens):
            few = f"the gradient of {name} has no more directions than there are tokens ({tokens})"
            return f"{few}, so every token lies in the span of this gradient"
        spans.append(Span(upload[name], tokens))
    table = table_rows(dict(block.backbone.named_parameters())[stem.table], stem)
    base = torch.where(hidden.unsqueeze(-1), block.base - table + unknown.to(table), block.base)
    return FirstBlock(block, base, *spans)


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
    """How long the attacker tries. rounds: of searches, over all patches. steps: of one search. starts: searches for
    hidden patches in a round. retries: searches in a round for each shown patch that does not fit yet."""

    rounds: int = 12
    steps: int = 24
    starts: int = 48
    retries: int = 6
    loose: int = 16
    """Largest number of weak directions that are searched."""


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
        return Activation(self.block.plain)

    def descent(self, functionals: Tensor | None = None) -> Descent:
        """The search for roots within the family."""
        fixed, along = (Tokens(m[:, :0], m[:, :0], torch.zeros_like(m), m) for m in self.family[:2])
        family, no_pixels = solver.Family(fixed, along, along.m[:0, 0]), Range(fixed.x[0], fixed.x[0])
        return Descent(self.activation, family, self.block.fc2, no_pixels, functionals=functionals)


def search(trial: Trial, places: Tensor, phi: Tensor, functionals: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """φ [Q, f] at the end of the search of each token from φ [Q, f], and its fit [Q]. places: [Q], of the families.
    functionals: as in `Descent`."""
    minimum = trial.descent(functionals).run(places, phi, trial.effort.steps, trial.deadline.over)
    return minimum.phi, _fit_of(trial, places, minimum.phi)


def _fit_of(trial: Trial, places: Tensor, phi: Tensor) -> Tensor:
    """The ratio of residuals to what noise explains, [Q]; infinite for what is no picture."""
    span = trial.block.fc2
    late = trial.block.plain.late(trial.family.streams(places, phi))
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
    block: FirstBlock | str,
    partly: Partly,
    grid: tuple[int, ...],
    size: tuple[int, int],
    effort: Effort,
    deadline: Deadline,
) -> TokenFit:
    """θ of every patch; the hidden ones are in any order among their places. block: as `first_block` gives it."""
    count, values = partly.base.shape
    theta = smoothest(partly, Smoothness(torch.zeros_like(partly.hidden), grid, size, values))
    if not len(partly.z):
        return TokenFit(theta, theta.new_zeros(count))
    untried = theta.new_full((count,), torch.inf)
    if isinstance(block, str):
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
    plain, norm = block.plain, block.plain.norm2
    width, group = plain.into.shape[1], Group(norm, block.fc1)
    mixing = (block.proj.inside / block.proj.column) @ plain.into  # [T, D]: c -> A o
    streams = torch.cat([partly.z @ plain.weight.T, mixing])
    # Theory says how many equations are independent (without β all are centred, the span too); the weakest of those
    # are left out and their directions searched.
    independent = min(block.tokens + norm.biased, width - block.tokens - (norm.centred and not norm.biased))

    def rank(values: Tensor) -> int:
        return min(independent, max(int((values > WEAK * values[0]).sum()), independent - loose))

    flat = Flat(group.rows(streams), rank)
    known = block.embed(partly.base) + plain.shift
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
        trial.deadline.say(f"adaptive-mjp: round {number + 1}, {solved} of {len(shown)} shown patches solved")
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
    known = block.plain.late(family.streams(solved, shown.at[solved]))
    roots = ends = TokenFit(shown.at[:0], shown.fit[:0])
    for number in range(trial.effort.rounds):
        if len(roots.at) == len(hidden) or trial.deadline.over():
            break
        places = one.expand(trial.effort.starts)
        excluded = torch.cat([known, block.plain.late(family.streams(one.expand(len(roots.at)), roots.at))])
        starts = family.phi(places, _like(pool, len(places), trial.generator))
        ends = TokenFit(*search(trial, places, starts, _functionals(block, excluded)))
        fits = ends.fit <= SOLVED
        if fits.any():
            # Without functionals an end that they only kept beside a root slides back into it.
            roots = _with_others(trial, roots, TokenFit(*search(trial, places[fits], ends.at[fits])), SOLVED, apart)
        trial.deadline.say(f"adaptive-mjp: round {number + 1}, {len(roots.at)} of {len(hidden)} hidden patches found")
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


# --- the attack ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdaptiveConfig(Effort):
    """How long the attack runs for each image, and which model predicts the order of the patches."""

    predictor: MP3 | None = None
    """A trained MP3 run that predicts positions. The attack orders the patches by these predictions and by how well
    their borders match."""


class AdaptiveMJP(Attack):
    """The mask, the shown patches, the hidden ones, and their order."""

    needs: ClassVar[str] = (
        "the gradients that the attack `patchembed` needs, and the gradients of the first block; a batch of one image"
    )
    measured: ClassVar[str] = "study mjp-table5"
    knows: ClassVar[str] = (
        "that MJP is used, and what MJP learned (the vector E_unk of hidden patches, and the regressor of the "
        "position loss DAL); optionally an MP3 model that predicts positions"
    )
    difference: ClassVar[str] = (
        "tests the defence in Table 5 of the MJP paper (Ren et al., CVPR 2023) with an attacker that knows that MJP "
        "is used. The attacker in the paper does not know this"
    )
    name: ClassVar[str] = "adaptive-mjp"
    about: ClassVar[str] = (
        "knows that MJP is used. Rows of zeros in the position table's gradient reveal which patches are hidden. The "
        "gradients of the patch embedding and of the first block reveal the content of all patches, also of the hidden "
        "patches. The order of the hidden patches is found from their borders, which must fit together"
    )
    closed_form: ClassVar[bool] = True
    separates_hidden: ClassVar[bool] = True
    slow: ClassVar[bool] = True
    Config: ClassVar[type[AdaptiveConfig]] = AdaptiveConfig
    config: AdaptiveConfig

    def prepare(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> Ready | Refused:
        plain = PatchEmbedding().prepare(backbone, sent, known)
        if isinstance(plain, Refused):
            return plain
        caveat, tokens = plain.caveat, backbone.num_tokens + backbone.num_prefix
        if caveat is None and tokens >= backbone.dim:
            caveat = (
                f"there are at least as many tokens ({tokens}) as channels ({backbone.dim}), so most gradients of "
                "the first block have full rank. Patches without a unique solution are chosen so that the image is "
                "smooth"
            )
        return Ready((*(plain.reads or ()), *first_matrices(backbone)), caveat)

    @torch.no_grad()
    def recover(
        self, backbone: Backbone, uploads: Sequence[Gradients], known: Knowledge, deadline: Deadline
    ) -> Recovery:
        stem, method = require_stem(backbone), known.trained(backbone)
        precise, block = deepcopy(backbone).double().requires_grad_(False).eval(), None
        images, facts, partial = [], [], None
        for number, upload in enumerate(uploads):
            if images and deadline.over():
                break
            hides = isinstance(method, HidesPlaces)
            if hides and known.step.batch == 1:
                upload = _without_noise(upload, stem, known.defence.noise_level(1))
            hidden = hidden_places(table_rows(upload[stem.table], stem))
            if known.step.batch > 1 or not hidden.any() or not hides:
                plain = PatchEmbedding().recover_shown(backbone, [upload], known, deadline)
                images.append(plain.images[0].double())
                partial = partial or plain.partial
                sure = known.step.batch == 1 and not known.blurs  # else a row without zeros may still be hidden
                facts.append({**plain.facts[0], "hidden": int(hidden.sum()) if sure else None})
                continue
            deadline.say(f"{self.name}: upload {known.first + number + 1}, {int(hidden.sum())} patches are hidden")
            block = read_block(precise) if block is None else block
            try:
                image, fact = self._one(precise, block, stem, method, upload, hidden, known, deadline)
            except KeyboardInterrupt:  # this image is lost, those before it are kept
                if not images:
                    raise
                deadline.interrupt()
                break
            images.append(image)
            facts.append(fact)
        cut = deadline.over() and facts[-1].get("patches_that_fit") not in (None, backbone.num_tokens)
        partial = "a part of the search for the image that was attacked last" if cut else partial
        return Recovery(torch.stack(images).float(), facts, partial=partial)

    def _one(
        self,
        backbone: Backbone,
        read: Block | str,
        stem: Stem,
        method: Method,
        upload: Gradients,
        hidden: Tensor,
        known: Knowledge,
        deadline: Deadline,
    ) -> tuple[Tensor, dict[str, Fact]]:
        """One image of an MJP step: [C, H, W], and what the attacker can say of it."""
        sent, sigma = known.type_of(upload[stem.table]), known.noise_on(upload[stem.table])
        equations = _equations(method, stem, upload, known)
        partly = separate(*equations, hidden, sent, sigma)
        learned = method.unknown_position()
        vector = None if learned is None else learned.vector
        unknown = torch.zeros_like(partly.base[0, :1]) if vector is None else vector.double()
        block = first_block(read, stem, upload, hidden, unknown)
        solution = solve_directions(block, partly, backbone.grid, stem.patch_size, self.config, deadline)
        patches = partly.patches(solution.at)
        patches = order_hidden(patches, hidden, backbone.grid, stem.patch_size, predictor=self.config.predictor)
        fact = _facts(partly, solution, block) | _fit(partly, solution, equations, sent, sigma)
        return see_through(patches.unsqueeze(0), backbone, stem, known, [fact])[0], fact


def _without_noise(upload: Gradients, stem: Stem, sigma: float) -> Gradients:
    """The upload with zeros in those rows of the table's gradient that noise of deviation σ explains.

    Where it explains all rows, they do not show the mask, and stay.
    """
    if sigma == 0:
        return upload
    table = upload[stem.table].clone()
    rows = table_rows(table, stem)
    size = rows.double().square().mean(dim=-1).sqrt()
    noise = size <= sigma * (1 + 4 / (2 * rows.shape[-1]) ** 0.5)  # four deviations of what noise alone has
    if noise.all():
        return upload
    rows[noise] = 0
    return {**upload, stem.table: table}


def _equations(method: Method, stem: Stem, upload: Gradients, known: Knowledge) -> tuple[Tensor, Tensor, Tensor | None]:
    """The table's rows [N, D], ∂l/∂W [D, K] and ∂l/∂E_unk [D] on those channels where none of them overflowed."""
    rows = patch_rows(method, stem, upload, known)
    weight = flat_weight(known_numbers(upload[stem.weight]), stem)
    total = None
    if UNKNOWN in upload:
        total = known_numbers(upload[UNKNOWN])
    elif stem.bias in upload:
        total = known_numbers(upload[stem.bias]) - rows.sum(dim=0)  # the bias has the sum over all patches
    finite = rows.isfinite().all(dim=0) & weight.isfinite().all(dim=1)
    finite = finite if total is None else finite & total.isfinite()
    return rows[:, finite], weight[finite], None if total is None else total[finite]


def _facts(partly: Partly, solution: TokenFit, block: FirstBlock | str) -> dict[str, Fact]:
    """proof: how the attacker knows that the image is right; verdict: why it may be wrong."""
    fits = int((solution.fit <= SOLVED).sum())
    proof = verdict = None
    if not len(partly.z) and not partly.base[partly.hidden].any():
        verdict = "the signal of the hidden patches is weaker than rounding and noise, so these patches are left grey"
    elif not len(partly.z) and int(partly.hidden.sum()) > 1:
        proof = "every patch is determined, because the hidden patches are equal to each other up to rounding and noise"
    elif not len(partly.z):
        proof = "every patch is determined, because only one patch is hidden"
    elif isinstance(block, str):
        verdict = (
            f"the equations leave {len(partly.z)} directions of each patch open, and the attack cannot use the "
            f"first block to determine them ({block}). The attack therefore chose the smoothest image"
        )
    elif fits == len(solution.fit):
        proof = "every patch agrees with the gradients of the first block up to rounding"
    else:
        verdict = "for some images, the gradients of the first block do not confirm that every patch is right"
    return {
        "hidden": int(partly.hidden.sum()),
        "open_directions": len(partly.z),
        "patches_that_fit": None if isinstance(block, str) or not len(partly.z) else fits,
        "proof": proof,
        "verdict": verdict,
    }


def _fit(
    partly: Partly, solution: TokenFit, equations: tuple[Tensor, Tensor, Tensor | None], sent: torch.dtype, sigma: float
) -> dict[str, Fact]:
    """Whether the solution meets its equations.

    Where directions were searched: the largest ratio of a token's residual outside the first block's spans to what
    noise explains. Else the residual of ∂l/∂W without the shown patches and the one that stands for all hidden ones.
    """
    if len(partly.z):
        worst = float(solution.fit.max())
        size = worst if math.isfinite(worst) else None
        return {"residual": size, "expected_residual": 1.0, "fits": worst <= SOLVED}
    rows, weight, total = equations
    shown, patches = rows[~partly.hidden], partly.base[~partly.hidden]
    if total is not None:
        shown = torch.cat([shown, total[None]])
        patches = torch.cat([patches, partly.base[partly.hidden][:1]])
    white, right = whiten(weight[None], shown[None], sent, sigma)
    residual, expected, fits = (float(part) for part in judge(white, right, patches[None], sent))
    return {"residual": residual, "expected_residual": expected, "fits": bool(fits)}
