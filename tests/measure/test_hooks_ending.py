"""What a training is told at its end: the largest class, too few samples, frozen features that do better."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from situs.measure.accuracy import Accuracy
from situs.measure.hooks import Baseline, ending

VAL: Any = SimpleNamespace(classes=("a", "b", "c"), source=SimpleNamespace(things="images"))
FROZEN = Baseline("kNN on its CLS token", 0.9, "situs evaluate knn x --k 5")


def accuracy(top1: float, majority: float, count: int = 37, only: int | None = None) -> Accuracy:
    return Accuracy(top1, 1.0, count, 1.0, 0.5, majority, 3, only)


@pytest.mark.parametrize(
    ("last", "frozen", "lines"),
    [
        (accuracy(0.95, 0.4), None, []),
        (accuracy(0.95, 0.4), FROZEN, []),
        (accuracy(16 / 37, 16 / 37, only=1), None, ["the model predicts one class, 'b', for all 37 images"]),
        (accuracy(0.3, 0.4), None, ["top-1 30.00 % is not better than always predicting the largest class (40.00 %)"]),
        (accuracy(0.4, 0.4), None, ["top-1 40.00 % is not better than always predicting the largest class (40.00 %)"]),
        (
            accuracy(0.5, 0.4),
            None,
            ["37 images are too few to distinguish the model from always predicting the largest class (40.00 %)"],
        ),
        (accuracy(0.5, 0.4, 1000), None, []),
        (accuracy(0.9, 0.4), FROZEN, ["as good as the fine-tuned model: kNN on its CLS token"]),
        (accuracy(0.8, 0.4), FROZEN, ["better"]),
        (
            accuracy(0.3, 0.4),
            FROZEN,
            ["is not better", "30.00 % (to measure the frozen features: situs evaluate"],
        ),
    ],
)
def test_what_is_said_of_a_top1(last: Accuracy, frozen: Baseline | None, lines: list[str]) -> None:
    told = list(ending(last, frozen, VAL))
    assert len(told) == len(lines)
    assert all(part in line for part, line in zip(lines, told, strict=True))
