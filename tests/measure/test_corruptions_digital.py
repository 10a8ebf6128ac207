"""Contrast, elastic transform, pixelation and JPEG against NumPy, SciPy and Pillow."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from situs.measure.corruptions import (
    Draw,
    box_matrix,
    contrast,
    corrupt,
    elastic_transform,
    gaussian,
    jpeg_compression,
    pixelate,
)


def images(channels: int = 3, side: int = 32) -> torch.Tensor:
    raw = torch.rand(2, channels, side, side, generator=torch.Generator().manual_seed(0))
    return (raw * 255).round() / 255


def draw(name: str) -> Draw:
    return Draw(1, 3, torch.tensor([2, 8]), name)


def pillow(image: torch.Tensor) -> Image.Image:
    return Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())


def test_contrast_by_hand() -> None:
    image = torch.tensor([[[[0.0, 1.0], [0.5, 0.5]], [[0.2, 0.2], [0.2, 1.0]]]])
    found = contrast(image, draw("contrast"), 0.1)
    expected = torch.tensor([[[[0.45, 0.55], [0.5, 0.5]], [[0.38, 0.38], [0.38, 0.46]]]])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("size", "new"), [(32, 30), (32, 20), (28, 26), (28, 18), (224, 134), (224, 56), (30, 32), (7, 7)]
)
def test_box_matrix_is_pillows_box(size: int, new: int) -> None:
    line = torch.randint(0, 256, (1, size), generator=torch.Generator().manual_seed(size + new))
    resized = Image.fromarray(line.byte().numpy()).resize((new, 1), Image.Resampling.BOX)
    found = line.double() @ box_matrix(size, new).T
    assert np.abs(np.asarray(resized, dtype=float) - found.numpy()).max() <= 0.5 + 1e-6


@pytest.mark.parametrize("share", [0.95, 0.65, 0.5, 0.25])
def test_pixelate_is_pillows_shrinking_and_enlarging(share: float) -> None:
    clean = images()
    found = pixelate(clean, draw("pixelate"), share)
    small = int(32 * share)
    for sample in range(2):
        there = pillow(clean[sample]).resize((small, small), Image.Resampling.BOX)
        back = np.asarray(there.resize((32, 32), Image.Resampling.BOX), dtype=float)
        # Pillow rounds to whole levels after each of two passes.
        assert np.abs(back - 255 * found[sample].permute(1, 2, 0).numpy()).max() <= 1.01


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_jpeg_is_pillows(channels: int) -> None:
    clean = images(channels)
    found = jpeg_compression(clean, draw("jpeg_compression"), 25)
    assert found.shape == clean.shape
    for sample in range(2):
        parts = clean[sample].split(1) if channels == 2 else [clean[sample]]
        for part, result in zip(parts, found[sample].split(len(parts[0])), strict=True):
            file = io.BytesIO()
            shown = pillow(part) if len(part) == 3 else Image.fromarray((part[0] * 255).round().byte().numpy())
            shown.save(file, "JPEG", quality=25)
            with Image.open(file) as opened:
                slow = np.asarray(opened).reshape(32, 32, -1)
            np.testing.assert_array_equal((result * 255).round().permute(1, 2, 0).numpy(), slow)


def test_lower_quality_is_worse() -> None:
    clean = torch.nn.functional.avg_pool2d(images(side=96), 3)
    errors = [(corrupt(clean, "jpeg_compression", level, torch.arange(2)) - clean).abs().mean() for level in (1, 3, 5)]
    assert errors[0] < errors[1] < errors[2]


def test_an_elastic_transform_of_nothing_changes_nothing() -> None:
    clean = images()
    torch.testing.assert_close(elastic_transform(clean, draw("elastic_transform"), 0, 0, 0), clean)


def test_elastic_transform_is_scipys_affine_change_and_displacement() -> None:
    clean, strength, side = images(), (6.0, 2.0, 3.0), 32
    found = elastic_transform(clean, draw("elastic_transform"), *strength)
    for sample, number in enumerate((2, 8)):
        one = Draw(1, 3, torch.tensor([number]), "elastic_transform")
        # Three points of a square, moved; the map that brings them back, by least squares in float64.
        arm = side // 3
        old = np.array([[16 + arm, 16 + arm], [16 + arm, 16 - arm], [16 - arm, 16 - arm]], dtype=float)
        new = old + (2 * one.uniform("affine", 3, 2)[0].double().numpy() - 1) * 3.0
        back = np.linalg.lstsq(np.c_[new, np.ones(3)], old, rcond=None)[0].T  # [2, 3], x first
        swap = back[::-1, [1, 0, 2]]  # SciPy's y first
        noise = 2 * one.uniform("displacement", 2, side, side)[0].double().numpy() - 1
        dx, dy = (6.0 * ndimage.gaussian_filter(each, 2.0, truncate=3.0, mode="reflect") for each in noise)
        y, x = np.mgrid[:side, :side]
        for channel in range(3):
            image = clean[sample, channel].double().numpy()
            moved = ndimage.affine_transform(image, swap[:, :2], swap[:, 2], order=1, mode="mirror")
            slow = ndimage.map_coordinates(moved, [y + dy, x + dx], order=1, mode="reflect")
            np.testing.assert_allclose(found[sample, channel].numpy(), slow, atol=2e-4)


def test_a_triangle_fallen_flat_gives_numbers_still() -> None:
    clean = images(1, 9).repeat(200, 1, 1, 1)
    many = Draw(0, 1, torch.arange(400), "elastic_transform")
    found = elastic_transform(clean, many, 0.0, 0.0, 6.0)
    assert torch.isfinite(found).all() and found.min() >= 0 and found.max() <= 1.0001
    assert not torch.equal(gaussian(clean, 0.0), found)
