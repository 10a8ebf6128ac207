"""timm's MLP with the bias of its first layer added by the kernel of its GELU, where half precision is compiled."""

from __future__ import annotations

import timm.layers.mlp
from torch import Tensor, nn

from situs.core.kernels import CompiledGelu, has_hooks, linear_gelu


class Mlp(timm.layers.mlp.Mlp):
    """timm's own, but for the forward of a compiled step in half precision on a GPU.

    One module decides for layer and activation, so that the bias cannot be lost between them. Both stay what they are:
    whoever reads, wraps or saves them sees timm's modules. What is dropped out or normed behind the activation is left
    to the compiler, which fuses it with the GELU.
    """

    def forward(self, x: Tensor) -> Tensor:
        alone = isinstance(self.norm, nn.Identity) and not (self.drop1.training and self.drop1.p)
        if alone and _plain(self.fc1) and not any(map(has_hooks, (self.act, self.drop1, self.norm))):
            joined = linear_gelu(x, self.fc1.weight, self.fc1.bias)
            if joined is not None:
                return self.drop2(self.fc2(joined))
        return super().forward(x)


def use_compiled_gelu(module: nn.Module) -> None:
    """Puts the faster forms in the place of every exact `nn.GELU`: of timm's MLPs together with the bias before it,
    of all others by `CompiledGelu`, but for those that something listens to. No parameter changes its name or its
    place."""
    for part in list(module.modules()):
        if type(part) is timm.layers.mlp.Mlp and _plain(part.fc1) and part.fc1.bias is not None and _exact(part.act):
            part.__class__ = Mlp
        for name, child in part.named_children():
            if _exact(child):
                setattr(part, name, CompiledGelu())


def _plain(layer: object) -> bool:
    return type(layer) is nn.Linear and not has_hooks(layer)


def _exact(act: object) -> bool:
    return type(act) is nn.GELU and act.approximate == "none" and not has_hooks(act)
