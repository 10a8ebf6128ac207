"""Antialiased resizing of bytes: images as torch does it, and on a GPU crops of many sizes at once, bit for bit equal.

So worker and device give the same. Crops are sent as they are in a decoded photograph, [h, w, C], concatenated: on
average that is fewer bytes than their resized form.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.core.kernels import has_kernels

Size = tuple[int, int]
# An image whose longer side is more than this many times the wanted size is cropped before it is resized.
_LONGEST = 8


def resized(image: Tensor, size: Size, mode: str = "bicubic") -> Tensor:
    """An image [..., C, H, W] resized with antialiasing, bilinear or bicubic; floats stay in [0, 1]."""
    if tuple(image.shape[-2:]) == size:
        return image
    if image.dtype == torch.uint8 and image.device.type == "cpu":  # torchvision takes floats for some on some CPUs
        *first, channels, height, width = image.shape
        # A crop that is not contiguous would be slower.
        rows = image.reshape(-1, channels, height, width).contiguous(memory_format=torch.channels_last)
        return F.interpolate(rows, size, mode=mode, antialias=True).view(*first, channels, *size)
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as tv

    image = tv.resize(image, list(size), interpolation=InterpolationMode(mode), antialias=True)
    # Bicubic weights overshoot; bytes are clamped, floats are not.
    return image.clamp(0.0, 1.0) if image.is_floating_point() else image


def centre_fit(image: Tensor, height: int, width: int) -> Tensor:
    """`image` [..., C, H, W] resized to cover the size, then cut to its centre."""
    if tuple(image.shape[-2:]) == (height, width):
        return image
    image = _shorten(image, height, width)
    covering = covering_size((image.shape[-2], image.shape[-1]), height, width)
    top, left = round((covering[0] - height) / 2), round((covering[1] - width) / 2)
    return resized(image, covering)[..., top : top + height, left : left + width]


def covering_size(have: tuple[int, int], height: int, width: int) -> tuple[int, int]:
    """The size of the aspect ratio of `have` that just covers another."""
    # Integers, truncated and not rounded, as torchvision computes the longer side.
    tall = have[0] * width >= height * have[1]
    return (have[0] * width // have[1], width) if tall else (height, have[1] * height // have[0])


def _shorten(image: Tensor, height: int, width: int) -> Tensor:
    """The middle of an image [..., H, W] whose aspect ratio is far from the wanted one.

    Resized whole, an image of 3,000,000 × 1 pixels would become one of 3,000,000 · `width` × `width`.
    """
    have = image.shape[-2:]
    most = max(1, _LONGEST * have[1] * height // width), max(1, _LONGEST * have[0] * width // height)
    for side, dim in ((0, -2), (1, -1)):
        if have[side] > most[side]:
            image = image.narrow(dim, (have[side] - most[side]) // 2, most[side])
    return image


def pack(crops: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Crops [C, h, w] of bytes, C the same for all, as one tensor of bytes; and their sides [n, 2]."""
    sides = torch.tensor([crop.shape[1:] for crop in crops])
    flat = torch.empty(sum(crop.numel() for crop in crops), dtype=torch.uint8)
    for crop, part in zip(crops, flat.split([crop.numel() for crop in crops]), strict=True):
        part.view(*crop.shape[1:], -1).copy_(crop.permute(1, 2, 0))
    return flat, sides


def channels_of(flat: Tensor, sides: Tensor) -> int:
    """C of what `pack` made."""
    return len(flat) // int(sides.prod(1).sum())


def resize_packed(flat: Tensor, sides: Tensor, size: Size, mode: str) -> Tensor:
    """What `pack` made, on any device, resized: [n, C, *size] bytes there. sides: on the host."""
    channels = channels_of(flat, sides)
    counts = (sides.prod(1) * channels).tolist()
    if not has_kernels(flat.device):
        shapes = zip(flat.cpu().split(counts), sides.tolist(), strict=True)
        crops = (part.view(*shape, channels).permute(2, 0, 1) for part, shape in shapes)
        return torch.stack([resized(crop, size, mode) for crop in crops]).to(flat.device)
    from situs.data.resize_kernel import launch

    starts = itertools.accumulate(counts[:-1], initial=0)
    table = [(at, w * channels, channels, 1, h, w) for at, (h, w) in zip(starts, sides.tolist(), strict=True)]
    return launch(flat, torch.tensor(table), channels, size, 1 if mode == "bilinear" else 2)
