"""How well a classifier does over a whole set: top-1, balanced accuracy and loss; exact, one wait for the device.

Where one class is much larger than the others, always predicting it is often right. So top-1 stands beside the share of
the largest class (the majority baseline) and beside balanced accuracy, the mean of the accuracies of the classes.

"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.config import checks_arguments
from situs.errors import SitusError, counted, verb
from situs.methods.base import Batch
from situs.models.data import AnyData, AnyModel, Chosen, check_classes, check_labels, load_any, made_with, opened
from situs.models.inference import Total, evaluating, rows_of_ranks
from situs.models.model import check_classifier
from situs.results import Cell, Figure, Result, Summary, Table, percent, points
from situs.train.distributed import Precision
from situs.train.step import autocast

MEANING = """
Top-1 is the share of samples whose class the model ranks first. Top-5 is the share of samples whose class is among the
five classes that the model ranks first (shown if there are more than ten classes). "Largest class" is the share of
samples in the largest class, and thus the top-1 of a model that always predicts this class. If the top-1 of a model is
not above this share, the model has learned nothing useful. Balanced accuracy is the mean of the accuracies of the
classes, so that a small class counts as much as a large one. A model that always predicts one class has a balanced
accuracy of 100 % divided by the number of classes. The 95 % interval is Wilson's confidence interval of top-1. Loss is
the mean cross entropy. The loss is low if the model is right and sure, and high if the model is wrong and sure.
"""

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
        verdict = f", but {clause}" if (clause := scores.verdict(self.classes)) else ""
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
        text = f"{text} {scores.words(self.classes, judged=True)}"
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
    top1 = f"top-1 (always predicting the largest class: {percent(score.majority, 2)})"
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


@checks_arguments("data")
def evaluate_accuracy(
    model: AnyModel,
    data: AnyData = None,
    *,
    precision: Precision = "fp32",
    seed: int = 0,
    **chosen: Unpack[Chosen],
) -> ClassAccuracy | LabelAccuracy:
    """Measures the accuracy of a classifier on a split: top-1, balanced, and of each class.

    Also measured: the loss, the share of the largest class, and top-5 if there are more than ten classes.

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
                    f"the model has {counted(logits.shape[-1], 'classes')}, but the data has {classes}", field="data"
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
        raise SitusError(f"this evaluation needs labels ({kind[target]}), but the data {has}", field="data")
    return batch.targets[target]


def hard(labels: Tensor) -> Tensor:
    """Labels as class numbers [n]; the largest where they are shares [n, C]."""
    if labels.dim() > 1 and not labels.is_floating_point():
        raise SitusError("the data is multi-label, but this evaluation needs one class per sample", field="data")
    return labels if labels.dim() == 1 else labels.argmax(dim=-1)


# --- what an accuracy is worth, class by class ----------------------------------------------------------------------


TOP5_FROM = 11
"""Classes from which top-5 is reported: of ten classes, five random guesses are right half of the time."""

LISTED = 30
"""Up to so many classes all are listed; of more, only the weakest."""

WEAKEST = 10
"""How many of the weakest classes are listed."""


Z = 1.959963984540054
"""Of the normal distribution: 95 % lie within so many standard deviations."""


