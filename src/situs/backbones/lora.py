"""LoRA (Hu et al., 2021): frozen matrices, each with a trained product of low rank.

W + (alpha / rank) · up @ down replaces W wherever the model uses it, by torch's own parametrizations: the backbones use
`weight` itself, so that a wrapped layer with another forward would have no effect. `up` is zero at first. peft does not
fit: it renames a model's layers and relies on their forward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from situs.backbones.base import Backbone
from situs.errors import SitusError

BLOCKS = "blocks"
"""As a target: every matrix of the blocks."""

_PARAMETRIZED, _ORIGINAL, _UP, _DOWN, _SCALE = ".parametrizations.weight.", "original", "0.up", "0.down", "0.scale"


class LowRank(nn.Module):
    """A parametrization of a weight [out, in]: up [out, rank] starts at zero, down [rank, in] like a linear layer."""

    scale: Tensor

    def __init__(self, weight: Tensor, rank: int, alpha: float) -> None:
        super().__init__()
        self.up = nn.Parameter(weight.new_zeros(weight.shape[0], rank))
        self.down = nn.Parameter(nn.init.kaiming_uniform_(weight.new_empty(rank, weight.shape[1]), a=math.sqrt(5)))
        # In the state dict, so that a run's weights can be merged without its config.
        self.register_buffer("scale", weight.new_tensor(alpha / rank))

    def forward(self, weight: Tensor) -> Tensor:
        return sum_of(weight, self.up, self.down, self.scale)


def sum_of(weight: Tensor, up: Tensor, down: Tensor, scale: Tensor) -> Tensor:
    """The weight with its product added."""
    return torch.addmm(weight, up * scale, down)


def add_lora(backbone: Backbone, rank: int, alpha: float, targets: Sequence[str]) -> list[str]:
    """Adds a product of low rank to each matrix that `targets` names; gives the layers' names.

    targets: "qkv" (queries, keys, values), "blocks" (every matrix of the blocks), or a layer's own name such as fc1.
    """
    roles, layers = backbone.roles(), dict(backbone.named_modules())
    able = {
        name.removesuffix(".weight"): role
        for name, role in roles.items()
        if role.part in ("qkv", "block") and name.endswith(".weight")
        and isinstance(layers[name.removesuffix(".weight")], nn.Linear)
    }  # fmt: skip
    layer_names = sorted({name.rsplit(".", 1)[-1] for name in able})
    for target in targets:
        if not any(_named(target, name, role.part) for name, role in able.items()):
            if not able:
                reason = f"{backbone.name} has no layers for LoRA, because its blocks have no matrices"
                raise SitusError(f"tuning.targets={target!r}: {reason}", field="tuning.targets")
            known = ", ".join(dict.fromkeys(["qkv", BLOCKS, *layer_names]))
            raise SitusError(
                field="tuning.targets", value=target, allowed=f"one of {known} (layers of {backbone.name})"
            )
    chosen = [name for name, role in able.items() if any(_named(target, name, role.part) for target in targets)]
    for name in chosen:
        layer = layers[name]
        assert isinstance(layer, nn.Linear)
        # unsafe: skips a trial forward, which is not needed here.
        parametrize.register_parametrization(layer, "weight", LowRank(layer.weight.detach(), rank, alpha), unsafe=True)
    return chosen


def _named(target: str, name: str, part: str) -> bool:
    return target in (BLOCKS, part) or name.rsplit(".", 1)[-1] == target


def merge_lora(backbone: nn.Module) -> None:
    """Merges each matrix and its product into one ordinary weight under its own name, in place."""
    for layer in list(backbone.modules()):
        if parametrize.is_parametrized(layer, "weight"):
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)


def merged_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict as it would be after `merge_lora`; one without products unchanged."""
    merged = {}
    for name, value in state.items():
        owner, parametrized, part = name.partition(_PARAMETRIZED)
        if not parametrized:
            merged[name] = value
        elif part == _ORIGINAL:
            factors = (state[f"{owner}{_PARAMETRIZED}{factor}"] for factor in (_UP, _DOWN, _SCALE))
            merged[f"{owner}.weight"] = sum_of(value, *factors)
    return merged


def low_rank_names(backbone: nn.Module) -> list[str]:
    """The names of the trained factors."""
    endings = (f"{_PARAMETRIZED}{_UP}", f"{_PARAMETRIZED}{_DOWN}")
    return [name for name, _ in backbone.named_parameters() if name.endswith(endings)]
