"""GELU of a product to which its bias is yet to be added, as one kernel each way in a compiled step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.core.compiled import operator, takes_kernels
from situs.core.normal import normal, slope


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """gelu(x weight + bias) where a compiled step has a kernel for it; None elsewhere."""
    if bias is None or not torch.compiler.is_dynamo_compiling():
        return None
    # Its precision is what counts, and autocast decides that; where it is not used the compiler drops it.
    h = F.linear(x, weight)
    return bias_gelu(h, bias) if takes_kernels(h) else None


@operator("bias_gelu")
def bias_gelu(h: Tensor, bias: Tensor) -> Tensor:
    """gelu(h + bias), computed in float32. h: [..., C], of half precision; bias: [C] -> as h.

    The gradient of the bias comes from the pass over h that makes that of h. An infinity gives NaN.
    """
    if h.is_cuda and h.numel():
        from situs.core import gelu_kernel

        return gelu_kernel.forward(_rows(h), bias.contiguous()).view(h.shape)
    z = h.float() + bias.float()
    return (z * normal(z)[0]).to(h.dtype).contiguous()


@operator("bias_gelu_backward")
def bias_gelu_backward(grad: Tensor, h: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of h, of bias in float32) of `bias_gelu`, given that of what it returned."""
    if h.is_cuda and h.numel():
        from situs.core import gelu_kernel

        dh, db = gelu_kernel.backward(_rows(grad), _rows(h), bias.contiguous())
        return dh.view(h.shape), db
    dh = grad.float() * slope(h.float() + bias.float())
    return dh.to(h.dtype).contiguous(), dh.reshape(-1, h.shape[-1]).sum(0)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


@bias_gelu.register_fake
def _(h: Tensor, bias: Tensor) -> Tensor:
    del bias
    return torch.empty_like(h, memory_format=torch.contiguous_format)


@bias_gelu_backward.register_fake
def _(grad: Tensor, h: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    del grad
    return torch.empty_like(h, memory_format=torch.contiguous_format), bias.new_empty(bias.shape, dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    h, bias = ctx.saved_tensors
    dh, db = bias_gelu_backward(grad, h, bias)
    return dh, db.to(bias.dtype)


bias_gelu.register_autograd(_gradients, setup_context=_keep)
