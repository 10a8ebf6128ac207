"""The ways to a classifier, the choice among them, and the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.backbones.config import PositionKind
from situs.measure.accuracy import MEANING, Accuracy, ByClass, class_figures, class_table, headline, shares
from situs.measure.probe.linear import Linear
from situs.results import Figure, Result, Summary, Table, percent, points

Way = Literal["kNN", "class means", "linear probe", "head", "LoRA", "all layers"]
WAYS: tuple[Way, ...] = ("class means", "linear probe", "head", "LoRA", "all layers")
"""The simplest first; a later one must be better by more than chance to be chosen. kNN does not fit into a head: it is
measured, and never chosen."""
PARTS: Mapping[Way, Literal["head", "lora", "all"]] = {"LoRA": "lora", "all layers": "all", "head": "head"}
"""The ways that train, and the part of the model. Tried in this order: where time is short, the first ones gained most
in `benchmarks/few_labels.py`."""
FOLDS = 5


class Initial(NamedTuple):
    """Initial weights. name: "" or the pretraining. source: as `finetune` takes it. positions, frozen: the kind of
    positions for training and for frozen features; None: those of the weights."""

    name: str
    source: str
    positions: PositionKind | None = None
    frozen: PositionKind | None = None


class TriedWay(NamedTuple):
    """A way from some weights, on the folds. right: [n], 1 or 0 by image, NaN where it was not tested. setting: weight
    decay of a probe, scale of class means, k of kNN. updates: the best number, of `total`. seconds: spent."""

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
    """The fold of each image, [n] in range(count), stratified by class; -1 for the image of a class of one, which is
    trained on in all folds."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    folds, at = torch.full_like(labels, -1), 0
    for label in labels.unique().tolist():
        rows = order[labels[order] == label]
        if len(rows) > 1:
            folds[rows] = (torch.arange(len(rows)) + at) % count
            at += len(rows)
    return folds


def class_means(features: Tensor, labels: Tensor, classes: int, scale: float = 1.0) -> Linear:
    """The nearest class mean of features [n, D] by cosine, as a linear classifier; with one image per class, the
    nearest neighbour. The length of a feature vector changes no answer."""
    unit = F.normalize(features, dim=-1)
    sums = torch.zeros(classes, features.shape[1], dtype=features.dtype, device=features.device)
    weight = F.normalize(sums.index_add_(0, labels, unit), dim=-1) * scale / features.norm(dim=-1).mean()
    zero = torch.zeros(features.shape[1], dtype=features.dtype, device=features.device)
    return Linear(weight, zero.new_zeros(classes), zero, zero + 1)


def gain(new: Tensor, old: Tensor, labels: Tensor) -> tuple[float, float]:
    """The gain in balanced accuracy of `new` [n] over `old`, and its standard error, over the images that both were
    tested on."""
    tested = ~(new.isnan() | old.isnan())
    if not tested.any():
        return 0.0, 0.0
    counts = torch.bincount(labels[tested])
    weight = (1 / counts[labels[tested]].double()) / (counts > 0).sum()
    differences = weight * (new[tested] - old[tested]).double()
    return float(differences.sum()), float(differences.square().sum().sqrt())


def choose(tried: Sequence[TriedWay], labels: Tensor) -> TriedWay:
    """The simplest way, unless a later one is better than the choice so far by more than one standard error."""
    order = sorted((trial for trial in tried if trial.way in WAYS), key=lambda trial: (
        WAYS.index(trial.way), bool(trial.origin.name)))  # fmt: skip
    best = order[0]
    for trial in order[1:]:
        more, error = gain(trial.right, best.right, labels)
        if more > error:
            best = trial
    return best


def top1_better(tried: Sequence[TriedWay], chosen: TriedWay) -> list[str]:
    """A remark where another way has a higher top-1 than the chosen one by more than chance: with classes of very
    different sizes, balanced accuracy and top-1 may choose differently."""
    best, remark = 0.0, list[str]()
    for trial in tried:
        tested = ~(trial.right.isnan() | chosen.right.isnan())
        differences = (trial.right - chosen.right)[tested].double()
        more, error = float(differences.sum()), float(differences.square().sum().sqrt())
        if trial.way in WAYS and len(differences) and more > max(best, 1.96 * error):
            new, old = (percent(float(way.right[tested].mean()), 1) for way in (trial, chosen))
            beside = f"{trial.name} has a higher top-1 on the folds ({new}, compared with {old})"
            remark = [f"The recipe was chosen by balanced accuracy, although {beside}."]
            best = more
    return remark


def one_label(labels: Tensor) -> bool:
    """Whether most classes have one image, so that cross-validation is impossible."""
    return bool((labels.bincount() == 1).double().mean() > 0.5)


def balanced(right: Tensor, labels: Tensor) -> float:
    """Balanced accuracy; NaN where nothing was tested."""
    return gain(right, torch.zeros_like(right), labels)[0] if (~right.isnan()).any() else float("nan")


