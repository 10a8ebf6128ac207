"""The jigsaw of hidden patches: exact on ramps, far above chance on photographs, held to all orders of a small one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import small_vit
from hypothesis import given
from hypothesis import strategies as st

from situs.audit.attacks.ordering import (
    PatchCosts,
    _gains,
    _links,
    _swapped,
    border_costs,
    make_puzzle,
    order_hidden,
    predicted_costs,
    solve_puzzle,
    total_cost,
)
from situs.core.jigsaw import draw_puzzle, puzzle_noise_shape
from situs.core.random import uniform
from situs.core.tokens import patchify
from situs.data.sources.samples import load_samples
from situs.methods.mp3 import MP3, MP3Config

PHOTOGRAPHS = Path(__file__).parents[5] / "shared" / "data" / "imagenet-samples"


def shuffled(images: torch.Tensor, grid: tuple[int, int], size: tuple[int, int], ratio: float) -> Any:
    """(true patches, shuffled patches, mask) of each image."""
    noise = uniform(0, 0, torch.arange(len(images)), "test", puzzle_noise_shape(grid, ratio))
    mask, index = draw_puzzle(noise, grid, ratio)
    patches = patchify(images.double(), size)
    return [(p, p[i], m) for p, i, m in zip(patches, index, mask, strict=True)]


def right(found: torch.Tensor, real: torch.Tensor, mask: torch.Tensor) -> float:
    return float(((found - real)[mask].abs().amax(dim=1) < 1e-9).double().mean())


@pytest.mark.slow
@given(st.integers(0, 200), st.floats(0.1, 0.9))
def test_a_ramp_is_put_together_exactly(seed: int, ratio: float) -> None:
    """A plane of grey with any slope and a bend: every border but the right one breaks it."""
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(24.0), indexing="ij")
    chance = torch.Generator().manual_seed(seed)
    a, b, c = (0.5 + torch.rand(3, generator=chance)).tolist()
    image = torch.stack([a * x + 37 * b * y, -b * x + 11 * y + 0.01 * x * y, c * x * 5 - y])
    [(real, mixed, mask)] = shuffled(image.unsqueeze(0), (4, 6), (4, 4), ratio)
    assert right(order_hidden(mixed, mask, (4, 6), (4, 4)), real, mask) == 1.0


def test_costs_by_hand() -> None:
    """Two patches of 2 x 2 grey pixels: steps 1 inside, 1 across: expected, so that only the step itself costs."""
    one = torch.tensor([[0.0, 1.0, 0.0, 1.0]], dtype=torch.float64)
    two = torch.tensor([[2.0, 3.0, 2.0, 3.0]], dtype=torch.float64)
    assert float(border_costs(one, two, (2, 2), "right")) == 1.0
    assert float(border_costs(two, one, (2, 2), "left")) == 1.0
    assert float(border_costs(two, one, (2, 2), "right")) == 4 + 3  # from 3 down to 0, where 1 up was expected
    assert float(border_costs(one, two, (2, 2), "below")) == 2 + 2


def test_sides_agree_with_a_cut_image() -> None:
    """The cost of two neighbours is the same from both sides, and for rows and columns of the turned image."""
    image = torch.randn(1, 3, 8, 12, dtype=torch.float64)
    patches = patchify(image, (4, 6))[0]  # 2 x 2
    turned = patchify(image.transpose(2, 3), (6, 4))[0]
    a, b = patches[:1], patches[1:2]
    torch.testing.assert_close(border_costs(a, b, (4, 6), "right"), border_costs(b, a, (4, 6), "left"))
    torch.testing.assert_close(
        border_costs(a, b, (4, 6), "right"), border_costs(turned[:1], turned[2:3], (6, 4), "below")
    )


@pytest.mark.slow
@given(st.integers(0, 500))
def test_the_best_order_of_few_is_found(seed: int) -> None:
    """Against all 120 orders of a 2 x 3 block that lacks a corner, random costs: no structure to lean on."""
    chance = torch.Generator().manual_seed(seed)
    alone, beside_cost, under_cost = torch.rand(3, 5, 5, generator=chance, dtype=torch.float64)
    beside, under = torch.tensor([[0, 1], [1, 2], [3, 4]]), torch.tensor([[0, 3], [1, 4]])
    puzzle = PatchCosts(alone, beside_cost, under_cost, beside, under)
    every = [total_cost(puzzle, torch.tensor(order)) for order in itertools.permutations(range(5))]
    found = solve_puzzle(puzzle)
    assert sorted(found.tolist()) == [0, 1, 2, 3, 4]
    rank = sum(cost < total_cost(puzzle, found) - 1e-9 for cost in every)
    assert rank <= 3  # a search, not a proof: among the best 4 of 120
    for a, b in itertools.combinations(range(5), 2):  # and no exchange is left that helps
        assert total_cost(puzzle, _swapped(found, a, b)) >= total_cost(puzzle, found) - 1e-9


def random_puzzle(count: int, seed: int, pairs: bool = True) -> PatchCosts:
    """Costs without any symmetry."""
    chance = torch.Generator().manual_seed(seed)
    alone, right_cost, below_cost = torch.rand(3, count, count, generator=chance, dtype=torch.float64)
    beside, under = torch.tensor([[0, 1], [1, 2], [3, 4]]), torch.tensor([[0, 3], [1, 4]])
    none = torch.zeros(0, 2, dtype=torch.int64)
    return PatchCosts(alone, right_cost, below_cost, beside if pairs else none, under if pairs else none)


@given(st.integers(0, 200))
def test_links_count_every_pair_once_from_either_end(seed: int) -> None:
    """From each place its neighbours' tables, read with its own patch first, add up to the cost of all pairs twice."""
    puzzle = random_puzzle(5, seed)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    pairs = total_cost(puzzle, order) - total_cost(puzzle._replace(alone=torch.zeros(5, 5)), order)
    both = 0.0
    for place, neighbours in enumerate(_links(puzzle)):
        both += sum(float(table[order[place], order[other]]) for other, table in neighbours)
    alone = float(puzzle.alone[order, torch.arange(5)].sum())
    assert pairs == pytest.approx(alone)
    assert both == pytest.approx(2 * (total_cost(puzzle, order) - alone))
    assert [len(neighbours) for neighbours in _links(puzzle)] == [2, 3, 1, 2, 2]


