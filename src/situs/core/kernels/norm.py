"""The residual stream plus a branch, and the LayerNorm of that: one pass over memory each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from situs.core.kernels.when import operator

WIDEST = 2048
"""Channels whose sums a program of the backward holds."""


def norm_fits(width: int) -> bool:
    """Whether `add_norm` has kernels for so many channels."""
    return 0 < width <= WIDEST


def add_norm(
    z: Tensor,
    branch: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    weight: Tensor,
    shift: Tensor,
    eps: float,
    keys: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(total, its LayerNorm, the first `keys` tokens of that once more): total = z + scale * (branch + bias).

    z, branch: [B, S, D] of half precision; bias, weight, shift: [D]; scale: [B] float32, has no gradient. All but the
    last give [B, S, D] in the precision of z, the last [B, keys, D]. The LayerNorm is that of the total as rounded.
    """
    total, normed, first, _, _ = _forward(z, branch, bias, scale, weight, shift, eps, keys)
    return total, normed, first


@operator("add_norm")
def _forward(
    z: Tensor,
    branch: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    weight: Tensor,
    shift: Tensor,
    eps: float,
    keys: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """And the means and the reciprocals of the deviations, [B * S], for the backward."""
    if z.is_cuda and z.numel():
        from situs.core.kernels.gpu import norm as gpu

        return gpu.forward(z.contiguous(), branch.contiguous(), bias, scale, weight, shift, eps, keys)
    wide = _wide(z)
    added = branch.to(wide) if bias is None else branch.to(wide) + bias
    total = (z + (added if scale is None else scale.view(-1, 1, 1) * added)).to(z.dtype).contiguous()
    mean = total.to(wide).mean(-1, keepdim=True)
    rstd = ((total - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    normed = ((total - mean) * rstd * weight + shift).to(z.dtype)
    return total, normed, normed[:, :keys].clone(memory_format=torch.contiguous_format), mean.view(-1), rstd.view(-1)


@operator("add_norm_backward")
def _backward(
    to_total: Tensor | None,
    to_normed: Tensor | None,
    to_first: Tensor | None,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    scale: Tensor | None,
    weight: Tensor,
    keys: int,
    biased: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of z, of branch where that is another, of (bias, weight, shift) [3, D] in float32)."""
    if to_normed is None:
        to_normed = torch.zeros_like(total)
    if not keys:
        to_first = None
    if total.is_cuda and total.numel():
        from situs.core.kernels.gpu import norm as gpu

        to_total, to_first = (None if grad is None else grad.contiguous() for grad in (to_total, to_first))
        rest = (total, mean, rstd, scale, weight, keys, biased)
        return gpu.backward(to_total, to_normed.contiguous(), to_first, *rest)
    wide, shape = mean.dtype, (*total.shape[:2], 1)
    grad = to_normed.to(wide, copy=True)
    if to_first is not None:
        grad[:, :keys] += to_first
    unit = (total - mean.view(shape)) * rstd.view(shape)
    through = grad * weight
    dx = through - through.mean(-1, keepdim=True) - unit * (through * unit).mean(-1, keepdim=True)
    dx = dx * rstd.view(shape) + (0 if to_total is None else to_total)
    dbranch = dx if scale is None else dx * scale.view(-1, 1, 1)
    sums = torch.stack([(dbranch if biased else 0 * dx).sum((0, 1)), (grad * unit).sum((0, 1)), grad.sum((0, 1))])
    return dx.to(total.dtype), total.new_empty(0) if scale is None else dbranch.to(total.dtype), sums


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@_forward.register_fake
def _(z: Tensor, *others: Any) -> tuple[Tensor, ...]:
    (batch, count, width), keys = z.shape, others[-1]
    total, normed, first = (z.new_empty(batch, many, width) for many in (count, count, keys))
    mean, rstd = (z.new_empty(batch * count, dtype=_wide(z)) for _ in range(2))
    return total, normed, first, mean, rstd


@_backward.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    total, mean, _, scale = inputs[3:7]
    other = total.new_empty(0 if scale is None else total.shape)
    return total.new_empty(total.shape), other, mean.new_empty(3, total.shape[-1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, bias, scale, weight, shift, _, ctx.keys = inputs
    total, _, _, mean, rstd = output
    ctx.types = None if bias is None else bias.dtype, weight.dtype, shift.dtype
    ctx.save_for_backward(total, mean, rstd, scale, weight)
    ctx.set_materialize_grads(False)  # a gradient that is not there is not read


def _gradients(
    ctx: Any, to_total: Tensor | None, to_normed: Tensor | None, to_first: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    total, mean, rstd, scale, weight = ctx.saved_tensors
    bias_type, weight_type, shift_type = ctx.types
    biased = bias_type is not None
    dz, dbranch, sums = _backward(to_total, to_normed, to_first, total, mean, rstd, scale, weight, ctx.keys, biased)
    db, dw, ds = sums.unbind()
    to_bias = db.to(bias_type) if biased else None
    return dz, dz if scale is None else dbranch, to_bias, None, dw.to(weight_type), ds.to(shift_type), None, None


_forward.register_autograd(_gradients, setup_context=_keep)
