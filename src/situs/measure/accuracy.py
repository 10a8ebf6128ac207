"""How well a classifier does over a whole set: top-1, balanced accuracy and loss; exact, one wait for the device.

Where a sample has any number of the classes, the scores of `situs.measure.multi_label` stand in their place.
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
    """top1, top5: shares in [0, 1]. count: samples. loss: their mean cross entropy. balanced: the mean over the
    classes' own top-1. majority: the share of the largest class. classes: how many there are. only: the class that all
    were taken for, if it is one."""

    top1: float
    top5: float
    count: int
    loss: float
    balanced: float
    majority: float
    classes: int
    only: int | None = None


@dataclass(frozen=True)
class ClassAccuracy(Result):
    """A classifier's accuracy and which classes it knows. answers: [C, C] counts by (true, named). classes: names."""

    file: ClassVar[str] = "accuracy"
    meaning: ClassVar[str] = MEANING
    accuracy: Accuracy
    answers: Tensor
    classes: Sequence[str]

    def summary(self) -> Summary:
        """How often it is right, beside naming the largest class every time; then a row a class."""
        whole, name, things = self.accuracy, self.provenance.name, self.provenance.things
        samples = self.provenance.counted(whole.count)
        beside = ByClass.of(self.answers)
        verdict = f", {end}" if (end := beside.verdict(self.classes)) else ""
        text = f"{name} recognises {percent(whole.top1, 2)} of {samples} of {len(self.classes):,} classes{verdict}."
        low, high = wilson(whole.top1 * whole.count, whole.count)
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
        text = f"{text} {beside.words(self.classes, samples, judged=True)}"
        return Summary(text, tuple(tables), numbers=headline(whole))

    def numbers(self) -> dict[str, Any]:
        """The numbers of the whole, and a row a class."""
        whole = asdict(self.accuracy)
        own = {name: whole[name] for name in ("top1", "top5", "count", "loss")}
        if len(self.classes) < TOP5_FROM:
            own["top5"] = None  # among five of so few, a guess is mostly right
        return {**own, **ByClass.of(self.answers).numbers(), "classes": by_class(self.answers, self.classes)}

    def figures(self) -> tuple[Figure, ...]:
        """The classes."""
        return class_figures(self.answers, self.classes, self.provenance.things, shares(self.accuracy))

    def details(self) -> list[Table]:
        """The weakest of many classes."""
        few = len(self.classes) <= LISTED  # they stand in the summary
        return [] if few else [class_table(self.answers, self.classes, self.provenance.things)]


def headline(of: Accuracy | ByClass) -> tuple[tuple[str, str], ...]:
    """Top-1 beside the largest class, and balanced accuracy, for a page's first screen."""
    top1 = f"top-1; naming the largest class: {percent(of.majority, 2)}"
    return (percent(of.top1, 2), top1), (percent(of.balanced, 2), "balanced accuracy")