@given(st.integers(0, 200))
def test_gains_are_what_exchanges_save(seed: int) -> None:
    puzzle = random_puzzle(6, seed, pairs=False)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    gains = _gains(puzzle.alone, order)
    for a, b in itertools.product(range(6), repeat=2):
        saved = total_cost(puzzle, order) - total_cost(puzzle, _swapped(order, a, b))
        assert a == b or float(gains[a, b]) == pytest.approx(saved)


@given(st.integers(0, 100))
def test_where_no_hidden_place_has_a_hidden_neighbour_the_order_is_the_best_of_all(seed: int) -> None:
    puzzle = random_puzzle(5, seed, pairs=False)
    best = min(total_cost(puzzle, torch.tensor(order)) for order in itertools.permutations(range(5)))
    assert total_cost(puzzle, solve_puzzle(puzzle, restarts=1)) == pytest.approx(best)


def test_total_cost_by_hand() -> None:
    puzzle = PatchCosts(
        torch.tensor([[1.0, 2.0], [4.0, 8.0]]),
        torch.tensor([[0.0, 16.0], [32.0, 0.0]]),
        torch.zeros(2, 2),
        torch.tensor([[0, 1]]),
        torch.zeros(0, 2, dtype=torch.int64),
    )
    assert total_cost(puzzle, torch.tensor([0, 1])) == 1 + 8 + 16
    assert total_cost(puzzle, torch.tensor([1, 0])) == 4 + 2 + 32
    assert solve_puzzle(puzzle).tolist() == [0, 1]


@pytest.mark.parametrize("hidden", [range(5, 6), [0, 1, 6, 11], range(3, 12), range(12)])
def test_the_cost_of_an_order_is_that_of_all_borders_of_hidden_patches(hidden: Any) -> None:
    """In units of the mean border of two known patches, where there are any."""
    chance, size, grid = torch.Generator().manual_seed(len(hidden)), (2, 3), (3, 4)
    patches, mask = torch.randn(12, 12, generator=chance).double(), torch.zeros(12, dtype=torch.bool)
    mask[list(hidden)] = True
    places = mask.nonzero()[:, 0]
    pairs = [(p, p + 1, "right") for p in range(12) if p % 4 < 3] + [(p, p + 4, "below") for p in range(8)]

    def cost(of: torch.Tensor, a: int, b: int, side: str) -> float:
        return float(border_costs(of[a : a + 1], of[b : b + 1], size, side))

    known = [cost(patches, *pair) for pair in pairs if not mask[pair[0]] and not mask[pair[1]]]
    puzzle, unit = make_puzzle(patches, mask, grid, size), sum(known) / len(known) if known else 1.0
    for _ in range(3):
        order, whole = torch.randperm(len(places), generator=chance), patches.clone()
        whole[places] = patches[places][order]
        costs = [cost(whole, *pair) for pair in pairs if mask[pair[0]] or mask[pair[1]]]
        assert total_cost(puzzle, order) * unit == pytest.approx(sum(costs))


