"""The order of shuffled patches, from their borders: a jigsaw puzzle whose other pieces are in place.

Two neighbours fit if the step across their border is the one that the pixels on both sides lead up to. That gives a
cost for each patch beside each known neighbour (`border_costs`), and for each pair of hidden patches side by side; a
trained MP3, which predicts a patch's place from its content, may add a cost. `solve_puzzle` searches the cheapest
order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from situs.core.tokens import take, unpatchify
from situs.methods.mp3 import MP3

# ---------------------------------------------------------------------------------------------------------------------
# The order of patches none of which has a known place: a jigsaw puzzle without a frame.
#
# First the surest borders, by how far the best neighbour is ahead of the second, join patches into floating pieces (a
# tree, as Gallagher, CVPR 2012). The largest piece is grown into a whole picture. Then the part whose neighbours are
# each other's best is the next piece, and the rest is grown anew around it (as Pomeranz and others, CVPR 2011), as long
# as that helps. Several starts, with noise on the costs, and the cheapest order of all of them.


Cell = tuple[int, int]
Table = np.ndarray
"""[m, m]: the cost of patch k on one side of patch j."""

SIDES: dict[str, Cell] = {"right": (0, 1), "left": (0, -1), "below": (1, 0), "above": (-1, 0)}
"""side -> the step (rows, columns) to the neighbour there; in the order of the four tables of `sides`."""

STEPS = tuple(SIDES.values())
"""A step's opposite has the other last bit."""

NOISE = 0.1
"""Noise of every start but the first: on the costs (by a factor) and on the choice of the next place."""

NEIGHBOUR = 0.25
"""The value of one more neighbour when the next place is chosen, beside how far its best patch is ahead."""

ROUNDS = 6


def floating_orders(
    right: Table, below: Table, grid: Cell, better: Callable[[Table], tuple[Table, float]], starts: int = 24
) -> Iterator[Table]:
    """Orders [m], the patch at each place of the grid. better: improves an order, and gives its cost."""
    tables, rng = sides(right, below), np.random.default_rng(0)
    for number in range(starts):
        noise = NOISE * (number > 0)
        piece, last = joined(tables, grid, noise, rng), np.inf
        for _ in range(ROUNDS):
            order, cost = better(grown(tables, piece, grid, noise, rng))
            yield order
            if cost >= last - 1e-9:
                break
            piece, last = agreed(tables, order, grid), cost


def sides(right: Table, below: Table) -> list[Table]:
    """The costs of patch k right of, left of, below and above patch j; no patch is its own neighbour."""
    alone = np.diag(np.full(len(right), np.inf))
    return [table + alone for table in (right, right.T, below, below.T)]


def joined(tables: list[Table], grid: Cell, noise: float, rng: np.random.Generator) -> dict[Cell, int]:
    """The largest piece of patches that the surest borders join, within a box of the grid's size."""
    count = len(tables[0])
    ties: list[tuple[float, int, int, int]] = []
    for step in (0, 2):
        table = tables[step] * np.exp(noise * rng.standard_normal((count, count)))
        ties += [(float(table[j, k] / rival), j, k, step) for j, k, rival in _rivals(table)]
    pieces = {patch: {(0, 0): patch} for patch in range(count)}
    at = {patch: (patch, (0, 0)) for patch in range(count)}  # its piece, and where in it
    for _, j, k, step in sorted(ties):
        (one, here), (other, there) = at[j], at[k]
        if one == other:
            continue
        shift = tuple(h + s - t for h, s, t in zip(here, STEPS[step], there, strict=True))
        moved = {(r + shift[0], c + shift[1]): patch for (r, c), patch in pieces[other].items()}
        if moved.keys() & pieces[one].keys() or not _fits((*moved, *pieces[one]), grid):
            continue
        pieces[one] |= moved
        del pieces[other]
        at |= {patch: (one, cell) for cell, patch in moved.items()}
    return max(pieces.values(), key=len)


def _rivals(table: Table) -> Iterator[tuple[int, int, float]]:
    """Every pair j, k with the least cost that either would have with another patch on that side."""
    rows, columns = np.sort(table, axis=1)[:, :2], np.sort(table, axis=0)[:2]
    for j, k in zip(*np.isfinite(table).nonzero(), strict=True):
        row = rows[j, int(table[j, k] == rows[j, 0])]
        column = columns[int(table[j, k] == columns[0, k]), k]
        yield int(j), int(k), max(float(min(row, column)), 1e-12)


