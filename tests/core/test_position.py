from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from situs.core.position import (
    PairBias,
    Positions,
    coordinates,
    distances,
    relative_index,
    resample_table,
    sincos,
    smoothed_targets,
)
from situs.errors import SitusError


@pytest.mark.parametrize("grid", [(5,), (3, 4), (2, 3, 2)])
def test_distances_are_euclidean(grid: tuple[int, ...]) -> None:
    places = list(product(*map(range, grid)))
    assert distances(grid).tolist() == [[pytest.approx(math.dist(one, other)) for other in places] for one in places]


@pytest.mark.parametrize("grid", [(1,), (1, 1), (1, 1, 1)])
def test_a_single_place_is_the_first(grid: tuple[int, ...]) -> None:
    assert sincos(grid, 8).tolist() == [[0.0] * 4 + [1.0] * 4]


def test_sincos_1d_is_the_formula() -> None:
    table = sincos((11,), 8)
    for place in range(11):
        for i in range(4):
            angle = place / 10000 ** (i / 4)
            assert table[place, i] == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[place, 4 + i] == pytest.approx(math.cos(angle), abs=1e-6)


@pytest.mark.parametrize(
    ("make", "width"),
    [(lambda d: sincos((4,), d), 7), (lambda d: sincos((2, 2), d), 6), (lambda d: sincos((2, 3, 2), d), 8)],
)
def test_sincos_refuses_a_width_it_cannot_split(make, width) -> None:
    with pytest.raises(SitusError, match=f"dim={width}"):
        make(width)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple))
def test_grids_of_any_length(grid: tuple[int, ...]) -> None:
    """Places count as nested loops do; each side's share of the sin-cos table is the table of that side alone."""
    places = list(product(*(range(side) for side in grid)))
    assert [tuple(place) for place in coordinates(grid).tolist()] == places
    width = 4
    long = (
        [side > 1 for side in grid] if max(grid) > 1 else [True] + [False] * (len(grid) - 1)
    )  # the others tell nothing
    table = sincos(grid, width * sum(long))
    index = relative_index(grid)
    offsets: dict[int, tuple[int, ...]] = {}
    for n, place in enumerate(places):
        shares = [sincos((side,), width)[at] for at, side, told in zip(place, grid, long, strict=True) if told]
        assert torch.equal(table[n], torch.cat(shares[::-1]))
        for m, other in enumerate(places):
            offset = tuple(a - b for a, b in zip(place, other, strict=True))
            assert offsets.setdefault(int(index[n, m]), offset) == offset
    assert len(set(offsets.values())) == len(offsets) == math.prod(2 * side - 1 for side in grid)
    assert 0 <= min(offsets) <= max(offsets) < len(offsets)


def test_a_sequence_is_resampled_as_one_row() -> None:
    table = torch.randn(6, 4)
    assert torch.equal(resample_table(table, (6,), (9,)), resample_table(table, (1, 6), (1, 9)))
    with pytest.raises(SitusError, match="at most 2"):
        resample_table(table, (1, 2, 3), (1, 2, 4))


def slow_targets(grid: tuple[int, ...], sigma: float, squared: bool) -> list[list[float]]:
    """SPEC's w(i, j), by loops and the standard library."""
    places = list(product(*(range(side) for side in grid)))
    rows = []
    for here in places:
        line = []
        for there in places:
            d2 = sum((a - b) ** 2 for a, b in zip(here, there, strict=True))
            line.append(math.exp(-(d2 if squared else math.sqrt(d2)) / sigma**2))
        rows.append([w / sum(line) for w in line])
    return rows


@pytest.mark.parametrize("grid", [(7, 11), (4, 4), (1, 6), (9,), (98,), (98, 1), (2, 3, 4)])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("squared", [False, True])
def test_smoothed_targets_match_a_slow_reference(grid, sigma, squared) -> None:
    ours = smoothed_targets(grid, sigma, squared=squared).double()
    reference = torch.tensor(slow_targets(grid, sigma, squared), dtype=torch.float64)
    assert torch.allclose(ours, reference, atol=1e-6)
    assert torch.allclose(ours.sum(1), torch.ones(len(ours), dtype=torch.float64), atol=1e-5)
    assert torch.equal(ours.argmax(1), torch.arange(len(ours)))


@pytest.mark.parametrize("sigma", [0.0, torch.tensor(0.0), 1e-9, 1e-3])
def test_zero_sigma_is_one_hot(sigma) -> None:
    assert torch.equal(smoothed_targets((3, 5), sigma), torch.eye(15))


def test_relative_index_is_timms() -> None:
    from timm.layers.pos_embed_rel import gen_relative_position_index

    assert torch.equal(relative_index((4, 6)), gen_relative_position_index((4, 6)))


def positions(n: int = 6, dim: int = 4, prefix: int = 1) -> Positions:
    torch.manual_seed(0)
    return Positions(
        table=torch.randn(n, dim, dtype=torch.float64),
        rotary=torch.randn(2, 1, 3, n, 8, dtype=torch.float64),
        bias=PairBias(torch.randn(2, 3, n + prefix, n + prefix, dtype=torch.float64), prefix),
    )


