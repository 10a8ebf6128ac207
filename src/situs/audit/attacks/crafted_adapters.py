"""A server that chooses the weights, and a client that sends the gradients of bottleneck adapters alone.

Published for adapters of a frozen, crafted ViT (arXiv 2506.04453). Here the frozen MLP passes its input on, since
gelu(z) - gelu(-z) = z, and the LayerNorm behind it does not see that tokens grew: z + norm(z) has the direction of z.
So an adapter gets what the MLP's first layer gets, and its neurons are the bins of `crafted`, fewer of them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from situs.audit.attacks.crafted import ChosenWeights, Plan, matrix, plan_of
from situs.backbones.adapters import Adapter, adapter_of
from situs.backbones.base import Backbone
from situs.backbones.block import Block


class ChosenAdapters(ChosenWeights):
    """Reads the gradients of the adapters' first layers."""

    name: ClassVar[str] = "crafted-adapters"
    about: ClassVar[str] = (
        "the server crafts the frozen weights, so that the MLPs pass tokens on to adapters, whose neurons separate the "
        "images"
    )
    paper: ClassVar[str] = "Sami et al. 2025, Gradient Inversion Attacks on PEFT (arXiv 2506.04453)"
    needs: ClassVar[str] = "adapters behind the MLPs"
    difference: ClassVar[str] = (
        "every patch is read at its position; patches with more values than the model has channels are projected to "
        "fewer values"
    )

    def plan(self, backbone: Backbone, batch: int) -> Plan | str:  # noqa: ARG002
        adapters = [adapter_of(block) for block in backbone.parts()] if backbone.depth else []
        widths = [0 if adapter is None else adapter.down.out_features for adapter in adapters]
        if not widths or not min(widths):
            return "the model has no adapters behind its MLPs"
        plan = plan_of(backbone, width=min(widths))
        if isinstance(plan, str):
            return plan
        if not all(map(_halves_add_up, backbone.parts())):
            return "the activation of the model's MLPs is neither ReLU nor GELU"
        if not all(map(passes_on, backbone.parts())):
            return "the model's MLPs cannot pass a token on: this needs biases, and twice as many neurons as channels"
        return plan

    def layers(self, block: Block) -> tuple[Any, Any]:
        adapter = adapter_of(block)
        assert isinstance(adapter, Adapter)
        return adapter.down, adapter.up

    def fill(self, model: Backbone, plan: Plan, batch: int, public: Tensor | None) -> None:
        super().fill(model, plan, batch, public)
        for block in model.parts():
            pass_on(matrix(block.mlp.up[0]), matrix(block.mlp.down))


def pass_on(up: Tensor, down: Tensor) -> None:
    """Writes an MLP that gives its input. up: [H, D], down: [D, H]; all else of them is 0."""
    dim = len(down)
    one = torch.eye(dim, dtype=up.dtype, device=up.device)
    up[: 2 * dim], down[:, : 2 * dim] = torch.cat([one, -one]), torch.cat([one, -one], dim=1)


def _halves_add_up(block: Block) -> bool:
    """Whether act(z) - act(-z) is z."""
    z = torch.linspace(-20, 20, 101, dtype=torch.float64)
    return bool((block.mlp.act(z) - block.mlp.act(-z) - z).abs().max() < 1e-6)


def passes_on(block: Block) -> bool:
    """Whether a block has an adapter, behind an MLP that can be written so."""
    if adapter_of(block) is None or not _halves_add_up(block):
        return False
    return block.mlp.up[0].bias is not None and len(block.mlp.up[0].bias) >= 2 * block.norm2.weight.numel()
