"""Where a model is cut: the blocks are the server's; embedding, positions, prefix tokens, norm and head the client's.

Both sides build the whole method, so that groups, depths and orders are those of local training; then each lets go of
what is the other's: such a parameter is left on the meta device, without values, and is in no state dict.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from situs.backbones.base import Backbone
from situs.errors import SitusError
from situs.locks.shards import WIDTHS
from situs.locks.veil import ENTERED, bytes_of
from situs.methods.base import Method
from situs.train.optim import BACKBONE, OptimConfig, groups

Side = Literal["client", "server"]

STORED = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.bool: "BOOL",
    torch.int64: "I64", torch.uint8: "U8",
}  # fmt: skip
"""torch's dtypes -> safetensors'."""

assert set(STORED.values()) <= WIDTHS.keys()


def server_names(backbone: Backbone) -> set[str]:
    """The tensors of a backbone's state dict that the server holds: the blocks, and relative bias and rotation."""
    backbone.require("tokens")
    top = len(backbone.block_modules()) + 1
    if top == 1:
        raise SitusError(f"{backbone.name}: its blocks are not known, so it cannot be cut around them")
    return {name for name, role in backbone.roles().items() if 0 < role.depth < top or role.part == "position"}


def own_names(method: Method, side: Side) -> set[str]:
    """The tensors of a method's state dict that one side holds; what a method adds is the client's."""
    served = {f"{BACKBONE}{name}" for name in server_names(method.backbone)}
    return served if side == "server" else set(method.state_dict()) - served


def trained_order(method: Method, optim: OptimConfig) -> list[str]:
    """Every trained parameter in the order of local training's optimiser, in which norms are added up."""
    return [name for group in groups(method, optim) for name in group["names"]]


def cut(method: Method, side: Side) -> Method:
    """Takes the other side's tensors out of `method`, in place: no values, no gradient, in no state dict of it."""
    own = own_names(method, side)
    for path, module in method.named_modules():
        tables: Any = (module._parameters, module._buffers)
        for kept in tables:
            for name, tensor in kept.items():
                whole = f"{path}.{name}".removeprefix(".")
                if tensor is None or whole in own or (kept is module._buffers and _passing(module, name)):
                    continue
                empty = torch.empty_like(tensor, device="meta")
                kept[name] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    method.register_state_dict_post_hook(_without_values)
    return method


def _passing(module: nn.Module, name: str) -> bool:
    """A buffer that is in no state dict: both sides keep it."""
    return name in module._non_persistent_buffers_set


def _without_values(_: nn.Module, state: dict[str, Any], prefix: str, __: object) -> None:
    for name in [name for name, value in state.items() if name.startswith(prefix) and value.is_meta]:
        del state[name]


def layout(backbone: Backbone) -> str:
    """A fingerprint of the blocks without their values: names, shapes, heads, places. Both sides must have the same."""
    state = backbone.state_dict()
    sizes = [(group.name, group.size) for group in backbone.groups()] if "columns" not in backbone.refusals else []
    facts = {
        "backbone": type(backbone).__name__.removeprefix(ENTERED),
        "grid": backbone.grid,
        "prefix": backbone.num_prefix,
        "tensors": {name: list(state[name].shape) for name in sorted(server_names(backbone))},
        "groups": sizes,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def digest(tensors: Mapping[str, Tensor], names: Iterable[str]) -> str:
    """The SHA-256 of some tensors: names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for name in sorted(names):
        tensor = tensors[name].cpu()
        found.update(f"{name} {STORED[tensor.dtype]} {list(tensor.shape)}\n".encode())
        found.update(bytes_of(tensor))
    return found.hexdigest()
