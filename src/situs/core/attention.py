"""Attention over few keys: of a context, of a small grid, of the patches that are left. Compiled on a GPU it is one
kernel each way (`attention_kernel`), which takes half of what kernels for long sequences take; elsewhere torch's own.

Queries, keys and values stay packed as one product gave them, [B, S, 3 * H * d], and so do their gradients: nothing is
put together or taken apart in memory.
"""

from __future__ import annotations

import math
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

FEW = 64
"""Keys that a tile has; with more, torch's kernels are the faster ones."""

_WIDTHS = (16, 32, 64, 128)  # of a head, as tiles have them
_HALF = (torch.bfloat16, torch.float16)
_TRITON = find_spec("triton") is not None
_op: Any = partial(torch.library.custom_op, mutates_args=())


def suits(projected: Tensor, width: int, keys: int) -> bool:
    """Whether the kernel takes over: in a compiled step in half precision, over few keys, for heads of usual widths.

    projected: what the queries' product gave. width: of a head.
    """
    if not torch.compiler.is_compiling() or torch.compiler.is_exporting() or not projected.is_cuda:
        return False
    return projected.dtype in _HALF and width in _WIDTHS and keys <= FEW and _TRITON


def attend_own(qkv: Tensor, heads: int, mask: Tensor | None = None) -> Tensor:
    """Self-attention: [B, S, 3 * H * d] -> [B, S, H * d]. mask: [B, S] bool, False for what no token sees."""
    q, k, v = _joint(qkv, heads)
    if mask is None and suits(qkv, q.shape[-1], k.shape[1]):
        return _own(qkv, heads)
    return _by_torch(q, k, v, None if mask is None else mask[:, None, None])


def attend_context(q: Tensor, kv: Tensor, heads: int) -> Tensor:
    """Attention to a context: [B, S, H * d] and [B, K, 2 * H * d] -> [B, S, H * d]."""
    parts = _apart(q, kv, heads)
    return _context(q, kv, heads) if suits(q, parts[0].shape[-1], kv.shape[1]) else _by_torch(*parts)


def _joint(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[B, S, 3 * H * d] -> q, k, v as [B, S, H, d], views."""
    q, k, v = qkv.view(*qkv.shape[:2], 3, heads, -1).unbind(2)
    return q, k, v


def _apart(q: Tensor, kv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[B, S, H * d] and [B, K, 2 * H * d] -> q, k, v as [B, S or K, H, d], views."""
    k, v = kv.view(*kv.shape[:2], 2, heads, -1).unbind(2)
    return q.view(*q.shape[:2], heads, -1), k, v


def _by_torch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


@_op("situs::attend_own")
def _own(qkv: Tensor, heads: int) -> Tensor:
    return _forward(*_joint(qkv, heads))


@_op("situs::attend_own_backward")
def _own_backward(grad: Tensor, qkv: Tensor, heads: int) -> Tensor:
    to = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    _backward(grad.reshape(*grad.shape[:2], heads, -1), _joint(qkv, heads), _joint(to, heads))
    return to


@_op("situs::attend_context")
def _context(q: Tensor, kv: Tensor, heads: int) -> Tensor:
    return _forward(*_apart(q, kv, heads))


@_op("situs::attend_context_backward")
def _context_backward(grad: Tensor, q: Tensor, kv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    to_q, to_kv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, kv))
    _backward(grad.reshape(*grad.shape[:2], heads, -1), _apart(q, kv, heads), _apart(to_q, to_kv, heads))
    return to_q, to_kv


def _forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if not q.is_cuda:
        return _by_torch(q, k, v).contiguous()
    from situs.core.attention_kernel import launch_forward

    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch_forward(q, k, v, out)
    return out.flatten(2)


def _backward(grad: Tensor, given: tuple[Tensor, ...], to: tuple[Tensor, ...]) -> None:
    if grad.is_cuda:
        from situs.core.attention_kernel import launch_backward

        launch_backward(grad, *given, *to)
        return
    q, k, v, grad = (x.transpose(1, 2) for x in (*given, grad))
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
    to_weights = grad @ v.mT
    to_logits = weights * (to_weights - (weights * to_weights).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    for place, value in zip(to, (to_logits @ k, to_logits.mT @ q, weights.mT @ grad), strict=True):
        place.copy_(value.transpose(1, 2))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001  (torch's form)
    *tensors, ctx.heads = inputs
    ctx.save_for_backward(*tensors)


def _own_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _own_backward(grad, *ctx.saved_tensors, ctx.heads), None


def _context_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_context_backward(grad, *ctx.saved_tensors, ctx.heads), None


def _like(*given: Any) -> Any:
    """For the compiler: tensors of the shapes of those that have a gradient, which come before the number of heads."""
    made = [each.new_empty(each.shape) for each in given[1:-1]]
    return tuple(made) if len(made) > 1 else made[0]


def _mixed(first: Tensor, *others: Any) -> Tensor:
    """For the compiler: a tensor of the shape of the queries."""
    return first.new_empty(*first.shape[:2], first.shape[2] // (3 if len(others) == 1 else 1))


_own.register_fake(_mixed)
_context.register_fake(_mixed)
_own_backward.register_fake(_like)
_context_backward.register_fake(_like)
_own.register_autograd(_own_grad, setup_context=_keep)
_context.register_autograd(_context_grad, setup_context=_keep)
