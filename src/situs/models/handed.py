"""Models that are in memory, under an address that stands wherever a model's path stands: `init`, `finetune`'s source.

A run's config holds the address; the weights are read when the run begins, and from then on lie in its checkpoints.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from situs.data.sources.memory import PREFIX, is_memory
from situs.errors import SitusError
from situs.methods.base import Method
from situs.models.model import Model
from situs.models.open import open_model

_KEPT = 2
_known: OrderedDict[str, Model] = OrderedDict()


def addressed_model(source: Any) -> str | None:
    """The address of a module or an open model; a path, a name and None as they are (a path as text)."""
    if source is None or isinstance(source, str | Path):
        return None if source is None else str(source)
    if not isinstance(source, nn.Module | Model):
        allowed = "a run, a model's folder, a name, a weight file, an nn.Module or an open model"
        raise SitusError(field="source", value=type(source).__name__, allowed=allowed)
    model = open_model(source.backbone if isinstance(source, Method) else source)
    mark = hashlib.blake2b(digest_size=6)
    for name, value in model.backbone.state_dict().items():
        mark.update(name.encode())
        mark.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    name = "".join(letter if letter.isalnum() or letter in "_." else "_" for letter in model.name)
    address = f"{PREFIX}{name}-{mark.hexdigest()}"
    _known[address] = model
    _known.move_to_end(address)
    while len(_known) > _KEPT:
        _known.popitem(last=False)
    return address


def handed(address: str | Path) -> Model | None:
    """The model at an address; None where it is none."""
    address = str(address)
    if not is_memory(address):
        return None
    if address not in _known:
        name = address.removeprefix(PREFIX).rpartition("-")[0]
        raise SitusError(f"{name}: was a model in memory, which is there no more; give it again", field="init")
    return _known[address]
