"""The ways to a classifier, and which of them is taken: pure functions of features, labels and right answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.backbones.config import PositionKind
from situs.measure.probe.linear import Linear

Way = Literal["kNN", "class means", "linear probe", "head", "LoRA", "all layers"]
WAYS: tuple[Way, ...] = ("class means", "linear probe", "head", "LoRA", "all layers")
"""From the simplest on; a later one must be better by more than chance to be taken. Neighbours fit into no head: they
are measured, and never taken."""
PARTS: Mapping[Way, Literal["head", "lora", "all"]] = {"LoRA": "lora", "all layers": "all", "head": "head"}
"""The ways that train, and what of the model; tried in this order, for where time is short, the first ones gained most
in `benchmarks/few_labels.py`."""
FOLDS = 5


class Origin(NamedTuple):
    """Weights to begin with. name: for people. source: as `finetune` takes it. positions, frozen: the kind of positions
    to train with and to take features with; None: those of the weights."""

    name: str
    source: str
    positions: PositionKind | None = None
    frozen: PositionKind | None = None


class Tried(NamedTuple):
    """A way from some weights, on the folds. right: [n], 1 or 0 by image, NaN where it was not tested. setting: the
    weight decay of a probe, the scale of means, k. updates: after which a training did best. seconds: what it took."""

    way: Way
    origin: Origin
    right: Tensor
    setting: float = 0.0
    updates: int = 0
    total: int = 0
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.way}{f' after {self.origin.name}' if self.origin.name else ''}"


def folds_of(labels: Tensor, count: int = FOLDS, seed: int = 0) -> Tensor:
    """The fold of each image, [n] in range(count), every class spread evenly; -1 for the one image of a class of one,
    which is trained on in all folds."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    folds, at = torch.full_like(labels, -1), 0
    for label in labels.unique().tolist():
        rows = order[labels[order] == label]
        if len(rows) > 1:
            folds[rows] = (torch.arange(len(rows)) + at) % count
            at += len(rows)
    return folds


def class_means(features: Tensor, labels: Tensor, classes: int, scale: float = 1.0) -> Linear:
    """The nearest class mean of features [n, D] by cosine, as a linear classifier: at one image a class its nearest
    neighbour. The length of what is classified moves no answer."""
    unit = F.normalize(features, dim=-1)
    sums = torch.zeros(classes, features.shape[1], dtype=features.dtype, device=features.device)
    weight = F.normalize(sums.index_add_(0, labels, unit), dim=-1) * scale / features.norm(dim=-1).mean()
    zero = torch.zeros(features.shape[1], dtype=features.dtype, device=features.device)
    return Linear(weight, zero.new_zeros(classes), zero, zero + 1)


def gain(new: Tensor, old: Tensor, labels: Tensor) -> tuple[float, float]:
    """How much more often `new` [n] is right than `old`, and the standard error of that: over the images that both
    were tested on, in which every class counts the same."""
    both = ~(new.isnan() | old.isnan())
    if not both.any():
        return 0.0, 0.0
    counts = torch.bincount(labels[both])
    weight = (1 / counts[labels[both]].double()) / (counts > 0).sum()
    apart = weight * (new[both] - old[both]).double()
    return float(apart.sum()), float(apart.square().sum().sqrt())


def choose(tried: Sequence[Tried], labels: Tensor) -> Tried:
    """The simplest, unless a later one is better than what is chosen so far by more than one standard error."""
    order = sorted((each for each in tried if each.way in WAYS), key=lambda each: (
        WAYS.index(each.way), bool(each.origin.name)))  # fmt: skip
    best = order[0]
    for each in order[1:]:
        more, error = gain(each.right, best.right, labels)
        if more > error:
            best = each
    return best


def one_label(labels: Tensor) -> bool:
    """Whether the fixed rule holds: most classes have one image, so that nothing is left to choose by."""
    return bool((labels.bincount() == 1).double().mean() > 0.5)


def balanced(right: Tensor, labels: Tensor) -> float:
    """The mean over the classes of their shares of right answers; NaN where nothing was tested."""
    return gain(right, torch.zeros_like(right), labels)[0] if (~right.isnan()).any() else float("nan")
