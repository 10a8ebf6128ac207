"""What of an adaptation fits into the minutes that it may take."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from situs.measure.adapt.bench import LOOKS
from situs.measure.adapt.ways import FOLDS

UPDATES, EPOCHS, FEWEST = 300, 10, 100
"""Updates of a training: so many, or these epochs where they are more; at least `FEWEST` where the minutes are few."""
FROZEN = "frozen"
Step = tuple[str, bool]
"""A way that trains, or `FROZEN`: what is fitted to frozen features; and whether after pretraining."""


class Plan(NamedTuple):
    """What fits into the minutes. seconds: expected of each step on its folds, in order. folds, total: of a training.
    refit: seconds of the last training at most. dropped: what does not fit."""

    seconds: Mapping[Step, float]
    folds: int
    total: int
    refit: float
    dropped: tuple[Step, ...] = ()


def plan_of(
    update: Mapping[str, float], pretraining: float | None, image: float, count: int, total: int, left: float
) -> Plan:
    """The most that fits into `left` seconds: fewer folds first, then fewer updates, then fewer ways.

    update: seconds of an update of each way that trains. pretraining: of one of it; None: without. image: seconds of a
    forward of one image, of which there are `count`. total: updates of a training, of which at least a quarter, and not
    fewer than `FEWEST`, are made.
    """
    steps: list[Step] = [(way, False) for way in update]
    if pretraining is not None:
        steps += [(FROZEN, True), *((way, True) for way in update)]
    every = tuple(steps)
    while steps:
        for folds, share in ((FOLDS, 1.0), (2, 1.0), (1, 1.0), (1, 0.5), (1, 0.25)):
            length = min(total, max(FEWEST, int(share * total)))
            looks = folds * LOOKS * image * count / FOLDS
            seconds = {
                (way, after): (pretraining or 0.0) * length + image * count
                if way == FROZEN
                else folds * length * update[way] + looks
                for way, after in steps
            }
            refit = length * max(update[way] for way, _ in steps if way != FROZEN)
            if sum(seconds.values()) + refit <= left:
                return Plan(seconds, folds, length, refit, every[len(steps) :])
        steps.pop()
    return Plan({}, 0, 0, 0.0, every)


def seconds_of(steps: Iterator[Any], device: torch.device) -> float:
    """What one of `steps` takes: the first are left out, in which kernels are chosen and recorded."""
    first, some = (6, 3) if device.type == "cuda" else (1, 2)
    for _ in range(first):
        next(steps)
    _wait(device)
    began = time.perf_counter()
    for _ in range(some):
        next(steps)
    _wait(device)
    return (time.perf_counter() - began) / some


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
