"""Scores of a multi-label classifier: average precision, accuracy, F1, exact matches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.errors import SitusError, counted, verb
from situs.measure.by_class import LISTED, WEAKEST
from situs.models.inference import rows_of_ranks
from situs.results import Figure, Result, Summary, Table, percent, points

_NAMED = 5
MEANING = """
A sample has any number of the classes. A class's average precision is the area under its curve of precision over
recall, the samples ordered by the model's probability: 100 % where all samples with the class come first; in a random
order about the share of samples with the class. For accuracy, a class is predicted if its probability is above one
half; the mean over the classes is compared with always giving each class's more frequent answer. F1 is the harmonic
mean of
precision and recall at that threshold. Unknown labels are left out of every number.
"""


@dataclass(frozen=True)
class LabelScore:
    """One class. count: samples whose label is known. positives: those of them that have the class.

    average_precision, f1: None where no sample has the class. accuracy: share predicted right, with a threshold of one
    half; None where no label is known.
    """

    count: int
    positives: int
    average_precision: float | None
    accuracy: float | None
    f1: float | None


@dataclass(frozen=True)
class LabelScores:
    """mean_ap, accuracy, f1: means over the classes that have the number. majority: the accuracy of always giving a
    class's more frequent answer. exact: share of the samples with every known label predicted right. loss: mean binary
    cross entropy of the known labels. count: samples. unknown: labels that are left out.
    """

    mean_ap: float
    accuracy: float
    f1: float
    majority: float
    exact: float
    loss: float
    count: int
    unknown: int
    by_class: tuple[LabelScore, ...]


@dataclass(frozen=True)
class LabelAccuracy(Result):
    """A multi-label classifier's scores. classes: their names."""

    file: ClassVar[str] = "accuracy"
    meaning: ClassVar[str] = MEANING
    scores: LabelScores
    classes: Sequence[str]

    def summary(self) -> Summary:
        """How often the labels are right, beside the more frequent answer, and how well samples are ranked."""
        scores, name = self.scores, self.provenance.name
        sentence = (
            f"{name} predicts {percent(scores.accuracy, 2)} of the labels of {self.provenance.counted(scores.count)} "
            f"right, as a mean over {counted(len(self.classes), 'classes')} (always the more frequent answer: "
            f"{percent(scores.majority, 2)}). Its mean average precision is {percent(scores.mean_ap, 2)}."
        )
        shares = [percent(share, 2) for share in (scores.mean_ap, scores.accuracy, scores.f1, scores.exact)]
        header = ["", "mean average precision", "accuracy", "F1", "all labels right", "loss"]
        title = self.provenance.title(self.provenance.counted(scores.count))
        table = Table(title, header, [[name, *shares, f"{scores.loss:.4f}"]])
        return Summary(sentence, (table,), self._notes(), ((shares[0], "mean average precision"),))

    def _notes(self) -> tuple[str, ...]:
        scores, notes = self.scores, []
        if scores.unknown:
            notes.append(f"{counted(scores.unknown, 'labels')} {verb(scores.unknown, 'are')} unknown and left out.")
        empty = [name for name, score in zip(self.classes, scores.by_class, strict=True) if not score.positives]
        if empty:
            named = ", ".join(empty[:_NAMED]) + (", …" if len(empty) > _NAMED else "")
            things = self.provenance.things
            none = f"{counted(len(empty), 'classes')} {verb(len(empty), 'have')} no {things} here"
            notes.append(f"{none}, hence no average precision and no F1: {named}.")
        return tuple(notes)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each class."""
        return [
            {"class": name, **asdict(score)} for name, score in zip(self.classes, self.scores.by_class, strict=True)
        ]

    def numbers(self) -> dict[str, Any]:
        """The means, and a row for each class."""
        means = asdict(self.scores)
        means.pop("by_class")
        return {**means, "classes": self.rows()}

    def figures(self) -> list[Figure]:
        """Every class where they are few."""
        if len(self.classes) > LISTED:
            return [Figure("", "", "bars", ({"mean average precision": 100 * self.scores.mean_ap}, "%"))]
        ranked = {row["class"]: 100 * row["average_precision"] for row in self._ranked()}
        caption = "Average precision of each class."
        return [Figure("classes", caption, "figures.bars", (ranked, "average precision, %"), {"digits": ".1f"})]

    def details(self) -> list[Table]:
        """The weakest classes."""
        header = ["class", f"{self.provenance.things} with it", "of", "average precision, %", "accuracy, %", "F1, %"]
        weakest = sorted(self._ranked(), key=lambda row: row["average_precision"])[:WEAKEST]
        shown = ("average_precision", "accuracy", "f1")
        rows = [
            [row["class"], row["positives"], row["count"], *(points(row[name]) for name in shown)] for row in weakest
        ]
        return [Table("The classes with the lowest average precision", header, rows)]

    def _ranked(self) -> list[dict[str, Any]]:
        return [row for row in self.rows() if row["average_precision"] is not None]


class LabelTally:
    """Keeps all logits and labels on the device: average precision needs their order. `target`: see `Source.target`."""

    target = "labels"

    def __init__(self) -> None:
        self.logits: list[Tensor] = []
        self.labels: list[Tensor] = []

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Adds logits [B, K] and labels [B, K] of 1, 0 and -1 for unknown."""
        self.logits.append(logits.float())
        self.labels.append(labels)

    def result(self) -> LabelScores:
        """The scores over the samples of all ranks."""
        if not self.logits:
            raise SitusError("there are no samples to evaluate on", field="data")
        return label_scores(rows_of_ranks(torch.cat(self.logits)), rows_of_ranks(torch.cat(self.labels)))


