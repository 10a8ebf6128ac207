# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN202, PLR0913 (a kernel's arguments are Triton's to type, and it takes no dataclass)
"""`kernels.mlp` as two Triton kernels, of few instructions, for memory is what should set their time.

A program of the backward has a block of columns and walks down a chunk of rows. It keeps the sums
of its columns in registers, so that the gradient of the bias costs no second reading of that of h; their order is
fixed, so equal inputs give equal bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from situs.core.constants import DENSITY, EXPONENT, SLOPE, TAIL
from situs.core.kernels.gpu.random import on_device_of
from situs.core.kernels.gpu.sums import add, multiprocessors

FORWARD = {"rows": 8, "columns": 512, "num_warps": 4}
BACKWARD = {"rows": 2, "columns": 512, "num_warps": 4}
PROGRAMS = 10
"""Programs of the backward for a multiprocessor, which holds 10 at once (by their registers): one full wave, and few
enough that their sums are soon added."""

_EXPONENT, _SLOPE, _DENSITY = tl.constexpr(EXPONENT), tl.constexpr(SLOPE), tl.constexpr(DENSITY)
_A, _B, _C, _D, _E = (tl.constexpr(value) for value in TAIL)


@triton.jit
def _reciprocal(x, ptx: tl.constexpr):
    """1 / x for x ≥ 1, as one instruction: Triton's own division guards against numbers that do not come here."""
    if ptx:
        result = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        result = 1.0 / x
    return result


@triton.jit
def _parts(z, ptx: tl.constexpr):
    """(exp(-z²/2), t, the polynomial in t): t · polynomial · exp(-z²/2) is Φ(-|z|)."""
    density = tl.exp2(z * z * _EXPONENT)
    t = _reciprocal(1.0 + _SLOPE * tl.abs(z), ptx)
    return density, t, _A + t * (_B + t * (_C + t * (_D + t * _E)))


@triton.jit(do_not_specialize=["count"])
def _forward(
    h, bias, y, count, width,
    rows: tl.constexpr, columns: tl.constexpr, ptx: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * columns + tl.arange(0, columns)[None, :]
    inside = column < width
    b = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    row = tl.arange(0, rows)[:, None]
    first = tl.program_id(0) * rows
    at = first.to(tl.int64) * width + (row * width + column)
    there = inside & (first + row < count)
    z = tl.load(h + at, mask=there, other=0.0).to(tl.float32) + b
    density, t, polynomial = _parts(z, ptx)
    value = tl.maximum(z, 0.0) - tl.abs(z) * (density * t * polynomial)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["count", "chunk"])
def _backward(
    grad, h, bias, out, sums, count, width, chunk,
    rows: tl.constexpr, columns: tl.constexpr, ptx: tl.constexpr,
):  # fmt: skip
    """chunk: the rows of a program. sums: [programs, width], a row a program, of float32 before it is rounded."""
    column = tl.program_id(1) * columns + tl.arange(0, columns)[None, :]
    inside = column < width
    b = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    first = tl.program_id(0) * chunk
    left = tl.minimum(count - first, chunk)
    start = first.to(tl.int64) * width
    row = tl.arange(0, rows)[:, None]
    total = tl.zeros((rows, columns), tl.float32)
    for step in tl.range(0, left, rows, num_stages=1):
        at = start + ((row + step) * width + column)
        there = inside & (row + step < left)
        z = tl.load(h + at, mask=there, other=0.0).to(tl.float32) + b
        g = tl.load(grad + at, mask=there, other=0.0).to(tl.float32)
        density, t, polynomial = _parts(z, ptx)
        below = density * (t * polynomial - _DENSITY * tl.abs(z))  # the derivative at -|z|; at |z| it is 1 less this
        value = g * tl.where(z > 0, 1.0 - below, below)
        total += value
        tl.store(out + at, value.to(out.dtype.element_ty), mask=there)
    at = tl.program_id(0).to(tl.int64) * width + column
    tl.store(sums + at, tl.sum(total, 0)[None, :], mask=inside)


def forward(h: Tensor, bias: Tensor) -> Tensor:
    """gelu(h + bias). h: contiguous [M, C] on a CUDA device; bias: [C]."""
    (count, width), y = h.shape, torch.empty_like(h)
    grid = (triton.cdiv(count, FORWARD["rows"]), triton.cdiv(width, FORWARD["columns"]))
    with on_device_of(h):
        _forward[grid](h, bias, y, count, width, ptx=_speaks_ptx(h), **FORWARD)
    return y


def backward(grad: Tensor, h: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of h, of bias in float32). grad and h: contiguous [M, C] on a CUDA device; bias: [C]."""
    (count, width), out = h.shape, torch.empty_like(h)
    rows, blocks = BACKWARD["rows"], triton.cdiv(width, BACKWARD["columns"])
    chunks = max(1, PROGRAMS * multiprocessors(h) // blocks)
    chunk = triton.cdiv(triton.cdiv(count, chunks), rows) * rows
    chunks = triton.cdiv(count, chunk)
    sums = torch.empty(chunks, width, dtype=torch.float32, device=h.device)
    with on_device_of(h):
        _backward[(chunks, blocks)](grad, h, bias, out, sums, count, width, chunk, ptx=_speaks_ptx(h), **BACKWARD)
    return out, add(sums)


def _speaks_ptx(tensor: Tensor) -> bool:
    """Not Triton's interpreter, which has the CPU, nor a GPU of AMD."""
    return tensor.is_cuda and torch.version.hip is None
