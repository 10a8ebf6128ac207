"""The GPU during a step, by the profiler: how long it is busy, and with which kinds of kernels."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from situs.bench.ceiling import wait

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


def profile_kernels(update: Callable[[], Any], device: torch.device, steps: int, top: int = 12) -> Kernels | None:
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
    kernels = kernels_of(events, steps, top)
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
