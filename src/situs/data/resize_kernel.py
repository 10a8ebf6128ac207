# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN202, PLR0913 (a kernel's arguments are Triton's to type)
"""Crops of many sizes resized to one, in Triton: bit for bit as torch resizes bytes.

Each direction has integer weights, with as many bits as a signed 16-bit number holds, and is rounded to bytes. The
weights are computed in float64 in torch's order, and no product is fused with a sum.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from situs.core.kernels.gpu.random import on_device_of

ROWS = 4
"""Rows that a program computes."""

# Of a crop in the table: its start, the strides of rows, columns and channels, its height and width, and its first row
# among those of all crops.
_ROW, _COLUMN, _CHANNEL, _HEIGHT, _WIDTH, _FIRST = (tl.constexpr(number) for number in range(1, 7))
_ENTRIES = tl.constexpr(7)


@triton.jit
def _weight(place, centre, wide, length, radius: tl.constexpr):
    """The weight of an old pixel in a new one, before normalisation."""
    x = tl.abs((place + 0.5 - centre) / wide)
    if radius == 1:  # bilinear
        weight = tl.where(x < 1, 1 - x, 0.0)
    else:  # bicubic, a = −½
        near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
        weight = tl.where(x < 1, near, tl.where(x < 2, far, 0.0))
    return tl.where(place < length, weight, 0.0)


@triton.jit(do_not_specialize=["count", "taps"])
def _weigh(table, first, weights, bits, count, taps, height, width, radius: tl.constexpr, s: tl.constexpr):
    """For a crop's width (0) or height (1): the first old pixel of each new one, its weights, and their bits."""
    crop, side = tl.program_id(0), tl.program_id(1)
    size, row = tl.where(side == 0, width, height), side * count + crop
    at = tl.arange(0, s)
    length = tl.load(table + crop * _ENTRIES + _WIDTH - side).to(tl.float64)
    scale = length / size.to(tl.float64)
    wide = tl.maximum(scale, 1.0)
    centre = (at.to(tl.float64) + 0.5) * scale
    start = tl.maximum(tl.ceil(centre - radius * wide - 0.5), 0.0)
    total = tl.zeros((s,), tl.float64)
    for number in range(taps):
        total += _weight(start + number, centre, wide, length, radius)
    most = tl.zeros((s,), tl.float64)
    for number in range(taps):
        most = tl.maximum(most, _weight(start + number, centre, wide, length, radius) / total)
    top, precision = tl.max(tl.where(at < size, most, 0.0), 0), 0
    for bit in tl.static_range(1, 23):
        precision += (tl.floor(top * 2.0**bit + 0.5) < 32768.0).to(tl.int32)
    unit = (1 << precision).to(tl.float64)
    for number in range(taps):
        weight = _weight(start + number, centre, wide, length, radius) / total * unit
        rounded = tl.where(weight < 0, tl.ceil(weight - 0.5), tl.floor(weight + 0.5))
        tl.store(weights + (row * taps + number) * s + at, rounded.to(tl.int32))
    tl.store(first + row * s + at, start.to(tl.int32))
    tl.store(bits + row, precision)


@triton.jit
def _byte(total, bits):
    return tl.minimum(tl.maximum((total + ((1 << bits) >> 1)) >> bits, 0), 255).to(tl.uint8)


@triton.jit(do_not_specialize=["taps"])
def _across(
    base, table, first, weights, bits, out, taps, width, channels: tl.constexpr, rows: tl.constexpr, s: tl.constexpr
):
    """Rows of a crop at their new width, [rows of all crops, C, width]."""
    crop = tl.program_id(0)
    table += crop * _ENTRIES
    height, length = tl.load(table + _HEIGHT), tl.load(table + _WIDTH)
    if tl.program_id(1) * rows >= height:
        return
    y, x = tl.program_id(1) * rows + tl.arange(0, rows), tl.arange(0, s)
    base += tl.load(table) + y[:, None] * tl.load(table + _ROW)
    column, channel = tl.load(table + _COLUMN), tl.load(table + _CHANNEL)
    start, precision = tl.load(first + crop * s + x), tl.load(bits + crop)
    inside = (y < height)[:, None] & (x < width)[None, :]
    out += (tl.load(table + _FIRST) + y[:, None]) * channels * width + x[None, :]
    for c in tl.static_range(channels):
        total = tl.zeros((rows, s), tl.int32)
        for number in range(taps):
            place = (start + number)[None, :]
            pixels = tl.load(base + place * column + c * channel, mask=inside & (place < length), other=0)
            total += pixels.to(tl.int32) * tl.load(weights + (crop * taps + number) * s + x)[None, :]
        tl.store(out + c * width, _byte(total, precision), mask=inside)


@triton.jit(do_not_specialize=["count", "taps"])
def _down(
    wide, table, first, weights, bits, out, count, taps, height, width,
    channels: tl.constexpr, rows: tl.constexpr, s: tl.constexpr,
):  # fmt: skip
    """Rows at their new height, of what `_across` made: [n, C, height, width]."""
    crop = tl.program_id(0)
    row = count + crop
    y, x = tl.program_id(1) * rows + tl.arange(0, rows), tl.arange(0, s)
    length = tl.load(table + crop * _ENTRIES + _HEIGHT)
    wide += tl.load(table + crop * _ENTRIES + _FIRST) * channels * width + x[None, :]
    start, precision = tl.load(first + row * s + y, mask=y < height, other=0), tl.load(bits + row)
    inside = (y < height)[:, None] & (x < width)[None, :]
    out += crop.to(tl.int64) * channels * height * width + y[:, None] * width + x[None, :]
    for c in tl.static_range(channels):
        total = tl.zeros((rows, s), tl.int32)
        for number in range(taps):
            place = (start + number)[:, None]
            pixels = tl.load(wide + (place * channels + c) * width, mask=inside & (place < length), other=0)
            part = tl.load(weights + (row * taps + number) * s + y, mask=y < height, other=0)
            total += pixels.to(tl.int32) * part[:, None]
        tl.store(out + c * height * width, _byte(total, precision), mask=inside)


def launch(base: Tensor, table: Tensor, channels: int, size: tuple[int, int], radius: int) -> Tensor:
    """[n, C, *size] uint8. table: [n, 6] on the host, as above without the last; in bytes from the start of `base`.
    radius: 1 for bilinear, 2 for bicubic."""
    count, heights = len(table), table[:, 4]
    longest = table[:, 4:].amax(0).tolist()
    taps = max(math.ceil(2 * radius * max(1.0, most / to)) + 1 for most, to in zip(longest, size, strict=True))
    table = torch.cat([table, (heights.cumsum(0) - heights)[:, None]], 1).to(base.device, non_blocking=True)
    s = triton.next_power_of_2(max(size))
    whole = {"dtype": torch.int32, "device": base.device}
    first, weights, bits = (torch.empty(2 * count, *rest, **whole) for rest in ((s,), (taps, s), ()))
    wide = base.new_empty(int(heights.sum()), channels, size[1])
    out = base.new_empty(count, channels, *size)
    plan, shape = (table, first, weights, bits), {"channels": channels, "rows": ROWS, "s": s}
    with on_device_of(base):
        options = {"enable_fp_fusion": False} if base.is_cuda else {}
        _weigh[(count, 2)](*plan, count, taps, *size, radius=radius, s=s, **options)
        _across[(count, triton.cdiv(longest[0], ROWS))](base, *plan, wide, taps, size[1], **shape)
        _down[(count, triton.cdiv(size[0], ROWS))](wide, *plan, out, count, taps, *size, **shape)
    return out
