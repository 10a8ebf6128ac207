"""How well a classifier does over a whole set: top-1, top-5 and loss; exact, one wait for the device at the end.

Where a sample has any number of the classes, the scores of `situs.evaluate.multi_label` stand in their place.
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
from situs.evaluate.multi_label import LabelAccuracy, LabelScores, LabelTally
from situs.methods.base import Batch
from situs.models.data import AnyData, AnyModel, Chosen, check_classes, check_labels, load_any, made_with, opened
from situs.models.inference import Total, evaluating
from situs.models.model import check_classifier
from situs.results import Result, Summary, Table, percent
from situs.train.step import autocast

Classifier = Callable[..., Tensor]
"""Inputs [B, …] -> logits [B, classes]; a backbone is one. Called with a mask where a batch has padding."""


@dataclass(frozen=True)
class Accuracy:
    """top1, top5: shares in [0, 1]. count: samples. loss: their mean cross entropy."""

    top1: float
    top5: float
    count: int
    loss: float


@dataclass(frozen=True)
class ClassAccuracy(Result):
    """A classifier's accuracy and which classes it knows. answers: [C, C] counts by (true, said). classes: names."""

    file: ClassVar[str] = "accuracy"
    accuracy: Accuracy
    answers: Tensor
    classes: Sequence[str]

    def summary(self) -> Summary:
        """How often it is right, beside a guess."""
        found, count, name = self.accuracy, len(self.classes), self.provenance.name
        said = (
            f"{name} recognises {percent(found.top1, 2)} of {self.provenance.counted(found.count)} of {count:,} "
            f"classes (a guess: {percent(1 / count, 2)})."
        )
        row = [name, percent(found.top1, 2), percent(found.top5, 2), f"{found.loss:.4f}"]
        title = self.provenance.title(self.provenance.counted(found.count))
        return Summary(said, (Table(title, ["", "top-1", "top-5", "loss"], [row]),))

    def numbers(self) -> dict[str, Any]:
        """The three numbers, and a row a class."""
        return {**asdict(self.accuracy), "classes": self.by_class()}

    def by_class(self) -> list[dict[str, Any]]:
        """A row a class: how many samples, the share recognised, and the class the others are taken for most often.

        None where there is no sample, or none that is taken for another class.
        """
        most, which = self.answers.clone().fill_diagonal_(0).max(dim=1)
        counts, hits = self.answers.sum(dim=1), self.answers.diagonal()
        return [
            {
                "class": name,
                "count": count,
                "top1": hit / count if count else None,
                "taken_for": self.classes[said] if often else None,
            }
            for name, count, hit, often, said in zip(
                self.classes, counts.tolist(), hits.tolist(), most.tolist(), which.tolist(), strict=True
            )
        ]


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
        hits = logits.topk(min(5, logits.shape[-1]), dim=-1).indices == truth[:, None]
        loss = F.cross_entropy(logits, truth, reduction="none").double().sum()
        sums = torch.stack([hits[:, 0].sum().double(), hits.sum().double(), loss])
        sums = torch.cat([sums, sums.new_full((1,), float(len(truth)))])
        self.sums.add(sums)
        if self.classes:
            said = truth * self.classes + logits.argmax(dim=-1)
            table = torch.zeros(self.classes**2, dtype=torch.float64, device=logits.device)
            self.table.add(table.scatter_add_(0, said, torch.ones_like(said, dtype=torch.float64)))

    def result(self) -> Accuracy:
        """The means over all samples of all ranks; waits for the device."""
        top1, top5, loss, count = self.sums.over_ranks().tolist()
        return Accuracy(top1 / count, top5 / count, int(count), loss / count)

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
    """Measures top-1, top-5 and loss of a classifier on a whole split, and which classes it knows.

    Of a multi-label one mean average precision, accuracy and F1 over the classes, and each class's own.

    model: whatever `open_model` takes. data: a path or a source; None for the samples that a run was trained on.
    precision: fp32, or bf16 for autocast. seed: of random weights. chosen: see `load_any`. Under torchrun the ranks
    share the samples.
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
