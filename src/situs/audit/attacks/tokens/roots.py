"""All tokens of an upload by search: rounds of starts at the places that lack some, found ones taken out of the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from situs.audit.attacks.spans import SOLVED, TELLING
from situs.audit.attacks.tokens.block import Block
from situs.audit.attacks.tokens.linear import Tokens
from situs.audit.attacks.tokens.search import Found, Search

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
            taken = torch.cat([taken, search.peel.take(fresh)])
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
