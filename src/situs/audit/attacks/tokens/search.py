"""All tokens of an upload by search: rounds of starts at the places that still lack some, deflated by the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vjp
from torch.nn import functional as F

from situs.audit.attacks.solver import SOLVED, TELLING, Activation, Descent, Range, Span, Tokens, blur
from situs.audit.attacks.tokens.block import Block
from situs.audit.attacks.tokens.linear import Counts, Spans, family_of, misfit, table_rank
from situs.audit.defences import Gradients
from situs.audit.stem import patches_of

# ---------------------------------------------------------------------------------------------------------------------
# Deflation: what a recovered token takes out of the gradients, so that the spans of the remaining tokens are narrower.
#
# The MLP's gradients are ∂W1 = Σ_t δ1_t h_t^T and ∂W2 = Σ_t δ2_t a_t^T, and δ1_t follows from δ2_t and the token:
# through W2 and the activation's derivative. Both lie in the column spaces of those gradients, which is a linear
# system for δ2_t with one solution, up to its size, at a token of the batch and none at any other. In coordinates of
# the row space, h_t = c_t V and δ1_s = (∂W1 V^T) y_s, the c of one token and the y of another are orthogonal (the δ
# and the h are inverses of each other), so that every remaining token has c · y_s = 0. Each recovered token closes one
# open direction of all others; with one left at each place, linear equations do the rest.
#
# Rounding turns the y. In the first layer's span that hardly moves other tokens: there y_s is removed. In the last
# layer's span, other tokens would get residuals as large as those of local minima, once many were removed from a batch
# with nearly as many tokens as channels. There c · y_s = 0 is one more equation, weighed by how well it holds for the
# recovered tokens.


class Deflation:
    """The spans of one upload without the recovered tokens.

    first, last [·, n]: the y of those tokens, as coordinates in the spans of the MLP's first and last layers; recovered
    [·, n]: their c in the latter, of length 1.
    """

    def __init__(
        self, block: Block, upload: Gradients, spans: Spans, late: Span, errors: tuple[bool, float | None]
    ) -> None:
        assert spans.fc1 is not None
        self.block, self.spans, self.first_span, self.late = block, spans, spans.fc1, late
        parameters = dict(block.backbone.named_parameters())
        one, two = torch.cat([upload[name].double() for name in block.layers.fc1]), upload[block.layers.fc2].double()
        self.first, self.last = late.inside.new_zeros(0, spans.fc1.rank), late.inside.new_zeros(0, late.rank)
        self.recovered = self.last
        self.finite = bool(one.isfinite().all() and two.isfinite().all())
        if not self.finite:
            return
        self._column = Span(one.T, spans.fc1.rank, *errors)
        back = Span(two.T, late.rank, *errors)
        self._basis = torch.linalg.qr((back.inside / back.column).T)[0].T  # [n, D], of the δ2
        self._before = self._basis @ parameters[block.layers.fc2]  # [n, H], the same before the last layer
        self._into = [_coordinates(g, span, errors[0]) for g, span in ((one, spans.fc1), (two, late))]

    def remove(self, m: Tensor) -> Tensor:
        """Removes tokens with streams m [Q, D], and gives which could be removed, [Q] bool."""
        removed = torch.zeros(len(m), dtype=torch.bool, device=m.device)
        if not self.finite:
            return removed
        weight, bias = self.block.entry()
        entered = self.block.norm2.apply(m) @ weight.T + bias
        for number, u in enumerate(entered):
            dual = self._backward(u)
            if dual is None:
                continue
            removed[number] = True
            self.first, self.last = torch.cat([self.first, dual[0]]), torch.cat([self.last, dual[1]])
        c = (self.block.late(m[removed]) * self.late.column) @ self.late.inside.T
        self.recovered = torch.cat([self.recovered, c / c.norm(dim=1, keepdim=True)])
        return removed

    def left(self) -> tuple[Spans, Span, Tensor]:
        """The spans of the remaining tokens, and a matrix [k, k]: in the last k directions of the second span these
        tokens have coordinates 0, up to its rows times independent numbers of deviation 1."""
        if not len(self.first):
            return self.spans, self.late, self.last[:, :0]
        late, lower = _turned(self.late, self.last)
        off = (self.recovered @ self.last.T).fill_diagonal_(0.0).square().mean(dim=0).sqrt()
        known = torch.linalg.solve_triangular(lower, torch.diag(off), upper=False)
        return self.spans._replace(fc1=_without(self.first_span, self.first)), late, known

    def _backward(self, u: Tensor) -> tuple[Tensor, Tensor] | None:
        """Both y [1, n] of a token with outputs u [H'] of the MLP's first layers, or None where rounding hides them."""
        count = len(self._before)
        slopes = vjp(self.block.tail, u.expand(count, -1))[1](self._before)[0]
        out = self._column.outside(slopes * self._column.column)
        vectors = torch.linalg.eigh(out @ out.T)[1]
        best = vectors[:, :2].T @ slopes
        fits = self._column.residual(best) <= SOLVED * self._column.expected(best)
        if fits.tolist() != [True, False]:  # where another direction fits as well, neither is known
            return None
        deltas = best[0], vectors[:, 0] @ self._basis
        one, two = (
            (into @ (delta * weight)).unsqueeze(0) for (into, weight), delta in zip(self._into, deltas, strict=True)
        )
        return one / one.norm(), two / two.norm()


def _coordinates(gradient: Tensor, span: Span, even: bool) -> tuple[Tensor, Tensor]:
    """The map from δ to y: a pseudo-inverse [n, out] of ∂W V^T, and a weight for each output."""
    size = gradient.norm(dim=1)
    weight = torch.ones_like(size) if even else torch.where(size > 0, 1 / size, 0.0)
    return torch.linalg.pinv((gradient * span.column) @ span.inside.T * weight.unsqueeze(1)), weight


def _without(span: Span, rows: Tensor) -> Span:
    """The part of a span whose coordinates are orthogonal to rows [k, n]."""
    rest = _turned(span, rows)[0]
    rest.rank -= len(rows)
    rest.inside = rest.inside[: rest.rank].contiguous()
    return rest


def _turned(span: Span, rows: Tensor) -> tuple[Span, Tensor]:
    """A span with other axes, of which the last k span the rows [k, n]; these are the matrix [k, k] times those."""
    axes, upper = torch.linalg.qr(rows.T, mode="complete")
    turned = copy(span)
    turned.inside = (axes.roll(-len(rows), dims=1).T @ span.inside).contiguous()
    return turned, upper[: len(rows)].T


# ---------------------------------------------------------------------------------------------------------------------
# Tokens that linear equations leave open: a search through the MLP's activation, and when its result is a proof.
#
# A token's a = late(m) must lie in the row space of the gradient of the MLP's last layer. Sums of tokens pass every
# linear test but not this one. Paths are followed in the deflated spans, where fewer directions are open; whether an
# end is a token is judged by the whole gradients, in float64.


SHARP = 3e-2
"""A token proves nothing if noise alone moves its pixels by more than this, in units of normalised pixels."""

UNITS = 1.4
"""Units used along a path, for each unknown and each direction of the span; a quarter of all at least."""

SPARE = 32
"""Units beyond the directions of the span, at least."""

POLISH = 12
"""Steps at most from the end of a path to the token."""

SMOOTH = (2, 3, 4, 6, 8)
"""Sides of the noise that smooth pictures are drawn from."""

CONTRAST = 2.0
"""Of the pictures on which the curvature of units is measured, relative to those that paths begin with."""


@dataclass(frozen=True)
class Effort:
    """How long the search tries. rounds: of new starts. steps: after each start."""

    rounds: int = 200
    steps: int = 30


class Candidates(NamedTuple):
    """Tokens [Q] and fit [Q]: the ratio of a token's residual to what noise explains."""

    tokens: Tokens
    fit: Tensor


class Search:
    """The constants of the search of one upload, and its deflation."""

    def __init__(
        self,
        block: Block,
        upload: Gradients,
        spans: Spans,
        counts: Counts,
        pixels: Range,
        effort: Effort | None = None,
        stop: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] = lambda _: None,
        errors: tuple[bool, float | None] = (False, None),
    ) -> None:
        self.block, self.spans, self.counts, self.pixels = block, spans, counts, pixels
        self.effort, self.stop, self.say = effort or Effort(), stop, say
        self.generator = torch.Generator().manual_seed(0)
        self.span = Span(upload[block.layers.fc2], counts.fc2, *errors)
        self.deflation = Deflation(block, upload, spans, self.span, errors)
        self.family = family_of(block, spans, counts.open)
        self.activation = Activation(block)
        self._whole = Descent(self.activation, self.family, self.span, pixels)
        self._least_curved = self._curvatures().argsort()

    def stage(self, present: Tensor) -> Descent:
        """The system of the remaining tokens; present: the places that have some."""
        block, counts, removed = self.block, self.counts, len(self.deflation.first)
        spans, late, known = self.deflation.left()
        table = table_rank(block, counts.x, block.base[present])
        tokens = counts.structural + counts.table - removed
        free = max(tokens - table, counts.general - removed, 1)
        family = family_of(block, spans, free) if removed else self.family
        if not self.activation.plain:
            return Descent(self.activation, family, late, self.pixels, known=known)
        directions = late.rank - removed + family.along.x.shape[0]
        count = max(int(UNITS * directions), late.rank + SPARE, self.activation.hidden // 4)
        units = self._least_curved[:count].sort().values
        return Descent(self.activation, family, late, self.pixels, units, torch.float32, known)

    def polished(self, places: Tensor, tokens: Tokens) -> Candidates:
        """Tokens near given ones [Q], by the whole gradients in float64."""
        minimum = self._whole.run(places, self._whole.start(places, tokens), POLISH)
        polished = self.family.tokens(places, minimum.phi)
        return Candidates(polished, self.fit(polished, minimum.normal))

    def fit(self, tokens: Tokens, normal: Tensor) -> Tensor:
        """The ratio of residuals to what noise explains, [Q]; far more where a small one would prove nothing."""
        a = self.block.late(tokens.m)
        linear = misfit(self.block, self.spans, tokens)
        residual = self.span.residual(a)
        # The uncertainty of the linear spans passes through the MLP as well.
        expected = (self.span.expected(a).square() + linear.second_expected.square()).sqrt()
        fit = (residual / expected).nan_to_num(torch.inf)
        over = torch.maximum(tokens.x - self.pixels.high, self.pixels.low - tokens.x).amax(dim=1)
        span = self.pixels.width
        along = self.family.along.x
        moved = expected * blur(normal, along, self.span) / along.shape[1] ** 0.5
        proves = (residual <= TELLING) & (over <= span / 4) & (moved <= SHARP * span)
        return torch.where(proves, fit, SOLVED * (2 + fit))

    def _curvatures(self) -> Tensor:
        """How much each of the MLP's units is curved over the tokens of pictures, [H]; 0 where it is not plain."""
        block = self.block
        if not self.activation.plain:
            return block.weight.new_zeros(self.activation.hidden)
        m = torch.cat([block.middle(self.smooth(1, side, CONTRAST))[0][0] for side in SMOOTH])
        weight, bias = block.entry()
        u = block.norm2.apply(m) @ weight.T + bias
        slopes = self.activation.slopes(u)[1]
        return (slopes.std(dim=0) * u.unflatten(1, slopes.shape[1:]).std(dim=0)).square().sum(dim=0)

    def smooth(self, count: int, side: int, contrast: float = 1.0) -> Tensor:
        """Patches [count, N, K] of smooth pictures: noise of `side` x `side` numbers, interpolated to their size."""
        backbone, shape = self.block.backbone, self.block.backbone.input.shape
        assert shape is not None
        size = (count, backbone.input.channels + 1, side, side)
        noise = torch.randn(size, generator=self.generator, dtype=torch.float64)
        mixed = 0.4 * noise[:, :1] + 0.2 * noise[:, 1:]  # brightness and colour
        pictures = F.interpolate(mixed, size=tuple(shape), mode="bilinear", align_corners=True).to(self.block.weight)
        middle, width = (self.pixels.low + self.pixels.high) / 2, (self.pixels.high - self.pixels.low) / 2
        return middle + contrast * width * patches_of(pictures, backbone, self.block.stem)


# --- all tokens, round by round --------------------------------------------------------------------------------------


APART = 1e-3
"""Relative distance from which two streams are different tokens: alike patches of two images get other attention."""

LEAST = 48
"""Starts of a round at all places together, at least."""

GROWTH = 8.0
"""Factor on the starts of a round, at most, once fewer directions are open and a path costs less."""

PICTURES = 16
"""Smooth pictures of each kind that the starts of a round are cut from."""

FINE = (1.0, 2.0)
"""Contrasts of pictures with detail inside a patch: they lead to tokens that smooth ones do not."""

LATE = 3.0
"""Those are used once a path costs this many times less than at first: the rest is what smooth ones do not reach."""

CHUNK = 4
"""Ends that are polished together, in the order of their residuals."""

VAIN = 4
"""Chunks without a fit after which no more are polished."""

FAR = 10.0
"""An end with this many times the residual of any that fits is no token."""

IDLE = 10
"""Rounds without a new token after which the search ends."""


class Roots(NamedTuple):
    """The recovered tokens, in any order: the place (the first of those that share their equations) and fit.

    wanted: [N], how many tokens each place has; places that share their equations are counted at the first of them.
    """

    place: Tensor
    tokens: Tokens
    fit: Tensor
    wanted: Tensor

    def at(self, place: int) -> Tensor:
        """The numbers of the roots of one place."""
        return (self.place == place).nonzero()[:, 0]

    @property
    def lacking(self) -> Tensor:
        """[N], how many are still missing."""
        return self.wanted - torch.bincount(self.place, minlength=len(self.wanted))

    def more(self, places: Tensor, added: Candidates) -> Roots:
        tokens = Tokens(*(torch.cat(parts) for parts in zip(self.tokens, added.tokens, strict=True)))
        return Roots(torch.cat([self.place, places]), tokens, torch.cat([self.fit, added.fit]), self.wanted)


def shared_places(base: Tensor) -> Tensor:
    """For each place the first one with the same base vector [N, D]: only that vector tells places apart."""
    away = torch.cdist(base, base, compute_mode="donot_use_mm_for_euclid_dist")
    close = away <= 1e-9 * base.norm(dim=1).max()
    return close.to(torch.uint8).argmax(dim=1)


def find_roots(search: Search, batch: int) -> Roots:
    """Rounds of starts until every place has its tokens, or the effort or the time is spent."""
    block, effort, family = search.block, search.effort, search.family
    first = shared_places(block.base)
    wanted = batch * torch.bincount(first, minlength=block.places)
    everywhere = torch.arange(block.places, device=first.device)
    roots = Roots(first[:0], family.fixed.at(first[:0]), block.base[:0, 0], wanted)
    removed = torch.zeros_like(first[:0], dtype=torch.bool)
    best = Candidates(Tokens(*(part.clone() for part in family.fixed)), torch.full_like(block.base[:, 0], torch.inf))
    stage = search.stage(wanted > 0)
    grey = family.tokens(everywhere, stage.start(everywhere, _starts(search, roots, everywhere, 0)))
    if float(search.span.expected(block.late(grey.m)).median()) > TELLING:  # wrong tokens would pass like right ones
        return _filled(roots, Candidates(grey, best.fit.nan_to_num(posinf=1e9)))
    idle = 0
    for number in range(effort.rounds):
        lacking = roots.lacking
        if not bool((lacking > 0).any()) or (number and search.stop()) or idle == IDLE:
            break
        here = (lacking > 0).nonzero()[:, 0]
        cheaper = (family.along.x.shape[0] / stage.family.along.x.shape[0]) ** 2
        starts = max(-(-LEAST // len(here)), int(LEAST * min(cheaper, GROWTH) / len(here)))
        places = here.repeat(starts if number else 1)
        phi = stage.start(places, _starts(search, roots, places, number, cheaper > LATE))
        minimum = stage.run(places, phi, effort.steps, search.stop)
        ends = stage.family.tokens(places, minimum.phi)
        residual = minimum.cost.clamp(min=0).sqrt()
        _keep_best(best, places, Candidates(ends, 1e3 + residual))
        near = (residual <= TELLING).nonzero()[:, 0]
        before = len(roots.place)
        if len(near):
            near = near[_distinct(places[near], ends.at(near).m, roots)]
            for polished, index in _polished(search, places, ends, near[residual[near].argsort()], residual):
                _keep_best(best, places[index], polished)
                roots = _with(roots, places[index], polished)
        fresh = roots.tokens.m[before:]
        idle = 0 if len(fresh) else idle + 1
        if len(fresh):
            removed = torch.cat([removed, search.deflation.remove(fresh)])
            present = roots.lacking > 0
            present[roots.place[~removed]] = True
            stage = search.stage(present) if bool((roots.lacking > 0).any()) else stage
        search.say(f"tokens: round {number + 1}, {len(roots.place)} of {int(wanted.sum())} tokens found")
    return _filled(roots, best)


def _polished(
    search: Search, places: Tensor, ends: Tokens, order: Tensor, residual: Tensor
) -> Iterator[tuple[Candidates, Tensor]]:
    """Ends polished in the order of their residuals, a few at a time, and their numbers.

    Tokens are well below local minima unless rounding hides that: it ends `FAR` above the last that fits, and where
    none of the best few chunks fits.
    """
    reached, vain = torch.inf, 0
    for index in order.split(CHUNK) if len(order) else ():  # all tokens may be known already
        if vain == VAIN or float(residual[index[0]]) > FAR * reached or search.stop():
            return
        polished = search.polished(places[index], ends.at(index))
        right = polished.fit <= SOLVED
        vain = 0 if bool(right.any()) else vain + 1
        reached = float(residual[index][right].max()) if bool(right.any()) else reached
        yield polished, index


def _starts(search: Search, roots: Roots, places: Tensor, number: int, fine: bool = False) -> Tokens:
    """Tokens to begin with [Q], with the attention of some picture: the mean of smooth pictures' tokens at first, then
    in turn a smooth picture's, a recovered one from nearby and a mixture of two recovered ones. fine: also of pictures
    with more detail."""
    block, generator, count = search.block, search.generator, len(places)
    side = max(block.grid)
    pictures = search.smooth(PICTURES, side + 1)
    if fine:
        pictures = torch.cat([pictures, *(search.smooth(PICTURES, 2 * side, contrast) for contrast in FINE)])
    outputs = block.middle(pictures)[1][:, len(block.prefix) :]
    if number == 0:
        return _tokens(block, places, pictures.mean(dim=0)[places], outputs.mean(dim=0)[places])

    def draw(size: int) -> Tensor:
        return torch.randint(size, (count,), generator=generator).to(places.device)

    which = draw(len(pictures))
    x, o = pictures[which, places], outputs[which, places]
    pool = roots.tokens
    if len(pool.x) > 1:
        columns = block.grid[1]
        where = [torch.stack([at // columns, at % columns], dim=1).double() for at in (places, roots.place)]
        nearest = torch.cdist(where[0], where[1]).argsort(dim=1)[:, : min(8, len(pool.x))]
        near = nearest.gather(1, draw(nearest.shape[1]).unsqueeze(1))[:, 0]
        one, other = draw(len(pool.x)), draw(len(pool.x))
        share = torch.rand(count, 1, generator=generator, dtype=torch.float64).to(pool.x)
        turn = draw(4).unsqueeze(1)
        mixed = share * pool.x[one] + (1 - share) * pool.x[other]
        x = torch.where(turn < 2, x, torch.where(turn == 2, pool.x[near], mixed))
        o = torch.where(turn < 2, o, torch.where(turn == 2, pool.o[near], pool.o[one]))
    return _tokens(block, places, x, o)


def _tokens(block: Block, places: Tensor, x: Tensor, o: Tensor) -> Tokens:
    """Tokens of patches x [Q, K] at places [Q] with attention outputs o [Q, ·]."""
    z = x @ block.weight.T + block.base[places]
    return Tokens(x, o, z, z + o @ block.into + block.shift)


def _keep_best(best: Candidates, places: Tensor, ends: Candidates) -> None:
    for index in ends.fit.argsort(descending=True).tolist():  # the best of a place is written last
        place = int(places[index])
        if ends.fit[index] < best.fit[place]:
            best.fit[place] = ends.fit[index]
            for part, end in zip(best.tokens, ends.tokens, strict=True):
                part[place] = end[index]


def _distinct(places: Tensor, m: Tensor, roots: Roots) -> Tensor:
    """The numbers of the ends that are near no earlier end and no recovered token of the same place."""
    places, m = torch.cat([roots.place, places]), torch.cat([roots.tokens.m, m])
    same = (places.unsqueeze(1) == places) & (torch.cdist(m, m) <= 10 * APART * m.norm(dim=1, keepdim=True))
    return (~same.tril(-1).any(dim=1))[len(roots.place) :].nonzero()[:, 0]


def _with(roots: Roots, places: Tensor, ends: Candidates) -> Roots:
    """The roots and those ends that fit and differ from all roots of their place, no more than the place has."""
    lacking = roots.lacking
    for index in ends.fit.argsort().tolist():
        place, m = int(places[index]), ends.tokens.m[index]
        here = roots.tokens.m[roots.place == place]
        if ends.fit[index] > SOLVED or lacking[place] < 1:
            continue
        if len(here) and float((here - m).norm(dim=1).min()) < APART * float(m.norm()):
            continue
        lacking[place] -= 1
        one = slice(index, index + 1)
        roots = roots.more(places[one], Candidates(Tokens(*(part[one] for part in ends.tokens)), ends.fit[one]))
    return roots


def _filled(roots: Roots, best: Candidates) -> Roots:
    """The best guess, without proof, at places that have no token at all."""
    empty = ((roots.lacking == roots.wanted) & (roots.wanted > 0) & best.fit.isfinite()).nonzero()[:, 0]
    return roots.more(empty, Candidates(best.tokens.at(empty), best.fit[empty].clamp(min=2 * SOLVED)))