def average_precision(scores: Tensor, truth: Tensor) -> float | None:
    """The sum of (R_i − R_{i−1}) · P_i over the distinct scores, highest first; None where nothing is true.

    scores: [n]. truth: [n] bool. R, P: recall and precision of all whose score is no lower; equal ones count together.
    """
    scores, order = scores.sort(descending=True)
    ends = (torch.cat([scores.diff() != 0, truth.new_ones(1, dtype=torch.bool)])).nonzero().flatten()
    hits = truth[order].double().cumsum(0)[ends]
    if not hits.numel() or not hits[-1]:
        return None
    gained = hits.diff(prepend=hits.new_zeros(1))
    return float((gained * hits / (ends + 1)).sum() / hits[-1])


def label_scores(logits: Tensor, labels: Tensor) -> LabelScores:
    """The scores of logits [n, K] against labels [n, K] of 1, 0 and -1 for unknown."""
    known, truth, predicted = labels >= 0, labels > 0, logits > 0
    if not known.any():
        raise SitusError("none of the labels of this data is known", field="data")
    right = (predicted == truth) & known
    columns = torch.stack([known, truth, predicted & known, right, predicted & truth]).sum(1).T.tolist()
    by_class = []
    for number, (count, positives, claimed, hits, true_positives) in enumerate(columns):
        rows = known[:, number]
        precision = average_precision(logits[rows, number], truth[rows, number]) if positives else None
        f1 = 2 * true_positives / (claimed + positives) if positives else None
        by_class.append(LabelScore(count, positives, precision, hits / count if count else None, f1))
    loss = F.binary_cross_entropy_with_logits(logits.double(), truth.double(), reduction="none")[known].mean()
    return LabelScores(
        mean_ap=_mean(score.average_precision for score in by_class),
        accuracy=_mean(score.accuracy for score in by_class),
        f1=_mean(score.f1 for score in by_class),
        majority=_mean(
            max(score.positives, score.count - score.positives) / score.count for score in by_class if score.count
        ),
        exact=float((right | ~known).all(1)[known.any(1)].double().mean()),
        loss=float(loss),
        count=len(labels),
        unknown=int((~known).sum()),
        by_class=tuple(by_class),
    )


def _mean(values: Any) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan
