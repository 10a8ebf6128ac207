# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# ruff: noqa: ANN001, ANN202, PLR0913 (a kernel's arguments are Triton's to type)
"""A product whose results become GELU's, or its gradient's, before they leave the chip; for Hopper, in Triton's Gluon.

Each multiprocessor walks over tiles of the result. One warp brings in what is multiplied. Two groups of four warps take
turns: while one finishes its tile, the other multiplies the next, so that neither the matrix units nor the others wait.
A tile keeps its place in shared memory from where it came (h, for the backward) to where it goes.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from situs.core.constants import DENSITY, EXPONENT, SLOPE, TAIL
from situs.core.kernels.gpu.random import on_device_of
from situs.core.kernels.gpu.sums import add, multiprocessors

TILE = 128
"""Rows and columns of a tile."""
DEPTH = 64
"""What is multiplied at a time."""

_EXPONENT, _SLOPE, _DENSITY = gl.constexpr(EXPONENT), gl.constexpr(SLOPE), gl.constexpr(DENSITY)
_A, _B, _C, _D, _E = (gl.constexpr(value) for value in TAIL)
_GROUP = gl.constexpr(8)  # rows of tiles whose columns follow each other, so that they find each other's in the cache
_ALONE, _WITH_H, _BACKWARD = (gl.constexpr(number) for number in range(3))


@gluon.jit
def _parts(z):
    """(exp(-z²/2), Φ(-|z|) without it)."""
    density = gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [z * z * _EXPONENT], gl.float32, True, 1)
    below = 1.0 + _SLOPE * gl.abs(z)
    t = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [below], gl.float32, True, 1)
    return density, t * (_A + t * (_B + t * (_C + t * (_D + t * _E))))


@gluon.jit
def _place(tile, across, down):
    """Row and column of a tile."""
    band = tile // (_GROUP * across)
    high = gl.minimum(down - band * _GROUP, _GROUP)
    inside = tile - band * (_GROUP * across)
    return band * _GROUP + inside % high, inside // high


@gluon.jit
def _bring(x, w, xs, ws, full, empty, across, down, steps: gl.constexpr, flat: gl.constexpr):
    stages: gl.constexpr = xs.shape[0]
    m: gl.constexpr = xs.shape[1]
    k: gl.constexpr = xs.shape[2]
    count = 0
    for tile in range(gl.program_id(0), across * down, gl.num_programs(0)):
        i, j = _place(tile, across, down)
        for step in range(steps):
            at = count % stages
            mbarrier.wait(empty.index(at), (count // stages & 1) ^ 1)
            mbarrier.expect(full.index(at), 2 * m * k * 2)
            tma.async_copy_global_to_shared(x, [i * m, step * k], full.index(at), xs.index(at))
            if flat:
                tma.async_copy_global_to_shared(w, [step * k, j * m], full.index(at), ws.index(at))
            else:
                tma.async_copy_global_to_shared(w, [j * m, step * k], full.index(at), ws.index(at))
            count += 1


@gluon.jit
def _multiply(total, xs, ws, full, empty, count, steps: gl.constexpr, flat: gl.constexpr):
    """All steps of a tile but for the end of the last. count: the steps of the program so far."""
    stages: gl.constexpr = xs.shape[0]
    for step in range(steps):
        at = (count + step) % stages
        mbarrier.wait(full.index(at), (count + step) // stages & 1)
        if flat:
            begun = warpgroup_mma(xs.index(at), ws.index(at), total, use_acc=step > 0, is_async=True)
        else:
            begun = warpgroup_mma(xs.index(at), ws.index(at).permute((1, 0)), total, use_acc=step > 0, is_async=True)
        total = warpgroup_mma_wait(1, deps=(begun,))
        mbarrier.arrive(empty.index((at + stages - 1) % stages), count=1, pred=step > 0)  # of the step before
    return total


@gluon.jit
def _work(
    out, h, bias, sums, tile_buffer, ready, xs, ws, full, empty, order, across, down,
    turn: gl.constexpr, steps: gl.constexpr, flat: gl.constexpr, kind: gl.constexpr,
):  # fmt: skip
    """Every second tile of the program.

    order: a barrier each, on which one waits until the other has seen the last of its data: it tells two fillings of
    a stage apart only if they follow each other. ready: that h is there.
    """
    stages: gl.constexpr = xs.shape[0]
    m: gl.constexpr = xs.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, m, 16])
    done = 0
    for tile in range(gl.program_id(0) + turn * gl.num_programs(0), across * down, 2 * gl.num_programs(0)):
        i, j = _place(tile, across, down)
        if kind == _BACKWARD:
            tma.store_wait(0)
            mbarrier.expect(ready, m * m * 2)
            tma.async_copy_global_to_shared(h, [i * m, j * m], ready, tile_buffer)
        mbarrier.wait(order.index(turn), (done + 1 - turn) & 1)
        count = (2 * done + turn) * steps
        total = gl.zeros((m, m), gl.float32, layout)
        total = _multiply(total, xs, ws, full, empty, count, steps, flat)
        mbarrier.arrive(order.index(1 - turn), count=1)
        total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(empty.index((count + steps - 1) % stages), count=1)
        columns = j * m + gl.arange(0, m, gl.SliceLayout(0, layout))
        b = gl.load(bias + columns).to(gl.float32)[None, :]
        if kind == _BACKWARD:
            mbarrier.wait(ready, done & 1)
            z = tile_buffer.load(layout).to(gl.float32) + b
            density, tail = _parts(z)
            below = density * (tail - _DENSITY * gl.abs(z))  # the derivative at -|z|; at |z| it is 1 less this
            value = total * gl.where(z > 0, 1.0 - below, below)
            gl.store(sums + i * across * m + columns, gl.sum(value, 0))
        else:
            if kind == _WITH_H:
                kept = total.to(h.dtype)
                tma.store_wait(0)
                tile_buffer.store(kept)
                fence_async_shared()
                tma.async_copy_shared_to_global(h, [i * m, j * m], tile_buffer)
                total = kept.to(gl.float32)
            z = total + b
            density, tail = _parts(z)
            value = gl.maximum(z, 0.0) - gl.abs(z) * (density * tail)
            tma.store_wait(0)
        tile_buffer.store(value.to(out.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [i * m, j * m], tile_buffer)
        done += 1  # noqa: SIM113  (Gluon has no enumerate)
    tma.store_wait(0)


@gluon.jit
def _gemm(
    x, w, bias, out, h, sums, across, down,
    steps: gl.constexpr, stages: gl.constexpr, flat: gl.constexpr, kind: gl.constexpr,
):  # fmt: skip
    m: gl.constexpr = out.block_type.shape[0]
    k: gl.constexpr = x.block_type.shape[1]
    xs = gl.allocate_shared_memory(x.dtype, [stages, m, k], x.layout)
    if flat:
        ws = gl.allocate_shared_memory(w.dtype, [stages, k, m], w.layout)
    else:
        ws = gl.allocate_shared_memory(w.dtype, [stages, m, k], w.layout)
    tile_buffer = gl.allocate_shared_memory(out.dtype, [2, m, m], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    pairs = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(stages):
        mbarrier.init(full.index(at), count=1)
        mbarrier.init(empty.index(at), count=1)
    for at in gl.static_range(4):
        mbarrier.init(pairs.index(at), count=1)
    fence_async_shared()
    gl.warp_specialize([
        (_work, (out, h, bias, sums, tile_buffer.index(0), pairs.index(2), xs, ws, full, empty, pairs, across, down,
                 0, steps, flat, kind)),
        (_work, (out, h, bias, sums, tile_buffer.index(1), pairs.index(3), xs, ws, full, empty, pairs, across, down,
                 1, steps, flat, kind)),
        (_bring, (x, w, xs, ws, full, empty, across, down, steps, flat)),
    ], [4, 1], [232, 40])  # fmt: skip


def forward(x: Tensor, weight: Tensor, bias: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """gelu(x weightᵀ + bias), and x weightᵀ itself where that is kept. x: [M, K], weight: [N, K], of one half
    precision; bias: [N]."""
    out = x.new_empty(len(x), len(weight))
    h = torch.empty_like(out) if keep else out
    _launch(x, weight, bias, out, h, None, _WITH_H if keep else _ALONE, stages=5)
    return out, h if keep else x.new_empty(0)


def backward(grad: Tensor, weight: Tensor, h: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of h, of bias in float32), where gelu(h + bias) was multiplied by weightᵀ. grad: [M, K], weight:
    [K, N], h: [M, N]."""
    out = torch.empty_like(h)
    sums = torch.empty(triton.cdiv(len(h), TILE), h.shape[1], dtype=torch.float32, device=h.device)
    _launch(grad, weight, bias, out, h, sums, _BACKWARD, stages=4)
    return out, add(sums)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    out: Tensor,
    h: Tensor,
    sums: Tensor | None,
    kind: gl.constexpr,
    *,
    stages: int,
) -> None:
    down, across, flat = triton.cdiv(len(out), TILE), out.shape[1] // TILE, sums is not None
    with on_device_of(x):
        _gemm[(min(down * across, multiprocessors(x)),)](
            _tiles(x, TILE, DEPTH), _tiles(weight, *((DEPTH, TILE) if flat else (TILE, DEPTH))), bias,
            _tiles(out, TILE, TILE), _tiles(h, TILE, TILE), sums if flat else bias, across, down,
            steps=x.shape[1] // DEPTH, stages=stages, flat=flat, kind=kind.value, num_warps=4,
        )  # fmt: skip


def _tiles(matrix: Tensor, *block: int) -> TensorDescriptor:
    kind = gl.bfloat16 if matrix.dtype == torch.bfloat16 else gl.float16
    return TensorDescriptor.from_tensor(matrix, [*block], gl.NVMMASharedLayout.get_default_for([*block], kind))
