"""The clock: a step, whatever makes it, timed after its warm-up and looked at by the profiler."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from situs.bench.cases import Timing
from situs.bench.ceiling import wait
from situs.bench.kernels import Kernels, profile_kernels

Turn = Callable[[], AbstractContextManager[Any]]
"""Gives the context in which this process has the device for itself."""


@dataclass(frozen=True)
class Times:
    """What the clock saw. seconds: a step's, the mean of each repeat. first: the first step's, with the compiling.

    gib: the most memory held at a time. kernels: what the profiler saw. Both None where the device is no GPU.
    """

    seconds: tuple[float, ...]
    first: float
    gib: float | None = None
    kernels: Kernels | None = None

    @property
    def median(self) -> float:
        """Of the repeats, in seconds."""
        return statistics.median(self.seconds)

    @property
    def busy(self) -> float | None:
        """The share of a step in which the GPU runs a kernel: kernels by the profiler, the step by the clock alone."""
        return None if self.kernels is None else min(1.0, self.kernels.busy_ms / (1e3 * self.median))

    def to_json(self) -> dict[str, Any]:
        """As `from_json` takes it."""
        return asdict(self) | {"kernels": None if self.kernels is None else self.kernels._asdict()}

    @classmethod
    def from_json(cls, held: dict[str, Any]) -> Times:
        """What `to_json` gave."""
        kernels = None if held["kernels"] is None else Kernels(**held["kernels"])
        return cls(tuple(held["seconds"]), held["first"], held["gib"], kernels)


def time_steps(update: Callable[[], Any], device: torch.device, timing: Timing, turn: Turn = nullcontext) -> Times:
    """Times an update that waits for nothing. Memory is counted from here on, so what it needs may be made before."""
    cuda = device.type == "cuda"

    def run(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            update()
        wait(device)
        return time.perf_counter() - began

    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    first = run(1)
    run(timing.warmup - 1)
    with turn():
        run(timing.warmup)
        seconds = tuple(run(timing.steps) / timing.steps for _ in range(timing.repeats))
        gib = torch.cuda.max_memory_allocated(device) / 2**30 if cuda else None
        kernels = profile_kernels(update, device, timing.profiled) if cuda and timing.profiled else None
    return Times(seconds, first, gib, kernels)
