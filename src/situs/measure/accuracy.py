"""How well a classifier does over a whole set: top-1, balanced accuracy and loss; exact, one wait for the device.

For multi-label data, see `situs.measure.multi_label`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.errors import SitusError, counted
from situs.measure.by_class import LISTED, MEANING, TOP5_FROM, ByClass, by_class, class_figures, class_table, wilson
from situs.measure.multi_label import LabelAccuracy, LabelScores, LabelTally
from situs.methods.base import Batch
from situs.models.data import AnyData, AnyModel, Chosen, check_classes, check_labels, load_any, made_with, opened
from situs.models.inference import Total, evaluating
from situs.models.model import check_classifier
from situs.results import Figure, Result, Summary, Table, percent
from situs.train.step import autocast

Classifier = Callable[..., Tensor]
"""Inputs [B, …] -> logits [B, classes]; a backbone is one. Called with a mask where a batch has padding."""


@dataclass(frozen=True)
class Accuracy:
    """top1, top5: shares in [0, 1]. count: samples. loss: their mean cross entropy. balanced: the mean over the classes
    of their top-1. majority: the share of the largest class. classes: how many there are. only: the class that was
    predicted for all samples, if it is one."""

    top1: float
    top5: float
    count: int
    loss: float
    balanced: float
    majority: float
    classes: int
    only: int | None = None

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of top-1."""
        return wilson(self.top1 * self.count, self.count)


@dataclass(frozen=True)
class ClassAccuracy(Result):
    """A classifier's accuracy, over all and class by class. answers: [C, C] counts by (true, predicted). classes:
    names."""

    file: ClassVar[str] = "accuracy"
    meaning: ClassVar[str] = MEANING
    accuracy: Accuracy
    answers: Tensor
    classes: Sequence[str]

    def summary(self) -> Summary:
        """How often it is right, beside always predicting the largest class; then a row for each class."""
        whole, name, things = self.accuracy, self.provenance.name, self.provenance.things
        samples = self.provenance.counted(whole.count)
        scores = ByClass.of(self.answers)
        verdict = f", {end}" if (end := scores.verdict(self.classes)) else ""
        text = f"{name} recognises {percent(whole.top1, 2)} of {samples} of {len(self.classes):,} classes{verdict}."
        low, high = whole.interval
        columns = {
            "top-1": percent(whole.top1, 2),
            "95 % interval": f"{100 * low:.1f} to {percent(high)}",
            "largest class": percent(whole.majority, 2),
            "balanced": percent(whole.balanced, 2),
            **({"top-5": percent(whole.top5, 2)} if len(self.classes) >= TOP5_FROM else {}),
            "loss": f"{whole.loss:.4f}",
        }
        tables = [Table(self.provenance.title(samples), ["", *columns], [[name, *columns.values()]])]
        if len(self.classes) <= LISTED:
            tables.append(class_table(self.answers, self.classes, things))
        text = f"{text} {scores.words(self.classes, samples, judged=True)}"
        return Summary(text, tuple(tables), numbers=headline(whole))

    def numbers(self) -> dict[str, Any]:
        """The numbers over all samples, and a row for each class."""
        whole = asdict(self.accuracy)
        scores = {name: whole[name] for name in ("top1", "top5", "count", "loss")}
        if len(self.classes) < TOP5_FROM:
            scores["top5"] = None  # among five of so few, a guess is mostly right
        return {**scores, **ByClass.of(self.answers).numbers(), "classes": by_class(self.answers, self.classes)}

    def figures(self) -> tuple[Figure, ...]:
        """The classes."""
        return class_figures(self.answers, self.classes, self.provenance.things, shares(self.accuracy))

    def details(self) -> list[Table]:
        """The weakest of many classes."""
        few = len(self.classes) <= LISTED  # the summary shows them
        return [] if few else [class_table(self.answers, self.classes, self.provenance.things)]


def headline(score: Accuracy | ByClass) -> tuple[tuple[str, str], ...]:
    """Top-1 beside the largest class, and balanced accuracy, for a page's first screen."""
    top1 = f"top-1; always the largest class: {percent(score.majority, 2)}"
    return (percent(score.top1, 2), top1), (percent(score.balanced, 2), "balanced accuracy")


def shares(accuracy: Accuracy) -> dict[str, float]:
    """What is drawn where there are many classes."""
    top5 = {"top-5": accuracy.top5} if accuracy.classes >= TOP5_FROM else {}
    return {"top-1": accuracy.top1, "balanced": accuracy.balanced, "largest class": accuracy.majority, **top5}


