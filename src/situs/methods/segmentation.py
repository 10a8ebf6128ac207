"""Segmentation with UperNet on features of several layers: the evaluation of MAE, BEiT and Swin on ADE20K.

Four depths of a plain ViT at four sizes (× 4, × 2, 1, ½), or the stages of a hierarchical model, give a class for every
place of the input; an auxiliary head on the third learns the same beside it. UperNet (Xiao et al., 2018) joins the maps
by a pooling pyramid and a top-down path. Deviations: norms over groups unless `norm` says batch, so that a sample's
features depend on no other; every depth of a ViT goes through the model's own final norm; maps are resized by products
with fixed matrices, whose gradients are deterministic on a GPU too, unlike those of torch's own kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from situs.backbones.base import Backbone
from situs.config import Checked
from situs.core.when import When
from situs.data.batch import VOID
from situs.errors import SitusError
from situs.limits import Count, NotNegative, Within
from situs.methods.base import Batch, Draws, Method, Output
from situs.methods.heads import level_maps, own_norms

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


class BatchNorm(nn.SyncBatchNorm):
    """Batch norm over the samples of all ranks; several ranks need GPUs."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        ranks = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
        if self.training and ranks * input.numel() == input.shape[1]:
            reason = "norm='batch': needs more than one sample per step; choose norm='group', or a larger batch"
            raise SitusError(reason, field=("method.norm", "data.batch"))
        return super().forward(input)


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


@dataclass(frozen=True)
class SegmentationConfig(Checked):
    """Settings of the segmentation decoder."""

    width: Count = 512
    """Number of channels of the decoder."""

    auxiliary_weight: NotNegative = 0.4
    """Weight of the auxiliary head's loss. With 0, there is no auxiliary head."""

    auxiliary_width: Count = 256
    """Number of channels of the auxiliary head."""

    norm: Norm = "group"
    """Normalisation in the decoder. group: over groups of a sample's channels, independent of ranks and micro-batches.
    batch: over the samples of a (micro-)step on all ranks, as published (SyncBN)."""

    dropout: Annotated[float, Within("[0, 1)")] = 0.1
    """Dropout rate of the channels before the last layer of a head."""


class Segmentation(Method):
    """UperNet on the backbone's feature maps. classes: their number."""

    Config: ClassVar[type[SegmentationConfig]] = SegmentationConfig
    needs_targets: ClassVar[tuple[str, ...]] = ("mask",)

    def __init__(self, backbone: Backbone | nn.Module, config: SegmentationConfig, classes: int) -> None:
        super().__init__(backbone, config)
        backbone = self.backbone
        if classes < 2:
            raise SitusError("segmentation needs at least two classes", field="data.masks.classes")
        self.classes, self.levels = classes, backbone.levels()
        widths = [level.dim for level in self.levels]
        flat = not any(level.halved for level in self.levels)
        self.norms = own_norms(self.levels)
        self.pyramid = Pyramid(widths, config.norm) if flat else None
        self.decoder = UperNet(widths, config.width, config.norm)
        self.classifier = nn.Conv2d(config.width, classes, 1)
        self.auxiliary = None
        if config.auxiliary_weight:
            head = [
                normed(widths[-2], config.auxiliary_width, 3, norm=config.norm),
                nn.Dropout2d(config.dropout),
                nn.Conv2d(config.auxiliary_width, classes, 1),
            ]
            self.auxiliary = nn.Sequential(*head)
        self.dropout = nn.Dropout2d(config.dropout)

    def draw(self, batch: Batch, when: When) -> Draws:
        return {}

    def maps(self, inputs: Tensor) -> list[Tensor]:
        """The feature maps of inputs [B, C, H, W], from fine to coarse, [B, C_i, h_i, w_i]."""
        maps = level_maps(self.backbone, inputs, self.levels, self.norms)
        return maps if self.pyramid is None else self.pyramid(maps)

    def logits(self, inputs: Tensor) -> Tensor:
        """Inputs [B, C, H, W] -> logits [B, K, H, W]."""
        return resize(self.classifier(self.dropout(self.decoder(self.maps(inputs)))), inputs.shape[2:])

    def forward(self, batch: Batch, draws: Draws) -> Output:
        maps, size = self.maps(batch.inputs), batch.inputs.shape[2:]
        logits = resize(self.classifier(self.dropout(self.decoder(maps))), size)
        truth = batch.targets["mask"]
        loss = mask_loss(logits, truth)
        if self.auxiliary is not None:
            loss = loss + self.config.auxiliary_weight * mask_loss(resize(self.auxiliary(maps[-2]), size), truth)
        return Output(loss, {"accuracy": mask_accuracy(logits, truth)}, {"logits": logits.detach()})


def mask_loss(logits: Tensor, truth: Tensor) -> Tensor:
    """Cross entropy of logits [B, K, H, W] and classes [B, H, W]: the mean over all pixels, where a void adds 0.

    So the losses of ranks or micro-batches average to that of the whole batch.
    """
    flat, classes = logits.permute(0, 2, 3, 1).flatten(0, 2).float(), truth.flatten().long()
    return F.cross_entropy(flat, classes, ignore_index=VOID, reduction="sum") / classes.numel()


@torch.no_grad()
def mask_accuracy(logits: Tensor, truth: Tensor) -> Tensor:
    """Share of the pixels with a class that are classified right."""
    known = truth != VOID
    return ((logits.argmax(dim=1) == truth) & known).sum() / known.sum().clamp(min=1)
