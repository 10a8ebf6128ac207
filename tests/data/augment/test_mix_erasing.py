from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from situs.core.random import uniform
from situs.data.augment import mix as erasing

AREA = (0.02, 1 / 3)


def erased(count: int, probability: float = 1.0, size: tuple[int, int] = (32, 40), table: bool = False) -> torch.Tensor:
    noise = uniform(0, 0, torch.arange(count), "x", (erasing.ERASE_NOISE,))
    images = torch.full((count, 3, *size), 9.0)
    numbers = erasing.normal_table(images.device) if table else torch.zeros(1)
    return erasing.erase(images, noise, probability, numbers)


def test_what_is_erased_is_one_rectangle_in_all_channels():
    gone = erased(500) == 0
    assert torch.equal(gone[:, 0], gone[:, 1])
    mask = gone[:, 0].float()
    rows, columns = mask.amax(2), mask.amax(1)
    assert torch.equal(mask, rows[:, :, None] * columns[:, None, :])
    for line in (rows, columns):  # the erased lines are next to each other
        assert (line.diff(dim=1).abs().sum(1) <= 2).all()
    aspect = rows.sum(1) / columns.sum(1)
    assert (aspect > 0.2).all()
    assert (aspect < 5.0).all()


def test_the_share_of_images_and_of_area():
    some = (erased(4000, 0.25) == 0).any(dim=3).any(dim=2).any(dim=1).float().mean()
    assert abs(float(some) - 0.25) < 0.03
    area = (erased(4000) == 0)[:, 0].float().mean((1, 2))
    assert AREA[0] * 0.7 < float(area.min())
    assert float(area.max()) < AREA[1] * 1.1
    # Uniform in AREA, but for boxes too long for the image, which are drawn again.
    assert stats.kstest(area.numpy(), stats.uniform(AREA[0], AREA[1] - AREA[0]).cdf).statistic < 0.08
    assert torch.equal(erased(5, 0.0), torch.full((5, 3, 32, 40), 9.0))


def test_the_noise_is_normal_and_each_samples_own():
    images = erased(200, table=True)
    values = images[images != 9.0]
    assert stats.kstest(values[:20000].numpy(), "norm").pvalue > 1e-3
    first, second = images[0][images[0] != 9.0], images[1][images[1] != 9.0]
    assert not torch.equal(first[:50], second[:50])
    assert torch.equal(erased(3, table=True), images[:3])


def slowly(noise: list[float], probability: float, height: int, width: int) -> tuple[int, int, int, int]:
    """Top, left, height and width of what is erased of one image; zeros where nothing is."""
    for area, ratio in zip(noise[1:11], noise[11:21], strict=True):
        pixels = (0.02 + area * (1 / 3 - 0.02)) * height * width
        aspect = 0.3 ** (1 - 2 * ratio)
        high, wide = round(math.sqrt(pixels * aspect)), round(math.sqrt(pixels / aspect))
        if high < height and wide < width:
            place = int(noise[21] * (height - high + 1)), int(noise[22] * (width - wide + 1))
            return (*place, high, wide) if noise[0] < probability else (0, 0, 0, 0)
    return 0, 0, 0, 0


@pytest.mark.parametrize("size", [(3, 9), (9, 3), (2, 2), (8, 6)])
def test_the_first_of_ten_boxes_smaller_than_the_image_is_erased(size):
    """In small images most boxes are as long as a side."""
    noise = uniform(1, 0, torch.arange(300), "x", (erasing.ERASE_NOISE,)).double()
    table, images = torch.arange(50.0, 101.0), torch.zeros(300, 2, *size)
    found = erasing.erase(images, noise, 0.9, table)
    for row, numbers in zip(found, noise.tolist(), strict=True):
        top, left, high, wide = slowly(numbers, 0.9, *size)
        values = table[(int(numbers[23] * 51) + torch.arange(2 * math.prod(size))) % 51].view(2, *size)
        wanted = torch.zeros(2, *size)
        wanted[:, top : top + high, left : left + wide] = values[:, top : top + high, left : left + wide]
        assert torch.equal(row, wanted)