START = "class means on the features of the initial weights"

ADAPT = """
A recipe is a way to train a classifier on your labels. Every recipe was tested by cross-validation on the training
split: it was fitted to all folds except one, and classified the images of the remaining fold. If a recipe was tested on
only some of the folds, it is compared with other recipes only on the images of these folds. The recipes are compared
in order, the simplest recipe first. A later recipe replaces the recipe chosen so far only if its balanced accuracy is
higher by more than one standard error (±) of the difference. A smaller difference may be chance. kNN is shown for
comparison and never chosen, because a head cannot represent kNN. The recipes `head`, `LoRA` and `all layers` use the
number of updates that gave the best result on the folds. The chosen recipe was then fitted to all labelled images of
the split. The test split was not used for these decisions.
"""


@dataclass(frozen=True)
class Adapted(Result):
    """The ways that were tried and the one that was chosen. run: the folder of the run. labels: [n] of the training
    images. test, start: accuracy of the chosen way and of the frozen start on the test images, or None; answers:
    [C, C] of the chosen way. remarks: sentences."""

    file: ClassVar[str] = "adapt"
    subject: ClassVar[str] = "adapted to your data"
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
        """The choice and its accuracy; a table of all ways, and of the test."""
        text, numbers = f"Chosen: {self.chosen.name}.", ()
        tables = [Table(f"cross-validation on {self.provenance.counted(len(self.labels))}", *self.table())]
        if self.test is not None and self.start is not None and self.answers is not None:
            numbers = headline(self.test)[0], (percent(self.start.top1, 2), "top-1 of the simplest recipe")
            samples = self.provenance.counted(self.test.count)
            by_class = ByClass.of(self.answers)
            verdict = f", but {verdict}" if (verdict := by_class.verdict(self.classes)) else ""
            text = (
                f"The chosen model ({self.chosen.name}) recognises {percent(self.test.top1)} of {samples} of "
                f"{len(self.classes):,} classes{verdict}. The test split was not used for any choice. "
                f"{by_class.words(self.classes, judged=True)} "
            )
            ends = {self.chosen.name: self.test}
            if self.chosen.way == "class means" and not self.chosen.origin.name:
                others = any(trial.way != "kNN" for trial in self.tried if trial is not self.chosen)
                reason = ", because no other recipe that was tried is better by more than one standard error"
                text += f"The chosen recipe is the simplest one ({START}){reason * others}."
            else:
                text += f"The simplest recipe ({START}) recognises {percent(self.start.top1)} of them."
                ends["class means (simplest recipe)"] = self.start
            rows = [
                [name, percent(score.top1), f"{100 * low:.1f} to {percent(high)}", percent(score.balanced),
                 percent(score.majority)]
                for name, score in ends.items()
                for low, high in [score.interval]
            ]  # fmt: skip
            header = ["", "top-1", "95 % interval", "balanced", "largest class"]
            tables.append(Table(self.provenance.title("the test split"), header, rows))
        return Summary(" ".join([text, *self.remarks]), tuple(tables), numbers=numbers)

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """Header and rows of the ways."""
        against, tested_on = "balanced, difference from chosen, %", f"{self.provenance.things} tested"
        header = ["recipe", tested_on, "top-1, %", "balanced, %", against, "best number of updates", "chosen"]
        rows: list[list[Any]] = []
        for trial in self.tried:
            tested = ~trial.right.isnan()
            more, error = gain(trial.right, self.chosen.right, self.labels)
            shares = [None, None] if not tested.any() else [
                f"{100 * float(trial.right[tested].mean()):.1f}", points(balanced(trial.right, self.labels), 1)
            ]  # fmt: skip
            beside = None if trial is self.chosen or not tested.any() else f"{100 * more:+.1f} ± {100 * error:.1f}"
            step = f"{trial.updates:,} of {trial.total:,}" if trial.total else None
            rows.append([trial.name, int(tested.sum()), *shares, beside, step, trial is self.chosen])
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
        """Everything, for JSON."""
        rows = [
            {
                "way": trial.way, "after": trial.origin.name, "tested": int((~trial.right.isnan()).sum()),
                "right": float(trial.right.nansum()), "balanced": balanced(trial.right, self.labels),
                "setting": trial.setting, "updates": trial.updates, "total": trial.total, "seconds": trial.seconds,
                "chosen": trial is self.chosen,
            }
            for trial in self.tried
        ]  # fmt: skip
        ends = {"test": self.test, "start": self.start}
        scores = {
            name: None if score is None else {
                "top1": score.top1, "count": score.count, "balanced": score.balanced, "majority": score.majority,
                "interval": score.interval,
            }
            for name, score in ends.items()
        }  # fmt: skip
        return {"tried": rows, **scores, "remarks": list(self.remarks)}
