"""What a training is told at its end: the largest class, too few samples, frozen features that do better."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from situs.measure import hooks
from situs.measure.accuracy import Accuracy
from situs.measure.hooks import Baseline, Validation, ending

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
            ["too few to distinguish the model from one that always predicts the largest class (40.00 %)"],
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


class Counted(hooks._Measures):
    """Keeps the steps at which it was asked."""

    def _log(self, state: Any) -> None:
        state.asked.append(state.step)

    def measure(self, method: Any) -> dict[str, float]:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("every", "total", "steps"),
    [
        (1, 12, [3, 6, 9, 12]), (2, 12, [6, 12]), (3, 12, [9, 12]), (9, 12, [12]),
        (2, 8, [6, 8]), (1, 7, [3, 6, 7]), (9, 2, [2]),
    ],
)  # fmt: skip
def test_a_run_is_measured_every_so_many_epochs_and_once_at_its_end(every: int, total: int, steps: list[int]) -> None:
    """Of three steps an epoch; where a run ends within an epoch, after that step."""
    hook, asked = Counted(every, "fp32"), list[int]()
    for step in range(1, total + 1):
        state: Any = SimpleNamespace(step=step, total=total, steps_per_epoch=3, epoch=(step - 1) // 3, asked=asked)
        hook.after_step(state)
        if step % 3 == 0:
            hook.after_epoch(state)
    assert asked == steps


@pytest.mark.parametrize(("keep", "kept"), [(True, 0.6), (False, 0.5)])
def test_the_best_model_is_told_of_at_the_end_where_it_is_the_one_that_is_kept(
    keep: bool, kept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = iter([0.4, 0.6, 0.6, 0.5])
    monkeypatch.setattr(hooks, "measure_accuracy", lambda *_, **__: accuracy(next(shares), 0.4))
    loader: Any = SimpleNamespace(source=SimpleNamespace(multi_label=False))
    hook = Validation(loader, 1, "fp32", keep_best=keep)
    method: Any = SimpleNamespace(needs_targets=("label",), backbone=None)
    numbers = [hook.measure(method) for _ in range(4)]
    assert [each["val_top1"] for each in numbers] == [0.4, 0.6, 0.6, 0.5]
    assert numbers[0] == {
        "val_top1": 0.4,
        "val_balanced": 0.5,
        "val_majority": 0.4,
        "val_loss": 1.0,
    }  # no top-5 of three
    assert hook.model is not None and hook.model.top1 == kept