class Tally:
    """Running sums on the device. Every sample counts once, so a smaller last batch weighs what it should.

    classes: how many there are, where every answer is kept by class too. `target`: see `Source.target`.
    """

    target = "label"

    def __init__(self, classes: int = 0) -> None:
        self.classes = classes
        self.sums, self.table = Total(), Total()

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Adds logits [B, C] and labels [B] (or [B, C] shares, whose largest is the true class)."""
        logits, truth = logits.float(), hard(labels)
        best = logits.topk(min(5, logits.shape[-1]), dim=-1).indices
        hits, named = best == truth[:, None], best[:, 0]
        loss = F.cross_entropy(logits, truth, reduction="none").double().sum()
        sums = torch.stack([hits[:, 0].sum().double(), hits.sum().double(), loss])
        sums = torch.cat([sums, sums.new_full((1,), float(len(truth)))])
        ones = torch.ones_like(truth, dtype=torch.float64)
        rows = torch.zeros(3, logits.shape[-1], dtype=torch.float64, device=logits.device)
        for row, index, value in zip(rows, (truth, truth, named), (ones, hits[:, 0].double(), ones), strict=True):
            row.scatter_add_(0, index, value)
        self.sums.add(torch.cat([sums, rows.flatten()]))
        if self.classes:
            table = torch.zeros(self.classes**2, dtype=torch.float64, device=logits.device)
            self.table.add(table.scatter_add_(0, truth * self.classes + named, ones))

    def result(self) -> Accuracy:
        """The means over all samples of all ranks; waits for the device."""
        sums = self.sums.over_ranks().cpu()
        (top1, top5, loss, count), rows = sums[:4].tolist(), ByClass(*sums[4:].view(3, -1))
        class_scores = (rows.balanced, rows.majority, len(rows.counts), rows.only)
        return Accuracy(top1 / count, top5 / count, int(count), loss / count, *class_scores)

    def answers(self) -> Tensor:
        """[C, C] int64 on the CPU: over all ranks, how many samples of class i were predicted as class j."""
        return self.table.over_ranks().view(self.classes, self.classes).long().cpu()


def evaluate_accuracy(
    model: AnyModel,
    data: AnyData = None,
    *,
    precision: str = "fp32",
    seed: int = 0,
    **chosen: Unpack[Chosen],
) -> ClassAccuracy | LabelAccuracy:
    """Measures the accuracy of a classifier on a split: top-1, balanced, and of each class.

    Beside them stand the loss, the share of the largest class, and top-5 where there are more than ten classes.

    For a multi-label classifier: mean average precision, accuracy and F1, over all classes and for each.

    model: whatever `open_model` takes. data: a path or a source; None for the samples that a run was trained on.
    precision: fp32, or bf16 for autocast. seed: of random weights. chosen: split, held_out, count and batch, as in
    `extract_features`. Under torchrun the ranks share the samples.

    >>> result = situs.evaluate_accuracy("runs/ft", count=20)  # print(result) shows the tables
    >>> result.accuracy.count
    20
    """
    model = opened(model, seed)
    check_classifier(model, multi_label=True)
    loader = load_any(model, data, shared=True, **chosen)
    check_classes(model, loader, multi_label=True)
    classes = check_labels(loader, multi_label=True)
    options = {"classes": len(classes), "precision": precision}
    if loader.source.multi_label:
        scores = measure_labels(model.backbone, loader, **options)
        check_numbers(model.name, scores.loss)
        return LabelAccuracy(scores, classes, provenance=made_with(model, loader, seed, precision))
    tally = Tally(len(classes))
    accuracy = measure_accuracy(model.backbone, loader, **options, tally=tally)
    check_numbers(model.name, accuracy.loss)
    return ClassAccuracy(accuracy, tally.answers(), classes, provenance=made_with(model, loader, seed, precision))


def measure_accuracy(
    model: Classifier,
    batches: Iterable[Batch],
    *,
    classes: int | None = None,
    precision: str = "fp32",
    tally: Tally | None = None,
) -> Accuracy:
    """The accuracy of `model` over all `batches`, summed over the ranks where there are several.

    Each rank has its part of the set. classes: how many the data has, where the model must have as many. tally: the
    sums to add to, where more than the accuracy is wanted.
    """
    tally = tally or Tally()
    _fill(tally, model, batches, classes, precision)
    return tally.result()


def measure_labels(
    model: Classifier, batches: Iterable[Batch], *, classes: int | None = None, precision: str = "fp32"
) -> LabelScores:
    """The scores of a multi-label classifier over all `batches` of all ranks."""
    tally = LabelTally()
    _fill(tally, model, batches, classes, precision)
    return tally.result()


def _fill(
    tally: Tally | LabelTally, model: Classifier, batches: Iterable[Batch], classes: int | None, precision: str
) -> None:
    with evaluating(model):
        for batch in batches:
            logits = logits_of(model, batch, precision)
            if classes not in (None, logits.shape[-1]):
                raise SitusError(
                    f"the model has {counted(logits.shape[-1], 'classes')} and the data {classes}", field="data"
                )
            tally.add(logits, labels_of(batch, tally.target))


def logits_of(model: Classifier, batch: Batch, precision: str) -> Tensor:
    """The logits [B, classes] of a batch."""
    with autocast(batch.inputs.device, precision):
        return model(batch.inputs) if batch.mask is None else model(batch.inputs, batch.mask)


def check_numbers(name: str, loss: float) -> None:
    """Refuses outputs that hold NaN: `argmax` takes one for the largest, so it would count as some class."""
    if math.isnan(loss):
        raise SitusError(f"{name}: some of its outputs are NaN, so it has no accuracy")


def labels_of(batch: Batch, target: str = "label") -> Tensor:
    """The labels of a batch, or one sentence where the data has none of this kind (see `Source.target`)."""
    if target not in batch.targets:
        kind = {"label": "one class per sample", "labels": "any number of classes per sample"}
        has = next((f"has {kind[name]}" for name in kind if name in batch.targets), "has no labels")
        raise SitusError(f"this evaluation needs labels ({kind[target]}), and the data {has}", field="data")
    return batch.targets[target]


def hard(labels: Tensor) -> Tensor:
    """Labels as class numbers [n]; the largest where they are shares [n, C]."""
    if labels.dim() > 1 and not labels.is_floating_point():
        raise SitusError("the data is multi-label, and this needs one class per sample", field="data")
    return labels if labels.dim() == 1 else labels.argmax(dim=-1)
