"""What fits into the minutes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from situs.measure.adapt.plan import FEWEST, FROZEN, plan_of, seconds_of


def test_a_plan_fits_and_drops_the_costliest_first() -> None:
    update = {"head": 0.1, "LoRA": 0.2, "all layers": 0.3}
    ample = plan_of(update, 0.3, 0.01, 100, 300, 1e6)
    assert (ample.folds, ample.total, ample.dropped) == (5, 300, ())
    assert ample.seconds["LoRA", False] == pytest.approx(5 * (300 * 0.2 + 8 * 0.01 * 20))
    for left in (2000.0, 600.0, 300.0, 100.0, 20.0, 1.0):
        plan = plan_of(update, 0.3, 0.01, 100, 300, left)
        assert sum(plan.seconds.values()) + plan.refit <= left
        assert not plan.seconds or plan.total >= FEWEST
        every = [*plan.seconds, *plan.dropped]
        assert every == [(w, False) for w in update] + [(FROZEN, True)] + [(w, True) for w in update]
    assert plan_of(update, None, 0.01, 100, 300, 1.0).seconds == {}


def test_the_first_steps_do_not_count() -> None:
    def steps() -> Iterator[int]:
        time.sleep(0.5)
        while True:
            yield 0

    assert seconds_of(steps(), torch.device("cpu")) < 0.1
