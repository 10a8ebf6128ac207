"""Floating point operations of a step, counted by its matrix products.

A product of [m, k] and [k, n] is 2 m k n. Attention counts as its two products, and four in the backward: what a fused
kernel recomputes is not counted, and neither is anything but products.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

SIZES = 1, 2
"""Batch sizes of the two steps that are counted; the products of a step grow linearly with its batch."""


def step_flops(loss_of: Callable[[int], torch.Tensor], batch: int) -> int:
    """Operations of a forward and backward over `batch` samples. loss_of: the loss of that many samples."""
    less, more = (_count(loss_of, size) for size in SIZES)
    per_sample = (more - less) // (SIZES[1] - SIZES[0])
    return less + (batch - SIZES[0]) * per_sample


def _count(loss_of: Callable[[int], torch.Tensor], size: int) -> int:
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss_of(size).backward()
    return counter.get_total_flops()
