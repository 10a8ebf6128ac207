"""All tokens of an upload by search: rounds of starts at the places that lack some, found ones taken out of the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vjp
from torch.nn import functional as F

from situs.audit.attacks.solver import Activation, Descent, Range, Tokens, blur
from situs.audit.attacks.spans import SOLVED, TELLING, Span
from situs.audit.attacks.tokens.block import Block
from situs.audit.attacks.tokens.linear import Counts, Spans, family_of, misfit, table_rank
from situs.audit.defences import Gradients
from situs.audit.stem import patches_of

# ---------------------------------------------------------------------------------------------------------------------
# What a token that was found takes out of the gradients: the spans of those that are left are narrower by it.
#
# The MLP's gradients are ∂W1 = Σ_t δ1_t h_t^T and ∂W2 = Σ_t δ2_t a_t^T, and δ1_t follows from δ2_t and the token:
# through W2 and the activation's derivative. Both lie in the column spaces of those gradients, which is a linear
# system for δ2_t with one solution, up to its size, at a token that is there and none at any other. In coordinates of
# the row space, h_t = c_t V and δ1_s = (∂W1 V^T) y_s, the c of one token and the y of another are orthogonal (the δ
# and the h are inverses of each other), so that every token that is left has c · y_s = 0. Each token that is found
# closes one open direction of all others; with one left at each place, linear equations do the rest.
#
# Rounding turns the y. In the first layer's span that moves no other token by what matters: there y_s is taken out. In
# the last layer's, other tokens would stick out as far as places of rest do that are none, once many are taken out of
# a batch whose tokens are nearly as many as channels. There c · y_s = 0 is one more equation, and worth as much as it
# holds for the tokens that were found.


class Deflation:
    """The spans of one upload less the tokens that were found.

    first, last [·, n]: the y of those tokens, as coordinates in the spans of the MLP's first and last layers; found
    [·, n]: their c in the latter, of length 1.
    """

    def __init__(
        self, block: Block, upload: Gradients, spans: Spans, late: Span, blur: tuple[bool, float | None]
    ) -> None:
        assert spans.fc1 is not None
        self.block, self.spans, self.first_span, self.late = block, spans, spans.fc1, late
        own = dict(block.backbone.named_parameters())
        one, two = torch.cat([upload[name].double() for name in block.layers.fc1]), upload[block.layers.fc2].double()
        self.first, self.last = late.inside.new_zeros(0, spans.fc1.rank), late.inside.new_zeros(0, late.rank)
        self.found = self.last
        self.whole = bool(one.isfinite().all() and two.isfinite().all())  # what overflowed is not known
        if not self.whole:
            return
        self._column = Span(one.T, spans.fc1.rank, *blur)
        back = Span(two.T, late.rank, *blur)
        self._basis = torch.linalg.qr((back.inside / back.column).T)[0].T  # [n, D], of the δ2
        self._given = self._basis @ own[block.layers.fc2]  # [n, H], what they are before the last layer
        self._into = [_coordinates(g, span, blur[0]) for g, span in ((one, spans.fc1), (two, late))]

    def take(self, m: Tensor) -> Tensor:
        """Takes tokens with streams m [Q, D] out, and tells which could be, [Q] bool."""
        taken = torch.zeros(len(m), dtype=torch.bool, device=m.device)
        if not self.whole:
            return taken
        weight, bias = self.block.entry()
        entered = self.block.norm2.apply(m) @ weight.T + bias
        for number, u in enumerate(entered):
            found = self._backward(u)
            if found is None:
                continue
            taken[number] = True
            self.first, self.last = torch.cat([self.first, found[0]]), torch.cat([self.last, found[1]])
        c = (self.block.late(m[taken]) * self.late.column) @ self.late.inside.T
        self.found = torch.cat([self.found, c / c.norm(dim=1, keepdim=True)])
        return taken

    def left(self) -> tuple[Spans, Span, Tensor]:
        """The spans of the tokens that are left, and what the last directions of the second are to one of these: 0, as
        far as the matrix [k, k] says that is known, whose rows times independent numbers of deviation 1 they are."""
        if not len(self.first):
            return self.spans, self.late, self.last[:, :0]
        late, lower = _turned(self.late, self.last)
        off = (self.found @ self.last.T).fill_diagonal_(0.0).square().mean(dim=0).sqrt()
        known = torch.linalg.solve_triangular(lower, torch.diag(off), upper=False)
        return self.spans._replace(fc1=_less(self.first_span, self.first)), late, known

    def _backward(self, u: Tensor) -> tuple[Tensor, Tensor] | None:
        """The y [1, n] of a token whose MLP's first layers give u [H'], or None where rounding hides it."""
        count = len(self._given)
        every = vjp(self.block.tail, u.expand(count, -1))[1](self._given)[0]
        out = self._column.outside(every * self._column.column)
        vectors = torch.linalg.eigh(out @ out.T)[1]
        best = vectors[:, :2].T @ every
        fits = self._column.residual(best) <= SOLVED * self._column.expected(best)
        if fits.tolist() != [True, False]:  # where another direction fits as well, neither is known
            return None
        deltas = best[0], vectors[:, 0] @ self._basis
        one, two = (
            (into @ (delta * weight)).unsqueeze(0) for (into, weight), delta in zip(self._into, deltas, strict=True)
        )
        return one / one.norm(), two / two.norm()


def _coordinates(gradient: Tensor, span: Span, even: bool) -> tuple[Tensor, Tensor]:
    """What makes y of δ: a pseudo-inverse [n, out] of ∂W V^T, and a weight for each output."""
    size = gradient.norm(dim=1)
    weight = torch.ones_like(size) if even else torch.where(size > 0, 1 / size, 0.0)
    return torch.linalg.pinv((gradient * span.column) @ span.inside.T * weight.unsqueeze(1)), weight


def _less(span: Span, taken: Tensor) -> Span:
    """The part of a span whose coordinates are orthogonal to those taken [k, n]."""
    left = _turned(span, taken)[0]
    left.rank -= len(taken)
    left.inside = left.inside[: left.rank].contiguous()
    return left


def _turned(span: Span, taken: Tensor) -> tuple[Span, Tensor]:
    """A span with other axes: the last k span the taken [k, n], which are the matrix [k, k] times these."""
    axes, upper = torch.linalg.qr(taken.T, mode="complete")
    turned = copy(span)
    turned.inside = (axes.roll(-len(taken), dims=1).T @ span.inside).contiguous()
    return turned, upper[: len(taken)].T


# ---------------------------------------------------------------------------------------------------------------------
# Tokens that linear equations leave open: what the MLP's activation tells apart, and when a token is believed.
#
# A token's a = late(m) must lie in the row space of the gradient of the MLP's last layer. Sums of tokens pass every
# linear test and not this one. Paths are followed in what the tokens found so far leave (`deflation`), where fewer
# directions are open; whether an end is a token is judged by the gradients themselves, all of them and in float64.


SHARP = 3e-2
"""A token proves nothing if noise alone moves its pixels by more than this, in units of normalised pixels."""

UNITS = 1.4
"""Units that a path is followed with, for each unknown and each direction of the span; a quarter of them at least."""

SPARE = 32
"""Units beyond the directions of the span, at least."""

POLISH = 12
"""Steps at most from the end of a path to the token."""

SMOOTH = (2, 3, 4, 6, 8)
"""Sides of the noise that smooth pictures are drawn from: what tokens are like."""

CONTRAST = 2.0
"""Of the pictures that tell how much a unit bends, beside those that paths begin with."""


@dataclass(frozen=True)
class Effort:
    """How long it tries: rounds of starts, steps of a path."""

    rounds: int = 200
    steps: int = 30
    loose: int = 0
    """Weak directions that are searched beside those that are open."""


class Found(NamedTuple):
    """Tokens [Q] and fit [Q]: how many times more of a token sticks out than noise explains."""

    tokens: Tokens
    fit: Tensor


class Search:
    """What stays the same while one upload is searched, and the tokens that were taken out of it."""

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
        blur: tuple[bool, float | None] = (False, None),
    ) -> None:
        self.block, self.spans, self.counts, self.pixels = block, spans, counts, pixels
        self.effort, self.stop, self.say = effort or Effort(), stop, say
        self.chance = torch.Generator().manual_seed(0)
        self.span = Span(upload[block.layers.fc2], counts.fc2, *blur)
        self.deflation = Deflation(block, upload, spans, self.span, blur)
        self.family = family_of(block, spans, counts.open + self.effort.loose)
        self.activation = Activation(block)
        self._whole = Descent(self.activation, self.family, self.span, pixels)
        self._calm = self._bends().argsort()

    def stage(self, present: Tensor) -> Descent:
        """The system of the tokens that were not taken out; present: the places that have some."""
        block, counts, taken = self.block, self.counts, len(self.deflation.first)
        spans, late, known = self.deflation.left()
        table = table_rank(block, counts.x, block.base[present])
        tokens = counts.structural + counts.table - taken
        free = max(tokens - table, counts.general - taken, 1) + self.effort.loose
        family = family_of(block, spans, free) if taken else self.family
        if not self.activation.plain:
            return Descent(self.activation, family, late, self.pixels, known=known)
        directions = late.rank - taken + family.along.x.shape[0]
        count = max(int(UNITS * directions), late.rank + SPARE, self.activation.hidden // 4)
        units = self._calm[:count].sort().values
        return Descent(self.activation, family, late, self.pixels, units, torch.float32, known)

    def polished(self, places: Tensor, tokens: Tokens) -> Found:
        """The tokens that others [Q] are nearly, by the whole gradients."""
        rest = self._whole.run(places, self._whole.start(places, tokens), POLISH)
        ended = self.family.tokens(places, rest.phi)
        return Found(ended, self.fit(ended, rest.normal))

    def fit(self, tokens: Tokens, normal: Tensor) -> Tensor:
        """How many times more of tokens sticks out than noise explains, [Q]; far more where that proves nothing."""
        a = self.block.late(tokens.m)
        linear = misfit(self.block, self.spans, tokens)
        residual = self.span.residual(a)
        # What the linear spans leave uncertain of a token goes through the MLP as well.
        expected = (self.span.expected(a).square() + linear.second_expected.square()).sqrt()
        fit = (residual / expected).nan_to_num(torch.inf)
        over = torch.maximum(tokens.x - self.pixels.high, self.pixels.low - tokens.x).amax(dim=1)
        span = self.pixels.width
        along = self.family.along.x
        moved = expected * blur(normal, along, self.span) / along.shape[1] ** 0.5
        proves = (residual <= TELLING) & (over <= span / 4) & (moved <= SHARP * span)
        return torch.where(proves, fit, SOLVED * (2 + fit))

    def _bends(self) -> Tensor:
        """How much each of the MLP's units bends over what tokens of pictures can be, [H]; 0 where it is not plain."""
        block = self.block
        if not self.activation.plain:
            return block.weight.new_zeros(self.activation.hidden)
        m = torch.cat([block.middle(self.smooth(1, side, CONTRAST))[0][0] for side in SMOOTH])
        weight, bias = block.entry()
        u = block.norm2.apply(m) @ weight.T + bias
        slopes = self.activation.slopes(u)[1]
        return (slopes.std(dim=0) * u.unflatten(1, slopes.shape[1:]).std(dim=0)).square().sum(dim=0)

    def smooth(self, count: int, side: int, contrast: float = 1.0) -> Tensor:
        """Patches [count, N, K] of pictures of smooth colours, noise of `side` x `side` numbers grown to their size."""
        backbone, shape = self.block.backbone, self.block.backbone.input.shape
        assert shape is not None
        drawn = torch.randn(count, backbone.input.channels + 1, side, side, generator=self.chance, dtype=torch.float64)
        mixed = 0.4 * drawn[:, :1] + 0.2 * drawn[:, 1:]  # brightness, and what is left to colour
        grown = F.interpolate(mixed, size=tuple(shape), mode="bilinear", align_corners=True).to(self.block.weight)
        middle, width = (self.pixels.low + self.pixels.high) / 2, (self.pixels.high - self.pixels.low) / 2
        return middle + contrast * width * patches_of(grown, backbone, self.block.stem)


