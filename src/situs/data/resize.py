"""Antialiased resizing of bytes: an image as torch does it, and on a GPU crops of many sizes at once, to the same bits.

So it does not matter who resizes a crop. Crops travel as they lie in a decoded photograph, [h, w, C], one behind the
other: on average that is fewer bytes than the size they are brought to has.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.core.kernels import has_kernels

Size = tuple[int, int]


def resized(image: Tensor, size: Size, mode: str) -> Tensor:
    """An image [C, H, W] antialiased to a size, bilinear or bicubic."""
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as tv

    if image.dtype == torch.uint8 and image.device.type == "cpu":  # torchvision takes floats for some on some CPUs
        # A cut whose rows are not beside each other would take the long way.
        image = image.permute(1, 2, 0)[None].contiguous().permute(0, 3, 1, 2)
        return F.interpolate(image, size, mode=mode, antialias=True)[0]
    return tv.resize(image, list(size), interpolation=InterpolationMode(mode), antialias=True)


def pack(crops: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Crops [C, h, w] of bytes, C of them all the same, as one tensor of bytes; and their sides [n, 2]."""
    sides = torch.tensor([crop.shape[1:] for crop in crops])
    flat = torch.empty(sum(crop.numel() for crop in crops), dtype=torch.uint8)
    for crop, part in zip(crops, flat.split([crop.numel() for crop in crops]), strict=True):
        part.view(*crop.shape[1:], -1).copy_(crop.permute(1, 2, 0))
    return flat, sides


def channels_of(flat: Tensor, sides: Tensor) -> int:
    """C of what `pack` made."""
    return len(flat) // int(sides.prod(1).sum())


def resize_packed(flat: Tensor, sides: Tensor, size: Size, mode: str) -> Tensor:
    """What `pack` made, on any device, at one size: [n, C, *size] bytes there. sides: on the host."""
    channels = channels_of(flat, sides)
    counts = (sides.prod(1) * channels).tolist()
    if not has_kernels(flat.device):
        shapes = zip(flat.cpu().split(counts), sides.tolist(), strict=True)
        crops = [part.view(*shape, channels).permute(2, 0, 1) for part, shape in shapes]
        return resize_all(crops, size, mode).to(flat.device)
    starts = itertools.accumulate(counts[:-1], initial=0)
    table = [(at, w * channels, channels, 1, h, w) for at, (h, w) in zip(starts, sides.tolist(), strict=True)]
    return _launch(flat, table, channels, size, mode)


def resize_all(crops: Sequence[Tensor], size: Size, mode: str) -> Tensor:
    """Crops [C, h, w] of bytes, views of anything on one device, at one size: [n, C, *size]."""
    if not has_kernels(crops[0].device):
        return torch.stack([resized(crop, size, mode) for crop in crops])
    base = crops[0]
    table = [(c.data_ptr() - base.data_ptr(), c.stride(1), c.stride(2), c.stride(0), *c.shape[1:]) for c in crops]
    return _launch(base, table, base.shape[0], size, mode)


def _launch(base: Tensor, table: list[tuple[int, ...]], channels: int, size: Size, mode: str) -> Tensor:
    from situs.data.resize_kernel import launch

    return launch(base, torch.tensor(table), channels, size, 1 if mode == "bilinear" else 2)
