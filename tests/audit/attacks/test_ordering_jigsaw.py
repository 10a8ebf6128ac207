"""Puzzles of which no patch is in place: laws of the pieces, and pictures put together wholly."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from situs.audit.attacks.ordering import (
    STEPS,
    _fits,
    _rivals,
    agreed,
    grown,
    joined,
    make_puzzle,
    order_hidden,
    sides,
    solve_puzzle,
    total_cost,
)
from situs.core.tokens import patchify

GRID, SIZE = (4, 6), (4, 4)


def picture(seed: int) -> torch.Tensor:
    """Patches [24, 48] of waves with noise on them."""
    chance = torch.Generator().manual_seed(seed)
    down, across = (torch.arange(n, dtype=torch.float64) for n in (16, 24))
    image = 0.5 * torch.randn(3, 16, 24, generator=chance, dtype=torch.float64)
    for _ in range(4):
        a, b, turn = torch.randn(3, 3, generator=chance, dtype=torch.float64).unbind()
        image += torch.sin(0.5 * (a.view(3, 1, 1) * down.view(16, 1) + b.view(3, 1, 1) * across) + turn.view(3, 1, 1))
    return patchify(image.unsqueeze(0), SIZE)[0]


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_picture_without_a_frame_is_put_together(seed: int) -> None:
    """Greedy starts in a frame, which do where some patches are known, come to rest at dearer orders."""
    real, hidden = picture(seed), torch.ones(24, dtype=torch.bool)
    mixed = real[torch.randperm(24, generator=torch.Generator().manual_seed(9))]
    assert torch.equal(order_hidden(mixed, hidden, GRID, SIZE), real)
    puzzle = make_puzzle(real, hidden, GRID, SIZE)
    assert total_cost(puzzle, solve_puzzle(puzzle)) > 1.1 * total_cost(puzzle, torch.arange(24))


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_pieces_fit_the_box_and_orders_have_every_patch_once(noise: float) -> None:
    chance = np.random.default_rng(1)
    tables = sides(*chance.random((2, 24, 24)))  # costs that mean nothing: ties meet and shut each other out
    piece = joined(tables, GRID, noise, chance)
    rows, columns = zip(*piece, strict=True)
    assert len(set(piece.values())) == len(piece) > 4
    assert max(rows) - min(rows) < GRID[0] and max(columns) - min(columns) < GRID[1]
    order = grown(tables, piece, GRID, noise, chance)
    assert sorted(order.tolist()) == list(range(24))
    where = {patch: divmod(place, GRID[1]) for place, patch in enumerate(order.tolist())}
    offsets = {tuple(np.subtract(where[patch], cell)) for cell, patch in piece.items()}
    assert len(offsets) == 1  # the piece stays together


@pytest.mark.parametrize("grid", [(3, 4), (4, 2)])
def test_a_piece_grows_to_the_picture_whose_borders_cost_least(grid: tuple[int, int]) -> None:
    """Patches in any order, and true neighbours alone cost little."""
    count, chance = grid[0] * grid[1], np.random.default_rng(3)
    picture = chance.permutation(count)
    tables = sides(*(1 + chance.random((2, count, count))))
    for place, patch in enumerate(picture.tolist()):
        row, column = divmod(place, grid[1])
        for (down, across), table in zip(STEPS, tables, strict=True):
            if 0 <= row + down < grid[0] and 0 <= column + across < grid[1]:
                table[patch, picture[place + down * grid[1] + across]] = 0.1
    for start in range(count):
        assert grown(tables, {(0, 0): start}, grid, 0.0, chance).tolist() == picture.tolist()


def test_a_border_is_as_sure_as_the_best_other_one_of_either_patch_is_dear() -> None:
    """By loops; no patch is its own neighbour, and of two equal costs each is the other's rival."""
    chance = np.random.default_rng(0)
    table = chance.random((6, 6)) + np.diag(np.full(6, np.inf))
    table[2, 4] = table[2, 5]
    found = list(_rivals(table))
    assert [(j, k) for j, k, _ in found] == [(j, k) for j in range(6) for k in range(6) if j != k]
    for j, k, rival in found:
        row = [table[j, other] for other in range(6) if other != k]
        column = [table[other, k] for other in range(6) if other != j]
        assert rival == min(*row, *column)


@pytest.mark.parametrize(
    ("cells", "fits"),
    [([(0, 0), (1, 2)], True), ([(-1, 5), (0, 7)], True), ([(0, 0), (2, 0)], False), ([(0, -1), (0, 2)], False)],
)
def test_cells_fit_a_box_wherever_it_stands(cells: list[tuple[int, int]], fits: bool) -> None:
    assert _fits(tuple(cells), (2, 3)) is fits


def test_what_is_kept_is_each_others_best() -> None:
    right, below = np.ones((2, 6, 6))
    order = np.array([3, 1, 4, 0, 5, 2])  # a picture of 2 × 3
    for one, other in pairwise(order[:3]):
        right[one, other] = 0.1
    below[order[0], order[3]] = 0.1
    right[order[3], order[5]] = 0.1  # not beside it
    kept = agreed(sides(right, below), order, (2, 3))
    assert kept == {(0, 0): 3, (0, 1): 1, (0, 2): 4, (1, 0): 0}
    assert [(-a, -b) for a, b in STEPS] == [STEPS[side ^ 1] for side in range(4)]


def test_a_search_that_is_stopped_gives_what_it_has() -> None:
    puzzle, asked = make_puzzle(picture(0), torch.ones(24, dtype=torch.bool), GRID, SIZE), []
    order = solve_puzzle(puzzle, GRID, stop=lambda: bool(asked.append(1)) or True)
    assert sorted(order.tolist()) == list(range(24)) and len(asked) == 2  # after one start of either kind
