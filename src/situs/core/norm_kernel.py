# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportOptionalOperand=false, reportOptionalMemberAccess=false
# ruff: noqa: ANN001, ANN202, PLR0913, RUF005 (a kernel's arguments are Triton's to type, and it takes no dataclass)
"""`core.norm` as two Triton kernels, for memory to set their time.

A row of the forward is `parts` tiles side by side, so that 768 channels are three of 256 and no lane is idle. A tile is
as wide as a warp reads at once, so that a row is a warp's own, and its sums need no barrier. A program of the backward
walks down a chunk of rows and keeps the sums of all columns in registers; their order is fixed, so equal inputs give
equal bits. Where `split`, its warps share each row, so that these sums take few registers, and more rows are under way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from situs.core.random_kernel import on_device_of
from situs.core.sum_kernel import add, multiprocessors

FORWARD = {"rows": 4}
BACKWARD = {"rows": 2, "stages": 3, "split": True}
"""rows: of a step, where a tile has 256 columns; of narrower ones there are more, but where the backward is `split`.
stages: steps whose reading is under way."""
PROGRAMS = 4
"""Programs of the backward for a multiprocessor, if they have four warps: so many it holds at once (by their
registers)."""


@triton.jit
def _mean(parts, width: tl.constexpr):
    """The mean of each row of all tiles, [rows, 1]; what lies behind the last column is 0."""
    total = parts[0]
    for i in tl.static_range(1, len(parts)):
        total += parts[i]
    return tl.sum(total, 1)[:, None] * (1.0 / width)


@triton.jit
def _down(value, split: tl.constexpr):
    """What a tile adds to the sums of its columns: their sum, where a thread has all rows of a column, or itself."""
    return tl.sum(value, 0)[None, :] if split else value


@triton.jit
def _pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _means(one, other, width: tl.constexpr):
    """As `_mean`, of two at once."""
    a, b = one[0], other[0]
    for i in tl.static_range(1, len(one)):
        a += one[i]
        b += other[i]
    a, b = tl.reduce((a, b), 1, _pairs)
    return a[:, None] * (1.0 / width), b[:, None] * (1.0 / width)


@triton.jit
def _vector(start, column, width: tl.constexpr, rows: tl.constexpr):
    """Some channels, for each row; read as the tiles are, so that they need not change places between threads."""
    at = tl.broadcast_to(column, (rows, column.shape[1]))
    return tl.load(start + at, mask=at < width, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["count", "keys"])
def _forward(
    z, branch, bias, scale, weight, shift, total, normed, first, means, rstds, count, seq, keys, eps,
    width: tl.constexpr, parts: tl.constexpr, tile: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """bias, scale, first: None where there is none."""
    column = tl.arange(0, tile)[None, :]
    row = tl.program_id(0) * rows + tl.arange(0, rows)[:, None]
    there = row < count
    start = row.to(tl.int64) * width
    if scale is not None:
        factor = tl.load(scale + row // seq, mask=there, other=0.0)
    values = ()
    for i in tl.static_range(parts):
        at = column + i * tile
        inside = there & (at < width)
        value = tl.load(branch + start + at, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            value += _vector(bias, at, width, rows)
        if scale is not None:
            value *= factor
        value += tl.load(z + start + at, mask=inside, other=0.0).to(tl.float32)
        value = value.to(total.dtype.element_ty)
        tl.store(total + start + at, value, mask=inside)
        values = values + (value.to(tl.float32),)
    mean = _mean(values, width)
    squares = ()
    for i in tl.static_range(parts):
        apart = tl.where(column + i * tile < width, values[i] - mean, 0.0)
        squares = squares + (apart * apart,)
    rstd = tl.rsqrt(_mean(squares, width) + eps)
    tl.store(means + row, mean, mask=there)
    tl.store(rstds + row, rstd, mask=there)
    for i in tl.static_range(parts):
        at = column + i * tile
        inside = there & (at < width)
        w = _vector(weight, at, width, rows)
        b = _vector(shift, at, width, rows)
        value = ((values[i] - mean) * rstd * w + b).to(normed.dtype.element_ty)
        tl.store(normed + start + at, value, mask=inside)
        if first is not None:
            token = row % seq
            place = ((row // seq) * keys + token).to(tl.int64) * width
            tl.store(first + place + at, value, mask=inside & (token < keys))


@triton.jit(do_not_specialize=["count", "keys", "chunk"])
def _backward(
    to_total, to_normed, to_first, total, means, rstds, scale, weight, dz, dbranch, sums, count, seq, keys, chunk,
    biased: tl.constexpr, width: tl.constexpr, parts: tl.constexpr, tile: tl.constexpr, rows: tl.constexpr,
    stages: tl.constexpr, split: tl.constexpr,
):  # fmt: skip
    """to_total, to_first, scale (and with it dbranch): None where there is none. chunk: the rows of a program.
    sums: [programs, 3, width], of float32 before it is rounded: what comes to the bias, the weight and the shift."""
    column = tl.arange(0, tile)[None, :]
    begin = tl.program_id(0) * chunk
    left = tl.minimum(count - begin, chunk)
    start = begin.to(tl.int64) * width
    weights, to_bias, to_weight, to_shift = (), (), (), ()
    for i in tl.static_range(parts):
        weights = weights + (_vector(weight, column + i * tile, width, 1),)
        zeros = tl.zeros((1 if split else rows, tile), tl.float32)
        to_bias, to_weight, to_shift = to_bias + (zeros,), to_weight + (zeros,), to_shift + (zeros,)
    for step in tl.range(0, left, rows, num_stages=stages):
        line = step + tl.arange(0, rows)
        mean = tl.load(means + begin + line, mask=line < left, other=0.0)[:, None]
        rstd = tl.load(rstds + begin + line, mask=line < left, other=0.0)[:, None]
        inner = line[:, None]
        there, row = inner < left, begin + inner
        grads, units, through, across = (), (), (), ()
        for i in tl.static_range(parts):
            at = inner * width + (column + i * tile)
            inside = there & (column + i * tile < width)
            unit = tl.load(total + start + at, mask=inside, other=0.0).to(tl.float32)
            unit = (unit - mean) * rstd
            grad = tl.load(to_normed + start + at, mask=inside, other=0.0).to(tl.float32)
            if to_first is not None:
                token = row % seq
                place = ((row // seq) * keys + token).to(tl.int64) * width + (column + i * tile)
                grad += tl.load(to_first + place, mask=inside & (token < keys), other=0.0).to(tl.float32)
            wg = grad * weights[i]
            grads, units = grads + (grad,), units + (unit,)
            through, across = through + (wg,), across + (wg * unit,)
        mean_through, mean_across = _means(through, across, width)
        if scale is not None:
            factor = tl.load(scale + row // seq, mask=there, other=0.0)
        new_bias, new_weight, new_shift = (), (), ()
        for i in tl.static_range(parts):
            at = inner * width + (column + i * tile)
            inside = there & (column + i * tile < width)
            dx = rstd * (through[i] - mean_through - units[i] * mean_across)
            if to_total is not None:
                dx += tl.load(to_total + start + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(dz + start + at, dx.to(dz.dtype.element_ty), mask=inside)
            if scale is not None:
                dx *= factor
                tl.store(dbranch + start + at, dx.to(dz.dtype.element_ty), mask=inside)
            new_bias = new_bias + ((to_bias[i] + _down(dx, split)) if biased else to_bias[i],)
            new_weight = new_weight + (to_weight[i] + _down(grads[i] * units[i], split),)
            new_shift = new_shift + (to_shift[i] + _down(grads[i], split),)
        to_bias, to_weight, to_shift = new_bias, new_weight, new_shift
    sums += tl.program_id(0).to(tl.int64) * 3 * width
    for i in tl.static_range(parts):
        at = column + i * tile
        tl.store(sums + at, tl.sum(to_bias[i], 0)[None, :], mask=at < width)
        tl.store(sums + width + at, tl.sum(to_weight[i], 0)[None, :], mask=at < width)
        tl.store(sums + 2 * width + at, tl.sum(to_shift[i], 0)[None, :], mask=at < width)


def forward(
    z: Tensor,
    branch: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    weight: Tensor,
    shift: Tensor,
    eps: float,
    keys: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(total, normed, first, mean, rstd) of `core.norm`. z, branch: contiguous [B, S, D] on a CUDA device."""
    batch, seq, width = z.shape
    total, normed, first = torch.empty_like(z), torch.empty_like(z), z.new_empty(batch, keys, width)
    mean, rstd = (z.new_empty(batch * seq, dtype=torch.float32) for _ in range(2))
    shape = _shape(width, **FORWARD)
    with on_device_of(z):
        _forward[(triton.cdiv(batch * seq, shape["rows"]),)](
            z, branch, bias, scale, weight, shift, total, normed, first if keys else None, mean, rstd,
            batch * seq, seq, keys, eps, **shape,
        )  # fmt: skip
    return total, normed, first, mean, rstd


