"""Samplers against slow Python that reads the same noise, against counts and against known statistics."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from scipy import stats
from torch import Tensor

from situs.core import masking
from situs.core.kernels import when
from situs.core.masking import (
    BlockRule,
    block_mask,
    block_noise_shape,
    count_of,
    draw_block_mask,
    jigsaw,
    one_of_cells,
)
from situs.core.permutation import is_permutation, random_permutation
from situs.core.random import uniform
from situs.core.tokens import mask_of
from situs.errors import SitusError

GRIDS = [(14, 14), (8, 8), (7, 11), (11, 7), (2, 2), (1, 9), (9, 1), (1, 1), (3, 20)]
RATIOS = [0.0, 0.03, 0.15, 0.27, 0.5, 0.75, 0.97, 1.0]


def noise_for(batch: int, *shape: int, seed: int = 0, stream: str = "test") -> Tensor:
    return uniform(seed, 0, torch.arange(batch), stream, shape)


def masks(batch: int, grid: tuple[int, int], ratio: float, rule: BlockRule, seed: int = 0) -> Tensor:
    return block_mask(noise_for(batch, *block_noise_shape(grid, ratio, rule=rule), seed=seed), grid, ratio, rule=rule)


# Random subsets


def test_of_equal_noise_the_first_places_come_first_in_every_draw():
    """Noise of 24 bits meets itself now and then, and the draw must be the same on every device; long rows, for short
    ones are sorted in order by any algorithm."""
    noise = (noise_for(4, 256) * 4).floor() / 4
    orders = [sorted(range(256), key=lambda i, row=row: float(row[i])) for row in noise]
    assert random_permutation(noise).tolist() == orders
    assert jigsaw(torch.ones(4, 256, dtype=torch.bool), noise).tolist() == orders
    filled = torch.cat([noise_for(4, block_noise_shape((1, 256), 0.5)[0] - 256), noise], dim=1)
    # One row is filled at random.
    assert mask_of(random_permutation(noise)[:, :128], 256).equal(block_mask(filled, (1, 256), 0.5))
    cells = [[32 * row + column + at for at in (0, 1, 16, 17)] for row in range(8) for column in range(0, 16, 2)]
    for found, row in zip(one_of_cells(noise, (16, 16)).tolist(), noise.tolist(), strict=True):
        picked = [min(cell, key=row.__getitem__) for cell in cells]
        assert found == sorted(picked, key=row.__getitem__)


def test_counts_are_those_a_person_reckons():
    for n in (100, 196, 64, 77, 1000, 4096):
        for percent in range(101):
            assert count_of(percent / 100, n) == percent * n // 100
    assert count_of(float(torch.tensor(0.29)), 100) == 29
    assert count_of(0.2899, 100) == 28


def test_every_place_is_kept_equally_often_and_so_is_every_pair():
    n, draws = 8, 20_000
    kept = mask_of(random_permutation(noise_for(draws, n))[:, :4], n).double()
    assert (kept.sum(1) == 4).all()
    # With 4 of 8 kept, a place is kept with chance 1/2 and a pair with chance 3/14.
    assert stats.chisquare(kept.sum(0).numpy(), [draws / 2] * n).pvalue > 1e-3
    pairs = (kept.T @ kept)[torch.triu_indices(n, n, 1).unbind()]
    spread = math.sqrt(draws * 3 / 14 * 11 / 14)
    assert (pairs - draws * 3 / 14).abs().max() < 4.5 * spread


# Jigsaw


def test_jigsaw_moves_only_the_masked_and_is_a_permutation():
    mask = masks(64, (7, 11), 0.5, "paper")
    index = jigsaw(mask, noise_for(64, 77, stream="shuffle"))
    here = torch.arange(77).expand_as(index)
    assert is_permutation(index).all()
    assert torch.equal(index[~mask], here[~mask])
    assert (index[mask] != here[mask]).float().mean() > 0.9


def test_jigsaw_is_the_loop_that_deals_shuffled_places_to_masked_ones():
    mask, noise = noise_for(20, 30) < 0.4, noise_for(20, 30, stream="shuffle")
    index = jigsaw(mask, noise)
    for b in range(20):
        places = [i for i in range(30) if mask[b, i]]
        dealt = iter(sorted(places, key=lambda i, row=noise[b]: float(row[i])))
        assert index[b].tolist() == [next(dealt) if mask[b, i] else i for i in range(30)]
    assert torch.equal(jigsaw(mask[3], noise[3]), index[3])


def test_all_orders_of_the_masked_places_are_equally_likely():
    draws = 12_000
    mask = torch.tensor([True, False, True, True, False, True]).expand(draws, 6)
    index = jigsaw(mask, noise_for(draws, 6))[:, [0, 2, 3, 5]]
    _, counts = index.unique(dim=0, return_counts=True)
    assert len(counts) == 24
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_jigsaw_refuses_what_does_not_fit():
    with pytest.raises(SitusError, match=r"torch\.float32"):
        jigsaw(torch.ones(2, 3), torch.rand(2, 3))
    with pytest.raises(SitusError, match=r"\(2, 4\)"):
        jigsaw(torch.ones(2, 3).bool(), torch.rand(2, 4))


# Block masks


def slow_block_mask(noise: list[float], grid: tuple[int, int], ratio: float, rule: BlockRule) -> list[bool]:
    """One sample at a time, one attempt after the other, one cell after the other, with Python's own floats."""
    height, width = grid
    target = math.floor(round(ratio * height * width, 6))
    covered: set[int] = set()
    rest = noise[len(noise) - height * width :] if rule == "paper" else []
    numbers = noise[: len(noise) - len(rest)]
    for start in range(0, len(numbers), 40):
        wanted = target - len(covered)
        if wanted == 0:
            break
        new: list[int] = []
        for attempt in range(10):
            area_u, aspect_u, top_u, left_u = (numbers[start + 10 * kind + attempt] for kind in range(4))
            low, high = (8, min(wanted, 75)) if rule == "official" else (min(8, wanted), wanted)
            area = low + (high - low) * area_u
            aspect = math.exp(math.log(0.3) + (math.log(1 / 0.3) - math.log(0.3)) * aspect_u)
            h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if h >= height or w >= width:
                continue
            top, left = math.floor(top_u * (height - h + 1)), math.floor(left_u * (width - w + 1))
            cells = [y * width + x for y in range(top, top + h) for x in range(left, left + w)]
            new = [cell for cell in cells if cell not in covered]
            if rule == "official" and len(new) > high:
                new = []
            if new:
                break
        if not new and rule == "official":
            break
        covered.update(new[:wanted])
    if rule == "paper":
        free = sorted((cell for cell in range(height * width) if cell not in covered), key=lambda cell: rest[cell])
        covered.update(free[: target - len(covered)])
    return [cell in covered for cell in range(height * width)]


