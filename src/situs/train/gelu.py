"""GELU for a compiled step in half precision: the same function, from one exponential.

The error function that GELU asks for costs a fused kernel more time than its memory does. Abramowitz and Stegun's
7.1.26 gives it from exp(-z²/2), which the derivative needs anyway, with an error below 7.5e-8 in Φ: as near to GELU as
torch's own float32 kernel, and far below what bf16 and fp16 can tell apart.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

_P = 0.3275911 / math.sqrt(2)
_A = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def normal(z: Tensor) -> tuple[Tensor, Tensor]:
    """(Φ(z), exp(-z²/2)): the normal distribution and, up to 1/√2π, its density."""
    density = torch.exp(-0.5 * z * z)
    t = 1 / (1 + _P * z.abs())
    tail = 0.5 * density * t * (_A[0] + t * (_A[1] + t * (_A[2] + t * (_A[3] + t * _A[4]))))
    return torch.where(z > 0, 1 - tail, tail), density


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        z = x.float()
        return (z * normal(z)[0]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        z = x.float()
        phi, density = normal(z)
        return (grad.float() * (phi + z * density * (1 / math.sqrt(2 * math.pi)))).to(grad.dtype)


class CompiledGelu(nn.GELU):
    """`nn.GELU`, and the faster form of it where half precision is compiled; unfused that form would be the slower."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        half = input.dtype in {torch.bfloat16, torch.float16}
        return _Gelu.apply(input) if half and torch.compiler.is_compiling() else super().forward(input)


def use_compiled_gelu(module: nn.Module) -> None:
    """Puts `CompiledGelu` in the place of every exact `nn.GELU`; neither has parameters."""
    for part in list(module.modules()):
        for name, child in part.named_children():
            if type(child) is nn.GELU and child.approximate == "none":
                setattr(part, name, CompiledGelu())
