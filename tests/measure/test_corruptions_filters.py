"""Each filter against SciPy, NumPy or plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage

from situs.measure.corruptions import (
    Draw,
    beyond,
    clouds,
    convolve,
    disk_kernel,
    gaussian,
    luma,
    trail,
    trail_kernels,
    zoom,
)

PAD = {"repeat": "edge", "mirror": "symmetric", "mirror101": "reflect"}
NDIMAGE = {"repeat": "nearest", "mirror": "reflect", "mirror101": "mirror"}


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


@given(size=st.integers(1, 7), far=st.integers(0, 25), edge=st.sampled_from(sorted(PAD)))
def test_beyond_the_border_is_as_numpy_pads(size: int, far: int, edge: str) -> None:
    expected = np.pad(np.arange(size), far, mode=PAD[edge])  # type: ignore[call-overload]
    assert beyond(torch.arange(-far, size + far), size, edge).tolist() == expected.tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize("edge", sorted(PAD))
@pytest.mark.parametrize(("sigma", "truncate"), [(0.25, 4.0), (1.5, 4.0), (6.0, 3.0), (40.0, 3.0)])
def test_gaussian_is_scipys(edge: str, sigma: float, truncate: float) -> None:
    images = noise(2, 3, 20, 17)
    found = gaussian(images, sigma, truncate, edge)  # type: ignore[arg-type]
    for image, result in zip(images.flatten(0, 1), found.flatten(0, 1), strict=True):
        slow = ndimage.gaussian_filter(image.double().numpy(), sigma, truncate=truncate, mode=NDIMAGE[edge])
        np.testing.assert_allclose(result.numpy(), slow, atol=2e-6)


def test_gaussian_of_no_width_changes_nothing() -> None:
    images = noise(1, 1, 9, 9)
    assert torch.equal(gaussian(images, 0.0), images)


@pytest.mark.parametrize("edge", sorted(PAD))
@pytest.mark.parametrize("side", [1, 3, 9])
def test_convolve_is_scipys_with_a_kernel_for_each_sample(edge: str, side: int) -> None:
    images, kernels = noise(2, 3, 13, 10), noise(2, 1, side, side, seed=1)
    found = convolve(images, kernels, edge)  # type: ignore[arg-type]
    for sample in range(2):
        for channel in range(3):
            slow = ndimage.convolve(images[sample, channel].numpy(), kernels[sample, 0].numpy(), mode=NDIMAGE[edge])
            np.testing.assert_allclose(found[sample, channel].numpy(), slow, atol=1e-5)


def test_one_channel_and_several_kernels_give_a_channel_each() -> None:
    images, kernels = noise(2, 1, 8, 8), noise(2, 4, 3, 3, seed=1)
    found = convolve(images, kernels, "repeat")
    assert found.shape == (2, 4, 8, 8)
    single = convolve(images, kernels[:, 2:3], "repeat")
    torch.testing.assert_close(found[:, 2:3], single)


def test_disk_by_hand() -> None:
    sharp = disk_kernel(3, 0.1, torch.device("cpu"))[0, 0]
    inside = [(y, x) for y in range(-4, 5) for x in range(-4, 5) if y * y + x * x <= 9]
    expected = torch.zeros(9, 9)
    for y, x in inside:
        expected[y + 4, x + 4] = 1 / len(inside)
    assert len(inside) == 29
    torch.testing.assert_close(sharp, expected, atol=1e-7, rtol=0)
    soft = disk_kernel(10, 0.5, torch.device("cpu"))[0, 0].double().numpy()
    grid = np.arange(-12, 13)
    disk = (grid[:, None] ** 2 + grid**2 <= 100).astype(float)
    taps = np.exp(-(np.arange(-2, 3) ** 2) / (2 * 0.25))
    slow = ndimage.convolve(disk / disk.sum(), np.outer(taps, taps) / taps.sum() ** 2, mode="constant")
    np.testing.assert_allclose(soft, slow / slow.sum(), atol=1e-7)


def test_a_trail_to_the_side_by_hand() -> None:
    """At angle 0 a pixel shows what stands to its right, nearer places more."""
    image = noise(1, 1, 5, 12)
    radius, sigma = 2, 1.3
    weights = np.exp(-0.5 * (np.arange(5) / sigma) ** 2)
    weights /= weights.sum()
    slow = np.zeros((5, 12))
    for y in range(5):
        for x in range(12):
            slow[y, x] = sum(weights[k] * float(image[0, 0, y, min(11, x + k)]) for k in range(5))
    found = trail(image, torch.tensor([0.0]), radius, sigma)
    np.testing.assert_allclose(found[0, 0].numpy(), slow, atol=1e-6)


def test_trails_weigh_one_and_point_along_their_angle() -> None:
    angles = torch.tensor([0.3, -1.2, 2.5])
    kernels = trail_kernels(angles, 15, 8)
    torch.testing.assert_close(kernels.sum((1, 2)), torch.ones(3))
    middle = kernels.shape[-1] // 2
    grid = torch.arange(kernels.shape[-1]) - middle
    x = -(kernels.sum(1) * grid).sum(1)  # a convolution turns the kernel round
    y = -(kernels.sum(2) * grid).sum(1)
    torch.testing.assert_close(torch.atan2(y, x), angles, atol=1e-4, rtol=0)


@pytest.mark.parametrize("factor", [1.0, 1.06, 1.5, 2.25, 4.0])
@pytest.mark.parametrize("side", [16, 28, 33])
def test_zoom_is_scipys_on_the_centre(factor: float, side: int) -> None:
    image = noise(1, 2, side, side)
    kept = math.ceil(side / factor)
    top = (side - kept) // 2
    found = zoom(image, factor)
    assert found.shape == image.shape
    for channel in range(2):
        centre = image[0, channel, top : top + kept, top : top + kept].double().numpy()
        large = ndimage.zoom(centre, factor, order=1)
        trim = (len(large) - side) // 2
        slow = large[trim : trim + side, trim : trim + side]
        np.testing.assert_allclose(found[0, channel].numpy(), slow, atol=1e-5)


def slow_clouds(draw: Draw, sample: int, rounds: int, decay: float) -> np.ndarray:
    """The diamond-square rule, point by point on one map."""
    side = 2**rounds
    height = np.zeros((side, side))
    step, amplitude = side, 1.0
    for number in range(rounds):
        points = side // step
        wobble = (2 * draw.uniform(f"w.{number}", 3, points, points)[sample].double().numpy() - 1) * amplitude
        half = step // 2
        for i in range(points):
            for j in range(points):
                y, x = i * step, j * step
                corners = [height[(y + a) % side, (x + b) % side] for a in (0, step) for b in (0, step)]
                height[y + half, x + half] = np.mean(corners) + wobble[0, i, j]
        for i in range(points):
            for j in range(points):
                y, x = i * step, j * step
                around = [(y, x), (y, x + step), (y + half, x + half), (y - half, x + half)]
                height[y, x + half] = np.mean([height[a % side, b % side] for a, b in around]) + wobble[1, i, j]
                around = [(y, x), (y + step, x), (y + half, x + half), (y + half, x - half)]
                height[y + half, x] = np.mean([height[a % side, b % side] for a, b in around]) + wobble[2, i, j]
        step, amplitude = half, amplitude / decay**2
    return (height - height.min()) / (height.max() - height.min())


@pytest.mark.parametrize(("size", "rounds"), [((16, 16), 4), ((9, 16), 4), ((2, 2), 1), ((1, 1), 1)])
def test_clouds_point_by_point(size: tuple[int, int], rounds: int) -> None:
    draw = Draw(3, 2, torch.tensor([4, 11]), "fog")
    found = clouds(draw, "w", size, 1.5)
    for sample in range(2):
        slow = slow_clouds(draw, sample, rounds, 1.5)[: size[0], : size[1]]
        np.testing.assert_allclose(found[sample, 0].numpy(), slow, atol=1e-5)


def test_clouds_fill_zero_to_one_and_are_smoother_with_more_decay() -> None:
    draw = Draw(0, 1, torch.arange(8), "fog")
    rough, smooth = (clouds(draw, "w", (64, 64), decay) for decay in (1.2, 3.0))
    assert rough.amin((1, 2, 3)).tolist() == [0.0] * 8 and rough.amax((1, 2, 3)).tolist() == [1.0] * 8
    assert rough.diff(dim=-1).abs().mean() > 3 * smooth.diff(dim=-1).abs().mean()
    assert clouds(draw, "w", (28, 40), 2.0).shape == (8, 1, 28, 40)


def test_luma() -> None:
    images = noise(1, 3, 2, 2)
    expected = 0.299 * images[:, 0] + 0.587 * images[:, 1] + 0.114 * images[:, 2]
    torch.testing.assert_close(luma(images)[:, 0], expected)
    torch.testing.assert_close(luma(images[:, :1]), images[:, :1])
    torch.testing.assert_close(luma(images[:, :2]), images[:, :2].mean(1, keepdim=True))
