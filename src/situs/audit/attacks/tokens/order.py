"""The order of tokens that nothing but attention tells apart: rotary and relative positions.

What a token's attention gave it, o, is known beside the token itself. The block's own attention over the tokens in some
order gives each of them an o: in the right order the same. Borders give a first order, which is often right but for a
shift of the whole and a few patches; those are tried. Where every order gives the same, no position is in attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from situs.audit.attacks.tokens.block import Block

NEARER = 3.0
"""The order is proved if attention is off by this many times less than in every other that was tried."""

WORST = 16
"""Tokens whose places are exchanged with each other in a round: those whose attention is furthest off."""

ROUNDS = 60

ABREAST = 2**14
"""Tokens that are run at a time."""


class Order(NamedTuple):
    """at: [N], which of the tokens stands at each place. proved: whether attention tells it from every other tried."""

    at: Tensor
    proved: bool


def order_by_attention(block: Block, patches: Tensor, o: Tensor, stop: Callable[[], bool] = lambda: False) -> Order:
    """The order of patches [N, K] whose attention gave o [N, ·], from the order they are in."""
    count = len(patches)
    here = torch.arange(count, device=patches.device)
    every = _off(block, patches, o, torch.cat([here[None], _shifts(block, here)]))
    best = int(every.sum(dim=1).argmin())
    at = torch.cat([here[None], _shifts(block, here)])[best]
    off, reached = every[best], float(every.sum(dim=1).max())
    if reached <= (1 + 1e-6) * float(off.sum()):
        return Order(here, False)  # attention knows no places
    nearest = torch.inf
    for _ in range(ROUNDS):
        if stop():
            return Order(at, False)
        worst = off.argsort(descending=True)[:WORST]
        tries = _exchanged(at, torch.combinations(worst))
        found = _off(block, patches, o, tries)
        nearest = float(found.sum(dim=1).min())
        if nearest >= float(off.sum()):
            break
        at, off = tries[found.sum(dim=1).argmin()], found[found.sum(dim=1).argmin()]
    # No exchange of the worst helps: what of all neighbours, and of others by chance?
    grid = here.view(block.grid)
    pairs = [
        torch.stack([a.flatten(), b.flatten()], dim=1) for a, b in ((grid[:, 1:], grid[:, :-1]), (grid[1:], grid[:-1]))
    ]
    pairs.append(torch.stack([here, here.roll(count // 2 + 1)], dim=1))
    found = _off(block, patches, o, _exchanged(at, torch.cat(pairs)), stop).sum(dim=1)
    alike = torch.cdist(patches, patches) <= 1e-6 * patches.norm(dim=1).max()
    told = ~alike[at[torch.cat(pairs)[:, 0]], at[torch.cat(pairs)[:, 1]]]  # two that are equal may stand either way
    nearest = min(nearest, float(found[told].min()) if bool(told.any()) else torch.inf)
    return Order(at, not stop() and NEARER**2 * float(off.sum()) <= nearest)


def _off(block: Block, patches: Tensor, o: Tensor, orders: Tensor, stop: Callable[[], bool] = lambda: False) -> Tensor:
    """How far attention is off in each order [T, N], squared, at each place: [T, N]."""
    first, found = len(block.prefix), []
    for part in orders.split(max(1, ABREAST // patches.shape[0])):
        if stop():
            found.append(torch.full(part.shape, torch.inf).to(patches))
            continue
        given = block.middle(patches[part])[1][:, first:]
        found.append(((given - o[part]) @ block.into).square().sum(dim=-1))
    return torch.cat(found)


def _shifts(block: Block, here: Tensor) -> Tensor:
    """The order shifted as a whole, every way but none, [N - 1, N]."""
    grid = here.view(block.grid)
    down, across = block.grid[0], block.grid[1]
    moved = [grid.roll((i, j), dims=(0, 1)).flatten() for i in range(down) for j in range(across) if i or j]
    return torch.stack(moved)


def _exchanged(at: Tensor, pairs: Tensor) -> Tensor:
    """The order with the tokens at two places exchanged, once for each of pairs [T, 2]: [T, N]."""
    orders = at.repeat(len(pairs), 1)
    rows = torch.arange(len(pairs), device=at.device)
    orders[rows, pairs[:, 0]], orders[rows, pairs[:, 1]] = at[pairs[:, 1]], at[pairs[:, 0]]
    return orders
