"""All tokens of an upload by search: rounds of starts at the places that lack some, found ones kept out of the way."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from situs.audit.attacks.spans import SOLVED, TELLING
from situs.audit.attacks.tokens.search import Found, Search

APART = 1e-2
"""Two roots are two if their patches are this far apart, in units of normalised pixels (root mean square)."""

MOST = 48
"""Starts of a round at one place at most."""

LEAST = 32
"""Starts of a round at all places together at least."""

IDLE = 3
"""Rounds in which nothing was found, after which nothing more is expected."""


class Roots(NamedTuple):
    """The tokens that were found, in any order: the place (the first of those that share their equations), φ and fit.

    wanted: [N], how many tokens each place has; those that share their equations are counted at the first of them.
    """

    place: Tensor
    phi: Tensor
    fit: Tensor
    wanted: Tensor

    def at(self, place: int) -> Tensor:
        """The numbers of the roots of one place."""
        return (self.place == place).nonzero()[:, 0]

    @property
    def lacking(self) -> Tensor:
        """[N], how many are still missing."""
        return self.wanted - torch.bincount(self.place, minlength=len(self.wanted))


def shared_places(base: Tensor) -> Tensor:
    """For each place the first one with the same base vector [N, D]: what tells places apart is that vector alone."""
    away = torch.cdist(base, base, compute_mode="donot_use_mm_for_euclid_dist")
    close = away <= 1e-9 * base.norm(dim=1).max()
    return close.to(torch.uint8).argmax(dim=1)


def find_roots(search: Search, batch: int) -> Roots:
    """Rounds of starts until every place has its tokens, or the effort or the time is over."""
    block, effort = search.block, search.effort
    first = shared_places(block.base)
    wanted = batch * torch.bincount(first, minlength=block.places)
    roots = Roots(first[:0], search.family.along.x.new_zeros(0, len(search.family.along.x)), first[:0].double(), wanted)
    best = Found(roots.phi.new_zeros(block.places, roots.phi.shape[1]), roots.phi.new_full((block.places,), torch.inf))
    idle, everywhere = 0, torch.arange(block.places, device=first.device)
    grey = search.start(everywhere, _starts(search, roots, everywhere, 0))
    if search.span.typical > TELLING:
        return _filled(roots, Found(grey, best.fit.nan_to_num(posinf=1e9)))  # wrong tokens would pass like right ones
    for number in range(effort.rounds):
        lacking = roots.lacking
        if not bool((lacking > 0).any()) or (number and search.stop()) or idle == IDLE:
            break
        each = max(effort.starts, LEAST // int(lacking.sum()))
        starts = (lacking * each).clamp(max=MOST) if number else lacking.clamp(max=1)
        places = torch.arange(len(lacking), device=lacking.device).repeat_interleave(starts)
        several = bool((wanted > 1).any()) and len(roots.place) > 0
        seen = search.late(roots.place, roots.phi) if several else roots.phi[:0]
        keep_out = search.functionals(seen) if several else None
        ends = search.run(places, search.start(places, _starts(search, roots, places, number)), keep_out)
        good = ends.fit <= SOLVED
        if several and bool(good.any()):
            # Without functionals an end that was only held beside a root slides back into it.
            ends = Found(ends.phi, ends.fit.clone())
            again = search.run(places[good], ends.phi[good])
            ends.phi[good], ends.fit[good] = again
        before, roots = len(roots.place), _with(search, roots, places, ends)
        idle = idle + 1 if len(roots.place) == before else 0
        closer = ends.fit < best.fit[places]
        best.phi[places[closer]], best.fit[places[closer]] = ends.phi[closer], ends.fit[closer]
        search.say(f"tokens: round {number + 1}, {len(roots.place)} of {int(wanted.sum())} tokens found")
    return _filled(roots, best)


def _starts(search: Search, roots: Roots, places: Tensor, number: int) -> Tensor:
    """Patches to begin with [Q, K]: grey at first, then by turns a patch found nearby, one found anywhere and a mixture
    of two."""
    middle, width = (search.pixels.low + search.pixels.high) / 2, (search.pixels.high - search.pixels.low) / 2
    chance, count = search.chance, len(places)
    grey = middle.expand(count, -1)
    if number == 0:
        return grey
    share = torch.rand(count, 1, generator=chance, dtype=torch.float64).to(middle)
    noise = width * torch.randn(count, len(middle), generator=chance, dtype=torch.float64).to(middle)
    if len(roots.place) < 2:
        return grey + 0.6 * width * (share - 0.5) + 0.1 * noise
    pool = search.tokens(roots.place, roots.phi).x
    one, other = (pool[torch.randint(len(pool), (count,), generator=chance).to(places.device)] for _ in range(2))
    columns = search.block.grid[1]
    where = [torch.stack([of // columns, of % columns], dim=1).double() for of in (places, roots.place)]
    nearest = torch.cdist(where[0], where[1]).argsort(dim=1)[:, : min(8, len(pool))]
    pick = torch.randint(nearest.shape[1], (count, 1), generator=chance).to(places.device)
    near = pool[nearest.gather(1, pick)[:, 0]]
    turn = torch.arange(count, device=places.device).unsqueeze(-1) % 3
    mixed = share * one + (1 - share) * other + 0.2 * noise
    return torch.where(turn == 0, near, torch.where(turn == 1, one, mixed))


def _with(search: Search, roots: Roots, places: Tensor, ends: Found) -> Roots:
    """The roots and those ends that fit and are apart from all roots of their place, no more than there are."""
    x = search.tokens(places, ends.phi).x
    lacking = roots.lacking
    known = search.tokens(roots.place, roots.phi).x
    for index in ends.fit.argsort().tolist():
        place = int(places[index])
        if ends.fit[index] > SOLVED or lacking[place] < 1:
            continue
        here = known[roots.place == place]
        if len(here) and float((here - x[index]).square().mean(dim=1).sqrt().min()) < APART:
            continue
        lacking[place] -= 1
        known = torch.cat([known, x[index : index + 1]])
        roots = roots._replace(
            place=torch.cat([roots.place, places[index : index + 1]]),
            phi=torch.cat([roots.phi, ends.phi[index : index + 1]]),
            fit=torch.cat([roots.fit, ends.fit[index : index + 1]]),
        )
    return roots


def _filled(roots: Roots, best: Found) -> Roots:
    """The best guess, which nothing proves, at places that have no token at all."""
    empty = ((roots.lacking == roots.wanted) & (roots.wanted > 0) & best.fit.isfinite()).nonzero()[:, 0]
    return roots._replace(
        place=torch.cat([roots.place, empty]),
        phi=torch.cat([roots.phi, best.phi[empty]]),
        fit=torch.cat([roots.fit, best.fit[empty].clamp(min=2 * SOLVED)]),
    )
