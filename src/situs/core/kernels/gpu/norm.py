# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportOptionalOperand=false, reportOptionalMemberAccess=false
# ruff: noqa: ANN001, ANN202, PLR0913, RUF005 (a kernel's arguments are Triton's to type, and it takes no dataclass)
"""`kernels.norm` as two Triton kernels, for memory to set their time.

A row of the forward is `parts` tiles side by side, so that 768 channels are three of 256 and no lane is idle. A tile is
as wide as a warp reads at once, so that a row is a warp's own, and its sums need no barrier. A program of the backward
walks down a chunk of rows and keeps the sums of all columns in registers; their order is fixed, so equal inputs give
equal bits. There the warps share each row, so that these sums take few registers, and more rows are under way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from situs.core.kernels.gpu.random import on_device_of
from situs.core.kernels.gpu.sums import add, multiprocessors

ROWS = 4
"""Of a program of the forward, where a tile has 256 columns; of narrower ones there are more."""
STEP, STAGES = 2, 3
"""Rows of a step of the backward, and steps whose reading is under way."""
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
def _pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _vector(start, column, width: tl.constexpr, rows: tl.constexpr):
    """Some channels, for each row; read as the tiles are, so they need not change places between threads."""
    at = tl.broadcast_to(column, (rows, column.shape[1]))
    return tl.load(start + at, mask=at < width, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["count", "keys"])
def _forward(
    z, branch, bias, scale, weight, shift, total, normed, first, means, rstds, count, seq, keys, eps,
    width: tl.constexpr, parts: tl.constexpr, tile: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """bias, scale, first: None if there is none."""
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
    biased: tl.constexpr, width: tl.constexpr, tile: tl.constexpr, rows: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """to_total, to_first, scale (and with it dbranch): None if there is none. chunk: the rows of a program.
    sums: [programs, 3, width], of float32 before it is rounded: what comes to the bias, the weight and the shift."""
    column = tl.arange(0, tile)[None, :]
    begin = tl.program_id(0) * chunk
    left = tl.minimum(count - begin, chunk)
    start = begin.to(tl.int64) * width
    weights = _vector(weight, column, width, 1)
    to_bias = tl.zeros((1, tile), tl.float32)
    to_weight, to_shift = to_bias, to_bias
    for step in tl.range(0, left, rows, num_stages=stages):
        line = step + tl.arange(0, rows)
        mean = tl.load(means + begin + line, mask=line < left, other=0.0)[:, None]
        rstd = tl.load(rstds + begin + line, mask=line < left, other=0.0)[:, None]
        inner = line[:, None]
        there, row = inner < left, begin + inner
        at, inside = inner * width + column, there & (column < width)
        unit = tl.load(total + start + at, mask=inside, other=0.0).to(tl.float32)
        unit = (unit - mean) * rstd
        grad = tl.load(to_normed + start + at, mask=inside, other=0.0).to(tl.float32)
        if to_first is not None:
            token = row % seq
            place = ((row // seq) * keys + token).to(tl.int64) * width + column
            grad += tl.load(to_first + place, mask=inside & (token < keys), other=0.0).to(tl.float32)
        through = grad * weights
        mean_through, mean_across = tl.reduce((through, through * unit), 1, _pairs)
        mean_through, mean_across = mean_through[:, None] * (1.0 / width), mean_across[:, None] * (1.0 / width)
        dx = rstd * (through - mean_through - unit * mean_across)
        if to_total is not None:
            dx += tl.load(to_total + start + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dz + start + at, dx.to(dz.dtype.element_ty), mask=inside)
        if scale is not None:
            dx *= tl.load(scale + row // seq, mask=there, other=0.0)
            tl.store(dbranch + start + at, dx.to(dz.dtype.element_ty), mask=inside)
        if biased:
            to_bias += tl.sum(dx, 0)[None, :]
        to_weight += tl.sum(grad * unit, 0)[None, :]
        to_shift += tl.sum(grad, 0)[None, :]
    sums += tl.program_id(0).to(tl.int64) * 3 * width
    tl.store(sums + column, to_bias, mask=column < width)
    tl.store(sums + width + column, to_weight, mask=column < width)
    tl.store(sums + 2 * width + column, to_shift, mask=column < width)


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
    """(total, normed, first, mean, rstd) of `kernels.norm`. z, branch: contiguous [B, S, D] on a CUDA device."""
    batch, seq, width = z.shape
    total, normed, first = torch.empty_like(z), torch.empty_like(z), z.new_empty(batch, keys, width)
    mean, rstd = (z.new_empty(batch * seq, dtype=torch.float32) for _ in range(2))
    shape = _tiles(width)
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
    """(dz, dbranch or nothing, sums [3, D]) of `kernels.norm`, of contiguous tensors on a CUDA device."""
    batch, seq, width = total.shape
    count, dz = batch * seq, torch.empty_like(total)
    dbranch = None if scale is None else torch.empty_like(total)
    tile = max(16, triton.next_power_of_2(width))
    warps = max(1, tile // 256)
    most = PROGRAMS * 4 // warps * multiprocessors(total)
    chunk = triton.cdiv(triton.cdiv(count, STEP), max(1, most)) * STEP
    programs = triton.cdiv(count, chunk)
    sums = torch.empty(programs, 3, width, dtype=torch.float32, device=total.device)
    with on_device_of(total):
        _backward[(programs,)](
            to_total, to_normed, to_first, total, mean, rstd, scale, weight, dz, dbranch, sums,
            count, seq, keys, chunk, biased=biased, width=width, tile=tile, rows=STEP, stages=STAGES, num_warps=warps,
        )  # fmt: skip
    return dz, total.new_empty(0) if dbranch is None else dbranch, add(sums)


def _tiles(width: int) -> dict[str, int]:
    """How a row of the forward is put into tiles: without a rest where it may be, and wide ones over more warps."""
    widest = 256 if width <= 1024 else 512
    tile = min(widest, width & -width)
    if width > 4 * tile or tile < 16:
        tile = min(widest, triton.next_power_of_2(width))
    rows = max(1, ROWS * 256 // tile)
    return {"width": width, "parts": triton.cdiv(width, tile), "tile": tile, "rows": rows, "num_warps": 4}