def _fits(cells: tuple[Cell, ...], grid: Cell) -> bool:
    """Whether cells lie within a box of the grid's size."""
    axes = zip(*cells, strict=True)
    return all(max(axis) - min(axis) < size for axis, size in zip(axes, grid, strict=True))


def grown(tables: list[Table], piece: dict[Cell, int], grid: Cell, noise: float, rng: np.random.Generator) -> Table:
    """A whole order: repeatedly fills the free place whose best patch is furthest ahead of the second."""
    at, costs = dict(piece), dict[Cell, tuple[Table, int]]()
    free = np.setdiff1d(np.arange(len(tables[0])), list(at.values()))

    def touch(cell: Cell) -> None:
        for (down, across), table in zip(STEPS, tables, strict=True):
            beside = (cell[0] + down, cell[1] + across)
            if beside not in at:
                cost, known = costs.get(beside, (np.zeros(len(table)), 0))
                costs[beside] = (cost + table[at[cell]], known + 1)

    for cell in piece:
        touch(cell)
    while len(free):
        best, chosen = np.inf, None
        spots = [(cell, cost, known) for cell, (cost, known) in costs.items() if _fits((cell, *at), grid)]
        for cell, cost, known in spots:
            first, *second = np.partition(cost[free], min(1, len(free) - 1))[:2]
            ahead = first / max(second[0], 1e-12) if second else 0.0
            rank = ahead - NEIGHBOUR * known + noise * rng.standard_normal()
            if rank < best:
                best, chosen = rank, (cell, int(free[cost[free].argmin()]))
        assert chosen is not None, "a box that is not full has a free place beside a patch"
        cell, at[chosen[0]] = chosen[0], chosen[1]
        free = free[free != chosen[1]]
        del costs[cell]
        touch(cell)
    corner = tuple(min(axis) for axis in zip(*at, strict=True))
    order = np.zeros(len(tables[0]), dtype=np.int64)
    for (row, column), patch in at.items():
        order[(row - corner[0]) * grid[1] + column - corner[1]] = patch
    return order


def agreed(tables: list[Table], order: Table, grid: Cell) -> dict[Cell, int]:
    """The largest piece of a picture whose neighbours are each other's best."""
    best, picture = [table.argmin(axis=1) for table in tables], order.reshape(grid)
    left = {(row, column) for row in range(grid[0]) for column in range(grid[1])}
    pieces: list[list[Cell]] = []
    while left:
        piece = [left.pop()]
        for cell in piece:
            for side, (down, across) in enumerate(STEPS):
                beside = (cell[0] + down, cell[1] + across)
                if beside in left:
                    one, other = picture[cell], picture[beside]
                    if best[side][one] == other and best[side ^ 1][other] == one:
                        left.remove(beside)
                        piece.append(beside)
        pieces.append(piece)
    return {cell: int(picture[cell]) for cell in max(pieces, key=len)}


# --- beside patches that are in place --------------------------------------------------------------------------------


class PatchCosts(NamedTuple):
    """m patches for m places. alone [m, m]: cost of patch j at place t beside the known ones. right, below [m, m]: cost
    of patch k to the right of, or below, patch j. beside, under [·, 2]: pairs (t, t') of hidden places, t' to the
    right of, or below, t.
    """

    alone: Tensor
    right: Tensor
    below: Tensor
    beside: Tensor
    under: Tensor


def border_costs(first: Tensor, second: Tensor, size: tuple[int, int], side: str) -> Tensor:
    """Cost [n, m] of each patch of `second` [m, K] standing at `side` of each of `first` [n, K].

    The mean over the border's pixels of |step - expected| + |step|, where a step is expected to be the mean of the
    last step on this side and the first on the other.
    """
    near, inner = _lines(first, size, side)
    far, beyond = _lines(second, size, _OPPOSITE[side])
    return _border(near.unsqueeze(1), inner.unsqueeze(1), far.unsqueeze(0), beyond.unsqueeze(0))


def _border(near: Tensor, inner: Tensor, far: Tensor, beyond: Tensor) -> Tensor:
    step = far - near
    return (step - 0.5 * ((near - inner) + (beyond - far))).abs().mean(dim=-1) + step.abs().mean(dim=-1)


_OPPOSITE = {"right": "left", "left": "right", "below": "above", "above": "below"}


