"""UperNet (Xiao et al., 2018): feature maps of several depths joined by pooling pyramid and top-down path.

Norms are over groups unless batch norm (over all ranks, as published) is chosen: so a sample's features depend on no
other, and ranks and micro-batches give the same. Maps are resized by products with fixed matrices, whose gradients are
deterministic on a GPU too, unlike those of torch's own kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from situs.errors import SitusError

Norm = Literal["group", "batch"]

POOLS = (1, 2, 3, 6)
"""Sides of the pyramid's grids."""


def resize(maps: Tensor, size: Sequence[int]) -> Tensor:
    """Maps [B, C, h, w] resized bilinearly (corners not aligned), by one product per direction."""
    for side, want in zip((-2, -1), size, strict=True):
        if maps.shape[side] != want:
            weights = bilinear(maps.shape[side], want, maps.device).to(maps.dtype)
            maps = weights @ maps if side == -2 else maps @ weights.T
    return maps


def bilinear(have: int, want: int, device: torch.device | None = None) -> Tensor:
    """Interpolation weights of `want` points from `have` points, [want, have]."""
    place = ((torch.arange(want, device=device) + 0.5) * (have / want) - 0.5).clamp(0, have - 1)
    return (1 - (place[:, None] - torch.arange(have, device=device)).abs()).clamp(min=0)


def pool(maps: Tensor, side: int) -> Tensor:
    """Means of maps [B, C, h, w] over side × side cells, which overlap where the sides do not divide."""
    rows, columns = (_cells(have, side, maps) for have in maps.shape[-2:])
    return rows @ maps @ columns.T


def _cells(have: int, want: int, like: Tensor) -> Tensor:
    places, cells = torch.arange(have, device=like.device), torch.arange(want, device=like.device)[:, None]
    inside = (places >= cells * have // want) & (places < -(-(cells + 1) * have // want))
    return (inside / inside.sum(1, keepdim=True)).to(like.dtype)


class BatchNorm(nn.BatchNorm2d):
    """Batch norm over the samples of all ranks, as torch's SyncBatchNorm, which is for GPUs alone."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        ranks = _ranks() if self.training else 1
        count = ranks * input.numel() // input.shape[1]
        if self.training and count < 2:
            reason = "norm='batch': needs more than one sample per step; choose group, or a larger batch"
            raise SitusError(reason, field=("method.norm", "data.batch"))
        if ranks == 1:
            return super().forward(input)
        running: Any = self  # torch's stubs allow a norm without running statistics
        values = input.float()
        mean = _mean_over_ranks(values.mean(dim=(0, 2, 3), keepdim=True))
        centred = values - mean
        variance = _mean_over_ranks(centred.square().mean(dim=(0, 2, 3), keepdim=True))
        with torch.no_grad():
            running.num_batches_tracked += 1
            running.running_mean.lerp_(mean.flatten(), self.momentum)
            running.running_var.lerp_(variance.flatten() * (count / (count - 1)), self.momentum)
        scaled = centred * (variance + self.eps).rsqrt() * self.weight[:, None, None] + self.bias[:, None, None]
        return scaled.to(input.dtype)


def _ranks() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _mean_over_ranks(values: Tensor) -> Tensor:
    """The mean of values of equally many samples on each rank, with gradients from all of them."""
    from torch.distributed.nn.functional import all_reduce

    return all_reduce(values) / _ranks()


def norm_of(width: int, norm: Norm, groups: int | None = None) -> nn.Module:
    """The norm of a map of `width` channels: batch norm, or `groups`, by default of 16 channels or fewer."""
    if norm == "batch":
        return BatchNorm(width)
    groups = groups or next(count for count in range(max(1, width // 16), 0, -1) if width % count == 0)
    return nn.GroupNorm(groups, width)


def normed(have: int, want: int, kernel: int = 1, *, norm: Norm = "group") -> nn.Sequential:
    """A convolution, its norm, and a ReLU."""
    convolution = nn.Conv2d(have, want, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, norm_of(want, norm), nn.ReLU())


class Pyramid(nn.Module):
    """Maps of a plain transformer, all on one grid, at four sizes: × 4, × 2, 1, ½. widths: of each map."""

    def __init__(self, widths: Sequence[int], norm: Norm = "group") -> None:
        super().__init__()
        first, second, *_ = widths
        self.fourfold = nn.Sequential(
            nn.ConvTranspose2d(first, first, 2, 2),
            norm_of(first, norm, 1),
            nn.GELU(),
            nn.ConvTranspose2d(first, first, 2, 2),
        )
        self.twofold = nn.ConvTranspose2d(second, second, 2, 2)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        first, second, third, last = maps
        return [self.fourfold(first), self.twofold(second), third, F.max_pool2d(last, 2, ceil_mode=True)]


class UperNet(nn.Module):
    """Maps from fine to coarse, [B, C_i, h_i, w_i], to one [B, width, h_0, w_0]. widths: C_i."""

    def __init__(self, widths: Sequence[int], width: int, norm: Norm = "group") -> None:
        super().__init__()
        *finer, last = widths
        self.pools = nn.ModuleList([normed(last, width, norm=norm) for _ in POOLS])
        self.bottleneck = normed(last + len(POOLS) * width, width, 3, norm=norm)
        self.laterals = nn.ModuleList([normed(have, width, norm=norm) for have in finer])
        self.smooth = nn.ModuleList([normed(width, width, 3, norm=norm) for _ in finer])
        self.fuse = normed(len(widths) * width, width, 3, norm=norm)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        *finer, last = maps
        size = last.shape[-2:]
        pooled = [resize(layer(pool(last, side)), size) for layer, side in zip(self.pools, POOLS, strict=True)]
        ways = [self.bottleneck(torch.cat([last, *pooled], dim=1))]
        for lateral, level in zip(reversed(self.laterals), reversed(finer), strict=True):  # from coarse to fine
            ways.insert(0, lateral(level) + resize(ways[0], level.shape[-2:]))
        smoothed = [layer(way) for layer, way in zip(self.smooth, ways, strict=False)]
        size = ways[0].shape[-2:]
        return self.fuse(torch.cat([resize(way, size) for way in (*smoothed, ways[-1])], dim=1))
