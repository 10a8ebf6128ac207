"""Counter-based randomness: every number is a hash of (seed, epoch, sample id, stream, counter).

A sample's augmentation and masks are then the same in any batch, worker, rank and after a resume, and no generator
state has to be saved. The hash is wrapping 64-bit integer arithmetic, so it runs on the tensor's device and gives the
same bits on the CPU and on a GPU.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from situs.core.constants import GAMMA, MIX_A, MIX_B
from situs.core.kernels import runs_kernels

_WORD = (1 << 64) - 1


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's own `>>` on int64 copies the sign bit."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser. In place on its own tensors: fresh memory costs a CPU more than the arithmetic."""
    x = _shift(x, 30).bitwise_xor_(x).mul_(MIX_A)
    x = _shift(x, 27).bitwise_xor_(x).mul_(MIX_B)
    return _shift(x, 31).bitwise_xor_(x)


def _mix_int(x: int) -> int:
    """`_mix` for one Python integer, so that the batch's shared part of the hash costs the device nothing."""
    x &= _WORD
    x = ((x ^ (x >> 30)) * (MIX_A & _WORD)) & _WORD
    x = ((x ^ (x >> 27)) * (MIX_B & _WORD)) & _WORD
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


@functools.cache
def stream_number(stream: str) -> int:
    """A stable 64-bit number for a stream's name (Python's own `hash` of a string changes from run to run)."""
    return int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=8).digest(), "little")


@functools.lru_cache(maxsize=1024)  # a training asks for the same few at every step of an epoch
def shared_hash(seed: int, epoch: int, stream: str) -> int:
    """The hash of what all samples of a draw share, as a signed 64-bit integer."""
    return _signed(_mix_int(_mix_int(seed + (GAMMA & _WORD)) ^ _mix_int(epoch + 1) ^ stream_number(stream)))


def bits(seed: int, epoch: int, sample_ids: Tensor, stream: str, shape: Sequence[int]) -> Tensor:
    """Independent 64-bit words, [B, *shape] int64: the hash behind `uniform`.

    sample_ids: [B] integers that name the samples (their index in the data set), on the device to draw on.
    """
    key = _mix(sample_ids.to(torch.int64) * GAMMA + shared_hash(seed, epoch, stream))
    counter = torch.arange(1, math.prod(shape) + 1, device=sample_ids.device, dtype=torch.int64)
    words = _mix(key[:, None] + counter * GAMMA)
    return words.view(sample_ids.shape[0], *shape)


def uniform(seed: int, epoch: int, sample_ids: Tensor, stream: str, shape: Sequence[int]) -> Tensor:
    """Uniform numbers in [0, 1), [B, *shape] float32, the same for a sample in any batch.

    sample_ids: [B]. stream: a name such as "mp3.context"; two streams of one sample are independent.
    """
    if runs_kernels(sample_ids) and (count := math.prod(shape)):
        from situs.core.kernels.gpu.random import draw_uniform

        numbers = draw_uniform(sample_ids, shared_hash(seed, epoch, stream), count)
        return numbers.view(sample_ids.shape[0], *shape)
    return _shift(bits(seed, epoch, sample_ids, stream, shape), 40).to(torch.float32).mul_(2.0**-24)


def normal(seed: int, epoch: int, sample_ids: Tensor, stream: str, shape: Sequence[int]) -> Tensor:
    """Standard normal numbers, [B, *shape] float32, by Box and Muller from two uniform streams."""
    radius = uniform(seed, epoch, sample_ids, f"{stream}/radius", shape)
    angle = uniform(seed, epoch, sample_ids, f"{stream}/angle", shape)
    return torch.sqrt(-2.0 * torch.log1p(-radius)) * torch.cos(2.0 * math.pi * angle)
