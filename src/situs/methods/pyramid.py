"""Pyramids of feature maps for detection, from fine to coarse and all of one width.

The simple pyramid is that of ViTDet (Li et al., 2022): strides of 4, 8, 16, 32 and 64 pixels from the one map of a
plain transformer, by transposed convolutions and pooling, with norms over the channels at each point. A hierarchical
model has maps of several strides itself, which torchvision's feature pyramid network joins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool
from torchvision.ops.misc import Permute

from situs.backbones.base import Level

FINEST = 4
"""Stride in pixels of the finest map, where the patches' side is a power of two."""

LEVELS = 4
"""Maps before the coarsest, which is the last of them subsampled."""


def channel_norm(channels: int) -> nn.Sequential:
    """LayerNorm over the channels at each point of maps [B, C, h, w]."""
    return nn.Sequential(Permute([0, 2, 3, 1]), nn.LayerNorm(channels, eps=1e-6), Permute([0, 3, 1, 2]))


class SimplePyramid(nn.Module):
    """ViTDet's pyramid: one map [B, dim, h, w] at five sizes, all of `width` channels. patch: the map's stride."""

    def __init__(self, dim: int, width: int, patch: int) -> None:
        super().__init__()
        finest = max(0, round(math.log2(patch / FINEST)))  # how often the finest map is doubled
        doubled = range(finest, finest - LEVELS, -1)
        self.strides = [patch * 2.0**-times for times in [*doubled, doubled[-1] - 1]]
        self.scales = nn.ModuleList([_scaled(dim, times) for times in doubled])
        self.smooth = nn.ModuleList([_smooth(dim >> max(0, times), width) for times in doubled])

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        levels = [smooth(scale(maps[-1])) for scale, smooth in zip(self.scales, self.smooth, strict=True)]
        return [*levels, F.max_pool2d(levels[-1], 1, 2)]


def _scaled(dim: int, times: int) -> nn.Sequential:
    """A map doubled in size `times` times, its channels halved as often; halved in size where negative."""
    if times <= 0:
        return nn.Sequential(*[nn.MaxPool2d(2, ceil_mode=True) for _ in range(-times)])
    layers: list[nn.Module] = []
    for done in range(times):
        if done:
            layers += [channel_norm(dim >> done), nn.GELU()]
        layers.append(nn.ConvTranspose2d(dim >> done, dim >> (done + 1), 2, 2))
    return nn.Sequential(*layers)


def _smooth(have: int, width: int) -> nn.Sequential:
    layers = [nn.Conv2d(have, width, 1, bias=False), nn.Conv2d(width, width, 3, padding=1, bias=False)]
    return nn.Sequential(*[part for layer in layers for part in (layer, channel_norm(width))])


class StagePyramid(nn.Module):
    """An FPN: the stages of a hierarchical model joined from coarse to fine, and the coarsest subsampled."""

    def __init__(self, levels: Sequence[Level], width: int, patch: int) -> None:
        super().__init__()
        self.strides = [float(patch * 2**level.halved) for level in levels]
        self.strides.append(2 * self.strides[-1])
        widths = [level.dim for level in levels]
        self.joined = FeaturePyramidNetwork(widths, width, LastLevelMaxPool(), norm_layer=channel_norm)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        return list(self.joined({str(number): level for number, level in enumerate(maps)}).values())