def _lines(patches: Tensor, size: tuple[int, int], side: str) -> tuple[Tensor, Tensor]:
    """The outermost line of pixels on a side and the next one inside, each [n, pixels · channels]."""
    cells = patches.view(len(patches), *size, patches.shape[1] // (size[0] * size[1]))
    dim = 2 if side in ("right", "left") else 1
    depth = cells.shape[dim]
    outer = depth - 1 if side in ("right", "below") else 0
    inner = min(depth - 1, 1) if outer == 0 else max(depth - 2, 0)
    return cells.select(dim, outer).flatten(1), cells.select(dim, inner).flatten(1)


def make_puzzle(patches: Tensor, hidden: Tensor, grid: tuple[int, ...], size: tuple[int, int]) -> PatchCosts:
    """Patches [N, K] of which those at `hidden` [N] are in any order; costs in units of what true neighbours have."""
    places = hidden.nonzero()[:, 0]
    pieces = patches[places]
    number = torch.full_like(hidden, -1, dtype=torch.int64)
    number[places] = torch.arange(len(places), device=hidden.device)
    alone = patches.new_zeros(len(places), len(places))
    pairs: dict[str, list[tuple[int, int]]] = {"right": [], "below": []}
    for t, place in enumerate(places.tolist()):
        for side, (down, across) in SIDES.items():
            row, column = place // grid[1] + down, place % grid[1] + across
            if not (0 <= row < grid[0] and 0 <= column < grid[1]):
                continue
            other = row * grid[1] + column
            if not hidden[other]:
                alone[:, t] += border_costs(pieces, patches[other : other + 1], size, side)[:, 0]
            elif side in pairs:
                pairs[side].append((t, int(number[other])))
    unit = _usual_cost(patches, hidden, grid, size)
    right, below = (border_costs(pieces, pieces, size, side) / unit for side in ("right", "below"))
    beside, under = (torch.tensor(pairs[side], dtype=torch.int64).view(-1, 2) for side in ("right", "below"))
    return PatchCosts(alone / unit, right, below, beside, under)


def _usual_cost(patches: Tensor, hidden: Tensor, grid: tuple[int, ...], size: tuple[int, int]) -> Tensor:
    """The mean cost of two known neighbours: the cost of a right border in this image."""
    table = torch.arange(len(patches), device=patches.device).view(grid)
    costs = []
    for side, (a, b) in (("right", (table[:, :-1], table[:, 1:])), ("below", (table[:-1], table[1:]))):
        a, b = a.flatten(), b.flatten()
        known = ~(hidden[a] | hidden[b])
        costs.append(_border(*_lines(patches[a[known]], size, side), *_lines(patches[b[known]], size, _OPPOSITE[side])))
    every = torch.cat(costs)
    return every.mean().clamp(min=1e-6) if len(every) else patches.new_ones(())


def predicted_costs(predictor: MP3, patches: Tensor, hidden: Tensor, size: tuple[int, int]) -> Tensor:
    """-log p(place t | patch j) by a trained MP3 that sees all patches in any order, [m, m].

    patches: normalised as the predictor's training images were.
    """
    like = next(predictor.parameters())
    image = unpatchify(patches.unsqueeze(0), predictor.backbone.grid, size).to(like.device, like.dtype)
    with torch.no_grad():
        logits = predictor.place_logits(image)[0]
    places = hidden.nonzero()[:, 0].to(like.device)
    return -logits.double().log_softmax(dim=-1)[places][:, places].to(patches.device, patches.dtype)


def order_hidden(
    patches: Tensor,
    hidden: Tensor,
    grid: tuple[int, ...],
    size: tuple[int, int],
    *,
    predictor: MP3 | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Tensor:
    """Patches [N, K] with the hidden patches at the places where they fit best.

    predictor: a trained MP3 with the same patches, whose -log p counts as the cost of a border. stop: ends the search
    with the best order so far.
    """
    places = hidden.nonzero()[:, 0]
    if len(places) < 2:
        return patches
    puzzle = make_puzzle(patches, hidden, grid, size)
    if predictor is not None:
        puzzle = puzzle._replace(alone=puzzle.alone + predicted_costs(predictor, patches, hidden, size))
    order = solve_puzzle(puzzle, (grid[0], grid[1]) if bool(hidden.all()) else None, stop=stop)
    ordered = patches.clone()
    ordered[places] = take(patches[places].unsqueeze(0), order.to(places.device))[0]
    return ordered


# --- the puzzle -------------------------------------------------------------------------------------------------


def total_cost(puzzle: PatchCosts, order: Tensor) -> float:
    """The cost of an order [m]: the patch at each place."""
    alone, right, below, beside, under = puzzle
    cost = alone[order, torch.arange(len(order))].sum()
    cost = cost + right[order[beside[:, 0]], order[beside[:, 1]]].sum()
    return float(cost + below[order[under[:, 0]], order[under[:, 1]]].sum())


def solve_puzzle(
    puzzle: PatchCosts,
    grid: tuple[int, int] | None = None,
    restarts: int = 16,
    stop: Callable[[], bool] = lambda: False,
) -> Tensor:
    """The patch at each place, [m]: the best of several greedy starts, each improved by exchanges until none helps.

    grid: given where no patch is known, so that floating pieces are put together first.
    """
    puzzle = PatchCosts(*(part.cpu() for part in puzzle))
    generator = torch.Generator().manual_seed(0)
    orders = []
    for number in range(restarts):
        if orders and stop():
            break
        noise = 0.0 if number == 0 else 0.3 * number / restarts
        orders.append(_improve(puzzle, _grow(puzzle, noise, generator)))
    if grid is not None:

        def better(order: np.ndarray) -> tuple[np.ndarray, float]:
            improved = _improve(puzzle, torch.from_numpy(order))
            return improved.numpy(), total_cost(puzzle, improved)

        floating = floating_orders(puzzle.right.double().numpy(), puzzle.below.double().numpy(), grid, better)
        orders += [torch.from_numpy(order) for order in takewhile(lambda _: not stop(), floating)]
    return min(orders, key=lambda order: total_cost(puzzle, order))


def _grow(puzzle: PatchCosts, noise: float, generator: torch.Generator) -> Tensor:
    """Greedy: repeatedly, the place with most neighbours gets the patch that fits it by the widest margin."""
    count = len(puzzle.alone)
    order = torch.full((count,), -1)
    cost, known = puzzle.alone.clone(), (puzzle.alone.abs().sum(dim=0) > 0).double()
    cost = cost * (1 + noise * torch.randn(cost.shape, generator=generator, dtype=cost.dtype))
    free_patch = torch.ones(count, dtype=torch.bool)
    links = _links(puzzle)
    for _ in range(count):
        open_places = (order < 0).nonzero()[:, 0]
        patches = free_patch.nonzero()[:, 0]
        part = cost[patches][:, open_places]
        best = part.topk(min(2, len(patches)), dim=0, largest=False).values
        margin = best[-1] - best[0] + 10 * known[open_places]
        place = int(open_places[margin.argmax()])
        patch = int(patches[cost[patches, place].argmin()])
        order[place], free_patch[patch] = patch, False
        for other, table in links[place]:
            cost[:, other] += table[patch]
            known[other] += 1
    return order


def _links(puzzle: PatchCosts) -> list[list[tuple[int, Tensor]]]:
    """For each place its neighbours t' with a table [j, k]: the cost of patch k at t' when patch j stands here."""
    links: list[list[tuple[int, Tensor]]] = [[] for _ in range(len(puzzle.alone))]
    for pairs, table in ((puzzle.beside, puzzle.right), (puzzle.under, puzzle.below)):
        for a, b in pairs.tolist():
            links[a].append((b, table))
            links[b].append((a, table.T))
    return links


def _improve(puzzle: PatchCosts, order: Tensor) -> Tensor:
    """Exchanges two patches, or assigns all anew beside the present neighbours, as long as that lowers the cost."""
    from scipy.optimize import linear_sum_assignment

    links, cost = _links(puzzle), total_cost(puzzle, order)
    for _ in range(20 * len(order)):
        local = puzzle.alone.clone()  # the cost of patch j at place t if the others stayed
        for place, neighbours in enumerate(links):
            for other, table in neighbours:
                local[:, place] += table[:, order[other]]
        gain = _gains(local, order).flatten()
        tries = [_swapped(order, *divmod(i, len(order))) for i in gain.topk(min(24, len(gain))).indices.tolist()]
        tries.append(torch.from_numpy(linear_sum_assignment(local.T.numpy())[1]))
        costs = [total_cost(puzzle, attempt) for attempt in tries]
        best = min(range(len(tries)), key=costs.__getitem__)
        if costs[best] >= cost - 1e-9:
            break
        order, cost = tries[best], costs[best]
    return order


def _gains(local: Tensor, order: Tensor) -> Tensor:
    """What exchanging the patches at two places saves, [m, m], if the other costs stay; local: [patch, place]."""
    here = local[order, torch.arange(len(order))]
    return here.unsqueeze(1) + here.unsqueeze(0) - local[order].T - local[order]


def _swapped(order: Tensor, a: int, b: int) -> Tensor:
    other = order.clone()
    other[a], other[b] = order[b], order[a]
    return other
