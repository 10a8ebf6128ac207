"""How many floating point operations a step is, by its matrix products: what the model needs, however it is computed.

A product of [m, k] and [k, n] is 2 m k n. Attention is its two products, and their four in the backward: what a fused
kernel computes again is not counted, nor what is no product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

SIZES = 1, 2
"""Samples of the two steps that are counted; a step's products grow linearly with its samples."""


def step_flops(loss_of: Callable[[int], torch.Tensor], batch: int) -> int:
    """Operations of a forward and backward over `batch` samples. loss_of: the loss of that many samples."""
    less, more = (_count(loss_of, size) for size in SIZES)
    each = (more - less) // (SIZES[1] - SIZES[0])
    return less + (batch - SIZES[0]) * each


def _count(loss_of: Callable[[int], torch.Tensor], size: int) -> int:
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss_of(size).backward()
    return counter.get_total_flops()
