"""Snow, frost, fog and brightness. Images are [B, C, H, W] in [0, 1]; results may leave it and are clipped later."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from situs.measure.corruptions.filters import Draw, clouds, convolve, gaussian, luma, trail, trail_kernels, zoom

# Frost, by eye and by the mean, spread and tint of photographs of frosted windows.
_NEEDLE = 0.035  # half the length of an ice needle, of the shorter side
_CRYSTAL = 0.05  # sigma of the fields that part one crystal from the next, of the shorter side
_DIRECTIONS = 6
_SEEDS = 0.07  # share of pixels where a needle starts
_TINT = (0.90, 1.02, 1.08)


def brightness(images: Tensor, draw: Draw, amount: float) -> Tensor:  # noqa: ARG001
    """The value V of hue, saturation and value raised by `amount`; hue and saturation stay.

    With both fixed, all channels are proportional to V. What is black has no hue and becomes grey.
    """
    value = images.amax(1, keepdim=True)
    raised = (value + amount).clamp(max=1.0)
    return torch.where(value > 0, images * (raised / value.clamp(min=1e-6)), raised)


def fog(images: Tensor, draw: Draw, thickness: float, decay: float) -> Tensor:
    """Clouds added, then all made darker so that the brightest value stays the same.

    thickness: the fog's largest value, of white. decay: how fast its structure fades from coarse to fine.
    """
    height, width = images.shape[-2:]
    brightest = images.amax((1, 2, 3), keepdim=True)
    layer = clouds(draw, "clouds", (height, width), decay)
    return (images + thickness * layer) * (brightest / (brightest + thickness))


def snow(
    images: Tensor,
    draw: Draw,
    mean: float,
    std: float,
    size: float,
    threshold: float,
    radius: float,
    sigma: float,
    keep: float,
) -> Tensor:
    """Falling flakes over a paler image.

    mean, std: of the noise that becomes flakes. size: their enlargement. threshold: below it there is no flake. radius,
    sigma: the trail of their fall. keep: share of the image's colour that is kept.
    """
    height, width = images.shape[-2:]
    noise = mean + std * draw.normal("flakes", 1, height, width)
    flakes = zoom(noise, max(1.0, size))
    flakes = torch.where(flakes < threshold, torch.zeros_like(flakes), flakes.clamp(0.0, 1.0))
    angles = -math.pi / 2 + (draw.uniform("angle") - 0.5) * (math.pi / 2)
    flakes = trail(flakes, angles, radius, sigma).clamp(0.0, 1.0)
    pale = torch.maximum(images, 1.5 * luma(images) + 0.5)
    return keep * images + (1 - keep) * pale + flakes + flakes.flip(2, 3)


def frost(images: Tensor, draw: Draw, keep: float, amount: float) -> Tensor:
    """keep · image + amount · ice. The ice is drawn here; the published images use parts of six photographs."""
    layer = ice(draw, (images.shape[2], images.shape[3]))
    if images.shape[1] == 3:
        layer = layer * torch.tensor(_TINT, device=images.device).view(1, 3, 1, 1)
    return keep * images + amount * layer.clamp(0.0, 1.0)


def ice(draw: Draw, size: tuple[int, int]) -> Tensor:
    """Frost on a window, [B, 1, H, W] about [0, 1]: crystals, each of needles in one direction, over haze."""
    height, width = size
    side = min(size)
    shade = 0.40 + 0.46 * draw.uniform("shade").view(-1, 1, 1, 1)  # windows differ in how white they are
    angles = math.pi * draw.uniform("angles", _DIRECTIONS)
    fields = gaussian(draw.uniform("crystals", _DIRECTIONS, height, width), _CRYSTAL * side, 3.0, "mirror")
    owner = fields.argmax(1, keepdim=True)
    tone = draw.uniform("tone", _DIRECTIONS).gather(1, owner.flatten(1)).view_as(owner) - 0.5
    seeds = (draw.uniform("seeds", 1, height, width) < _SEEDS).float() * draw.uniform("height", 1, height, width)
    length = max(1.5, _NEEDLE * side)
    one_way = trail_kernels(angles.flatten(), length, length / 1.5)
    both = (one_way + one_way.flip(1, 2)).view(-1, _DIRECTIONS, *one_way.shape[1:]) / 2
    needles = convolve(seeds, both, "mirror").gather(1, owner)
    spread = needles.std((2, 3), keepdim=True).clamp(min=1e-6)
    relief = (needles - needles.mean((2, 3), keepdim=True)) / spread
    haze = clouds(draw, "haze", size, 1.7) - 0.5
    return shade + 0.08 * relief + 0.12 * tone + 0.25 * haze
