"""The timing of a step after its warm-up, and its profile."""

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
"""Gives the context in which this process has exclusive use of the device."""


@dataclass(frozen=True)
class Times:
    """seconds: of a step, the mean of each repeat. first: of the first step, with compilation.

    gib: peak memory. kernels: from the profiler. Both None where the device is no GPU.
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
        """The share of a step in which the GPU runs a kernel: profiled kernels over the unprofiled step time."""
        return None if self.kernels is None else min(1.0, self.kernels.busy_ms / (1e3 * self.median))

    def to_json(self) -> dict[str, Any]:
        """As `from_json` takes it."""
        return asdict(self) | {"kernels": None if self.kernels is None else self.kernels._asdict()}

    @classmethod
    def from_json(cls, numbers: dict[str, Any]) -> Times:
        """What `to_json` gave."""
        kernels = None if numbers["kernels"] is None else Kernels(**numbers["kernels"])
        return cls(tuple(numbers["seconds"]), numbers["first"], numbers["gib"], kernels)


def time_steps(update: Callable[[], Any], device: torch.device, timing: Timing, turn: Turn = nullcontext) -> Times:
    """Times an update that does not wait for the device; peak memory includes what exists already."""
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