def wilson(hits: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % confidence interval of the share `hits` / `count`.

    >>> tuple(round(end, 4) for end in wilson(16, 37))
    (0.2871, 0.5905)
    """
    share = hits / count
    middle = share + Z**2 / (2 * count)
    half = Z * math.sqrt(share * (1 - share) / count + (Z / (2 * count)) ** 2)
    scale = 1 + Z**2 / count
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


class ByClass(NamedTuple):
    """By class, [C]: its samples (counts), those of them recognised (hits), samples predicted as it (named)."""

    counts: Tensor
    hits: Tensor
    named: Tensor

    @classmethod
    def of(cls, answers: Tensor) -> ByClass:
        """From counts [C, C] by (true, predicted)."""
        return cls(answers.sum(dim=1), answers.diagonal(), answers.sum(dim=0))

    @property
    def top1(self) -> float:
        """The share of the samples that are recognised."""
        return float(self.hits.sum()) / float(self.counts.sum())

    @property
    def balanced(self) -> float:
        """The mean accuracy of the classes that have samples."""
        present = self.counts > 0
        return float((self.hits[present].double() / self.counts[present].double()).mean())

    @property
    def majority(self) -> float:
        """The share of the largest class."""
        return float(self.counts.max()) / float(self.counts.sum())

    @property
    def only(self) -> int | None:
        """The class that was predicted for all samples, where it is one."""
        return int(self.named.argmax()) if float(self.named.max()) == float(self.named.sum()) else None

    def verdict(self, classes: Sequence[str]) -> str:
        """What a weak top-1 means, as a clause after "but"; "" where it is above the largest class."""
        low, high = wilson(int(self.hits.sum()), int(self.counts.sum()))
        if int((self.counts > 0).sum()) == 1:
            return "all samples are of one class, so the model had nothing to distinguish"
        if self.only is not None:
            return f"the model predicts one class, {classes[self.only]!r}, for all samples, so it distinguishes nothing"
        if low <= self.majority <= high:
            return "the samples are too few to distinguish the model from one that always predicts the largest class"
        return "the model is worse than always predicting the largest class" if high < self.majority else ""

    def words(self, classes: Sequence[str], *, judged: bool = False) -> str:
        """The sentences after a top-1: its interval, the largest class, balanced accuracy, and what they mean.
        judged: whether the verdict was written already."""
        count, hits = int(self.counts.sum()), int(self.hits.sum())
        low, high = wilson(hits, count)
        largest = int(self.counts.argmax())
        text = (
            f"A model that always predicts {classes[largest]!r}, the largest class, has a top-1 of "
            f"{percent(self.majority, 2)}. The 95 % interval of the measured top-1 is {percent(low)} to "
            f"{percent(high)}. Balanced accuracy (the mean over the classes) is {percent(self.balanced, 2)}."
        )
        if (verdict := self.verdict(classes)) and not judged:
            text += f" {verdict[0].upper()}{verdict[1:]}."
        empty = [name for name, number in zip(classes, self.counts.tolist(), strict=True) if not number]
        if empty:
            listed = ", ".join(map(repr, empty[:3])) + (", …" if len(empty) > 3 else "")
            text += f" {len(empty):,} of {len(classes):,} classes {verb(len(empty), 'have')} no samples here, and "
            text += f"{verb(len(empty), 'were')} not tested ({listed})."
        return text

    def numbers(self) -> dict[str, Any]:
        """The numbers beside a top-1, for JSON."""
        interval = wilson(float(self.hits.sum()), int(self.counts.sum()))
        return {"balanced_accuracy": self.balanced, "majority": self.majority, "interval": interval}


def by_class(answers: Tensor, classes: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each class of counts [C, C]: samples, share recognised, and the class it is confused with most often.

    None where there is no sample, or none that is confused.
    """
    columns = [column.tolist() for column in ByClass.of(answers)]
    return [
        {"class": name, "count": count, "top1": hit / count if count else None, "named": named, "taken_for": other}
        for name, count, hit, named, other in zip(classes, *columns, confused_with(answers, classes), strict=True)
    ]


def confused_with(answers: Tensor, classes: Sequence[str]) -> list[str | None]:
    """The class that each class of counts [C, C] is confused with most often; None for a class without confusions."""
    most, which = answers.clone().fill_diagonal_(0).max(dim=1)
    return [classes[int(other)] if count else None for count, other in zip(most, which, strict=True)]


def class_table(answers: Tensor, classes: Sequence[str], things: str) -> Table:
    """A table of the classes: all of them, or the weakest where they are many."""
    rows, title = by_class(answers, classes), "Class by class"
    if len(classes) > LISTED:
        rows = sorted((row for row in rows if row["count"]), key=lambda row: row["top1"])[:WEAKEST]
        title = "The classes with the lowest accuracy"
    header = ["class", things, "right, %", f"{things} predicted as the class", "most often confused with"]
    cells: list[list[Cell]] = [
        [row["class"], row["count"], None if row["top1"] is None else points(row['top1']), row["named"],
         row["taken_for"] or ("none" if row["count"] else None)]
        for row in rows
    ]  # fmt: skip
    return Table(title, header, cells)


def class_figures(
    answers: Tensor, classes: Sequence[str], things: str, shares: Mapping[str, float], model: str = ""
) -> tuple[Figure, ...]:
    """Every class and what it is confused with, where they are few; else `shares`, by name. model: ", in NAME"."""
    if len(classes) > LISTED:
        return (Figure("", "", "bars", ({name: 100 * share for name, share in shares.items()}, "%")),)
    rows = by_class(answers, classes)
    right = {row["class"]: 100 * row["top1"] for row in rows if row["top1"] is not None}
    predicted = 100 * answers.double() / answers.sum(dim=1, keepdim=True)  # NaN, a dash, where a class has no sample
    names = [f"{row['class']} ({row['count']:,})" for row in rows]
    return (
        Figure("classes", f"For each class: the share of its {things} that are recognised{model}.", "figures.bars",
               (right, f"recognised {things} of the class, %"), {"digits": ".1f"}),
        Figure(
            "confusion",
            f"How the {things} of each true class are predicted, in percent{model}. The diagonal shows right answers.",
            "figures.value_grids",
            ({"": (predicted, f"{things} of the class, %")}, names, classes, "predicted class", "true class"),
            {"limits": (0, 100), "digits": ".0f", "cell": (0.95, 0.62 if len(classes) <= 12 else 0.3)},
            "Class by class",
        ),
    )  # fmt: skip


def mixed_pairs(answers: Tensor, names: Sequence[str], most: int) -> list[tuple[int, int]]:
    """The pairs (true, predicted) of different classes with the largest counts in [C, C], the largest first."""
    mixed = answers.clone().fill_diagonal_(0).flatten()
    order = mixed.argsort(descending=True, stable=True)[:most].tolist()
    return [divmod(place, len(names)) for place in order if int(mixed[place])]


# --- multi-label: average precision, accuracy, F1, exact matches ----------------------------------------------------


_NAMED = 5
MEANING_OF_LABELS = """
A sample can have any number of classes. For each class, the samples are ordered by the model's probability of the
class. The average precision of the class is the area under the curve of precision against recall in this order. Average
precision is 100 % if all samples with the class come first. For a random order, average precision is about equal to the
share of samples with the class. A class counts as predicted if its probability is above one half. Accuracy is the share
of labels that are predicted right, averaged over the classes. Compare this accuracy with the accuracy of a model that
always gives the more frequent answer (present or absent) for each class. F1 is the harmonic mean of precision and
recall at the threshold of one half. Unknown labels are left out of all numbers.
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
    meaning: ClassVar[str] = MEANING_OF_LABELS
    scores: LabelScores
    classes: Sequence[str]

    def summary(self) -> Summary:
        """How often the labels are right, beside the more frequent answer, and how well samples are ranked."""
        scores, name = self.scores, self.provenance.name
        sentence = (
            f"{name} predicts {percent(scores.accuracy, 2)} of the labels of {self.provenance.counted(scores.count)} "
            f"right, as a mean over {counted(len(self.classes), 'classes')}. If a model always gave the more "
            f"frequent answer for each class (present or absent), it would predict {percent(scores.majority, 2)} of "
            f"the labels right. The mean average precision of {name} is {percent(scores.mean_ap, 2)}."
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
            notes.append(
                f"{none}, so {'its' if len(empty) == 1 else 'their'} average precision and F1 are undefined: {named}."
            )
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
        header = [
            "class",
            f"{self.provenance.things} with the class",
            "of",
            "average precision, %",
            "accuracy, %",
            "F1, %",
        ]
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
