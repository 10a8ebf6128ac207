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


def attend_packed(packed: Tensor, context: Tensor | None, heads: int) -> Tensor:
    """Attention -> [B, S, H * d].

    packed: queries, keys and values of tokens that attend to themselves, [B, S, 3 * H * d]; or the queries alone,
    [B, S, H * d], and the keys and values of their context, [B, K, 2 * H * d].
    """
    q, k, v = _views(packed, context, heads)
    if fits_kernel(packed, q.shape[1], k.shape[1], q.shape[-1]):
        return _forward(packed, context, heads)[0]
    return _by_torch(q, k, v)


def _views(packed: Tensor, context: Tensor | None, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as [B, S or K, H, d], views."""
    if context is None:
        q, k, v = packed.view(*packed.shape[:2], 3, heads, -1).unbind(2)
        return q, k, v
    k, v = context.view(*context.shape[:2], 2, heads, -1).unbind(2)
    return packed.view(*packed.shape[:2], heads, -1), k, v


def _by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


def _shapes(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Empty outputs of `_forward`."""
    batch, queries, heads, width = q.shape
    walks = k.shape[1] > FEW and _holds(queries, width)
    sums = q.new_empty((batch * heads, queries) if walks else (0,), dtype=torch.float32)
    return q.new_empty(batch, queries, heads * width), sums


@operator("attend")
def _forward(packed: Tensor, context: Tensor | None, heads: int) -> tuple[Tensor, Tensor]:
    """[B, S, H * d], and what the backward needs: [B * H, S], or nothing where it loops over the queries."""
    q, k, v = _views(packed, context, heads)
    out, sums = _shapes(q, k)
    if not q.is_cuda:
        return _by_torch(q, k, v).contiguous(), sums.zero_()
    from situs.core.kernels.gpu.attention import launch_forward

    launch_forward(q, k, v, out.view(q.shape), sums if sums.numel() else None)
    return out, sums


@operator("attend_backward")
def _backward(
    grad: Tensor, packed: Tensor, context: Tensor | None, out: Tensor, sums: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    """The gradients of `packed`, and of the context if there is one."""
    to_packed = torch.empty_like(packed, memory_format=torch.contiguous_format)
    to_context = None if context is None else torch.empty_like(context, memory_format=torch.contiguous_format)
    qkv, to = _views(packed, context, heads), _views(to_packed, to_context, heads)
    grad, out = (x.contiguous().view(qkv[0].shape) for x in (grad, out))  # a sum's gradient is one number, expanded
    if grad.is_cuda:
        from situs.core.kernels.gpu.attention import launch_backward

        launch_backward(grad, qkv, out, sums if sums.numel() else None, to)
    else:
        q, k, v, grad = (x.transpose(1, 2) for x in (*qkv, grad))
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        to_weights = grad @ v.mT
        to_logits = weights * (to_weights - (weights * to_weights).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        to_q, to_k, to_v = (x.transpose(1, 2) for x in to)
        to_q.copy_(to_logits @ k)
        to_k.copy_(to_logits.mT @ q)
        to_v.copy_(weights.mT @ grad)
    return to_packed, packed.new_empty(0) if to_context is None else to_context


@_forward.register_fake
def _(packed: Tensor, context: Tensor | None, heads: int) -> tuple[Tensor, Tensor]:
    return _shapes(*_views(packed, context, heads)[:2])


@_backward.register_fake
def _(
    grad: Tensor, packed: Tensor, context: Tensor | None, out: Tensor, sums: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    del grad, out, sums, heads
    return packed.new_empty(packed.shape), packed.new_empty(0 if context is None else context.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.heads = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor | None, None]:
    packed, context, out, sums = ctx.saved_tensors
    to_packed, to_context = _backward(grad, packed, context, out, sums, ctx.heads)
    return to_packed, None if context is None else to_context, None


_forward.register_autograd(_gradients, setup_context=_keep)
