"""GELU for compiled steps in half precision: the same function from one exponential, in less time.

The error function that GELU asks for costs a fused kernel more time than its memory does. Abramowitz and Stegun's
7.1.26 gives it from exp(-z²/2), which the derivative needs anyway, with an error below 7.5e-8 in Φ: as near to GELU as
torch's own float32 kernel, and far below what bf16 and fp16 can tell apart.

`CompiledGelu` is left to the compiler to fuse; `bias_gelu` is one kernel each way with the bias before it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.core.constants import DENSITY, SLOPE, TAIL
from situs.core.kernels.when import operator, takes_kernels


def normal(z: Tensor) -> tuple[Tensor, Tensor]:
    """(Φ(z), exp(-z²/2)): the normal distribution and, up to 1/√2π, its density."""
    density = torch.exp(-0.5 * z * z)
    t = 1 / (1 + SLOPE * z.abs())
    tail = density * t * (TAIL[0] + t * (TAIL[1] + t * (TAIL[2] + t * (TAIL[3] + t * TAIL[4]))))
    return torch.where(z > 0, 1 - tail, tail), density


def slope(z: Tensor) -> Tensor:
    """The derivative of GELU."""
    phi, density = normal(z)
    return phi + z * density * DENSITY


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        z = x.float()
        return (z * normal(z)[0]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return (grad.float() * slope(x.float())).to(grad.dtype)


class CompiledGelu(nn.GELU):
    """`nn.GELU`, and the faster form of it where half precision is compiled; unfused that form would be the slower."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        half = input.dtype in {torch.bfloat16, torch.float16}
        return _Gelu.apply(input) if half and torch.compiler.is_compiling() else super().forward(input)


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
        from situs.core.kernels.gpu import gelu as gpu

        return gpu.forward(_rows(h), bias.contiguous()).view(h.shape)
    z = h.float() + bias.float()
    return (z * normal(z)[0]).to(h.dtype).contiguous()


@operator("bias_gelu_backward")
def bias_gelu_backward(grad: Tensor, h: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of h, of bias in float32) of `bias_gelu`, given that of what it returned."""
    if h.is_cuda and h.numel():
        from situs.core.kernels.gpu import gelu as gpu

        dh, db = gpu.backward(_rows(grad), _rows(h), bias.contiguous())
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
