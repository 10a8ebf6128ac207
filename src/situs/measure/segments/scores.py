"""How right the classes of pixels are: intersection over union, from one table of true and said classes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from situs.data.batch import VOID


@dataclass(frozen=True)
class SegmentScores:
    """answers: [K, K] int64, pixels by (true, said), void ones left out. loss: their mean cross entropy."""

    answers: Tensor
    loss: float = float("nan")

    @property
    def iou(self) -> Tensor:
        """Intersection over union of each class, [K]; NaN where it is neither there nor said."""
        return class_iou(self.answers)

    @property
    def miou(self) -> float:
        """Its mean over the classes that are there or said."""
        return float(self.iou.nanmean())

    @property
    def accuracy(self) -> float:
        """Share of the pixels whose class is right."""
        return float(self.answers.diagonal().sum() / self.answers.sum())

    @property
    def class_accuracy(self) -> float:
        """The mean over the classes that are there of the share of their pixels that are right."""
        return float((self.answers.diagonal() / self.answers.sum(dim=1)).nanmean())


def class_iou(answers: Tensor) -> Tensor:
    """answers [..., K, K] -> intersection over union [..., K], NaN where both are empty."""
    right = answers.diagonal(dim1=-2, dim2=-1).double()
    return right / (answers.sum(-1) + answers.sum(-2) - right)


def count_answers(truth: Tensor, said: Tensor, classes: int) -> Tensor:
    """Pixels by (true, said), [K, K] int64; those without a class are left out. truth, said: any one shape."""
    truth, said = truth.flatten().long(), said.flatten().long()
    pairs = torch.where(truth == VOID, classes * classes, truth * classes + said)
    return torch.bincount(pairs, minlength=classes * classes + 1)[:-1].view(classes, classes)
