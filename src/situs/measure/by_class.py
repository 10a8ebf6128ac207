"""What a classifier's accuracy is worth: beside the largest class, class by class, with its interval.

Where one class is much larger than the others, always predicting it is often right. So top-1 stands beside the share of
the largest class (the majority baseline) and beside balanced accuracy, the mean of the accuracies of the classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from situs.results import Cell, Figure, Table, percent, points

TOP5_FROM = 11
"""Classes from which top-5 is reported: of ten classes, five random guesses are right half of the time."""

LISTED = 30
"""Up to so many classes all are listed; of more, only the weakest."""

WEAKEST = 10
"""How many of the weakest classes are listed."""

MEANING = """
Top-1 is the share of the samples whose class the model ranks first, top-5 the share whose class is among its first five
(shown for more than ten classes). Always predicting the largest class has the accuracy of that class's share; a model
that does no better has learned nothing useful. Balanced accuracy is the mean of the accuracies of the classes, so that
a small class counts as much as a large one; always predicting one class gives 100 % divided by the number of classes.
The interval is Wilson's 95 % confidence interval. Loss is the mean cross entropy: low where the model is right and
sure, high where it is sure and wrong.
"""

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
        """What a weak top-1 means, as the end of a sentence; "" where it is above the largest class."""
        low, high = wilson(int(self.hits.sum()), int(self.counts.sum()))
        if int((self.counts > 0).sum()) == 1:
            return "all of one class, so the model had nothing to distinguish"
        if self.only is not None:
            return f"and predicts one class, {classes[self.only]!r}, for everything: it distinguishes nothing"
        if low <= self.majority <= high:
            return "too few to distinguish from always predicting the largest class"
        return "worse than always predicting the largest class" if high < self.majority else ""

    def words(self, classes: Sequence[str], samples: str, *, judged: bool = False) -> str:
        """The sentences after a top-1: its interval, the largest class, balanced accuracy, and what they mean.
        samples: the samples counted, as "37 images". judged: whether the verdict was written already."""
        count, hits = int(self.counts.sum()), int(self.hits.sum())
        low, high = wilson(hits, count)
        largest = int(self.counts.argmax())
        text = (
            f"Always predicting {classes[largest]!r}, the largest class, is right in {percent(self.majority, 2)}; the "
            f"95 % interval of the measured top-1 is {percent(low)} to {percent(high)}. Balanced accuracy (the mean "
            f"over the classes) is {percent(self.balanced, 2)}."
        )
        if (verdict := self.verdict(classes)) and not judged:
            text += f" It {verdict[4:]}." if verdict.startswith("and ") else f" {samples}: {verdict}."
        empty = [name for name, number in zip(classes, self.counts.tolist(), strict=True) if not number]
        if empty:
            listed = ", ".join(map(repr, empty[:3])) + (", …" if len(empty) > 3 else "")
            text += f" Not tested, because they have no samples: {len(empty):,} of {len(classes):,} classes ({listed})."
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
    header = ["class", things, "right, %", f"{things} predicted as it", "most often confused with"]
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
        Figure("classes", f"Share of each class that is recognised{model}.", "figures.bars",
               (right, f"{things} of the class recognised, %"), {"digits": ".1f"}),
        Figure(
            "confusion",
            f"What each class is predicted as, in percent of its {things}; right answers are on the diagonal{model}.",
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
