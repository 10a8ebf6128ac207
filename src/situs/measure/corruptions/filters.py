"""The filters of the corruptions: smoothing, convolution, trails, zoom, clouds; and their noise.

All work on batches on the device, and the result of a sample depends on that sample alone.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.core.random import normal, uniform

Edge = Literal["repeat", "mirror", "mirror101"]
"""Beyond the border abcd goes on as dddd, as dcba, or as cba."""


class Draw(NamedTuple):
    """The noise of one corruption at one severity: a pure function of (seed, severity, id, corruption, what for)."""

    seed: int
    severity: int
    ids: Tensor
    corruption: str

    def uniform(self, what: str, *shape: int) -> Tensor:
        """In [0, 1), [B, *shape]."""
        return uniform(self.seed, self.severity, self.ids, f"corruption.{self.corruption}.{what}", shape)

    def normal(self, what: str, *shape: int) -> Tensor:
        """Standard normal, [B, *shape]."""
        return normal(self.seed, self.severity, self.ids, f"corruption.{self.corruption}.{what}", shape)


def beyond(index: Tensor, size: int, edge: Edge) -> Tensor:
    """The pixel in 0 … size − 1 for each index, however far outside."""
    if edge == "repeat" or size == 1:
        return index.clamp(0, size - 1)
    period = 2 * size if edge == "mirror" else 2 * (size - 1)
    folded = index % period
    return torch.where(folded < size, folded, period - int(edge == "mirror") - folded)


def gaussian_matrix(size: int, sigma: float, truncate: float, edge: Edge, device: torch.device) -> Tensor:
    """A Gaussian filter of a line as a matrix [size, size]: row i holds the weights of the pixels that make pixel i.

    The border is in the matrix, so the filter may be wider than the line.
    """
    if sigma <= 0:
        return torch.eye(size, device=device)
    reach = int(truncate * sigma + 0.5)
    offsets = torch.arange(-reach, reach + 1)
    weights = torch.exp(-0.5 * (offsets.double() / sigma) ** 2)
    weights = weights / weights.sum()
    sources = beyond(torch.arange(size)[:, None] + offsets, size, edge)
    matrix = torch.zeros(size, size, dtype=torch.float64).scatter_add_(1, sources, weights.expand(size, -1))
    return matrix.to(device, torch.float32)


def gaussian(images: Tensor, sigma: float, truncate: float = 4.0, edge: Edge = "repeat") -> Tensor:
    """`images` [..., H, W] smoothed along both axes."""
    rows, columns = (
        gaussian_matrix(size, sigma, truncate, edge, images.device) for size in (images.shape[-2], images.shape[-1])
    )
    return rows @ images @ columns.T


def convolve(images: Tensor, kernels: Tensor, edge: Edge) -> Tensor:
    """Each image [B, C, H, W] convolved with its kernel; kernels: [B or 1, C or 1, k, k], k odd, centred.

    By Fourier transform: a kernel for each sample, and any radius, at the price of one. One channel and several kernels
    give a channel for each kernel.
    """
    reach = kernels.shape[-1] // 2
    height, width = images.shape[-2:]
    y, x = (beyond(torch.arange(-reach, size + reach, device=images.device), size, edge) for size in (height, width))
    padded = images[..., y, :][..., x]
    sizes = [-(-side // 8) * 8 for side in padded.shape[-2:]]  # lengths that the transform is fast on
    spectrum = torch.fft.rfft2(padded, s=sizes) * torch.fft.rfft2(kernels, s=sizes)
    whole = torch.fft.irfft2(spectrum, s=sizes)
    # What the transform wraps round from the other side falls on the first 2 · reach rows and columns only.
    return whole[..., 2 * reach : 2 * reach + height, 2 * reach : 2 * reach + width]


def disk_kernel(radius: float, soft: float, device: torch.device) -> Tensor:
    """A disk of equal weights, its border smoothed by a Gaussian of sigma `soft` over 3 or 5 pixels: [1, 1, k, k]."""
    edge = 1 if radius <= 8 else 2
    reach = math.floor(radius) + edge
    line = torch.arange(-reach, reach + 1, dtype=torch.float64)
    inside = (line[:, None] ** 2 + line**2 <= radius**2).double()
    taps = torch.exp(-0.5 * (torch.arange(-edge, edge + 1, dtype=torch.float64) / max(soft, 1e-3)) ** 2)
    taps = taps / taps.sum()
    smooth = F.conv2d(inside[None, None], (taps[:, None] * taps)[None, None], padding=edge)
    return (smooth / smooth.sum()).to(device, torch.float32)


def trail_kernels(angles: Tensor, radius: float, sigma: float) -> Tensor:
    """Kernels of motion trails: points one pixel apart, from the centre along `angles` [B] (radians): [B, k, k].

    There are 2 · radius + 1 points whose weights fall as a Gaussian; each is shared among the four pixels around it.
    """
    count = min(2 * math.ceil(radius) + 1, math.ceil(5 * sigma) + 1)  # beyond five sigma the weights are below 4e-6
    steps = torch.arange(count, device=angles.device, dtype=torch.float32)
    weights = torch.exp(-0.5 * (steps / sigma) ** 2)
    weights = weights / weights.sum()
    side = 2 * count + 1
    x = count - steps * torch.cos(angles)[:, None]
    y = count - steps * torch.sin(angles)[:, None]
    kernels = torch.zeros(len(angles), side * side, device=angles.device)
    left, top = x.floor(), y.floor()
    for dy in (0, 1):
        for dx in (0, 1):
            share = (1 - (x - left - dx).abs()) * (1 - (y - top - dy).abs()) * weights
            kernels.scatter_add_(1, ((top + dy) * side + left + dx).long(), share)
    return kernels.view(-1, side, side)


def trail(images: Tensor, angles: Tensor, radius: float, sigma: float) -> Tensor:
    """`images` [B, C, H, W] blurred along `angles` [B] as by a motion that fades."""
    return convolve(images, trail_kernels(angles, radius, sigma)[:, None], "repeat")


def zoom(images: Tensor, factor: float) -> Tensor:
    """The centre of `images` [B, C, H, W] enlarged `factor` times (bilinear), at the size they had."""
    sizes = images.shape[-2:]
    kept = [math.ceil(size / factor) for size in sizes]
    top, left = ((size - keep) // 2 for size, keep in zip(sizes, kept, strict=True))
    centre = images[..., top : top + kept[0], left : left + kept[1]]
    large = [round(keep * factor) for keep in kept]
    grown = F.interpolate(centre, size=large, mode="bilinear", align_corners=True)
    top, left = ((have - size) // 2 for size, have in zip(sizes, large, strict=True))
    return grown[..., top : top + sizes[0], left : left + sizes[1]]


def clouds(draw: Draw, what: str, size: tuple[int, int], decay: float) -> Tensor:
    """Random clouds (plasma) from 0 to 1, [B, 1, H, W]. decay: 1 is rough at every scale, larger is smoother.

    The diamond-square rule on a torus whose side is a power of two: each round puts a point between any four, at their
    mean with some noise, whose amplitude falls by decay² from round to round.
    """
    rounds = max(1, math.ceil(math.log2(max(size))))
    device = draw.ids.device
    map_ = torch.zeros(len(draw.ids), 1, 1, device=device)
    amplitude = 1.0
    for number in range(rounds):
        side = map_.shape[-1]
        noise = (2.0 * draw.uniform(f"{what}.{number}", 3, side, side) - 1.0) * amplitude
        below, right = map_.roll(-1, 1), map_.roll(-1, 2)
        centre = (map_ + below + right + below.roll(-1, 2)) / 4 + noise[:, 0]
        across = (map_ + right + centre + centre.roll(1, 1)) / 4 + noise[:, 1]
        down = (map_ + below + centre + centre.roll(1, 2)) / 4 + noise[:, 2]
        rows = torch.stack([torch.stack([map_, across], dim=3), torch.stack([down, centre], dim=3)], dim=2)
        map_ = rows.reshape(-1, 2 * side, 2 * side)
        amplitude /= decay**2
    low, high = map_.amin((1, 2), keepdim=True), map_.amax((1, 2), keepdim=True)
    return ((map_ - low) / (high - low).clamp(min=1e-12))[:, None, : size[0], : size[1]]


def luma(images: Tensor) -> Tensor:
    """Luma [B, 1, H, W]: Rec. 601 for RGB, the mean for any other number of channels."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    red, green, blue = images.unbind(1)
    return (0.299 * red + 0.587 * green + 0.114 * blue)[:, None]
