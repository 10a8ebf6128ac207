"""Patches against explicit loops, against a convolution's embedding, and back again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from situs.core.tokens import grid_of, mask_of, pair, patchify, take, unpatchify
from situs.errors import SitusError

small = st.integers(1, 4)


def images_of(batch: int, channels: int, grid: tuple[int, int], patch: tuple[int, int]) -> Tensor:
    """Every value differs from every other, so that no wrong layout goes unseen."""
    shape = (batch, channels, grid[0] * patch[0], grid[1] * patch[1])
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


@given(small, small, st.tuples(small, small), st.tuples(small, small))
def test_patches_hold_row_column_channel_place_by_place(
    batch: int, channels: int, grid: tuple[int, int], patch: tuple[int, int]
):
    images = images_of(batch, channels, grid, patch)
    patches = patchify(images, patch)
    assert patches.shape == (batch, grid[0] * grid[1], patch[0] * patch[1] * channels)
    for place in range(grid[0] * grid[1]):
        row, column = divmod(place, grid[1])
        expected = [
            images[:, c, row * patch[0] + y, column * patch[1] + x]
            for y in range(patch[0])
            for x in range(patch[1])
            for c in range(channels)
        ]
        assert torch.equal(patches[:, place], torch.stack(expected, dim=1))


@given(small, small, st.tuples(small, small), st.tuples(small, small))
def test_unpatchify_undoes_patchify_and_the_other_way_round(
    batch: int, channels: int, grid: tuple[int, int], patch: tuple[int, int]
):
    images = images_of(batch, channels, grid, patch)
    patches = patchify(images, patch)
    assert torch.equal(unpatchify(patches, grid, patch), images)
    assert torch.equal(patchify(unpatchify(patches, grid, patch), patch), patches)


@pytest.mark.parametrize("tail", [(), (2,), (2, 3)])
@pytest.mark.parametrize("shared", [True, False])
def test_take_is_the_loop(tail: tuple[int, ...], shared: bool):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(4, 7, *tail, generator=generator)
    index = torch.randint(0, 7, (3,) if shared else (4, 3), generator=generator)
    taken = take(tokens, index)
    assert taken.shape == (4, 3, *tail)
    for b in range(4):
        for k in range(3):
            assert torch.equal(taken[b, k], tokens[b, int(index[k] if shared else index[b, k])])


def test_take_from_one_row_for_every_sample():
    table, index = torch.randn(1, 7, 2), torch.randint(0, 7, (4, 3))
    assert torch.equal(take(table, index), take(table.expand(4, 7, 2), index))


def test_gradients_reach_the_tokens_taken_as_often_as_they_were_taken():
    tokens = torch.zeros(2, 4, 1, dtype=torch.float64, requires_grad=True)
    take(tokens, torch.tensor([[0, 0, 3], [1, 2, 3]])).sum().backward()
    assert tokens.grad is not None
    assert tokens.grad.flatten(1).tolist() == [[2, 0, 0, 1], [0, 1, 1, 1]]


@given(st.lists(st.permutations(range(6)), min_size=1, max_size=4), st.integers(0, 6))
def test_a_mask_is_true_where_the_index_points(rows: list[list[int]], count: int):
    index = torch.tensor([row[:count] for row in rows], dtype=torch.int64).view(len(rows), count)
    mask = mask_of(index, 6)
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[place in row[:count] for place in range(6)] for row in rows]
    assert torch.equal(mask_of(index[0], 6), mask[0])


def test_sizes_and_grids():
    assert pair(4) == (4, 4)
    assert pair((4, 8)) == (4, 8)
    assert grid_of(224, 16) == (14, 14)
    assert grid_of((160, 224), (16, 32)) == (10, 7)


def test_what_does_not_divide_is_refused_in_a_sentence():
    with pytest.raises(SitusError, match=r"img_size=30x32: must be a multiple of the patch size 4x4$") as told:
        grid_of((30, 32), 4)
    assert told.value.fields == ("img_size", "patch_size")
    for size in (0, -4, (4, 0)):
        with pytest.raises(SitusError, match=r"img_size=32x32: must be a multiple of the patch size"):
            grid_of(32, size)
    with pytest.raises(SitusError, match="img_size=8x9: must be a multiple"):
        patchify(torch.zeros(1, 3, 8, 9), 4)
    with pytest.raises(SitusError, match="grid of 2x2"):
        unpatchify(torch.zeros(1, 5, 12), (2, 2), 2)
    with pytest.raises(SitusError, match="2x2 pixels"):
        unpatchify(torch.zeros(1, 4, 13), (2, 2), 2)
