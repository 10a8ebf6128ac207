# pyright: basic, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN202, PLR0912, PLR0913, PLR0915, SIM108 (a kernel's arguments are Triton's to type, and it takes no dataclass)
"""The block sampler of `core.masking` as one Triton kernel: a program a sample, no launch a round.

Laying blocks is a chain of tiny steps, each waiting for the last. As separate tensor operations the launches cost far
more than the work; here the chain stays in one program, which also ends as soon as its sample is done. The noise may
be given, or hashed on the spot, of which only what is used is then ever drawn. The masks are those of the tensor
version, bit for bit: same noise, same float64 arithmetic, same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from situs.core.kernels.gpu.random import key_of, number_at, on_device_of


@triton.jit
def _round(x):
    """To the nearest integer, halves to the even one, as torch and Python round."""
    up = tl.floor(x + 0.5)
    return tl.where((up - x == 0.5) & (up * 0.5 != tl.floor(up * 0.5)), up - 1.0, up).to(tl.int32)


@triton.jit
def _number(noise, key, index, hashed: tl.constexpr):
    """The sample's number at `index`: from memory, or hashed from its key."""
    if hashed:
        number = number_at(key, index)
    else:
        number = tl.load(noise + index)
    return number


@triton.jit(do_not_specialize=["stride", "shared", "rounds", "target", "height", "width"])
def _sample(
    source,
    mask,
    stride,
    shared,
    rounds,
    target,
    height,
    width,
    log_aspect: tl.constexpr,
    min_area: tl.constexpr,
    max_area: tl.constexpr,
    attempts: tl.constexpr,
    official: tl.constexpr,
    hashed: tl.constexpr,
    size: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    if hashed:
        numbers = source
        key = key_of(tl.load(source + sample), shared)
    else:
        numbers = source + sample * stride
        key = sample
    count = height * width
    cells = tl.arange(0, size)
    y = cells // width
    x = cells % width
    free = (cells < count).to(tl.int32)
    wanted = target
    step = 0
    while (step < rounds) & (wanted > 0):
        if official:
            least = min_area
            most = tl.minimum(wanted, max_area)
        else:
            least = tl.minimum(wanted, min_area)
            most = wanted
        new = 0
        attempt = 0
        while (attempt < attempts) & (new == 0):
            draw = step * 4 * attempts + attempt
            weight = _number(numbers, key, draw, hashed).to(tl.float64)
            area = least + (most - least) * weight
            aspect = tl.exp((2.0 * _number(numbers, key, draw + attempts, hashed).to(tl.float64) - 1.0) * log_aspect)
            h = _round(tl.sqrt(area * aspect))
            w = _round(tl.sqrt(area / aspect))
            down = _number(numbers, key, draw + 2 * attempts, hashed).to(tl.float64)
            right = _number(numbers, key, draw + 3 * attempts, hashed).to(tl.float64)
            top = (down * (height + 1 - h)).to(tl.int32)
            left = (right * (width + 1 - w)).to(tl.int32)
            box = (y >= top) & (y < top + h) & (x >= left) & (x < left + w)
            box = box & (h < height) & (w < width)
            gained = tl.where(box, free, 0)
            new = tl.sum(gained, 0)
            if official:
                new = tl.where(new <= most, new, 0)
            if new > 0:
                kept = (gained > 0) & (tl.cumsum(gained, 0) <= wanted)
                free = tl.where(kept, 0, free)
            attempt += 1
        wanted = tl.maximum(wanted - new, 0)
        if official:
            wanted = tl.where(new > 0, wanted, 0)
        step += 1
    if not official:
        start = rounds * 4 * attempts
        if hashed:
            rest = number_at(key, start + cells)
        else:
            rest = tl.load(numbers + start + cells, mask=cells < count, other=2.0)
        while wanted > 0:
            least_noise = tl.argmin(tl.where(free > 0, rest, 2.0), 0)
            free = tl.where(cells == least_noise, 0, free)
            wanted -= 1
    tl.store(mask + sample * count + cells, free == 0, mask=cells < count)


def sample_blocks(
    source: Tensor,
    grid: tuple[int, ...],
    target: int,
    rounds: int,
    attempts: int,
    areas: tuple[int, int],
    log_aspect: float,
    official: bool,
    shared: int | None = None,
) -> Tensor:
    """source: noise [B, M] on a CUDA device, laid out as `masking.block_mask` has it -> bool [B, N].

    areas: the least area of a block and, for `official`, the largest. shared: `random.shared_hash` of the draw; then
    the source is the samples' ids [B], and the noise is `random.uniform`'s.
    """
    source = source.contiguous()
    mask = torch.empty((source.shape[0], grid[0] * grid[1]), dtype=torch.bool, device=source.device)
    size = triton.next_power_of_2(mask.shape[1])
    with on_device_of(source):
        _sample[(source.shape[0],)](
            source,
            mask,
            source.stride(0),
            shared or 0,
            rounds,
            target,
            *grid,
            log_aspect=log_aspect,
            min_area=areas[0],
            max_area=areas[1],
            attempts=attempts,
            official=official,
            hashed=shared is not None,
            size=size,
            num_warps=min(8, max(1, size // 256)),
        )
    return mask
