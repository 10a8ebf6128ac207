"""Plain pre-norm blocks run as a compiled step wants them: each residual sum with the LayerNorm behind it, each GELU
with the product and the bias before it, attention over short sequences, one kernel each.

Between two of those stand products alone, which need no bias then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.core.kernels.attention import attend_packed
from situs.core.kernels.mlp import mlp
from situs.core.kernels.norm import add_norm
from situs.core.kernels.when import operator


class Layer(NamedTuple):
    """A linear layer's tensors."""

    weight: Tensor
    bias: Tensor | None


class Norm(NamedTuple):
    """A LayerNorm's."""

    weight: Tensor
    shift: Tensor
    eps: float


class Parts(NamedTuple):
    """A block's: z + scale1 * proj(attention(qkv(norm1(z)))), then that + scale2 * fc2(gelu(fc1(norm2(that)))).

    scale1, scale2: [B] float32, of drop path; None: 1.
    """

    norm1: Norm
    qkv: Layer
    heads: int
    proj: Layer
    norm2: Norm
    fc1: Layer
    fc2: Layer
    scale1: Tensor | None = None
    scale2: Tensor | None = None


def run_joined(blocks: Sequence[Parts], z: Tensor, keys: int | None) -> Tensor:
    """All blocks over z [B, S, D], of half precision; with `keys`, the first tokens alone are keys and values."""
    norm = blocks[0].norm1
    normed = F.layer_norm(z, z.shape[-1:], norm.weight, norm.shift, norm.eps).to(z.dtype)
    context = normed[:, : keys or 0]
    for block, after in zip(blocks, (*blocks[1:], None), strict=True):
        mixed = _attend(block, normed, context, keys)
        branch = F.linear(mixed, block.proj.weight)
        z, normed, _ = add_norm(z, branch, block.proj.bias, block.scale1, *block.norm2, 0)
        assert block.fc1.bias is not None
        branch = mlp(normed, block.fc1.weight, block.fc1.bias, block.fc2.weight)
        if after is not None:
            z, normed, context = add_norm(z, branch, block.fc2.bias, block.scale2, *after.norm1, keys or 0)
            continue
        if block.fc2.bias is not None:
            branch = branch + block.fc2.bias.to(branch.dtype)
        if block.scale2 is not None:
            branch = branch * block.scale2.to(branch.dtype)[:, None, None]
        z = z + branch
    return z


def _attend(block: Parts, normed: Tensor, context: Tensor, keys: int | None) -> Tensor:
    weight, bias = block.qkv
    if keys is None:
        return attend_packed(F.linear(normed, weight, bias), None, block.heads)
    width = weight.shape[0] // 3
    q = F.linear(normed, weight[:width], None if bias is None else bias[:width])
    kv = _OfContext.apply(normed.detach(), context, weight[width:], None if bias is None else bias[width:])
    return attend_packed(q, kv, block.heads)


class _OfContext(torch.autograd.Function):
    """A layer on the context, which is a copy of the first tokens of `normed`, side by side.

    normed is kept anyway: the backward copies its first tokens again (`_product`), and `context` is not kept beside it.
    """

    @staticmethod
    def forward(ctx: Any, normed: Tensor, context: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(normed, weight)
        ctx.biased = None if bias is None else bias.dtype
        return F.linear(context, weight.to(context.dtype), None if bias is None else bias.to(context.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        normed, weight = ctx.saved_tensors
        to_bias = None if ctx.biased is None else grad.sum((0, 1), dtype=torch.float32).to(ctx.biased)
        return None, grad @ weight.to(grad.dtype), _product(grad, normed).to(weight.dtype), to_bias


@operator("context_product")
def _product(grad: Tensor, normed: Tensor) -> Tensor:
    """gradᵀ context, [C, D], of the first tokens of normed [B, S, D], as many as grad [B, K, C] has.

    One operation for the compiler, which would else copy those tokens in the forward and keep the copy.
    """
    context, rows = (x.reshape(-1, x.shape[-1]) for x in (normed[:, : grad.shape[1]], grad))
    return rows.mT @ context


@_product.register_fake
def _(grad: Tensor, normed: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[-1], normed.shape[-1])
