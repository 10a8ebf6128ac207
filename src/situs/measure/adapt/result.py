"""What an adaptation comes to: every way that was tried, the one that was taken, and what it is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from situs.measure.accuracy import Accuracy, headline, shares
from situs.measure.adapt.ways import Tried, balanced, gain
from situs.measure.by_class import MEANING, class_figures, class_table, wilson
from situs.results import Figure, Result, Summary, Table, percent

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
    tried: tuple[Tried, ...]
    chosen: Tried
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