@pytest.mark.parametrize("rule", ["paper", "official"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_masks_are_those_of_the_slow_reference(grid: tuple[int, int], rule: BlockRule):
    for ratio in RATIOS:
        noise = noise_for(24, *block_noise_shape(grid, ratio, rule=rule), seed=int(100 * ratio))
        fast = block_mask(noise, grid, ratio, rule=rule)
        assert fast.dtype == torch.bool
        slow = [slow_block_mask(row, grid, ratio, rule) for row in noise.double().tolist()]
        assert fast.tolist() == slow, f"ratio {ratio}"


@pytest.mark.parametrize("grid", [(14, 14), (8, 8), (7, 11)], ids=str)
def test_paper_masks_hit_the_count_for_every_ratio(grid: tuple[int, int]):
    n = grid[0] * grid[1]
    for percent in range(0, 101, 4):
        mask = masks(16, grid, percent / 100, "paper", seed=percent)
        assert mask.shape == (16, n)
        assert (mask.sum(1) == percent * n // 100).all()


# gamma: (target, mean of 5,000 simulated masks, share of empty masks), SPEC section 1.
OFFICIAL = {
    0.03: (5, 3.79, 0.16),
    0.27: (52, 51.8, 0.0),
    1.0: (196, 181.7, 0.0),
}


@pytest.mark.parametrize("ratio", OFFICIAL)
def test_official_masks_have_the_published_statistics(ratio: float):
    target, mean, empty = OFFICIAL[ratio]
    draws = 2_000
    counts = masks(draws, (14, 14), ratio, "official", seed=1).sum(1).double()
    assert counts.max() <= target
    # Both means are simulated, that of SPEC with 5,000 draws, and it is rounded to the digits it has.
    digits = 0.005 if ratio == 0.03 else 0.05
    assert abs(float(counts.mean()) - mean) < 4 * float(counts.std()) * math.sqrt(1 / draws + 1 / 5_000) + digits
    spread = math.sqrt(max(empty * (1 - empty), 1e-4) * (1 / draws + 1 / 5_000))
    assert abs(float((counts == 0).double().mean()) - empty) < 4 * spread + (0.005 if empty else 0.0)


@pytest.mark.parametrize(("grid", "ratio"), [((14, 14), 1.0), pytest.param((32, 32), 1.0, marks=pytest.mark.slow)])
def test_official_masks_end_before_the_rounds_do(grid: tuple[int, int], ratio: float):
    """The bound on rounds is no part of the published rule, so it must never be what ends a mask: with the last
    quarter of the rounds taken away nothing changes."""
    noise = noise_for(500, *block_noise_shape(grid, ratio, rule="official"))
    whole = block_mask(noise, grid, ratio, rule="official")
    rounds = noise.shape[1] // 40
    fewer = rounds * 3 // 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masking, "_rounds", lambda target, rule: fewer)
        assert torch.equal(block_mask(noise[:, : fewer * 40], grid, ratio, rule="official"), whole)


def test_a_sample_has_its_mask_whatever_batch_it_stands_in():
    shape = block_noise_shape((14, 14), 0.5)
    ids = torch.arange(40)
    whole = block_mask(uniform(3, 1, ids, "m", shape), (14, 14), 0.5)
    for some in (ids[7:8], ids.flip(0), ids[::3]):
        assert torch.equal(block_mask(uniform(3, 1, some, "m", shape), (14, 14), 0.5), whole[some])
    assert len(whole.unique(dim=0)) == 40


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["paper", "official"])
def test_the_compiled_sampler_gives_the_same_masks(rule: BlockRule):
    """Compiled there is no early exit: a full graph proves that no branch looks at a tensor."""
    torch.compiler.reset()
    grid, ratio = (2, 3), 0.5
    noise = noise_for(512, *block_noise_shape(grid, ratio, rule=rule))  # of the official rule few have a block
    compiled = torch.compile(block_mask, fullgraph=True, backend="eager")
    assert torch.equal(compiled(noise, grid, ratio, rule=rule), block_mask(noise, grid, ratio, rule=rule))


def test_subset_and_jigsaw_compile_in_one_graph():
    torch.compiler.reset()

    def both(noise: Tensor, more: Tensor) -> Tensor:
        return jigsaw(mask_of(random_permutation(noise)[:, :5], 9), more)

    noise, more = noise_for(4, 9), noise_for(4, 9, stream="more")
    assert torch.equal(torch.compile(both, fullgraph=True, backend="aot_eager")(noise, more), both(noise, more))


@pytest.mark.gpu
@pytest.mark.parametrize("triton", [True, False], ids=["kernel", "tensors"])
@pytest.mark.parametrize("rule", ["paper", "official"])
def test_masks_on_the_gpu_are_those_of_the_cpu_without_a_wait(
    rule: BlockRule, triton: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(when, "_can_run_triton", lambda: triton)
    for grid in GRIDS:
        for ratio in RATIOS:
            noise, n = noise_for(256, *block_noise_shape(grid, ratio, rule=rule)), grid[0] * grid[1]
            here, shuffle = block_mask(noise, grid, ratio, rule=rule), noise_for(256, n)
            there, shuffle_there = noise.cuda(), shuffle.cuda()
            block_mask(there, grid, ratio, rule=rule)  # the first call builds the kernel
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch calls its detector of waits a prototype
                torch.cuda.set_sync_debug_mode("error")
            try:
                mask = block_mask(there, grid, ratio, rule=rule)
                index = jigsaw(mask, shuffle_there)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert torch.equal(mask.cpu(), here)
            assert torch.equal(index.cpu(), jigsaw(here, shuffle))
            ids = torch.arange(256)
            drawn = draw_block_mask(3, 1, ids.cuda(), "mask", grid, ratio, rule=rule)
            assert torch.equal(drawn.cpu(), draw_block_mask(3, 1, ids, "mask", grid, ratio, rule=rule))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about torch's own code and about TF32
@pytest.mark.parametrize("rule", ["paper", "official"])
def test_the_compiler_for_the_gpu_gives_the_same_masks(rule: BlockRule):
    torch.compiler.reset()
    noise = noise_for(2000, *block_noise_shape((14, 14), 0.09, rule=rule))
    mask = torch.compile(block_mask, fullgraph=True)(noise.cuda(), (14, 14), 0.09, rule=rule)
    assert torch.equal(mask.cpu(), block_mask(noise, (14, 14), 0.09, rule=rule))


def test_block_masks_refuse_what_does_not_fit():
    with pytest.raises(SitusError, match=r"ratio=1.1: must be in \[0, 1\]"):
        block_noise_shape((4, 4), 1.1)
    with pytest.raises(SitusError, match="official, paper"):
        block_noise_shape((4, 4), 0.5, rule="nosuch")  # pyright: ignore[reportArgumentType]
    with pytest.raises(SitusError, match=r"grid=\(0, 4\)"):
        block_noise_shape((0, 4), 0.5)
    with pytest.raises(SitusError, match=r"must be \[B, \d+\]"):
        block_mask(torch.rand(2, 7), (4, 4), 0.5)


def test_one_of_cells_is_fair_and_takes_one_of_each() -> None:
    noise = uniform(0, 0, torch.arange(4000), "cells", (24,))
    places = one_of_cells(noise, (4, 6))
    cells = places // 6 // 2 * 3 + places % 6 // 2
    assert torch.equal(cells.sort(dim=1).values, torch.arange(6).expand(4000, -1))
    for share, expected in (
        (places.flatten().bincount(minlength=24) / 4000, 1 / 4),
        (cells[:, 0].bincount() / 4000, 1 / 6),
    ):
        assert torch.allclose(share, torch.full_like(share, expected), atol=0.04)
    with pytest.raises(SitusError, match="even numbers of rows"):
        one_of_cells(noise[:, :15], (3, 5))
