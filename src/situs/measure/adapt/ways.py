"""The ways to a classifier, which of them is taken, and the result: what each way and the choice are worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.backbones.config import PositionKind
from situs.measure.accuracy import Accuracy, headline, shares
from situs.measure.by_class import MEANING, class_figures, class_table, wilson
from situs.measure.probe.linear import Linear
from situs.results import Figure, Result, Summary, Table, percent

Way = Literal["kNN", "class means", "linear probe", "head", "LoRA", "all layers"]
WAYS: tuple[Way, ...] = ("class means", "linear probe", "head", "LoRA", "all layers")
"""From the simplest on; a later one must be better by more than chance to be taken. Neighbours fit into no head: they
are measured, and never taken."""
PARTS: Mapping[Way, Literal["head", "lora", "all"]] = {"LoRA": "lora", "all layers": "all", "head": "head"}
"""The ways that train, and what of the model; tried in this order, for where time is short, the first ones gained most
in `benchmarks/few_labels.py`."""
FOLDS = 5


class Initial(NamedTuple):
    """Weights to begin with. name: for people. source: as `finetune` takes it. positions, frozen: the kind of positions
    to train with and to take features with; None: those of the weights."""

    name: str
    source: str
    positions: PositionKind | None = None
    frozen: PositionKind | None = None


class TriedWay(NamedTuple):
    """A way from some weights, on the folds. right: [n], 1 or 0 by image, NaN where it was not tested. setting: the
    weight decay of a probe, the scale of means, k. updates: after which a training did best. seconds: what it took."""

    way: Way
    origin: Initial
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


def choose(tried: Sequence[TriedWay], labels: Tensor) -> TriedWay:
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


ADAPT = """
Every way was tried by cross-validation on the training labels alone: one fold is left out, the way is fitted to the
others, and the images of that fold are classified. A way that trains may have had fewer folds; it is compared with the
others on the images of its own folds. The ways stand in order, the simplest first. A later way is chosen over an
earlier one where its balanced accuracy is higher by more than one standard error (±) of the difference; below that the
difference may be chance. Neighbours (kNN) are shown for comparison and never chosen: no head can hold them. A training
was stopped after the update at which it did best on the folds. The chosen way was then fitted to all labels. The test
images played no part in any of this. "Largest class" is the accuracy of naming the most frequent class every time.
"""


@dataclass(frozen=True)
class Adapted(Result):
    """What was tried and taken. run: the folder of the run. tried: on the folds. labels: [n] of the training images.
    test, start: accuracy of what was chosen and of the frozen start on the test images, None without any; answers:
    [C, C] of the first. remarks: sentences."""

    file: ClassVar[str] = "adapt"
    subject: ClassVar[str] = "adapted to your images"
    meaning: ClassVar[str] = ADAPT + MEANING
    run: Path
    tried: tuple[TriedWay, ...]
    chosen: TriedWay
    labels: Tensor
    classes: Sequence[str]
    test: Accuracy | None
    start: Accuracy | None
    answers: Tensor | None
    remarks: tuple[str, ...]

    def summary(self) -> Summary:
        """What was taken and what it is worth; the table of all, and of the test."""
        text, numbers = f"Taken: {self.chosen.name}.", ()
        tables = [Table(f"cross-validation on {self.provenance.counted(len(self.labels))}", *self.table())]
        if self.test is not None and self.start is not None:
            numbers = headline(self.test)[0], (percent(self.start.top1, 2), "top-1 of the frozen start")
            low, high = wilson(self.test.top1 * self.test.count, self.test.count)
            text = (
                f"{percent(self.test.top1)} of {self.provenance.counted(self.test.count)} of {len(self.classes):,} "
                f"classes are recognised, with {self.chosen.name}. These images played no part in any choice; the 95 % "
                f"interval is {percent(low)} to {percent(high)}, and naming the largest class is right in "
                f"{percent(self.test.majority)}. "
            )
            ends = {self.chosen.name: self.test}
            if self.chosen.way == "class means" and not self.chosen.origin.name:
                others = any(each.way != "kNN" for each in self.tried if each is not self.chosen)
                text += f"That is the frozen start{'; nothing else is better by more than chance' * others}."
            else:
                text += f"The frozen start, class means on the given weights, has {percent(self.start.top1)}."
                ends["class means (frozen start)"] = self.start
            rows = [
                [name, percent(each.top1), f"{100 * low:.1f} to {percent(high)}", percent(each.balanced),
                 percent(each.majority)]
                for name, each in ends.items()
                for low, high in [wilson(each.top1 * each.count, each.count)]
            ]  # fmt: skip
            header = ["", "top-1", "95 % interval", "balanced", "largest class"]
            tables.append(Table(self.provenance.title("the test images"), header, rows))
        return Summary(" ".join([text, *self.remarks]), tuple(tables), numbers=numbers)

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """Header and rows of what was tried."""
        against = "balanced, against the chosen, %"
        header = ["way", "images tested", "top-1, %", "balanced, %", against, "updates, best of all", "chosen"]
        rows: list[list[Any]] = []
        for each in self.tried:
            tested = ~each.right.isnan()
            more, error = gain(each.right, self.chosen.right, self.labels)
            shares = [None, None] if not tested.any() else [
                f"{100 * float(each.right[tested].mean()):.1f}", f"{100 * balanced(each.right, self.labels):.1f}"
            ]  # fmt: skip
            beside = None if each is self.chosen or not tested.any() else f"{100 * more:+.1f} ± {100 * error:.1f}"
            step = f"{each.updates:,} of {each.total:,}" if each.total else None
            rows.append([each.name, int(tested.sum()), *shares, beside, step, each is self.chosen])
        return header, rows

    def figures(self) -> tuple[Figure, ...]:
        """The classes of the test images."""
        if self.answers is None or self.test is None:
            return ()
        return class_figures(self.answers, self.classes, self.provenance.things, shares(self.test))

    def details(self) -> list[Table]:
        """The classes of the test images."""
        if self.answers is None:
            return []
        return [class_table(self.answers, self.classes, self.provenance.things)]

    def numbers(self) -> dict[str, Any]:
        """Everything, as JSON holds it."""
        rows = [
            {
                "way": each.way, "after": each.origin.name, "tested": int((~each.right.isnan()).sum()),
                "right": float(each.right.nansum()), "balanced": balanced(each.right, self.labels),
                "setting": each.setting, "updates": each.updates, "total": each.total, "seconds": each.seconds,
                "chosen": each is self.chosen,
            }
            for each in self.tried
        ]  # fmt: skip
        ends = {"test": self.test, "start": self.start}
        scores = {
            name: None if each is None else {
                "top1": each.top1, "count": each.count, "balanced": each.balanced, "majority": each.majority,
                "interval": wilson(each.top1 * each.count, each.count),
            }
            for name, each in ends.items()
        }  # fmt: skip
        return {"tried": rows, **scores, "remarks": list(self.remarks)}
