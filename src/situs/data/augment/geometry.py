"""Crop, flip and affine transforms of a batch, composed into one resampling of each image.

Coordinates are continuous pixels: an image of width W spans [0, W] and the centre of pixel i is at i + ½, as in Pillow
and in torch with align_corners=False. Every function is pure in its noise and elementwise, so that the result for a
sample does not depend on its batch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

CROP_NOISE = 22  # two numbers for each of ten attempts, two for the place
_ATTEMPTS = 10
_RATIO = 3 / 4, 4 / 3  # smallest and largest width over height of a random crop


def resized_crop_boxes(noise: Tensor, height: Tensor | int, width: Tensor | int, scale: tuple[float, float]) -> Tensor:
    """Boxes of random area (uniform, a share in `scale`) and aspect (log-uniform, 3/4 to 4/3): [B, 4] top, left, h, w.

    noise: [B, 22]. The first of ten attempts that fits is taken, else the largest centred box of such an aspect: the
    law of torchvision's RandomResizedCrop. height, width: of the images, numbers or [B].
    """
    # Created on the device: copying a number there would make the host wait.
    height, width = (_column(side, noise) for side in (height, width))
    area = height * width * (scale[0] + noise[:, :_ATTEMPTS] * (scale[1] - scale[0]))
    low, high = math.log(_RATIO[0]), math.log(_RATIO[1])
    aspect = torch.exp(low + noise[:, _ATTEMPTS : 2 * _ATTEMPTS] * (high - low))
    w, h = torch.sqrt(area * aspect).round(), torch.sqrt(area / aspect).round()
    fits = (w >= 1) & (h >= 1) & (w <= width) & (h <= height)
    # argmax gives the first of the equal largest: the first attempt that fits.
    first = fits.to(torch.uint8).argmax(dim=1, keepdim=True)
    any_fits = fits.gather(1, first)
    shape = width / height
    centred_w = torch.where(shape > _RATIO[1], (height * _RATIO[1]).round(), width)
    centred_h = torch.where(shape < _RATIO[0], (width / _RATIO[0]).round(), height)
    w = torch.where(any_fits, w.gather(1, first), centred_w)
    h = torch.where(any_fits, h.gather(1, first), centred_h)
    spare_y, spare_x = height - h, width - w
    top = torch.where(any_fits, (noise[:, 20:21] * (spare_y + 1)).floor(), (spare_y / 2).floor())
    left = torch.where(any_fits, (noise[:, 21:22] * (spare_x + 1)).floor(), (spare_x / 2).floor())
    return torch.cat([top, left, h, w], dim=1)


def scaled_crop_boxes(
    noise: Tensor,
    height: Tensor | int,
    width: Tensor | int,
    size: tuple[int, int],
    scales: tuple[float, float],
    fitted: Tensor | None = None,
) -> Tensor:
    """Boxes of the result's size in images that were scaled first, by a number uniform in `scales`: [B, 4].

    An image scaled by 1 just covers the result; the position of the box is uniform, and a smaller image is anywhere in
    the box. fitted: whether each is flipped [B]; then an image scaled by 1 just fits into the result, and a smaller one
    is at the result's top left. noise: [B, 22].
    """
    height, width = (_column(side, noise) for side in (height, width))
    scale = scales[0] + noise[:, :1] * (scales[1] - scales[0])
    choose = torch.maximum if fitted is None else torch.minimum
    per_pixel = scale * choose(size[0] / height, size[1] / width)
    h, w = size[0] / per_pixel, size[1] / per_pixel
    top, left = noise[:, 20:21] * (height - h), noise[:, 21:22] * (width - w)
    if fitted is not None:
        margin = torch.where(fitted.view(-1, 1), width - w, 0.0)
        top, left = top.clamp(min=0.0), torch.where(width > w, left, margin)
    return torch.cat([top, left, h, w], dim=1)


def pad_crop_boxes(noise: Tensor, height: Tensor | int, width: Tensor | int, pad: int) -> Tensor:
    """Boxes of the image's size shifted by up to `pad` whole pixels each way: [B, 4]. noise: [B, 2] or more."""
    shift = (noise[:, :2] * (2 * pad + 1)).floor() - pad
    return torch.cat([shift, _column(height, noise), _column(width, noise)], dim=1)


