"""The timing of a step after its warm-up, the peak rate it is compared with, and its profile."""

from __future__ import annotations

import json
import os
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from situs.bench.cases import Timing
from situs.train.distributed import DTYPES

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


# --- the peak rate of matrix products ---------------------------------------------------------------------------------


SIDES = {"cuda": 8192, "cpu": 768}
"""Of the square matrices, by the kind of device: large enough that other costs do not show."""


def measure_ceiling(device: torch.device, precision: str, seconds: float = 1.0) -> float:
    """Operations per second of one large product, repeated for `seconds` after a warm-up of the same length.

    The numbers are random: a GPU multiplies zeros faster than it can sustain for other numbers.
    """
    side = SIDES.get(device.type, SIDES["cpu"])
    maker = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, device=device, generator=maker).to(DTYPES[precision]) for _ in range(2))
    product = torch.empty_like(a)
    share = 1 / 8
    _run(a, b, product, 1)  # workspaces
    count = 1
    while (took := _run(a, b, product, count)) < share * seconds:
        count = max(count + 1, int(count * min(10.0, share * seconds / max(took, 1e-6)) + 1))
    timed = [took] if took >= seconds else []  # one product alone: half precision on a CPU
    while took < seconds:
        took += _run(a, b, product, count)
    while sum(timed) < seconds:
        timed.append(_run(a, b, product, count))
    return 2 * side**3 * count * len(timed) / sum(timed)


def _run(a: torch.Tensor, b: torch.Tensor, product: torch.Tensor, count: int) -> float:
    wait(a.device)
    began = time.perf_counter()
    for _ in range(count):
        torch.mm(a, b, out=product)
    wait(a.device)
    return time.perf_counter() - began


def wait(device: torch.device) -> None:
    """Waits until the device has finished its work."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


# --- the GPU during a step, by the profiler ---------------------------------------------------------------------------


KINDS = {
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "optimiser": ("adam", "multi_tensor_apply", "lpnorm"),
    "copies": ("memcpy", "memset", "direct_copy", "catarray"),
    "matmul": ("gemm", "nvjet", "cutlass", "cublas", "xmma", "splitk", "triton_tem", "triton_mm"),
    "elementwise": ("triton_", "elementwise", "reduce", "norm", "softmax", "index", "gather", "scatter"),
}
"""kind -> parts of the names of its kernels; the first match counts, `CAST` before all. "elementwise" includes the
compiler's fused kernels."""

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace's events that occupy the device."""


CAST = re.compile(r"triton_poi_fused_(?=\w*_to_copy)(?:_to_copy|_?unsafe_view|view|t|permute|slice|clone|_)*_\d+")
"""The compiler's names of kernels that only change a precision."""


class Kernels(NamedTuple):
    """Of one step, in ms: the time with at least one kernel running, and the sums by kind and by name.

    launches: number of kernels; counts: by kind.
    """

    busy_ms: float
    kinds: dict[str, float]
    top: dict[str, float]
    launches: float
    counts: dict[str, float]


def profile_kernels(update: Callable[[], Any], device: torch.device, steps: int) -> Kernels | None:
    """Runs `update` `steps` times under the profiler; None where it sees no kernel, as without a GPU or CUPTI."""
    # Restarting CUPTI breaks recorded graphs.
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    wait(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            update()
        wait(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    kernels = kernels_of(events, steps)
    return kernels if kernels.launches else None


def kernels_of(events: Iterable[dict[str, Any]], steps: int, top: int = 12) -> Kernels:
    """The kernels per step in the events of a trace (Chrome's format, in µs)."""
    on_device = [event for event in events if event.get("ph") == "X" and event.get("cat") in ON_DEVICE]
    kinds, counts, names = Counter[str](), Counter[str](), Counter[str]()
    for event in on_device:
        kind = kind_of(event["name"])
        counts[kind] += 1
        kinds[kind] += event["dur"]
        names[event["name"]] += event["dur"]
    unit = 1e3 * steps
    busy = covered((event["ts"], event["ts"] + event["dur"]) for event in on_device)
    shares = {kind: length / unit for kind, length in kinds.most_common()}
    longest = {name: length / unit for name, length in names.most_common(top)}
    each_step = {kind: counts[kind] / steps for kind in shares}
    return Kernels(busy / unit, shares, longest, len(on_device) / steps, each_step)


def kind_of(name: str) -> str:
    """The kind of a kernel by its name."""
    if CAST.fullmatch(name):
        return "casts"
    name = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other")


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