# --- all tokens, round by round --------------------------------------------------------------------------------------


APART = 1e-3
"""Two tokens are two if their streams are this share apart: alike patches of two images get different attention."""

LEAST = 48
"""Starts of a round at all places together at least."""

GROWTH = 8.0
"""Times as many in a round, at most, once fewer directions are open and a path costs less."""

PICTURES = 16
"""Smooth pictures of a kind that the starts of a round are cut from."""

FINE = (1.0, 2.0)
"""Contrasts of those with something to see inside a patch: they lead to tokens that plain ones do not."""

LATE = 3.0
"""They are taken once a path costs so many times less than at first: what is left is what plain ones do not reach."""

CHUNK = 4
"""Ends that are polished together, those first of which least sticks out."""

VAIN = 4
"""Chunks of which nothing fits, after which no more are polished."""

FAR = 10.0
"""Times more sticks out of an end than of any that fits: it is none."""

IDLE = 10
"""Rounds in which nothing was found, after which nothing more is expected."""


class Roots(NamedTuple):
    """The tokens that were found, in any order: the place (the first of those that share their equations) and fit.

    wanted: [N], how many tokens each place has; those that share their equations are counted at the first of them.
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

    def more(self, places: Tensor, found: Found) -> Roots:
        tokens = Tokens(*(torch.cat(parts) for parts in zip(self.tokens, found.tokens, strict=True)))
        return Roots(torch.cat([self.place, places]), tokens, torch.cat([self.fit, found.fit]), self.wanted)


def shared_places(base: Tensor) -> Tensor:
    """For each place the first one with the same base vector [N, D]: what tells places apart is that vector alone."""
    away = torch.cdist(base, base, compute_mode="donot_use_mm_for_euclid_dist")
    close = away <= 1e-9 * base.norm(dim=1).max()
    return close.to(torch.uint8).argmax(dim=1)


def find_roots(search: Search, batch: int) -> Roots:
    """Rounds of starts until every place has its tokens, or the effort or the time is over."""
    block, effort, family = search.block, search.effort, search.family
    first = shared_places(block.base)
    wanted = batch * torch.bincount(first, minlength=block.places)
    everywhere = torch.arange(block.places, device=first.device)
    roots = Roots(first[:0], family.fixed.at(first[:0]), block.base[:0, 0], wanted)
    taken = torch.zeros_like(first[:0], dtype=torch.bool)
    best = Found(Tokens(*(part.clone() for part in family.fixed)), torch.full_like(block.base[:, 0], torch.inf))
    stage = search.stage(wanted > 0)
    grey = family.tokens(everywhere, stage.start(everywhere, _starts(search, roots, everywhere, 0)))
    if float(search.span.expected(block.late(grey.m)).median()) > TELLING:  # wrong tokens would pass like right ones
        return _filled(roots, Found(grey, best.fit.nan_to_num(posinf=1e9)))
    idle = 0
    for number in range(effort.rounds):
        lacking = roots.lacking
        if not bool((lacking > 0).any()) or (number and search.stop()) or idle == IDLE:
            break
        here = (lacking > 0).nonzero()[:, 0]
        cheaper = (family.along.x.shape[0] / stage.family.along.x.shape[0]) ** 2
        more = max(-(-LEAST // len(here)), int(LEAST * min(cheaper, GROWTH) / len(here)))
        places = here.repeat(more if number else 1)
        begun = stage.start(places, _starts(search, roots, places, number, cheaper > LATE))
        rest = stage.run(places, begun, effort.steps, search.stop)
        ends = stage.family.tokens(places, rest.phi)
        share = rest.cost.clamp(min=0).sqrt()
        _keep_best(best, places, Found(ends, 1e3 + share))
        near = (share <= TELLING).nonzero()[:, 0]
        before = len(roots.place)
        if len(near):
            near = near[_distinct(places[near], ends.at(near).m, roots)]
            for found, some in _polished(search, places, ends, near[share[near].argsort()], share):
                _keep_best(best, places[some], found)
                roots = _with(roots, places[some], found)
        fresh = roots.tokens.m[before:]
        idle = 0 if len(fresh) else idle + 1
        if len(fresh):
            taken = torch.cat([taken, search.deflation.take(fresh)])
            present = roots.lacking > 0
            present[roots.place[~taken]] = True
            stage = search.stage(present) if bool((roots.lacking > 0).any()) else stage
        search.say(f"tokens: round {number + 1}, {len(roots.place)} of {int(wanted.sum())} tokens found")
    return _filled(roots, best)


def _polished(
    search: Search, places: Tensor, ends: Tokens, order: Tensor, share: Tensor
) -> Iterator[tuple[Found, Tensor]]:
    """Ends polished in the order of how much sticks out, a few at a time, and their numbers.

    Tokens stand apart from other places of rest unless rounding hides that: it ends `FAR` above the last that fits, and
    where none of the best few chunks do.
    """
    reached, vain = torch.inf, 0
    for some in order.split(CHUNK) if len(order) else ():  # all may be found already
        if vain == VAIN or float(share[some[0]]) > FAR * reached or search.stop():
            return
        found = search.polished(places[some], ends.at(some))
        right = found.fit <= SOLVED
        vain = 0 if bool(right.any()) else vain + 1
        reached = float(share[some][right].max()) if bool(right.any()) else reached
        yield found, some


def _starts(search: Search, roots: Roots, places: Tensor, number: int, fine: bool = False) -> Tokens:
    """Tokens to begin with [Q], with the attention of some picture: the mean of smooth pictures' own tokens at first,
    then by turns a smooth picture's, a found one's from nearby and a mixture of two found anywhere. fine: of pictures
    with more to see as well."""
    block, chance, count = search.block, search.chance, len(places)
    side = max(block.grid)
    drawn = search.smooth(PICTURES, side + 1)
    if fine:
        drawn = torch.cat([drawn, *(search.smooth(PICTURES, 2 * side, contrast) for contrast in FINE)])
    given = block.middle(drawn)[1][:, len(block.prefix) :]
    if number == 0:
        return _token(block, places, drawn.mean(dim=0)[places], given.mean(dim=0)[places])

    def any_of(size: int) -> Tensor:
        return torch.randint(size, (count,), generator=chance).to(places.device)

    which = any_of(len(drawn))
    x, o = drawn[which, places], given[which, places]
    pool = roots.tokens
    if len(pool.x) > 1:
        columns = block.grid[1]
        where = [torch.stack([of // columns, of % columns], dim=1).double() for of in (places, roots.place)]
        nearest = torch.cdist(where[0], where[1]).argsort(dim=1)[:, : min(8, len(pool.x))]
        near = nearest.gather(1, any_of(nearest.shape[1]).unsqueeze(1))[:, 0]
        one, other = any_of(len(pool.x)), any_of(len(pool.x))
        share = torch.rand(count, 1, generator=chance, dtype=torch.float64).to(pool.x)
        turn = any_of(4).unsqueeze(1)
        mixed = share * pool.x[one] + (1 - share) * pool.x[other]
        x = torch.where(turn < 2, x, torch.where(turn == 2, pool.x[near], mixed))
        o = torch.where(turn < 2, o, torch.where(turn == 2, pool.o[near], pool.o[one]))
    return _token(block, places, x, o)


def _token(block: Block, places: Tensor, x: Tensor, o: Tensor) -> Tokens:
    """Tokens of patches x [Q, K] at places [Q] whose attention gave o [Q, ·]."""
    z = x @ block.weight.T + block.base[places]
    return Tokens(x, o, z, z + o @ block.into + block.shift)


def _keep_best(best: Found, places: Tensor, ends: Found) -> None:
    for index in ends.fit.argsort(descending=True).tolist():  # the best of a place is written last
        place = int(places[index])
        if ends.fit[index] < best.fit[place]:
            best.fit[place] = ends.fit[index]
            for part, end in zip(best.tokens, ends.tokens, strict=True):
                part[place] = end[index]


def _distinct(places: Tensor, m: Tensor, roots: Roots) -> Tensor:
    """The numbers of those ends that no earlier one of the same place comes near to, nor a token that was found."""
    places, m = torch.cat([roots.place, places]), torch.cat([roots.tokens.m, m])
    same = (places.unsqueeze(1) == places) & (torch.cdist(m, m) <= 10 * APART * m.norm(dim=1, keepdim=True))
    return (~same.tril(-1).any(dim=1))[len(roots.place) :].nonzero()[:, 0]


def _with(roots: Roots, places: Tensor, ends: Found) -> Roots:
    """The roots and those ends that fit and are apart from all roots of their place, no more than there are."""
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
        roots = roots.more(places[one], Found(Tokens(*(part[one] for part in ends.tokens)), ends.fit[one]))
    return roots


def _filled(roots: Roots, best: Found) -> Roots:
    """The best guess, which nothing proves, at places that have no token at all."""
    empty = ((roots.lacking == roots.wanted) & (roots.wanted > 0) & best.fit.isfinite()).nonzero()[:, 0]
    return roots.more(empty, Found(best.tokens.at(empty), best.fit[empty].clamp(min=2 * SOLVED)))
