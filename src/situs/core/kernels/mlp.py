"""GELU for compiled steps in half precision, and the MLP of a block around it.

The error function that GELU asks for costs a fused kernel more time than its memory does. Abramowitz and Stegun's
7.1.26 gives it from exp(-z²/2), which the derivative needs anyway, with an error below 7.5e-8 in Φ: as near to GELU as
torch's own float32 kernel, and far below what bf16 and fp16 can tell apart. `CompiledGelu` is left to the compiler to
fuse; `bias_gelu` is one kernel each way with the bias before it.

In an MLP, GELU and its gradient belong to the product that comes before them. On a Hopper GPU that is one kernel
(`gpu.mlp`), of which GELU takes little more than nothing; elsewhere the product and `bias_gelu` behind it. Which of
them it is, an operator decides when it runs.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.core.constants import DENSITY, SLOPE, TAIL
from situs.core.kernels.when import operator, takes_kernels

_GLUON = ((3, 6), (3, 8))  # the first and the last Triton whose Gluon was tried: it is young, and changes
_TILE, _DEPTH = 128, 64  # of the Gluon kernel


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

        return gpu.forward(_rows(h).contiguous(), bias.contiguous()).view(h.shape)
    z = h.float() + bias.float()
    return (z * normal(z)[0]).to(h.dtype).contiguous()


@operator("bias_gelu_backward")
def bias_gelu_backward(grad: Tensor, h: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of h, of bias in float32) of `bias_gelu`, given that of what it returned."""
    if h.is_cuda and h.numel():
        from situs.core.kernels.gpu import gelu as gpu

        dh, db = gpu.backward(_rows(grad).contiguous(), _rows(h).contiguous(), bias.contiguous())
        return dh.view(h.shape), db
    dh = grad.float() * slope(h.float() + bias.float())
    return dh.to(h.dtype).contiguous(), dh.reshape(-1, h.shape[-1]).sum(0)


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


def mlp(x: Tensor, weight1: Tensor, bias: Tensor, weight2: Tensor) -> Tensor:
    """gelu(x weight1ᵀ + bias) weight2ᵀ. x: [..., D], of half precision, as the products are."""
    if torch.is_grad_enabled():
        return _Mlp.apply(x, weight1, bias, weight2)
    return F.linear(_forward(x, weight1.to(x.dtype), bias, keep=False)[0], weight2.to(x.dtype))


class _Mlp(torch.autograd.Function):
    """Keeps what the products need: x, the first product without its bias, and GELU of it. Its gradients are not to be
    differentiated again: what they owe to these would be left out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight1: Tensor, bias: Tensor, weight2: Tensor) -> Tensor:
        activated, h = _forward(x, weight1.to(x.dtype), bias, keep=True)
        ctx.save_for_backward(x, h, activated, weight1, bias, weight2)
        return F.linear(activated, weight2.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, h, activated, weight1, bias, weight2 = ctx.saved_tensors
        to_h, to_bias = _backward(grad, weight2.to(grad.dtype), h, bias)
        to_weight1, to_weight2 = _rows(to_h).mT @ _rows(x), _rows(grad).mT @ _rows(activated)
        to_x = to_h @ weight1.to(to_h.dtype)
        return to_x, to_weight1.to(weight1.dtype), to_bias.to(bias.dtype), to_weight2.to(weight2.dtype)


@operator("mlp_gelu")
def _forward(x: Tensor, weight: Tensor, bias: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """(gelu(x weightᵀ + bias), x weightᵀ), or nothing as the second where it is not to be kept."""
    rows = _rows(x).contiguous()
    shape = (*x.shape[:-1], len(weight))
    if _fits_kernel(rows, weight):
        from situs.core.kernels.gpu import mlp as gpu

        activated, h = gpu.forward(rows, weight.contiguous(), bias.contiguous(), keep)
    else:
        h = F.linear(rows, weight)
        activated = bias_gelu(h, bias)
    return activated.view(shape), h.view(shape) if keep else x.new_empty(0)


@operator("mlp_gelu_backward")
def _backward(grad: Tensor, weight: Tensor, h: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of h, of bias in float32), where gelu(h + bias) weightᵀ has the gradient `grad`."""
    rows, before = _rows(grad).contiguous(), _rows(h).contiguous()
    if _fits_kernel(rows, weight.mT):
        from situs.core.kernels.gpu import mlp as gpu

        to_h, to_bias = gpu.backward(rows, weight.contiguous(), before, bias.contiguous())
    else:
        to_h, to_bias = bias_gelu_backward(rows @ weight, before, bias)
    return to_h.view(h.shape), to_bias


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _fits_kernel(rows: Tensor, weight: Tensor) -> bool:
    """Whether the kernel multiplies [M, K] by [N, K]: whole tiles of columns and of depth, any number of rows."""
    if not rows.is_cuda or not len(rows) or rows.element_size() != 2 or not _has_kernel(rows.device):
        return False
    aligned = rows.data_ptr() % 16 == weight.data_ptr() % 16 == 0
    return aligned and weight.shape[0] % _TILE == 0 and weight.shape[1] % _DEPTH == 0


@cache
def _has_kernel(device: torch.device) -> bool:
    try:
        installed = tuple(map(int, version("triton").split(".")[:2]))
    except (PackageNotFoundError, ValueError):
        return False
    hopper = torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9
    return hopper and _GLUON[0] <= installed <= _GLUON[1]


@_forward.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    del bias
    activated = x.new_empty(*x.shape[:-1], len(weight))
    return activated, torch.empty_like(activated) if keep else x.new_empty(0)


@_backward.register_fake
def _(grad: Tensor, weight: Tensor, h: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    del grad, weight
    return h.new_empty(h.shape), bias.new_empty(bias.shape, dtype=torch.float32)