def backward(
    to_total: Tensor | None,
    to_normed: Tensor,
    to_first: Tensor | None,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    scale: Tensor | None,
    weight: Tensor,
    keys: int,
    biased: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dz, dbranch or nothing, sums [3, D]) of `core.norm`, of contiguous tensors on a CUDA device."""
    batch, seq, width = total.shape
    count, shape, dz = batch * seq, _shape(width, **BACKWARD), torch.empty_like(total)
    dbranch = None if scale is None else torch.empty_like(total)
    steps = triton.cdiv(count, shape["rows"])
    most = PROGRAMS * 4 // shape["num_warps"] * multiprocessors(total)
    chunk = triton.cdiv(steps, max(1, most)) * shape["rows"]
    programs = triton.cdiv(count, chunk)
    sums = torch.empty(programs, 3, width, dtype=torch.float32, device=total.device)
    with on_device_of(total):
        _backward[(programs,)](
            to_total, to_normed, to_first, total, mean, rstd, scale, weight, dz, dbranch, sums,
            count, seq, keys, chunk, biased=biased, split=BACKWARD["split"], **shape,
        )  # fmt: skip
    return dz, total.new_empty(0) if dbranch is None else dbranch, add(sums)


def _shape(width: int, rows: int, split: bool = False, **others: int) -> dict[str, int]:
    """How a row of `width` is put into tiles: one of as many warps as it takes, where it is `split`; else without a
    rest where it may be, and wide ones over more warps."""
    if split:
        tile = max(16, triton.next_power_of_2(width))
        return {"width": width, "parts": 1, "tile": tile, "rows": rows, "num_warps": max(1, tile // 256)} | others
    widest = 256 if width <= 1024 else 512
    tile = min(widest, width & -width)
    if width > 4 * tile or tile < 16:
        tile = min(widest, triton.next_power_of_2(width))
    rows = max(1, rows * 256 // tile)
    return {"width": width, "parts": triton.cdiv(width, tile), "tile": tile, "rows": rows, "num_warps": 4} | others
