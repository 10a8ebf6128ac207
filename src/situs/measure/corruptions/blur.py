"""Defocus, frosted glass, motion and zoom blur. Images are [B, C, H, W] in [0, 1]."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from situs.measure.corruptions.filters import Draw, convolve, disk_kernel, gaussian, trail, zoom


def defocus_blur(images: Tensor, draw: Draw, radius: float, soft: float) -> Tensor:  # noqa: ARG001
    """Every point becomes a disk, as with a lens out of focus. soft: sigma that smooths its border."""
    return convolve(images, disk_kernel(radius, soft, images.device), "mirror101")


def motion_blur(images: Tensor, draw: Draw, radius: float, sigma: float) -> Tensor:
    """A trail in one direction within 45° of the horizontal: 2 · radius + 1 points with Gaussian weights."""
    angles = (draw.uniform("angle") - 0.5) * (math.pi / 2)
    return trail(images, angles, radius, sigma)


def zoom_blur(images: Tensor, draw: Draw, largest: float, step: float) -> Tensor:  # noqa: ARG001
    """The mean of the image and its enlargements by 1, 1 + step, … up to `largest`, as with a moving camera."""
    count = round((largest - 1) / step)
    total = images
    for number in range(count + 1):
        total = total + zoom(images, 1 + number * step)
    return total / (count + 2)


def glass_blur(images: Tensor, draw: Draw, sigma: float, reach: float, rounds: int) -> Tensor:
    """Smoothed, pixels replaced by random near ones, smoothed again: as through frosted glass.

    The paper swaps pixels; the published generator overwrites one before it reads it, so its images hold copies. So do
    ours, because published numbers are for those images. sigma: of the blur before and after. reach: the largest
    distance of a replacement. rounds: how often.
    """
    height, width = images.shape[-2:]
    smooth = gaussian(images, sigma)
    places = torch.arange(height * width, device=images.device).repeat(len(images), 1)
    for number in range(rounds):
        places = fetch(
            places, (height, width), max(1, round(reach)), draw.uniform(f"offsets.{number}", 2, height, width)
        )
    index = places[:, None].expand(-1, images.shape[1], -1)
    moved = smooth.flatten(2).gather(2, index).view_as(images)
    return gaussian(moved, sigma)


def fetch(places: Tensor, size: tuple[int, int], reach: int, noise: Tensor) -> Tensor:
    """Replaces every pixel, from the last to the first, by the current pixel at a random offset in [−reach, reach).

    places: [B, H · W], the source of each pixel. noise: [B, 2, H, W] uniform, one (y, x) per pixel. A pixel reads what
    later pixels have become, so the order matters; but pixels 2 · reach columns apart in neighbouring rows do not meet,
    and all of one slanted line are replaced at once with the same result.
    """
    width = size[1]
    places = places.clone()
    offsets = (noise * (2 * reach)).floor().long() - reach
    jumps = (offsets[:, 0] * width + offsets[:, 1]).flatten(1)
    for line in _slanted_lines(size, reach, places.device):
        places[:, line] = places.gather(1, line + jumps[:, line])
    return places


def _slanted_lines(size: tuple[int, int], reach: int, device: torch.device) -> tuple[Tensor, ...]:
    """The pixels at least `reach` from the border, as flat indices, in lines that may be replaced at once."""
    height, width = size
    if min(size) <= 2 * reach:
        return ()
    y = torch.arange(height - reach, reach, -1)
    x = torch.arange(width - reach, reach, -1)
    step = (y[0] - y)[:, None] * (2 * reach) + (x[0] - x)
    flat = (y[:, None] * width + x).flatten()[step.flatten().argsort(stable=True)]
    return flat.to(device).split([count for count in torch.bincount(step.flatten()).tolist() if count])
