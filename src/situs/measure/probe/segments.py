"""Segmentation by one linear layer on frozen patch features, whose logits are upsampled.

The layer is fitted by full-batch L-BFGS, as the other probes are: the mean cross entropy at 4 × 4 points of each patch,
with bilinear logits between the patches' centres, on the centre crop of each training sample. It is scored at the size
of the masks, by sliding windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.backbones.base import Backbone
from situs.data.batch import VOID
from situs.errors import SitusError, counted
from situs.measure.probe.linear import (
    AT_ONCE,
    WEIGHT_DECAYS,
    Linear,
    Probe,
    Probes,
    Score,
    choose_decay,
    minimise,
)
from situs.measure.segments import (
    MEANING,
    Inference,
    SegmentScores,
    by_class,
    class_details,
    class_figures,
    measure,
    seeing,
)
from situs.methods.base import Batch
from situs.methods.upernet import resize
from situs.models.inference import evaluating
from situs.results import Cell, Figure, Summary, Table, percent, points
from situs.train.step import autocast

PROBE = """
The model is frozen. One linear layer, the same for every patch, gives each patch a logit for each class; the logits are
upsampled to the image (bilinear), and the largest is the class of a pixel. This measures what the patch features
already say about the classes in the image.
"""
PLACES = 4
"""Points along a patch's side at which the layer is fitted."""


@dataclass(frozen=True)
class SegmentProbe(Probe):
    """score: over the pixels of the test split."""

    @property
    def scores(self) -> SegmentScores:
        """Intersection over union."""
        return SegmentScores(self.score.answers, self.score.loss)

    def numbers(self) -> dict[str, Any]:
        """The scores, and how it was fitted."""
        scores = self.scores
        means = {"miou": scores.miou, "accuracy": scores.accuracy, "class_accuracy": scores.class_accuracy}
        return {**means, "loss": scores.loss, "count": self.score.count, **super().numbers()}


@dataclass(frozen=True)
class SegmentProbes(Probes[SegmentProbe]):
    """Masks read off frozen features. classes: their names."""

    file: ClassVar[str] = "probe-segments"
    subject: ClassVar[str] = "linear segmentation probe"
    meaning: ClassVar[str] = PROBE + MEANING
    classes: Sequence[str] = field(kw_only=True)

    def summary(self) -> Summary:
        """The mIoU on each model; a row for each."""
        (name, first), *rest = self.probes.items()
        text = (
            f"A linear layer on the patches of {name} reaches {percent(first.scores.miou, 2)} mIoU on "
            f"{self.provenance.counted(first.score.count)} of {counted(len(self.classes), 'classes')}."
        )
        text += "".join(f" With {other} it is {percent(probe.scores.miou, 2)}." for other, probe in rest)
        things = self.provenance.things
        header = ["model", "mIoU, %", "pixel accuracy, %", "loss", things, f"{things} fitted to", "weight decay"]
        rows: list[list[Cell]] = [
            [name, points(probe.scores.miou), points(probe.scores.accuracy), probe.score.loss,
             probe.score.count, probe.train_count, f"{probe.fitted.weight_decay:g}"]
            for name, probe in self.probes.items()
        ]  # fmt: skip
        miou = (percent(first.scores.miou, 2), f"mIoU, {self.first[0]}")
        return Summary(text, (Table(self.data, header, rows),), numbers=(miou,))

    def figures(self) -> list[Figure]:
        """The IoU of the classes for each model; the confusion of classes for the first."""
        figures: list[Figure] = []
        for number, (name, probe) in enumerate(self.probes.items(), start=1):
            picture = "classes" if number == 1 else f"classes-{number}"
            figures += class_figures(probe.scores, self.classes, f", in {name}", picture)
        return figures

    def details(self) -> list[Table]:
        """The classes of the first model, and how it was fitted."""
        name, first = self.first
        return [*class_details(first.scores, self.classes, f", in {name}"), *super().details()]

    def numbers(self) -> dict[str, Any]:
        """The numbers of every model, with its classes."""
        numbers = super().numbers()
        for name, probe in self.probes.items():
            numbers["models"][name]["classes"] = by_class(probe.scores, self.classes)
        return numbers


