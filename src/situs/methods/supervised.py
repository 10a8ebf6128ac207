"""Supervised classification: the baseline, and what fine-tuning runs.

The backbone's own forward and head; labels may be hard or, after MixUp and CutMix, soft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.backbones.base import Backbone
from situs.config import check_range
from situs.errors import SitusError
from situs.methods.base import Batch, Draws, Method, Output


@dataclass(frozen=True)
class SupervisedConfig:
    """Supervised training's own settings."""

    label_smoothing: float = 0.1
    """Mass taken from the true class and spread over all; soft labels bring their own and are left as they are."""

    def __post_init__(self) -> None:
        check_range("label_smoothing", self.label_smoothing, 0, 1, flag="--method.label-smoothing", high_open=True)


class Supervised(Method):
    """Cross entropy on the backbone's logits. Works on every backbone, convolutional ones too."""

    Config: ClassVar[type[SupervisedConfig]] = SupervisedConfig
    needs: ClassVar[tuple[str, ...]] = ("images",)
    needs_labels: ClassVar[bool] = True

    def __init__(self, backbone: Backbone, config: SupervisedConfig) -> None:
        super().__init__(backbone)
        self.config = config

    def draw(self, ids: Tensor, *, seed: int, epoch: int, progress: float = 0.0) -> Draws:
        return {}

    def forward(self, batch: Batch, draws: Draws) -> Output:
        if batch.labels is None:
            raise SitusError("supervised training needs labels, and this data has none (--data)")
        logits = self.backbone(batch.images)
        smoothing = self.config.label_smoothing if batch.labels.dim() == 1 else 0.0
        loss = F.cross_entropy(logits.float(), batch.labels, label_smoothing=smoothing)
        return Output(loss, {"accuracy": top1(logits, batch.labels)}, {"logits": logits.detach()})


@torch.no_grad()
def top1(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of samples whose best class is the label (or the heaviest of a soft label)."""
    hard = labels if labels.dim() == 1 else labels.argmax(dim=-1)
    return (logits.argmax(dim=-1) == hard).float().mean()
