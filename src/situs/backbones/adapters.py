"""Bottleneck adapters (Houlsby et al., 2019; Pfeiffer et al., 2021): a small trained MLP after each frozen MLP.

    y + up(gelu(down(y)))        y: what the last layer of an MLP gives

`up` is zero at first. The adapter is a child of that layer and runs as its hook, so all other names stay.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from situs.backbones.base import Backbone
from situs.backbones.block import Block
from situs.errors import SitusError


class Adapter(nn.Module):
    """[..., D] -> [..., D], with `width` channels between."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(dim, width), nn.Linear(width, dim)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, y: Tensor) -> Tensor:
        return y + self.up(F.gelu(self.down(y)))


def add_adapters(backbone: Backbone, width: int) -> list[str]:
    """Puts an adapter behind the MLP of each block; gives the names of their parameters."""
    for block in backbone.parts():
        if block.mlp.down is None:
            raise SitusError(
                f"{backbone.name}: Situs cannot add an adapter, because Situs does not know the last layer of this "
                "model's MLP"
            )
        weight = block.mlp.down.weight
        block.mlp.down.adapter = Adapter(backbone.dim, width).to(weight)
        block.mlp.down.register_forward_hook(_adapted)
    return [name for name, _ in backbone.named_parameters() if ".adapter." in name]


def adapter_of(block: Block) -> Adapter | None:
    """A block's adapter, if it has one."""
    return getattr(block.mlp.down, "adapter", None)


def _adapted(layer: Any, _: Any, output: Tensor) -> Tensor:
    return layer.adapter(output)