def probe_segments(
    backbone: Backbone,
    train: Iterable[Batch],
    test: Iterable[Batch],
    classes: int,
    *,
    seed: int = 0,
    precision: str = "fp32",
    positions: bool = True,
    weight_decays: Sequence[float] = WEIGHT_DECAYS,
) -> SegmentProbe:
    """Fits to the patch features of `train`, kept on the device, and scores on `test`.

    positions: whether the backbone uses its own.
    """
    backbone.require("tokens")
    places = [PLACES * side for side in backbone.out_grid]

    def patches(inputs: Tensor) -> Tensor:
        with torch.no_grad(), autocast(inputs.device, precision):
            return backbone.encode(backbone.embed(inputs), backbone.positions() if positions else None).patches.float()

    with evaluating(backbone):
        parts = []
        for batch in train:
            inputs, masks = _centres(batch, backbone.input.shape or (0, 0), places)
            parts.append((patches(inputs), masks))
        if not parts:
            raise SitusError("there are no samples to fit the probe to", field="data")
        features, masks = (torch.cat(part) for part in zip(*parts, strict=True))

        def fit(rows: Tensor, decay: float, start: Linear | None) -> Linear:
            return fit_patches(features[rows], masks[rows], classes, decay, backbone.out_grid, start=start)

        def judge(rows: Tensor, linear: Linear) -> tuple[float, float]:
            return _judged(linear, features[rows], masks[rows], backbone.out_grid)

        groups = torch.arange(len(features), device=features.device)
        fitted = choose_decay(groups, fit, judge, weight_decays, seed)

        def predict(inputs: Tensor) -> Tensor:
            return resize(grid_logits(fitted.linear, patches(inputs), backbone.out_grid), inputs.shape[2:])

        measured = measure(seeing(_Frozen(backbone), predict, Inference(), precision), test, classes)
    scores = measured.scores
    score = Score(scores.accuracy, scores.loss, len(measured.rows), scores.answers)
    return SegmentProbe(score, fitted, len(features))


@dataclass(frozen=True)
class _Frozen:
    backbone: Backbone


def grid_logits(linear: Linear, features: Tensor, grid: Sequence[int]) -> Tensor:
    """Patch features [B, N, D] -> logits [B, K, *grid]."""
    return linear(features).transpose(1, 2).unflatten(2, tuple(grid))


def _centres(batch: Batch, size: Sequence[int], places: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The centre crops of a batch's samples [B, C, *size], and the classes at a grid of points in them [B, *places]."""
    inputs, masks = [], []
    sides, whole = batch.targets["sides"].tolist(), batch.targets["whole"].tolist()
    for number, (side, full_size) in enumerate(zip(sides, whole, strict=True)):
        first = [(have - want) // 2 for have, want in zip(side, size, strict=True)]
        inputs.append(batch.inputs[number, :, first[0] : first[0] + size[0], first[1] : first[1] + size[1]])
        rows, columns = (
            ((start + (torch.arange(count, device=batch.inputs.device) + 0.5) * (want / count)) * (full / have)).long()
            for start, count, want, full, have in zip(first, places, size, full_size, side, strict=True)
        )
        masks.append(batch.targets["mask"][number][rows[:, None], columns])
    return torch.stack(inputs), torch.stack(masks)


def fit_patches(
    features: Tensor,
    masks: Tensor,
    classes: int,
    weight_decay: float,
    grid: Sequence[int],
    *,
    start: Linear | None = None,
) -> Linear:
    """The minimum of mean cross entropy + weight_decay / 2 · ‖W‖² on standardised features; the bias is free.

    features: [n, N, D] on `grid`. masks: [n, h, w] classes or VOID, to whose size logits are brought.
    """
    known, rows = int((masks != VOID).sum()), _rows(masks, classes)

    @torch.enable_grad()
    def slope_of(linear: Linear) -> Tensor:
        linear.weight.grad = linear.bias.grad = None
        total = weight_decay / 2 * linear.weight.square().sum()
        total.backward()
        total = total.detach()
        for part, truth in zip(features.split(rows), masks.split(rows), strict=True):
            loss = _loss(linear, part, truth, grid) / known
            loss.backward()
            total += loss.detach()
        return total

    return minimise(features, classes, start, slope_of)


def _loss(linear: Linear, features: Tensor, masks: Tensor, grid: Sequence[int]) -> Tensor:
    """The sum over all points that have a class."""
    logits = resize(grid_logits(linear, features, grid), masks.shape[1:])
    flat, truth = logits.permute(0, 2, 3, 1).flatten(0, 2), masks.flatten().long()
    return F.cross_entropy(flat, truth, ignore_index=VOID, reduction="sum")


def _judged(linear: Linear, features: Tensor, masks: Tensor, grid: Sequence[int]) -> tuple[float, float]:
    """Accuracy and mean cross entropy."""
    known, right, loss = int((masks != VOID).sum()), 0, 0.0
    for part, truth in zip(features.split(_rows(masks, 1)), masks.split(_rows(masks, 1)), strict=True):
        predicted = resize(grid_logits(linear, part, grid), truth.shape[1:]).argmax(dim=1)
        right += int((predicted == truth).sum())
        loss += float(_loss(linear, part, truth, grid))
    return right / known, loss / known


def _rows(masks: Tensor, classes: int) -> int:
    return max(1, AT_ONCE // (classes * masks.shape[1] * masks.shape[2]))
