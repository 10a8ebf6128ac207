"""Supervised classification: the baseline, and the method of fine-tuning.

The backbone's own forward and head; labels may be hard or, after MixUp and CutMix, soft. Cross entropy where a sample
has one class; binary cross entropy of each class where it has any number of them.
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
from situs.data.augment.mix import soft_multi_labels
from situs.errors import SitusError
from situs.limits import Within
from situs.methods.base import Batch, Draws, Method, Output


@dataclass(frozen=True)
class SupervisedConfig(Checked):
    """Settings of supervised training."""

    label_smoothing: Annotated[float, Within("[0, 1)")] = 0.1
    """Label smoothing: probability mass that is spread over all classes. With several labels per sample, the mass is
    spread over "yes" and "no" of each class. Soft labels are not smoothed."""


class Supervised(Method):
    """(Binary) cross entropy on the backbone's logits. Works on every backbone, convolutional ones too."""

    Config: ClassVar[type[SupervisedConfig]] = SupervisedConfig
    needs: ClassVar[tuple[str, ...]] = ()
    needs_targets: ClassVar[tuple[str, ...]] = ("label",)
    reads_text: ClassVar[bool] = True

    def __init__(self, backbone: Backbone | nn.Module, config: SupervisedConfig | None = None) -> None:
        super().__init__(backbone, config)

    def draw(self, batch: Batch, when: When) -> Draws:
        return {}

    def forward(self, batch: Batch, draws: Draws) -> Output:
        logits = self.backbone(batch.inputs, batch.mask)
        loss, metrics = label_loss(logits, batch, self.config.label_smoothing)
        return Output(loss, metrics, {"logits": logits.detach()})


def label_loss(logits: Tensor, batch: Batch, smoothing: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross entropy, and top-1 accuracy under "accuracy". smoothing: of hard labels.

    `multi_label_loss` where the batch has "labels".
    """
    if "labels" in batch.targets:
        return multi_label_loss(logits, batch.targets["labels"], smoothing)
    if "label" not in batch.targets:
        raise SitusError("supervised training needs labels, and this data set has no labels", field="data")
    labels = batch.targets["label"]
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    truth = labels if labels.dim() == 1 else labels.to(precise.dtype)
    loss = F.cross_entropy(precise, truth, label_smoothing=smoothing if labels.dim() == 1 else 0.0)
    return loss, {"accuracy": top1(logits, labels)}


def multi_label_loss(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Binary cross entropy, and under "accuracy" the share of the known labels that are right.

    logits: [B, K]. labels: [B, K] integers 1, 0 and -1 for unknown, or soft, with NaN for unknown. The loss is the mean
    over all B · K, where an unknown label adds 0: so the losses of ranks or micro-batches average to that of the whole
    batch.
    """
    shares = labels if labels.is_floating_point() else soft_multi_labels(labels, smoothing)
    known = ~shares.isnan()
    losses = F.binary_cross_entropy_with_logits(logits.float(), shares.float().nan_to_num(), reduction="none")
    with torch.no_grad():
        right = ((logits > 0) == (shares > 0.5)) & known
        accuracy = right.sum() / known.sum().clamp(min=1)
    return (losses * known).mean(), {"accuracy": accuracy}


@torch.no_grad()
def top1(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of samples whose best class is the label (or the heaviest of a soft label)."""
    hard = labels if labels.dim() == 1 else labels.argmax(dim=-1)
    return (logits.argmax(dim=-1) == hard).float().mean()