def whole_boxes(count: int, height: Tensor | int, width: Tensor | int, device: torch.device) -> Tensor:
    """Boxes that leave the images whole: [B, 4]."""
    none = torch.zeros(count, 2, device=device)
    return torch.cat([none, _column(height, none), _column(width, none)], dim=1)


def _column(side: Tensor | int, like: Tensor) -> Tensor:
    """A number, or one per sample, as [B, 1] float32 on the device of `like` [B, …]."""
    if isinstance(side, Tensor):
        return side.to(like.device, torch.float32).view(-1, 1)
    return torch.full((like.shape[0], 1), float(side), device=like.device)


class SamplingGrid(NamedTuple):
    """Where each pixel of a result is sampled. x, y: in pixels of the source, [B or 1, h, w]. inside: likewise, False
    where the point is outside the image at any of the transforms. finer: samples along a side of each pixel."""

    x: Tensor
    y: Tensor
    inside: Tensor
    finer: int


def sampling_grid(
    boxes: Tensor,
    flip: Tensor,
    size: tuple[int, int],
    source: tuple[int, int] | Tensor,
    matrices: Tensor | None = None,
    finer: int = 1,
) -> SamplingGrid:
    """Crop to `boxes`, resize to `size`, flip, then the affine transforms, as one grid.

    source: (height, width) of all, or [B, 2] of each. flip: [B] bool. matrices: [B, S, 2, 3], S affine transforms in
    their order, each mapping a point of its result (x, y) to the point it is sampled from, in pixels of the resized
    crop. The transforms are composed, and a point that leaves the image at any of them is outside.
    """
    (height, width), device = size, boxes.device
    x = (torch.arange(width * finer, device=device) + 0.5).div(finer).view(1, 1, -1)
    y = (torch.arange(height * finer, device=device) + 0.5).div(finer).view(1, -1, 1)
    inside = None
    if matrices is not None:
        for slot in reversed(range(matrices.shape[1])):
            a, b, c, d, e, f = matrices[:, slot].reshape(-1, 6, 1, 1).unbind(1)
            x, y = a * x + b * y + c, d * x + e * y + f
            here = (x >= 0) & (x < width) & (y >= 0) & (y < height)
            inside = here if inside is None else inside & here
    top, left, box_h, box_w = boxes.view(-1, 4, 1, 1).unbind(1)
    x = torch.where(flip.view(-1, 1, 1), width - x, x) * (box_w / width) + left
    y = y * (box_h / height) + top
    high, wide = source.view(-1, 2, 1, 1).unbind(1) if isinstance(source, Tensor) else source
    within = (x >= 0) & (x < wide) & (y >= 0) & (y < high)
    return SamplingGrid(x, y, within if inside is None else inside & within, finer)


def sample(images: Tensor, at: SamplingGrid, mode: str) -> Tensor:
    """The values of images [B, C, H, W] float at each point, [B, C, h, w]; outside those of the border."""
    height, width = images.shape[2:]
    grid = torch.stack(torch.broadcast_tensors(at.x * (2 / width) - 1, at.y * (2 / height) - 1), dim=-1)
    return F.grid_sample(images, grid, mode=mode, padding_mode="border", align_corners=False)


def sample_nearest(values: Tensor, at: SamplingGrid) -> Tensor:
    """The values [B, …, H, W] of any type at the pixel of each point, [B, …, h, w]; 0 outside the image."""
    batch, *_, height, width = values.shape
    rows, columns = at.y.floor().long().clamp(0, height - 1), at.x.floor().long().clamp(0, width - 1)
    pixels = (rows * width + columns).expand(batch, *at.inside.shape[1:]).flatten(1)
    flat = values.flatten(1, -3).flatten(2)
    sampled = flat.gather(2, pixels[:, None].expand(-1, flat.shape[1], -1))
    sampled = sampled.unflatten(2, at.inside.shape[1:]) * at.inside[:, None]
    return sampled.view(*values.shape[:-2], *at.inside.shape[1:])


