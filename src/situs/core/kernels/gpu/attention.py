# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false
# ruff: noqa: ANN001, ANN202, PLR0913 (a kernel's arguments are Triton's to type)
"""Attention over short sequences for Triton.

Kernels for long ones walk over the keys, add up the queries' gradients in float32 in memory, and round them in a kernel
of their own. Here a program has a whole head, so that nothing leaves it unfinished:

- few keys: all of them are one tile, and a row's softmax is known at once, in the backward too. That reads q, k, v and
  the gradient, and walks over the queries.
- few queries and narrow heads: the gradients of all queries stay in registers while it walks over the keys.

Gradients are written where the next product wants them.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from situs.core.kernels.gpu.random import on_device_of

M = 64
"""Queries of a block: the fewest that Hopper's matrix units take."""
N = 64
"""Keys of a block, where one walks over them."""


@triton.jit
def _tile(start, rows, dims, row_stride, count):
    """Some rows [n, d] of one head; those behind the last are 0."""
    return tl.load(start + rows[:, None] * row_stride + dims[None, :], mask=rows[:, None] < count, other=0.0)


@triton.jit
def _put(start, rows, dims, row_stride, count, value):
    """The reverse of `_tile`."""
    place = start + rows[:, None] * row_stride + dims[None, :]
    tl.store(place, value.to(start.dtype.element_ty), mask=rows[:, None] < count)


@triton.jit
def _softmax(q, k, cols, keys, scale):
    """Each query's weights [m, n], before they are divided by their sum, and the sums [m]. scale: with log2(e)."""
    logits = tl.where(cols[None, :] < keys, tl.dot(q, tl.trans(k)) * scale, float("-inf"))
    weights = tl.exp2(logits - tl.max(logits, 1)[:, None])
    return weights, tl.sum(weights, 1)


@triton.jit(do_not_specialize=["queries", "keys"])
def _few_forward(
    q, k, v, out, queries, keys, heads, scale,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, o_batch, o_row, o_head,
    m: tl.constexpr, n: tl.constexpr, d: tl.constexpr,
):  # fmt: skip
    batch, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    rows, cols, dims = tl.program_id(1) * m + tl.arange(0, m), tl.arange(0, n), tl.arange(0, d)
    q_tile = _tile(q + batch * q_batch + head * q_head, rows, dims, q_row, queries)
    others = _tile(k + batch * k_batch + head * k_head, cols, dims, k_row, keys)
    values = _tile(v + batch * v_batch + head * v_head, cols, dims, v_row, keys)
    weights, total = _softmax(q_tile, others, cols, keys, scale)
    mixed = tl.dot(weights.to(values.dtype), values) / total[:, None]
    _put(out + batch * o_batch + head * o_head, rows, dims, o_row, queries, mixed)


@triton.jit(do_not_specialize=["queries", "keys"])
def _few_backward(
    grad, q, k, v, dq, dk, dv, queries, keys, heads, scale, log2_scale,
    g_batch, g_row, g_head, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    dq_batch, dq_row, dq_head, dk_batch, dk_row, dk_head, dv_batch, dv_row, dv_head,
    m: tl.constexpr, n: tl.constexpr, d: tl.constexpr,
):  # fmt: skip
    batch, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    cols, dims = tl.arange(0, n), tl.arange(0, d)
    others = _tile(k + batch * k_batch + head * k_head, cols, dims, k_row, keys)
    values = _tile(v + batch * v_batch + head * v_head, cols, dims, v_row, keys)
    to_k, to_v = tl.zeros((n, d), tl.float32), tl.zeros((n, d), tl.float32)
    q += batch * q_batch + head * q_head
    grad += batch * g_batch + head * g_head
    dq += batch * dq_batch + head * dq_head
    for start in tl.range(0, queries, m, num_stages=1):
        rows = start + tl.arange(0, m)
        q_tile, grad_tile = _tile(q, rows, dims, q_row, queries), _tile(grad, rows, dims, g_row, queries)
        weights, total = _softmax(q_tile, others, cols, keys, log2_scale)
        weights = weights / total[:, None]
        to_weights = tl.dot(grad_tile, tl.trans(values))
        to_logits = weights * (to_weights - tl.sum(weights * to_weights, 1)[:, None])
        to_logits = (to_logits * scale).to(q_tile.dtype)
        to_v += tl.dot(tl.trans(weights.to(grad_tile.dtype)), grad_tile)
        to_k += tl.dot(tl.trans(to_logits), q_tile)
        _put(dq, rows, dims, dq_row, queries, tl.dot(to_logits, others))
    _put(dk + batch * dk_batch + head * dk_head, cols, dims, dk_row, keys, to_k)
    _put(dv + batch * dv_batch + head * dv_head, cols, dims, dv_row, keys, to_v)