def test_known_patches_never_move() -> None:
    images = load_samples("test").images[:4].double() / 255
    for real, mixed, mask in shuffled(images, (4, 4), (7, 7), 0.5):
        found = order_hidden(mixed, mask, (4, 4), (7, 7))
        assert torch.equal(found[~mask], real[~mask])
        both = (torch.sort(part[mask].sum(dim=1)).values for part in (found, real))
        torch.testing.assert_close(*both)


@pytest.mark.shared_data
@pytest.mark.parametrize(("ratio", "least"), [(0.15, 0.8), pytest.param(0.27, 0.8, marks=pytest.mark.slow)])
def test_photographs_are_put_together_far_better_than_by_chance(ratio: float, least: float) -> None:
    if not PHOTOGRAPHS.is_dir():
        pytest.skip("no photographs here")
    import numpy as np
    from PIL import Image

    images = []
    for path in sorted(PHOTOGRAPHS.iterdir())[:3]:
        picture = Image.open(path).convert("RGB").resize((224, 224))
        images.append(torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255)
    cases = shuffled(torch.stack(images), (14, 14), (16, 16), ratio)
    found = [right(order_hidden(mixed, mask, (14, 14), (16, 16)), real, mask) for real, mixed, mask in cases]
    chance = [right(mixed, real, mask) for real, mixed, mask in cases]
    assert sum(chance) / len(chance) < 0.15
    assert sum(found) / len(found) > least


def test_a_predictor_decides_where_borders_say_nothing() -> None:
    """Patches of one grey each, on noise: an MP3 whose head reads the grey puts them in order; borders cannot."""
    torch.manual_seed(0)
    grid, size = (4, 4), (4, 4)
    grey = torch.arange(16, dtype=torch.float64) / 15
    backbone = small_vit(depth=1, width=32, in_chans=1)
    predictor = MP3(backbone, MP3Config()).eval()

    class ReadsGrey(torch.nn.Module):
        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return features

    real = grey[torch.randperm(16)].unsqueeze(-1).expand(-1, 16).contiguous()
    mask = torch.zeros(16, dtype=torch.bool)
    mask[[5, 6, 9, 10]] = True
    mixed = real.clone()
    mixed[mask] = real[mask].flip(0)
    place_of = {round(float(value), 6): place for place, value in enumerate(real[:, 0])}

    def encode(tokens: torch.Tensor, places: object, context: object = None, mask: object = None) -> Any:
        del places, context, mask
        greys = mixed[:, 0]
        logits = torch.zeros(1, 16, 16)
        for index, value in enumerate(greys):
            logits[0, index, place_of[round(float(value), 6)]] = 200.0
        return type("Features", (), {"patches": logits + 0 * tokens.sum()})()

    predictor.position_head = ReadsGrey()  # type: ignore[assignment]
    backbone.encode = encode  # type: ignore[method-assign]
    costs = predicted_costs(predictor, mixed, mask, size)
    assert costs.shape == (4, 4)
    assert costs.argmin(dim=1).tolist() == [3, 2, 1, 0]
    found = order_hidden(mixed, mask, grid, size, predictor=predictor)
    assert right(found, real, mask) == 1.0
    assert right(order_hidden(mixed, mask, grid, size), real, mask) < 1.0


def test_a_real_mp3_gives_log_probabilities() -> None:
    torch.manual_seed(0)
    backbone = small_vit(depth=1, width=32, in_chans=3).eval()
    predictor = MP3(backbone, MP3Config()).eval()
    patches = torch.randn(16, 48, dtype=torch.float64)
    everywhere = torch.ones(16, dtype=torch.bool)
    costs = predicted_costs(predictor, patches, everywhere, (4, 4))
    torch.testing.assert_close((-costs).exp().sum(dim=1), torch.ones(16, dtype=torch.float64))
    order = torch.randperm(16)
    again = predicted_costs(predictor, patches[order], everywhere, (4, 4))
    torch.testing.assert_close(again, costs[order], atol=1e-4, rtol=1e-4)


def test_a_puzzle_with_no_known_neighbours_still_has_an_answer() -> None:
    patches = torch.randn(4, 12, dtype=torch.float64)
    found = order_hidden(patches, torch.ones(4, dtype=torch.bool), (2, 2), (2, 2))
    assert sorted(found[:, 0].tolist()) == sorted(patches[:, 0].tolist())
    puzzle = make_puzzle(patches, torch.ones(4, dtype=torch.bool), (2, 2), (2, 2))
    assert not puzzle.alone.any()
    assert puzzle.beside.tolist() == [[0, 1], [2, 3]]
    assert puzzle.under.tolist() == [[0, 2], [1, 3]]
