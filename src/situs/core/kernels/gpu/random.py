# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN201, ANN202 (a kernel's arguments are Triton's to type)
"""The hash of `core.random` for Triton, and `uniform` as one kernel: the same bits, without a launch an operation."""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

from situs.core import constants

_GAMMA = tl.constexpr(constants.GAMMA)
_MIX_A = tl.constexpr(constants.MIX_A)
_MIX_B = tl.constexpr(constants.MIX_B)
_LOW_34 = tl.constexpr((1 << 34) - 1)
_LOW_37 = tl.constexpr((1 << 37) - 1)
_LOW_33 = tl.constexpr((1 << 33) - 1)
_LOW_24 = tl.constexpr((1 << 24) - 1)


@triton.jit
def _mix(x):
    """SplitMix64's finaliser. A signed shift copies the sign bit, which the masks take away."""
    x = (((x >> 30) & _LOW_34) ^ x) * _MIX_A
    x = (((x >> 27) & _LOW_37) ^ x) * _MIX_B
    return ((x >> 31) & _LOW_33) ^ x


@triton.jit
def key_of(sample_id, shared):
    """What a sample's numbers are hashed from: the batch's shared part and the sample's id."""
    return _mix(sample_id.to(tl.int64) * _GAMMA + shared)


@triton.jit
def number_at(key, index):
    """The number in [0, 1) that `uniform` has at `index` of the sample, float32."""
    word = _mix(key + (index + 1).to(tl.int64) * _GAMMA)
    return ((word >> 40) & _LOW_24).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit(do_not_specialize=["shared", "count"])
def _uniform(ids, numbers, shared, count, size: tl.constexpr):
    sample = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * size + tl.arange(0, size)
    key = key_of(tl.load(ids + sample), shared)
    tl.store(numbers + sample * count + index, number_at(key, index), mask=index < count)


def draw_uniform(ids: Tensor, shared: int, count: int) -> Tensor:
    """ids: [B] on a CUDA device; shared: `random.shared_hash` -> float32 [B, count]."""
    ids = ids.contiguous()
    numbers = torch.empty((ids.shape[0], count), dtype=torch.float32, device=ids.device)
    size = min(1024, triton.next_power_of_2(count))
    with on_device_of(ids):
        _uniform[(ids.shape[0], triton.cdiv(count, size))](ids, numbers, shared, count, size=size)
    return numbers


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Where a kernel is to be launched; nothing where that is so already, since changing devices costs microseconds.

    The CPU serves only Triton's interpreter, which the tests use.
    """
    there = not tensor.is_cuda or tensor.device.index == torch.cuda.current_device()
    return contextlib.nullcontext() if there else torch.cuda.device(tensor.device)
