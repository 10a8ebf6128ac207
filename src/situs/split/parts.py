"""Where a model is cut: the server has the blocks; the client has embedding, positions, prefix tokens, norm and head.

Both sides build the whole method, so groups, depths and orders are those of local training. Each then drops the other's
parameters: they stay on the meta device, without values, and are in no state dict.
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
    """The tensors of a backbone's state dict that the server has: the blocks, relative bias and rotary tables."""
    backbone.require("tokens")
    top = len(backbone.block_modules()) + 1
    if top == 1:
        raise SitusError(f"{backbone.name}: its blocks are not known, so it cannot be split")
    return {name for name, role in backbone.roles().items() if 0 < role.depth < top or role.part == "position"}


def side_names(method: Method, side: Side) -> set[str]:
    """The tensors of a method's state dict that one side has; those that a method adds are the client's."""
    served = {f"{BACKBONE}{name}" for name in server_names(method.backbone)}
    return served if side == "server" else set(method.state_dict()) - served


def trained_order(method: Method, optim: OptimConfig) -> list[str]:
    """Every trained parameter in the order of local training's optimiser, in which norms are summed."""
    return [name for group in groups(method, optim) for name in group["names"]]


def cut(method: Method, side: Side) -> Method:
    """Removes the other side's tensors from `method`, in place: no values, no gradient, in no state dict."""
    names = side_names(method, side)
    for path, module in method.named_modules():
        tables: Any = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                full_name = f"{path}.{name}".removeprefix(".")
                temporary = table is module._buffers and name in module._non_persistent_buffers_set
                if tensor is None or full_name in names or temporary:  # both sides have buffers outside the state dict
                    continue
                empty = torch.empty_like(tensor, device="meta")
                if isinstance(tensor, nn.Parameter):
                    trained, empty = tensor.requires_grad, nn.Parameter(empty, requires_grad=False)
                    empty.trained_elsewhere = trained  # pyright: ignore[reportAttributeAccessIssue]
                table[name] = empty
    method.register_state_dict_post_hook(_without_values)
    return method


def _without_values(_: nn.Module, state: dict[str, Any], prefix: str, __: object) -> None:
    for name in [name for name, value in state.items() if name.startswith(prefix) and value.is_meta]:
        del state[name]


def layout(backbone: Backbone, *, any_length: bool = False) -> str:
    """A fingerprint of the blocks' layout (names, shapes, heads, places), which must be equal on both sides.

    any_length: without the longest text, to generate; the server limits it.
    """
    state = backbone.state_dict()
    sizes = [(group.name, group.size) for group in backbone.groups()] if "columns" not in backbone.refusals else []
    facts = {
        "backbone": type(backbone).__name__.removeprefix(ENTERED),
        "grid": None if any_length else backbone.grid,
        "prefix": backbone.num_prefix,
        "tensors": {name: list(state[name].shape) for name in sorted(server_names(backbone))},
        "groups": sizes,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def digest(tensors: Mapping[str, Tensor], names: Iterable[str]) -> str:
    """The SHA-256 of some tensors: names, dtypes, shapes and bytes."""
    checksum = hashlib.sha256()
    for name in sorted(names):
        tensor = tensors[name].cpu()
        checksum.update(f"{name} {STORED[tensor.dtype]} {list(tensor.shape)}\n".encode())
        checksum.update(bytes_of(tensor))
    return checksum.hexdigest()
