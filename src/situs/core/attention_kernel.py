# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN202, PLR0913 (a kernel's arguments are Triton's to type)
"""Attention over few keys for Triton: all keys of a head are one tile, so nothing has to be carried or made twice.

Kernels for long sequences walk over the keys, keep each row's sum for the backward, add up the queries' gradients in
float32 in memory and round them in a kernel of their own. With all keys at hand a row's softmax is known at once, in
the backward too: it reads q, k, v and the gradient, and writes the three gradients where the next product wants them.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from situs.core.random_kernel import on_device_of

ROWS = 64
"""Queries at a time: the fewest that Hopper's matrix units take."""


@triton.jit
def _tile(start, rows, dims, row_stride, count):
    """Some rows [n, d] of one head; those behind the last are 0."""
    return tl.load(start + rows[:, None] * row_stride + dims[None, :], mask=rows[:, None] < count, other=0.0)


@triton.jit
def _softmax(q, k, cols, keys, scale):
    """Each query's weights [m, n], before they are divided by their sum, and the sums [m]. scale: with log2(e)."""
    logits = tl.where(cols[None, :] < keys, tl.dot(q, tl.trans(k)) * scale, float("-inf"))
    weights = tl.exp2(logits - tl.max(logits, 1)[:, None])
    return weights, tl.sum(weights, 1)


@triton.jit(do_not_specialize=["queries", "keys"])
def _forward(
    q, k, v, out, queries, keys, heads, scale,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, o_batch, o_row, o_head,
    m: tl.constexpr, n: tl.constexpr, d: tl.constexpr,
):  # fmt: skip
    batch, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    rows, cols, dims = tl.program_id(1) * m + tl.arange(0, m), tl.arange(0, n), tl.arange(0, d)
    own = _tile(q + batch * q_batch + head * q_head, rows, dims, q_row, queries)
    others = _tile(k + batch * k_batch + head * k_head, cols, dims, k_row, keys)
    values = _tile(v + batch * v_batch + head * v_head, cols, dims, v_row, keys)
    weights, total = _softmax(own, others, cols, keys, scale)
    mixed = tl.dot(weights.to(values.dtype), values) / total[:, None]
    place = out + batch * o_batch + head * o_head + rows[:, None] * o_row + dims[None, :]
    tl.store(place, mixed.to(values.dtype), mask=rows[:, None] < queries)


@triton.jit(do_not_specialize=["queries", "keys"])
def _backward(
    grad, q, k, v, dq, dk, dv, queries, keys, heads, scale, log2_scale,
    g_batch, g_row, g_head, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    dq_batch, dq_row, dq_head, dk_batch, dk_row, dk_head, dv_batch, dv_row, dv_head,
    m: tl.constexpr, n: tl.constexpr, d: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    batch, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    cols, dims = tl.arange(0, n), tl.arange(0, d)
    others = _tile(k + batch * k_batch + head * k_head, cols, dims, k_row, keys)
    values = _tile(v + batch * v_batch + head * v_head, cols, dims, v_row, keys)
    to_k, to_v = tl.zeros((n, d), tl.float32), tl.zeros((n, d), tl.float32)
    q += batch * q_batch + head * q_head
    grad += batch * g_batch + head * g_head
    dq += batch * dq_batch + head * dq_head
    for start in tl.range(0, queries, m, num_stages=stages):
        rows = start + tl.arange(0, m)
        own, given = _tile(q, rows, dims, q_row, queries), _tile(grad, rows, dims, g_row, queries)
        weights, total = _softmax(own, others, cols, keys, log2_scale)
        weights = weights / total[:, None]
        to_weights = tl.dot(given, tl.trans(values))
        to_logits = weights * (to_weights - tl.sum(weights * to_weights, 1)[:, None])
        to_logits = (to_logits * scale).to(own.dtype)
        to_v += tl.dot(tl.trans(weights.to(given.dtype)), given)
        to_k += tl.dot(tl.trans(to_logits), own)
        to_q = tl.dot(to_logits, others)
        tl.store(dq + rows[:, None] * dq_row + dims[None, :], to_q.to(own.dtype), mask=rows[:, None] < queries)
    here, shown = cols[:, None], cols[:, None] < keys
    tl.store(dk + batch * dk_batch + head * dk_head + here * dk_row + dims[None, :], to_k.to(others.dtype), mask=shown)
    tl.store(dv + batch * dv_batch + head * dv_head + here * dv_row + dims[None, :], to_v.to(values.dtype), mask=shown)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """q, out: [B, S, H, d]; k, v: [B, K, H, d]; any strides but the last, which is 1. Writes into `out`."""
    batch, queries, heads, width = q.shape
    keys = k.shape[1]
    scale = math.log2(math.e) / math.sqrt(width)
    with on_device_of(q):
        _forward[(batch * heads, triton.cdiv(queries, ROWS))](
            q, k, v, out, queries, keys, heads, scale, *_strides(q, k, v, out),
            m=ROWS, n=tile_of(keys), d=width, num_warps=4,
        )  # fmt: skip


def launch_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Writes into dq, dk and dv what `grad`, of the shape of q, comes to there."""
    batch, queries, heads, width = q.shape
    keys = k.shape[1]
    scale = 1 / math.sqrt(width)
    with on_device_of(q):
        _backward[(batch * heads,)](
            grad, q, k, v, dq, dk, dv, queries, keys, heads, scale, scale * math.log2(math.e),
            *_strides(grad, q, k, v, dq, dk, dv),
            m=ROWS, n=tile_of(keys), d=width, stages=2, num_warps=4 if keys <= 64 else 8,
        )  # fmt: skip


def tile_of(keys: int) -> int:
    """The keys of a tile: a power of two."""
    return max(16, triton.next_power_of_2(keys))


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]