def warp(
    images: Tensor,
    boxes: Tensor,
    flip: Tensor,
    size: tuple[int, int],
    fill: Tensor,
    matrices: Tensor | None = None,
    mode: str = "bicubic",
    *,
    sides: Tensor | None = None,
    finer: int | None = None,
) -> Tensor:
    """Images [B, C, H, W] float in [0, 1] at their `sampling_grid`: one resampling, [B, C, *size] in [0, 1].

    fill: [C], the colour outside the image. The result is that of one transform after the other with only one
    interpolation. Enlarging needs no filter against aliasing. Where `size` is much smaller than the images, each
    output pixel is the mean of k × k samples, k being the rounded ratio, or `finer`. sides: [B, 2], height and width of
    each image where some are smaller and padded by their last row and column.
    """
    height, width = images.shape[2:]
    finer = finer or max(1, round(height / size[0]), round(width / size[1]))
    at = sampling_grid(boxes, flip, size, (height, width) if sides is None else sides, matrices, finer)
    # Bicubic weights overshoot at edges.
    warped = torch.where(at.inside[:, None], sample(images, at, mode).clamp(0.0, 1.0), fill.view(1, -1, 1, 1))
    return warped if finer == 1 else F.avg_pool2d(warped, finer)


def warp_masks(
    masks: Tensor,
    boxes: Tensor,
    flip: Tensor,
    size: tuple[int, int],
    matrices: Tensor | None = None,
    *,
    fill: int = 255,
    sides: Tensor | None = None,
) -> Tensor:
    """Masks [B, H, W] of integers at the same points as `warp`'s pixels, each from the nearest pixel: [B, *size].

    fill: the number outside the image; losses ignore 255. sides: as `warp` takes them.
    """
    at = sampling_grid(boxes, flip, size, (masks.shape[1], masks.shape[2]) if sides is None else sides, matrices)
    # float64 holds every number that a mask can have.
    sampled = sample(masks[:, None].double(), SamplingGrid(at.x.double(), at.y.double(), at.inside, 1), "nearest")[:, 0]
    return torch.where(at.inside, sampled.to(masks.dtype), fill)


def warp_boxes(
    objects: Tensor, boxes: Tensor, flip: Tensor, size: tuple[int, int], matrices: Tensor | None = None
) -> Tensor:
    """Objects' boxes [B, K, 4] (left, top, right, bottom in pixels) in the result, cut at its border.

    By the inverse of the transforms: a rotated box becomes the upright one around its corners. Empty where nothing is
    left.
    """
    height, width = size
    left, top, right, bottom = move_boxes(objects, boxes, flip, size, matrices).unbind(-1)
    return torch.stack([left.clamp(0, width), top.clamp(0, height), right.clamp(0, width), bottom.clamp(0, height)], -1)


def move_boxes(
    objects: Tensor, boxes: Tensor, flip: Tensor, size: tuple[int, int], matrices: Tensor | None = None
) -> Tensor:
    """`warp_boxes`, not cut at the border."""
    height, width = size
    x, y = objects[..., [0, 2, 2, 0]], objects[..., [1, 1, 3, 3]]
    top, left, box_h, box_w = boxes.view(-1, 4, 1, 1).unbind(1)
    x, y = (x - left) * (width / box_w), (y - top) * (height / box_h)
    x = torch.where(flip.view(-1, 1, 1), width - x, x)
    for slot in range(0 if matrices is None else matrices.shape[1]):
        assert matrices is not None
        a, b, c, d, e, f = matrices[:, slot].reshape(-1, 6, 1, 1).unbind(1)
        u, v, det = x - c, y - f, a * e - b * d
        x, y = (e * u - b * v) / det, (a * v - d * u) / det
    return torch.stack([x.amin(-1), y.amin(-1), x.amax(-1), y.amax(-1)], dim=-1)


def rotation(degrees: Tensor, height: int, width: int) -> Tensor:
    """Rotate about the centre, counter-clockwise as Pillow does: [B, 2, 3] for `warp`. degrees: [B]."""
    angle = torch.deg2rad(degrees)
    cos, sin = torch.cos(angle), torch.sin(angle)
    x, y = width / 2, height / 2
    return _matrix(cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y)


def shear(x: Tensor, y: Tensor) -> Tensor:
    """Shear about the top-left corner by factors x, y [B]: [B, 2, 3] for `warp`."""
    one, none = torch.ones_like(x), torch.zeros_like(x)
    return _matrix(one, x, none, y, one, none)


def translation(x: Tensor, y: Tensor) -> Tensor:
    """Sample each point x, y [B] pixels further on: [B, 2, 3] for `warp`."""
    one, none = torch.ones_like(x), torch.zeros_like(x)
    return _matrix(one, none, x, none, one, y)


def _matrix(*entries: Tensor) -> Tensor:
    return torch.stack(entries, dim=-1).view(-1, 2, 3)