def shares(accuracy: Accuracy) -> dict[str, float]:
    """What is drawn of many classes."""
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
        """Takes in logits [B, C] and labels [B] (or [B, C] shares, whose heaviest class is the true one)."""
        logits, truth = logits.float(), hard(labels)
        best = logits.topk(min(5, logits.shape[-1]), dim=-1).indices
        hits, named = best == truth[:, None], best[:, 0]
        loss = F.cross_entropy(logits, truth, reduction="none").double().sum()
        sums = torch.stack([hits[:, 0].sum().double(), hits.sum().double(), loss])
        sums = torch.cat([sums, sums.new_full((1,), float(len(truth)))])
        one = torch.ones_like(truth, dtype=torch.float64)
        rows = torch.zeros(3, logits.shape[-1], dtype=torch.float64, device=logits.device)
        for row, index, value in zip(rows, (truth, truth, named), (one, hits[:, 0].double(), one), strict=True):
            row.scatter_add_(0, index, value)
        self.sums.add(torch.cat([sums, rows.flatten()]))
        if self.classes:
            table = torch.zeros(self.classes**2, dtype=torch.float64, device=logits.device)
            self.table.add(table.scatter_add_(0, truth * self.classes + named, one))

    def result(self) -> Accuracy:
        """The means over all samples of all ranks; waits for the device."""
        sums = self.sums.over_ranks().cpu()
        (top1, top5, loss, count), rows = sums[:4].tolist(), ByClass(*sums[4:].view(3, -1))
        beside = (rows.balanced, rows.majority, len(rows.counts), rows.only)
        return Accuracy(top1 / count, top5 / count, int(count), loss / count, *beside)

    def answers(self) -> Tensor:
        """[C, C] int64 on the CPU: how many samples of class i over all ranks were taken for class j."""
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

    Of a multi-label one mean average precision, accuracy and F1 over the classes, and each class's own.

    model: whatever `open_model` takes. data: a path or a source; None for the samples that a run was trained on.
    precision: fp32, or bf16 for autocast. seed: of random weights. chosen: see `load_any`. Under torchrun the ranks
    share the samples.

    >>> print(situs.evaluate_accuracy("runs/ft", count=20))
    """
    model = opened(model, seed)
    check_classifier(model, multi_label=True)
    loader = load_any(model, data, shared=True, **chosen)
    check_classes(model, loader, multi_label=True)
    classes = check_labels(loader, multi_label=True)
    told = {"classes": len(classes), "precision": precision}
    if loader.source.multi_label:
        scores = measure_labels(model.backbone, loader, **told)
        check_numbers(model.name, scores.loss)
        return LabelAccuracy(scores, classes, provenance=made_with(model, loader, seed, precision))
    tally = Tally(len(classes))
    found = measure_accuracy(model.backbone, loader, **told, tally=tally)
    check_numbers(model.name, found.loss)
    return ClassAccuracy(found, tally.answers(), classes, provenance=made_with(model, loader, seed, precision))


def measure_accuracy(
    model: Classifier,
    batches: Iterable[Batch],
    *,
    classes: int | None = None,
    precision: str = "fp32",
    tally: Tally | None = None,
) -> Accuracy:
    """The accuracy of `model` over all `batches`, summed over the ranks where there are several.

    Each rank brings its own part of the set. classes: how many the data has, where the model must have as many.
    tally: what keeps the sums, where more than the accuracy is asked for.
    """
    tally = tally or Tally()
    _run(model, batches, tally, classes, precision)
    return tally.result()


def measure_labels(
    model: Classifier, batches: Iterable[Batch], *, classes: int | None = None, precision: str = "fp32"
) -> LabelScores:
    """The same of a classifier that tells any number of classes a sample."""
    tally = LabelTally()
    _run(model, batches, tally, classes, precision)
    return tally.result()


def _run(
    model: Classifier, batches: Iterable[Batch], tally: Tally | LabelTally, classes: int | None, precision: str
) -> None:
    with evaluating(model):
        for batch in batches:
            with autocast(batch.inputs.device, precision):
                logits = model(batch.inputs) if batch.mask is None else model(batch.inputs, batch.mask)
            if classes not in (None, logits.shape[-1]):
                raise SitusError(
                    f"the model has {counted(logits.shape[-1], 'classes')} and the data {classes}", field="data"
                )
            tally.add(logits, labels_of(batch, tally.target))


def check_numbers(name: str, loss: float) -> None:
    """Refuses the accuracy of outputs that are no numbers: a NaN counts as the largest, so as some class."""
    if math.isnan(loss):
        raise SitusError(f"{name}: some of its outputs are not numbers (NaN), so that it has no accuracy")


def labels_of(batch: Batch, target: str = "label") -> Tensor:
    """The labels of a batch, or one sentence where the data has none of this kind (see `Source.target`)."""
    if target not in batch.targets:
        kind = {"label": "one class a sample", "labels": "any number of classes a sample"}
        has = next((f"gives {kind[each]}" for each in kind if each in batch.targets), "has none")
        raise SitusError(f"this evaluation needs labels, {kind[target]}, and the data {has}", field="data")
    return batch.targets[target]


def hard(labels: Tensor) -> Tensor:
    """Labels as class numbers [n], the heaviest class where they are shares [n, C]."""
    if labels.dim() > 1 and not labels.is_floating_point():
        raise SitusError("the data is multi-label, and one class a sample is asked for here", field="data")
    return labels if labels.dim() == 1 else labels.argmax(dim=-1)
