"""Least squares of many tokens at once, open directions and attention: by laws, and by references of one row each."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from situs.audit.attacks.solver import (
    PROGRESS,
    STUCK,
    Family,
    Flat,
    Group,
    Heads,
    Norm,
    Range,
    Span,
    Tokens,
    blur,
    descend,
    pulls,
)


def chance(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Valley:
    """Rosenbrock's valley, bent differently for each row; its minimum 0 is at (1, bend)."""

    def __init__(self, bends: Tensor) -> None:
        self.bends, self.calls = bends, list[int]()

    def __call__(self, rows: Tensor, phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.calls.append(len(rows))
        x, y, bend = phi[:, 0], phi[:, 1], self.bends[rows]
        r = torch.stack([10 * (y - bend * x.square()), 1 - x], dim=1)
        zero = torch.zeros_like(x)
        jacobian = torch.stack([torch.stack([-20 * bend * x, -1 + zero], 1), torch.stack([10 + zero, zero], 1)], 1)
        return r.square().sum(1), (jacobian @ r[..., None])[..., 0], jacobian @ jacobian.mT


def never() -> bool:
    return False


def test_every_row_arrives_by_itself() -> None:
    bends = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
    start = torch.stack([torch.ones(4).double(), bends], dim=1) + 0.3 * chance(4, 2)
    phi, cost, matrix = descend(Valley(bends), start, 200, never)
    torch.testing.assert_close(phi, torch.stack([torch.ones(4).double(), bends], dim=1), rtol=0, atol=1e-7)
    assert float(cost.max()) < 1e-15
    for row in range(4):
        alone = descend(Valley(bends[row : row + 1]), start[row : row + 1], 200, never)
        torch.testing.assert_close(phi[row : row + 1], alone[0], rtol=0, atol=1e-7)
    expected = Valley(bends)(torch.arange(4), phi)
    assert torch.equal(cost, expected[0]) and torch.equal(matrix, expected[2])


def test_each_step_taken_is_downhill_and_the_start_is_left_alone() -> None:
    bends, start = torch.tensor([1.0, 3.0], dtype=torch.float64), torch.tensor([[-3.0, 8.0], [2.0, -9.0]]).double()
    kept, costs = start.clone(), []
    for steps in range(12):
        phi, cost, _ = descend(Valley(bends), start, steps, never)
        assert torch.equal(cost, Valley(bends)(torch.arange(2), phi)[0])
        costs.append(cost)
    assert all(bool((after <= before).all()) for before, after in itertools.pairwise(costs))
    assert torch.equal(start, kept) and bool((costs[-1] < costs[0]).all())


def test_it_ends_when_told_where_it_is_near_enough_and_where_all_have_ended() -> None:
    bends, start = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([[1.0, 1.0], [-1.0, 3.0]]).double()
    valley = Valley(bends)
    phi, cost, _ = descend(valley, start, 50, lambda: True)
    assert torch.equal(phi, start) and valley.calls == [2]
    told = iter([False, False, True])
    valley = Valley(bends)
    descend(valley, start, 50, lambda: next(told))
    assert len(valley.calls) == 3  # the start, and two steps
    valley = Valley(bends)
    cost = descend(valley, start, 200, never, near=1e-2)[1]
    whole = Valley(bends)
    assert cost[0] == 0 and 1e-30 < float(cost[1]) <= 1e-2
    assert float(descend(whole, start, 200, never)[1][1]) < 1e-20 and len(whole.calls) > len(valley.calls)


@pytest.mark.parametrize(("share", "taken"), [(0.0, STUCK), (0.5 * PROGRESS, STUCK), (2 * PROGRESS, 30), (-1.0, STUCK)])
def test_too_little_progress_ends_a_search_but_is_taken(share: float, taken: int) -> None:
    """Costs that fall by a share at each look, or never."""
    looks = []

    def normal(rows: Tensor, phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        looks.append(phi.clone())
        cost = torch.full((len(rows),), (1 - share) ** (len(looks) - 1), dtype=torch.float64)
        return cost, torch.ones_like(phi), torch.eye(1, dtype=torch.float64).expand(len(rows), 1, 1)

    phi, cost, _ = descend(normal, torch.zeros(1, 1, dtype=torch.float64), 30, never)
    assert len(looks) == 1 + taken
    if share > 0:
        assert torch.equal(phi, looks[-1]) and float(cost) == pytest.approx((1 - share) ** taken)
        lengths = -torch.cat(looks).flatten().diff()
        assert bool((lengths > 0).all()) and bool((lengths.diff() >= 0).all())  # bolder after each success
    else:
        assert not phi.any() and float(cost) == 1
        assert bool((torch.cat(looks[2:]).abs() < torch.cat(looks[1:-1]).abs()).all())  # shorter after each failure


def test_a_row_without_a_normal_matrix_stays_and_spoils_no_other() -> None:
    def normal(rows: Tensor, phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        matrix = torch.eye(2, dtype=torch.float64).repeat(len(rows), 1, 1)
        matrix[rows == 0] = torch.nan
        return phi.square().sum(1), phi.clone(), matrix

    phi, cost, _ = descend(normal, torch.ones(2, 2, dtype=torch.float64), 60, never)
    assert torch.equal(phi[0], torch.ones(2).double()) and float(phi[1].norm()) < 1e-8 and cost[0] == 2


@pytest.mark.parametrize(("unknowns", "equations", "rank"), [(9, 6, 4), (6, 9, 4), (5, 5, 5), (7, 3, 3)])
def test_what_equations_leave_open_is_all_of_it(unknowns: int, equations: int, rank: int) -> None:
    matrix = chance(unknowns, rank) @ chance(rank, equations, seed=1)
    seen = []
    flat = Flat(matrix, lambda values: seen.append(values) or rank)
    torch.testing.assert_close(seen[0], torch.linalg.svdvals(matrix))
    constant = chance(3, unknowns, seed=2) @ matrix
    least = flat.least(constant)
    assert flat.free.shape == (unknowns - rank, unknowns)
    torch.testing.assert_close(least @ matrix, -constant, rtol=0, atol=1e-9)
    torch.testing.assert_close(least, -constant @ torch.linalg.pinv(matrix, rtol=1e-9), rtol=0, atol=1e-9)
    torch.testing.assert_close(flat.free @ matrix, torch.zeros(unknowns - rank, equations).double(), rtol=0, atol=1e-9)
    torch.testing.assert_close(flat.free @ flat.free.T, torch.eye(unknowns - rank).double(), rtol=0, atol=1e-12)
    assert len(Flat(matrix, rank - 1).free) == unknowns - rank + 1


def test_a_family_behind_a_norm_is_divided_by_its_own_size() -> None:
    parts = [chance(4, 5, seed=n) for n in range(4)], [chance(2, 5, seed=n) for n in range(4, 8)]
    scale = chance(4, 1, seed=8).abs() + 5, chance(2, 1, seed=9)
    fixed, along = (Tokens(*each) for each in parts)
    places, phi = torch.tensor([3, 1]), chance(2, 2, seed=10)
    plain = Family(fixed, along, torch.ones(0)).tokens(places, phi)
    scaled = Family(fixed, along, torch.ones(0), scale).tokens(places, phi)
    for row, place in enumerate(places.tolist()):
        size = scale[0][place] + phi[row] @ scale[1]
        for number in range(4):
            expected = parts[0][number][place] + phi[row] @ parts[1][number]
            torch.testing.assert_close(plain[number][row], expected)
            torch.testing.assert_close(scaled[number][row], expected / size if number else expected)
    assert torch.equal(fixed.at(2).z, fixed.z[2])


def test_the_nearest_patches_have_the_shortest_coordinates() -> None:
    x = torch.cat([chance(2, 5), torch.zeros(1, 5).double()])
    x[2] = x[0]  # a direction that patches do not see
    blank = torch.zeros(1, 5).double()
    along, fixed = Tokens(x, x, x, x), Tokens(*[chance(3, 5, seed=4)] * 4)
    wanted, places = chance(2, 5, seed=5), torch.tensor([0, 2])
    found = Family(fixed, along, blank[0]).phi(places, wanted)
    expected = torch.linalg.lstsq(x.T, (wanted - fixed.x[places]).T, driver="gelsd").solution.T
    torch.testing.assert_close(found, expected)


def test_the_range_of_pixels_is_as_wide_as_on_the_mean() -> None:
    assert Range(torch.tensor([-1.0, -2.0]), torch.tensor([3.0, 0.0])).width == 3


@pytest.mark.parametrize("biased", [True, False])
def test_equations_of_a_norm_have_a_row_for_its_deviation_where_it_has_a_bias(biased: bool) -> None:
    weight, bias = chance(8, seed=1), chance(8, seed=2)
    norm = Norm(weight, bias if biased else None, 1e-6)
    inputs = chance(3, 8, seed=3)
    span = Span(chance(20, 3, seed=4) @ inputs, 3)
    rows = Group(norm, span, 2.5).rows(chance(4, 8, seed=5))
    assert len(rows) == 4 + biased

    def outside(formed: Tensor) -> Tensor:
        scaled = formed * span.column
        basis = torch.linalg.qr((inputs * span.column).T)[0]
        return 2.5 * (scaled - scaled @ basis @ basis.T)

    moves = chance(4, 8, seed=5)
    torch.testing.assert_close(rows[:4], outside((moves - moves.mean(dim=1, keepdim=True)) * weight))
    if biased:
        torch.testing.assert_close(rows[4], outside(bias))
    assert Group(norm, None).rows(chance(4, 8)).shape == (4 + biased, 0)
    assert not Norm(weight, torch.zeros(8), 1e-6).biased


@pytest.mark.parametrize("scale", [None, 0.3])
def test_pulls_of_an_image_add_up_to_nothing(scale: float | None) -> None:
    """Against torch's own attention; a token of another image does not belong there."""
    heads = Heads(chance(24, 8), chance(24, seed=1), 2, scale)
    entered = chance(5, 8, seed=2)
    q, k, v = heads.split(entered)
    named = F.linear(entered, heads.weight, heads.bias)
    torch.testing.assert_close(q[1], named[:, 4:8])
    torch.testing.assert_close(v[0], named[:, 16:20])
    o = F.scaled_dot_product_attention(q, k, v, scale=scale)
    paid = heads.paid(q, k)
    torch.testing.assert_close(paid / paid.sum(dim=-1, keepdim=True) @ v, o)
    assert float(paid.max()) == 1.0
    for token in range(5):
        pulled = pulls(paid[:, token], v, o[:, token])
        assert pulled.shape == (5, 8)
        torch.testing.assert_close(pulled.sum(dim=0), torch.zeros(8).double(), rtol=0, atol=1e-12)
        assert float(pulled[:4].sum(dim=0).norm()) > 1e-3


def test_noise_moves_a_solution_as_far_as_least_squares_say() -> None:
    """By draws: residuals of deviation 1 over all numbers outside the span together."""
    jacobian, along = chance(3, 10), chance(3, 6, seed=1)
    span: Any = SimpleNamespace(column=torch.ones(14), rank=4)
    noise = chance(40_000, 10, seed=2) / math.sqrt(10)
    moved = noise @ torch.linalg.pinv(jacobian) @ along
    expected = float(moved.square().sum(dim=1).mean().sqrt())
    assert float(blur((jacobian @ jacobian.T)[None], along, span)) == pytest.approx(expected, rel=0.02)
    assert math.isfinite(float(blur(torch.full((1, 3, 3), torch.nan).double(), along, span)))
    flat = torch.diag(torch.tensor([1.0, 2.0, 0.0])).double()  # a direction without equations is moved without end
    assert float(blur(flat[None], along, span)) > 1e6 * expected
    for factor in (4.0**-20, 4.0**20):  # residuals in other units
        torch.testing.assert_close(factor**0.5 * blur(factor * flat[None], along, span), blur(flat[None], along, span))