@settings(max_examples=30)
@given(st.permutations(range(6)), st.permutations(range(6)), st.integers(1, 6))
def test_take_acts_alike_on_every_kind(first, second, count) -> None:
    """Taking twice is taking the composed index, per sample or shared, on table, rotary and bias."""
    a = torch.tensor([first, second])
    b = torch.tensor([second[:count], first[:count]]) if count < 6 else torch.tensor([second, first])
    b = b % 6
    twice = positions().take(a).take(b)
    once = positions().take(a.gather(1, b))
    assert torch.equal(twice.table, once.table)
    assert torch.equal(twice.rotary, once.rotary)
    assert torch.equal(twice.bias.layer(1), once.bias.layer(1))
    full = positions()
    for s in range(2):
        rows = a.gather(1, b)[s]
        assert torch.equal(twice.table[s], full.table[rows])
        assert torch.equal(twice.rotary[:, s], full.rotary[:, 0][:, :, rows])
        keep = torch.cat([torch.zeros(1, dtype=torch.long), rows + 1])
        assert torch.equal(twice.bias.layer(1)[s], full.bias.values[1][:, keep][:, :, keep])


def test_a_shared_index_equals_the_same_index_for_each_sample() -> None:
    index = torch.tensor([4, 0, 2])
    shared, each = positions().take(index), positions().take(index.expand(2, -1))
    assert torch.equal(shared.table.expand(2, -1, -1), each.table)
    assert torch.equal(shared.rotary.expand(-1, 2, -1, -1, -1), each.rotary)
    assert torch.equal(shared.bias.layer(0).expand(2, -1, -1, -1), each.bias.layer(0))


def test_forget_then_take_is_take_then_forget() -> None:
    where = torch.tensor([[1, 0, 0, 1, 0, 0], [0, 0, 1, 1, 1, 0]], dtype=torch.bool)
    index = torch.tensor([[3, 1, 0], [2, 5, 4]])
    unknown = torch.tensor([9.0, 8.0, 7.0, 6.0], dtype=torch.float64)
    a = positions().forget(where, unknown).take(index)
    b = positions().take(index).forget(where.gather(1, index), unknown)
    assert torch.equal(a.table, b.table)
    assert torch.equal(a.rotary, b.rotary)
    assert torch.equal(a.bias.layer(0), b.bias.layer(0))
    assert torch.equal(a.table[0, 0], unknown)
    assert torch.equal(a.rotary[:, 0, :, 0], torch.tensor([0.0] * 4 + [1.0] * 4).double().expand(2, 3, 8))
    assert (a.bias.layer(0)[0, :, 1] == 0).all() and (a.bias.layer(0)[0, :, :, 1] == 0).all()
    assert (a.bias.layer(0)[0, :, 2, 2] != 0).all()


@pytest.mark.parametrize("shared", [True, False])
def test_forgetting_twice_is_forgetting_both(shared: bool) -> None:
    first = torch.tensor([1, 0, 0, 1, 0, 0], dtype=torch.bool)
    second = torch.tensor([0, 0, 1, 1, 0, 0], dtype=torch.bool)
    if not shared:
        first, second = torch.stack([first, second]), torch.stack([second, first.roll(1)])
    unknown = torch.tensor([9.0, 8.0, 7.0, 6.0], dtype=torch.float64)
    twice = positions().forget(first, unknown).forget(second, unknown)
    once = positions().forget(first | second, unknown)
    assert torch.equal(twice.table, once.table)
    assert torch.equal(twice.rotary, once.rotary)
    assert torch.equal(twice.bias.layer(1), once.bias.layer(1))
    assert not torch.equal(once.bias.layer(1), positions().forget(second, unknown).bias.layer(1))
    # Also with a choice of tokens in between, in whose order the second says which.
    index = torch.tensor([3, 0, 5, 2])
    later = positions().forget(first, unknown).take(index).forget(second[..., index], unknown)
    whole = once.take(index)
    assert torch.equal(later.table, whole.table)
    assert torch.equal(later.rotary, whole.rotary)
    assert torch.equal(later.bias.layer(1), whole.bias.layer(1))


def test_forget_adds_the_vector_where_there_is_no_table() -> None:
    rotary_only = Positions(rotary=positions().rotary)
    where = torch.tensor([False, True, False, False, False, False])
    unknown = torch.ones(4, dtype=torch.float64)
    forgotten = rotary_only.forget(where, unknown)
    assert forgotten.kinds == ("table", "rotary")
    assert torch.equal(forgotten.table.abs().sum(-1) > 0, where)


def test_gradients_reach_the_table_and_the_unknown_vector() -> None:
    table = torch.zeros(6, 4, dtype=torch.float64, requires_grad=True)
    unknown = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    where = torch.tensor([[True, False, False, True, False, False]])
    Positions(table=table).take(torch.arange(6).expand(1, -1)).forget(where, unknown).table.sum().backward()
    assert torch.equal(table.grad, (~where[0])[:, None].expand(-1, 4).double())
    assert torch.equal(unknown.grad, torch.full((4,), 2.0, dtype=torch.float64))


def test_rigid_positions_refuse_take() -> None:
    with pytest.raises(SitusError, match="windows"):
        Positions(rigid="windows need the whole grid").take(torch.arange(2))


def test_resample_table_keeps_a_smooth_table() -> None:
    """A table that is linear in the row stays so in the middle of the grid."""
    rows = coordinates((8, 8))[:, :1].float().expand(-1, 3)
    larger = resample_table(rows, (8, 8), (16, 16)).view(16, 16, 3)
    expected = (torch.arange(16) + 0.5) / 2 - 0.5
    assert torch.allclose(larger[3:-3, 5, 0], expected[3:-3], atol=0.02)
    assert torch.equal(resample_table(rows, (8, 8), (8, 8)), rows)
    with pytest.raises(SitusError, match="64 rows"):
        resample_table(rows, (7, 8), (4, 4))
