from __future__ import annotations

import pytest
import torch
from torch import Tensor

from situs.core.jigsaw import draw_puzzle, jigsaw_images, move_patches, move_pixels, puzzle_noise_shape
from situs.core.random import uniform
from situs.errors import SitusError

GRID = (7, 11)


def noise(ratio: float, batch: int = 40) -> Tensor:
    return uniform(0, 0, torch.arange(batch), "test", puzzle_noise_shape(GRID, ratio))


def images(batch: int = 40) -> Tensor:
    return torch.rand(batch, 3, 14, 33, generator=torch.Generator().manual_seed(0))  # patches of 2x3


def patch(image: Tensor, place: int) -> Tensor:
    row, column = 2 * (place // 11), 3 * (place % 11)
    return image[:, row : row + 2, column : column + 3]


@pytest.mark.thin(2)
@pytest.mark.parametrize("ratio", [0.0, 0.15, 0.5, 1.0])
def test_masked_patches_change_places_among_themselves(ratio: float) -> None:
    before = images()
    after, mask, index = jigsaw_images(before, GRID, ratio, noise(ratio))
    assert mask.sum(1).tolist() == [int(ratio * 77)] * 40
    for b in range(40):
        inside = mask[b].nonzero().flatten().tolist()
        assert sorted(index[b, inside].tolist()) == inside
        for place in range(77):
            assert torch.equal(patch(after[b], place), patch(before[b], int(index[b, place])))
            if place not in inside:
                assert torch.equal(patch(after[b], place), patch(before[b], place))
    if ratio > 0.1:
        assert len({tuple(row) for row in index.tolist()}) == 40  # each sample has its own


def test_one_row_of_noise_serves_the_batch() -> None:
    after, mask, index = jigsaw_images(images(), GRID, 0.4, noise(0.4, 1))
    alone = [jigsaw_images(images()[b : b + 1], GRID, 0.4, noise(0.4, 1)) for b in (0, 39)]
    assert torch.equal(after[[0, 39]], torch.cat([each[0] for each in alone]))
    assert (mask == mask[0]).all() and (index == index[0]).all() and mask.shape == index.shape == (40, 77)


def test_moved_pixels_stay_in_their_patch() -> None:
    before = images(2)
    order = torch.stack([torch.randperm(6), torch.randperm(6)])
    after = move_pixels(before, GRID, order)
    for b in range(2):
        for place in range(77):
            flat = patch(before[b], place).flatten(1)
            assert torch.equal(patch(after[b], place).flatten(1), flat[:, order[b]])


def test_moves_are_undone_by_their_inverse() -> None:
    index = torch.randperm(77)
    assert torch.equal(move_patches(move_patches(images(2), GRID, index), GRID, index.argsort()), images(2))


def test_mistakes_are_sentences() -> None:
    with pytest.raises(SitusError, match=r"block_mask: noise has shape \(40, 0\)"):
        draw_puzzle(torch.rand(40, 3), GRID, 0.5)
    with pytest.raises(SitusError, match="images of 14x32 pixels cannot be cut into a grid of 7x11"):
        move_patches(torch.rand(1, 3, 14, 32), GRID, torch.arange(77))