@triton.jit(do_not_specialize=["queries", "keys"])
def _forward(
    q, k, v, out, sums, queries, keys, heads, scale,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, o_batch, o_row, o_head,
    m: tl.constexpr, n: tl.constexpr, d: tl.constexpr,
):  # fmt: skip
    """sums: [B * H, S], the logarithm to the base 2 of each row's sum of exponentials."""
    batch, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    rows, dims = tl.program_id(1) * m + tl.arange(0, m), tl.arange(0, d)
    q_tile = _tile(q + batch * q_batch + head * q_head, rows, dims, q_row, queries)
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    top = tl.full((m,), float("-inf"), tl.float32)
    total = tl.zeros((m,), tl.float32)
    mixed = tl.zeros((m, d), tl.float32)
    for start in tl.range(0, keys, n, num_stages=2):
        cols = start + tl.arange(0, n)
        others, values = _tile(k, cols, dims, k_row, keys), _tile(v, cols, dims, v_row, keys)
        logits = tl.where(cols[None, :] < keys, tl.dot(q_tile, tl.trans(others)) * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        weights = tl.exp2(logits - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(values.dtype), values, mixed * shrink[:, None])
        top = higher
    _put(out + batch * o_batch + head * o_head, rows, dims, o_row, queries, mixed / total[:, None])
    tl.store(sums + tl.program_id(0).to(tl.int64) * queries + rows, top + tl.log2(total), mask=rows < queries)


@triton.jit
def _block(q, grad, out, sums, start, dims, q_row, g_row, o_row, queries, m: tl.constexpr):
    """A block of queries, its gradient, the inner product of each row's gradient and output, and each row's sum."""
    rows = start + tl.arange(0, m)
    q_tile, grad_tile = _tile(q, rows, dims, q_row, queries), _tile(grad, rows, dims, g_row, queries)
    inner = tl.sum(grad_tile.to(tl.float32) * _tile(out, rows, dims, o_row, queries).to(tl.float32), 1)
    return q_tile, grad_tile, inner, tl.load(sums + rows, mask=rows < queries, other=float("inf"))


@triton.jit
def _pair(q_tile, grad_tile, inner, total, others, values, shown, scale, log2_scale, to_q, to_k, to_v):
    """What a block of queries and one of keys add to the gradients. shown: which keys there are."""
    weights = tl.where(shown, tl.exp2(tl.dot(q_tile, tl.trans(others)) * log2_scale - total[:, None]), 0.0)
    to_logits = (weights * (tl.dot(grad_tile, tl.trans(values)) - inner[:, None]) * scale).to(q_tile.dtype)
    to_v = tl.dot(tl.trans(weights.to(q_tile.dtype)), grad_tile, to_v)
    to_k = tl.dot(tl.trans(to_logits), q_tile, to_k)
    return tl.dot(to_logits, others, to_q), to_k, to_v


@triton.jit(do_not_specialize=["queries", "keys"])
def _backward(
    grad, q, k, v, out, sums, dq, dk, dv, queries, keys, heads, scale, log2_scale,
    g_batch, g_row, g_head, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    o_batch, o_row, o_head, dq_batch, dq_row, dq_head, dk_batch, dk_row, dk_head, dv_batch, dv_row, dv_head,
    blocks: tl.constexpr, m: tl.constexpr, n: tl.constexpr, d: tl.constexpr,
):  # fmt: skip
    """blocks: of m queries each, 1 to 4. All of them are held, and so each has its own names."""
    batch, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    dims, rows = tl.arange(0, d), tl.arange(0, m)
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    grad += batch * g_batch + head * g_head
    out += batch * o_batch + head * o_head
    dq += batch * dq_batch + head * dq_head
    dk += batch * dk_batch + head * dk_head
    dv += batch * dv_batch + head * dv_head
    sums += tl.program_id(0).to(tl.int64) * queries
    to_q0 = tl.zeros((m, d), tl.float32)
    to_q1, to_q2, to_q3 = to_q0, to_q0, to_q0
    q_tile0, grad_tile0, inner0, total0 = _block(q, grad, out, sums, 0, dims, q_row, g_row, o_row, queries, m)
    if blocks > 1:
        q_tile1, grad_tile1, inner1, total1 = _block(q, grad, out, sums, m, dims, q_row, g_row, o_row, queries, m)
    if blocks > 2:
        q_tile2, grad_tile2, inner2, total2 = _block(q, grad, out, sums, 2 * m, dims, q_row, g_row, o_row, queries, m)
    if blocks > 3:
        q_tile3, grad_tile3, inner3, total3 = _block(q, grad, out, sums, 3 * m, dims, q_row, g_row, o_row, queries, m)
    for start in tl.range(0, keys, n, num_stages=1):
        cols = start + tl.arange(0, n)
        a, b, shown = _tile(k, cols, dims, k_row, keys), _tile(v, cols, dims, v_row, keys), cols[None, :] < keys
        to_k, to_v = tl.zeros((n, d), tl.float32), tl.zeros((n, d), tl.float32)
        to_q0, to_k, to_v = _pair(
            q_tile0, grad_tile0, inner0, total0, a, b, shown, scale, log2_scale, to_q0, to_k, to_v
        )
        if blocks > 1:
            to_q1, to_k, to_v = _pair(
                q_tile1, grad_tile1, inner1, total1, a, b, shown, scale, log2_scale, to_q1, to_k, to_v
            )
        if blocks > 2:
            to_q2, to_k, to_v = _pair(
                q_tile2, grad_tile2, inner2, total2, a, b, shown, scale, log2_scale, to_q2, to_k, to_v
            )
        if blocks > 3:
            to_q3, to_k, to_v = _pair(
                q_tile3, grad_tile3, inner3, total3, a, b, shown, scale, log2_scale, to_q3, to_k, to_v
            )
        _put(dk, cols, dims, dk_row, keys, to_k)
        _put(dv, cols, dims, dv_row, keys, to_v)
    _put(dq, rows, dims, dq_row, queries, to_q0)
    if blocks > 1:
        _put(dq, m + rows, dims, dq_row, queries, to_q1)
    if blocks > 2:
        _put(dq, 2 * m + rows, dims, dq_row, queries, to_q2)
    if blocks > 3:
        _put(dq, 3 * m + rows, dims, dq_row, queries, to_q3)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor | None) -> None:
    """q, out: [B, S, H, d]; k, v: [B, K, H, d]; any strides but the last, which is 1. Writes into `out`.

    sums: [B * H, S] float32, written too; None if the keys are few.
    """
    (batch, queries, heads, width), keys = q.shape, k.shape[1]
    m, warps = (128, 8) if queries > 128 and keys > 32 and sums is None else (M, 4)
    grid, scale = (batch * heads, triton.cdiv(queries, m)), math.log2(math.e) / math.sqrt(width)
    shape = {"m": m, "n": N if sums is not None else _tile_of(keys), "d": width, "num_warps": warps}
    kernel = _few_forward if sums is None else _forward
    with on_device_of(q):
        tensors = (q, k, v, out, *([] if sums is None else [sums]))
        kernel[grid](*tensors, queries, keys, heads, scale, *_strides(q, k, v, out), **shape)


