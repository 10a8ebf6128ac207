"""The GELU of `core.gelu` for a compiled step in half precision: the same function, in less time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from situs.core.joined import heard
from situs.core.normal import normal, slope


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


def use_compiled_gelu(module: nn.Module) -> None:
    """Puts the faster forms in the place of every exact `nn.GELU`: of timm's MLPs together with the bias before it,
    of all others by `CompiledGelu`, but for those that something listens to. No parameter changes its name or its
    place."""
    from situs.backbones.timm.mlp import join_bias_and_gelu

    join_bias_and_gelu(module)
    for part in list(module.modules()):
        for name, child in part.named_children():
            if type(child) is nn.GELU and child.approximate == "none" and not heard(child):
                setattr(part, name, CompiledGelu())
