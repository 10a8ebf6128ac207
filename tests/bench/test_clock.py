"""What is timed, and what follows from it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from situs.bench.cases import Timing
from situs.bench.clock import Kernels, Times, time_steps


def test_compiling_is_the_first_step_and_no_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step takes 5 s, the others 0.5, and in our turn 0.25, for nobody else is on the device."""
    now, done, ours = 0.0, 0, False

    def update() -> None:
        nonlocal now, done
        now += 5.0 if done == 0 else 0.25 if ours else 0.5
        done += 1

    @contextmanager
    def turn() -> Iterator[None]:
        nonlocal ours
        assert done == 3
        ours = True
        yield

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    found = time_steps(update, torch.device("cpu"), Timing(warmup=3, steps=4, repeats=2), turn)
    assert found == Times((0.25, 0.25), 5.0)
    assert done == 3 + 3 + 2 * 4


def test_busy_is_the_kernels_share_of_a_step() -> None:
    times = Times((0.012, 0.010, 0.009), 1.0, 2.0, Kernels(7.5, {"matmul": 8.0}, {"gemm": 8.0}, 3.0, {"matmul": 3.0}))
    assert times.median == 0.010
    assert times.busy == pytest.approx(0.75)
    assert Times((0.005,), 1.0, 2.0, times.kernels).busy == 1.0
    assert Times((0.005,), 1.0).busy is None
    assert Times.from_json(times.to_json()) == times