def launch_backward(
    grad: Tensor, qkv: tuple[Tensor, ...], out: Tensor, sums: Tensor | None, to: tuple[Tensor, ...]
) -> None:
    """Writes into `to` (dq, dk, dv) what `grad`, of the shape of q, comes to there. qkv: q, k, v. out, sums: what the
    forward wrote; of few keys neither is read."""
    q, k, _ = qkv
    (batch, queries, heads, width), keys = q.shape, k.shape[1]
    scale = 1 / math.sqrt(width)
    numbers = (queries, keys, heads, scale, scale * math.log2(math.e))
    with on_device_of(q):
        if sums is not None:
            shape = {"blocks": triton.cdiv(queries, M), "m": M, "n": N, "d": width, "num_warps": 4}
            strides = _strides(grad, *qkv, out, *to)
            _backward[(batch * heads,)](grad, *qkv, out, sums, *to, *numbers, *strides, **shape)
            return
        shape = {"m": M, "n": _tile_of(keys), "d": width, "num_warps": 4}
        if shape["n"] > N:
            shape["m"] = 32  # more would not fit into the registers
        elif grad.is_cuda:
            shape["maxnreg"] = 168  # three programs on a multiprocessor instead of two
        _few_backward[(batch * heads,)](grad, *qkv, *to, *numbers, *_strides(grad, *qkv, *to), **shape)


def _tile_of(keys: int) -> int:
    return max(16, triton.next_power_of_2(keys))


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]
