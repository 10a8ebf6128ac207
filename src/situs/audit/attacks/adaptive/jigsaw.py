"""The order of patches of which none stands at a known place: a jigsaw puzzle without a frame.

First the borders that are surest, by how far the best neighbour is ahead of the second, join patches into pieces that
float (a tree, as Gallagher, CVPR 2012). The largest piece is grown into a whole picture. Then what fits on both sides
is kept as the next piece, and the rest is grown anew around it (as Pomeranz and others, CVPR 2011), for as long as
that helps. Several starts, with noise on what is sure, and the cheapest order of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

Cell = tuple[int, int]
Table = np.ndarray
"""[m, m]: the cost of patch k on one side of patch j."""

STEPS: tuple[Cell, ...] = ((0, 1), (0, -1), (1, 0), (-1, 0))
"""Right, left, below, above: the order of the four tables of `sides`. A step's opposite has the other last bit."""

NOISE = 0.1
"""Of every start but the first: on the costs (by a factor) and on what is grown next."""

COMPANY = 0.25
"""What a neighbour more is worth when the next place is chosen, beside how far its best patch is ahead."""

ROUNDS = 6


def floating_orders(
    right: Table, below: Table, grid: Cell, better: Callable[[Table], tuple[Table, float]], starts: int = 24
) -> Iterator[Table]:
    """Orders [m], the patch at each place of the grid. better: an order improved, and what it costs then."""
    tables, chance = sides(right, below), np.random.default_rng(0)
    for number in range(starts):
        noise = NOISE * (number > 0)
        piece, last = joined(tables, grid, noise, chance), np.inf
        for _ in range(ROUNDS):
            order, cost = better(grown(tables, piece, grid, noise, chance))
            yield order
            if cost >= last - 1e-9:
                break
            piece, last = agreed(tables, order, grid), cost


def sides(right: Table, below: Table) -> list[Table]:
    """The costs of patch k right of, left of, below and above patch j; none is its own neighbour."""
    alone = np.diag(np.full(len(right), np.inf))
    return [table + alone for table in (right, right.T, below, below.T)]


def joined(tables: list[Table], grid: Cell, noise: float, chance: np.random.Generator) -> dict[Cell, int]:
    """The largest piece of patches that the surest borders join, within a box of the grid's size."""
    count = len(tables[0])
    ties: list[tuple[float, int, int, int]] = []
    for step in (0, 2):
        table = tables[step] * np.exp(noise * chance.standard_normal((count, count)))
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
    return all(max(each) - min(each) < size for each, size in zip(zip(*cells, strict=True), grid, strict=True))


def grown(tables: list[Table], piece: dict[Cell, int], grid: Cell, noise: float, chance: np.random.Generator) -> Table:
    """A whole order: again and again the free place whose best patch is furthest ahead of the second."""
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
        spots = [(cell, *each) for cell, each in costs.items() if _fits((cell, *at), grid)]
        for cell, cost, known in spots:
            first, *second = np.partition(cost[free], min(1, len(free) - 1))[:2]
            ahead = first / max(second[0], 1e-12) if second else 0.0
            rank = ahead - COMPANY * known + noise * chance.standard_normal()
            if rank < best:
                best, chosen = rank, (cell, int(free[cost[free].argmin()]))
        assert chosen is not None, "a box that is not full has a place beside what is in it"
        cell, at[chosen[0]] = chosen[0], chosen[1]
        free = free[free != chosen[1]]
        del costs[cell]
        touch(cell)
    corner = tuple(min(each) for each in zip(*at, strict=True))
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
