"""timm's MLP with the bias of its first layer added by the kernel of its GELU, where half precision is compiled."""

from __future__ import annotations

from typing import Any

import timm.layers.mlp
from torch import Tensor, nn

from situs.core.gelu import linear_gelu
from situs.core.joined import heard


class Mlp(timm.layers.mlp.Mlp):
    """timm's own, but for the forward of a compiled step in half precision on a GPU.

    One module decides for layer and activation, so that the bias cannot be lost between them. Both stay what they are:
    whoever reads, wraps or saves them sees timm's modules. What is dropped out or normed behind the activation is left
    to the compiler, which fuses it with the GELU.
    """

    def forward(self, x: Tensor) -> Tensor:
        alone = isinstance(self.norm, nn.Identity) and not (self.drop1.training and self.drop1.p)
        if alone and not any(map(heard, (self.act, self.drop1, self.norm))) and plain(self.fc1, nn.Linear):
            joined = linear_gelu(x, self.fc1.weight, self.fc1.bias)
            if joined is not None:
                return self.drop2(self.fc2(joined))
        return super().forward(x)


def join_bias_and_gelu(module: nn.Module) -> None:
    """Makes each MLP of timm whose first layer is a plain one with a bias, and whose GELU is exact, an `Mlp`."""
    for part in module.modules():
        if type(part) is timm.layers.mlp.Mlp and _joins(part.fc1, part.act):
            part.__class__ = Mlp


def _joins(fc1: Any, act: Any) -> bool:
    both = plain(fc1, nn.Linear) and plain(act, nn.GELU)
    return both and fc1.bias is not None and act.approximate == "none"


def plain(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Exactly of one of these kinds, and nothing listens to it."""
    return type(module) in kinds and not heard(module)
