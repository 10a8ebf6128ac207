"""Attention over short sequences: a context, a small grid, the visible patches. Compiled on a GPU it is one kernel each
way (`gpu.attention`), in half the time of kernels for long sequences; elsewhere torch's.

Queries, keys and values stay packed as one product gives them, [B, S, 3 * H * d], and so do their gradients: nothing is
copied together or apart.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from situs.core.attention import attend
from situs.core.kernels.when import operator, takes_kernels

FEW = 64
"""Keys of one tile."""
MOST = 128
"""Most keys for the kernel."""
MOST_IN_REGISTERS = 256
"""Most keys where all queries fit into registers."""
QUERY_BLOCKS = 4
"""Blocks of 64 queries in registers, for heads of width 32; fewer for wider ones."""

_WIDTHS = (16, 32, 64)  # of a head; wider tiles do not fit into the shared memory of every GPU


def fits_kernel(projected: Tensor, queries: int, keys: int, width: int) -> bool:
    """Whether the kernel is used: in a compiled step, on a short sequence, with usual heads.

    projected: output of the queries' product. width: of a head.
    """
    most = MOST_IN_REGISTERS if _holds(queries, width) else MOST
    return takes_kernels(projected) and width in _WIDTHS and keys <= most


def _holds(queries: int, width: int) -> bool:
    """Whether the gradients of all queries of a head fit into registers, so that the backward can loop over keys."""
    return -(-queries // 64) * max(32, width) <= 32 * QUERY_BLOCKS


def attend_own(qkv: Tensor, heads: int) -> Tensor:
    """Self-attention: [B, S, 3 * H * d] -> [B, S, H * d]."""
    q, k, v = _joint(qkv, heads)
    if fits_kernel(qkv, q.shape[1], k.shape[1], q.shape[-1]):
        return _own(qkv, heads)[0]
    return _by_torch(q, k, v)


def attend_context(q: Tensor, kv: Tensor, heads: int) -> Tensor:
    """Attention to a context: [B, S, H * d] and [B, K, 2 * H * d] -> [B, S, H * d]."""
    parts = _apart(q, kv, heads)
    if fits_kernel(q, q.shape[1], kv.shape[1], parts[0].shape[-1]):
        return _context(q, kv, heads)[0]
    return _by_torch(*parts)


def _joint(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[B, S, 3 * H * d] -> q, k, v as [B, S, H, d], views."""
    q, k, v = qkv.view(*qkv.shape[:2], 3, heads, -1).unbind(2)
    return q, k, v


def _apart(q: Tensor, kv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[B, S, H * d] and [B, K, 2 * H * d] -> q, k, v as [B, S or K, H, d], views."""
    k, v = kv.view(*kv.shape[:2], 2, heads, -1).unbind(2)
    return q.view(*q.shape[:2], heads, -1), k, v


def _by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


@operator("attend_own")
def _own(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    return _forward(*_joint(qkv, heads))


@operator("attend_own_backward")
def _own_backward(grad: Tensor, qkv: Tensor, out: Tensor, sums: Tensor, heads: int) -> Tensor:
    to = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    _backward(grad, _joint(qkv, heads), out, sums, _joint(to, heads))
    return to


@operator("attend_context")
def _context(q: Tensor, kv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    return _forward(*_apart(q, kv, heads))


@operator("attend_context_backward")
def _context_backward(
    grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, sums: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    to_q, to_kv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, kv))
    _backward(grad, _apart(q, kv, heads), out, sums, _apart(to_q, to_kv, heads))
    return to_q, to_kv


def _shapes(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Empty outputs of `_forward`."""
    batch, queries, heads, width = q.shape
    walks = k.shape[1] > FEW and _holds(queries, width)
    sums = q.new_empty((batch * heads, queries) if walks else (0,), dtype=torch.float32)
    return q.new_empty(batch, queries, heads * width), sums


def _forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """[B, S, H * d], and what the backward needs: [B * H, S], or nothing where it loops over the queries."""
    out, sums = _shapes(q, k)
    if not q.is_cuda:
        return _by_torch(q, k, v).contiguous(), sums.zero_()
    from situs.core.kernels.gpu.attention import launch_forward

    launch_forward(q, k, v, out.view(q.shape), sums if sums.numel() else None)
    return out, sums


def _backward(grad: Tensor, qkv: tuple[Tensor, ...], out: Tensor, sums: Tensor, to: tuple[Tensor, ...]) -> None:
    grad, out = (x.contiguous().view(qkv[0].shape) for x in (grad, out))  # a sum's gradient is one number, expanded
    if grad.is_cuda:
        from situs.core.kernels.gpu.attention import launch_backward

        launch_backward(grad, qkv, out, sums if sums.numel() else None, to)
        return
    q, k, v, grad = (x.transpose(1, 2) for x in (*qkv, grad))
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
    to_weights = grad @ v.mT
    to_logits = weights * (to_weights - (weights * to_weights).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    for place, value in zip(to, (to_logits @ k, to_logits.mT @ q, weights.mT @ grad), strict=True):
        place.copy_(value.transpose(1, 2))


@_own.register_fake
def _(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    return _shapes(*_joint(qkv, heads)[:2])


@_context.register_fake
def _(q: Tensor, kv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    return _shapes(*_apart(q, kv, heads)[:2])


@_own_backward.register_fake
def _(grad: Tensor, qkv: Tensor, out: Tensor, sums: Tensor, heads: int) -> Tensor:
    del grad, out, sums, heads
    return qkv.new_empty(qkv.shape)


@_context_backward.register_fake
def _(grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, sums: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    del grad, out, sums, heads
    return q.new_empty(q.shape), kv.new_empty(kv.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.heads = inputs
    ctx.save_for_backward(*tensors, *output)


def _own_grad(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None]:
    return _own_backward(grad, *ctx.saved_tensors, ctx.heads), None


def _context_grad(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor, None]:
    return *_context_backward(grad, *ctx.saved_tensors, ctx.heads), None


_own.register_autograd(_own_grad, setup_context=_keep)
_context.register_autograd(_context_grad, setup_context=_keep)
