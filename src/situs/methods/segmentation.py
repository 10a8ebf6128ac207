"""Segmentation with UperNet over a transformer's depths, as MAE, BEiT and Swin are evaluated on ADE20K.

Four depths of a plain ViT at four sizes (× 4, × 2, 1, ½), or the stages of a hierarchical model, give a class for every
place of the input; an auxiliary head on the third learns the same beside it. Deviations: norms over groups unless
`norm` says batch, and every depth of a ViT goes through the model's own final norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.backbones.base import Backbone
from situs.config import Checked
from situs.core.when import When
from situs.data.batch import VOID
from situs.errors import SitusError
from situs.limits import Count, NotNegative, Within
from situs.methods.base import Batch, Draws, Method, Output
from situs.methods.maps import level_maps, own_norms
from situs.methods.upernet import Norm, Pyramid, UperNet, normed, resize


@dataclass(frozen=True)
class SegmentationConfig(Checked):
    """The decoder's own settings."""

    width: Count = 512
    """Channels of the decoder."""

    auxiliary_weight: NotNegative = 0.4
    """Weight of the auxiliary head's loss; 0: no such head."""

    auxiliary_width: Count = 256
    """Channels of the auxiliary head."""

    norm: Norm = "group"
    """The decoder's norm: over groups of a sample's channels, the same with any ranks and micro-batches; or over the
    batch of a (micro-)step on all ranks, as published (SyncBN)."""

    dropout: Annotated[float, Within("[0, 1)")] = 0.1
    """Share of channels dropped before the last layer of a head, in training."""


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
