"""The peak rate of this machine's matrix products, which a step is compared with."""

from __future__ import annotations

import time

import torch

from situs.train.distributed import DTYPES

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
