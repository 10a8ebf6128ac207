"""A model for the playground: its tensors in one string, and the facts that the page needs to run it.

Tensors are stored in 32 bits if the page is then small enough; else matrices in 16 bits, each row as integers times the
row's step, which is several times finer than a 16-bit float where the numbers of a row are of similar size.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from situs.backbones.base import Backbone
from situs.backbones.timm.plain import plain_vit
from situs.errors import SitusError
from situs.methods.base import Method
from situs.methods.droppos import DropPos
from situs.methods.heads import Decoder
from situs.methods.mjp import MJP
from situs.methods.mp3 import MP3
from situs.methods.supervised import Supervised
from situs.models.model import Model

T = TypeVar("T", bound=nn.Module)

STEPS = 32767
"""Steps of a row's largest number."""

_SMALL = 1024  # numbers of a matrix that stays in 32 bits


def described(model: Model, trained: Method | Backbone | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The facts of a model for the page, and its tensors by the page's names; a model that cannot run there is refused.

    trained: `model.trained` with other values, such as rounded ones.
    """
    trained = model.trained if trained is None else trained
    method = trained if isinstance(trained, Method) else None
    backbone = trained.backbone if isinstance(trained, Method) else trained
    if not model.samples.modality.pixels:
        raise SitusError(f"{model.name}: the playground takes only models whose input is images", field="model")
    vit = plain_vit(backbone)
    tensors, eps = dict(vit.tensors), dict(vit.eps)
    about: dict[str, Any] = {
        "name": model.name,
        "architecture": str(model.facts.get("model") or backbone.name),
        "method": str(model.facts.get("method") or "").lower(),
        "size": list(backbone.input.shape or ()),
        "channels": backbone.input.channels,
        "patch": list(backbone.input.patch or ()),
        "grid": list(backbone.grid),
        "dim": backbone.dim,
        "depth": backbone.depth,
        "heads": vit.heads,
        "prefix": backbone.num_prefix,
        "pool": vit.pool,
        "act": vit.act,
        "kind": _kind(model, method),
        "told": model.positions,
        "multi": model.multi_label,
        "weights": sum(value.numel() for value in tensors.values()),
    }
    about["mean"], about["std"] = (list(values) for values in model.data.normalisation)
    if isinstance(method, MP3):
        about["hidden"] = method.config.mask_ratio
        tensors |= _linear("place", method.position_head)
    elif isinstance(method, DropPos):
        about |= {"hidden": method.config.mask_ratio, "dropped": method.config.position_mask_ratio}
        about["decoder"] = _decoder(method.decoder, tensors, eps)
        tensors["unknown"] = method.mask_token
    elif isinstance(method, MJP):
        if method.config.index != "none":
            raise SitusError(
                f"{model.name}: has a second position table (method.index), which the playground does not support",
                field="model",
            )
        about["hidden"] = method.config.mask_ratio
        if method.config.unknown:
            tensors["unknown"] = method.unknown
    if about["kind"] == "classes":
        names = model.classes or [f"class {number}" for number in range(backbone.num_classes)]
        about["classes"] = list(names)
    about["eps"] = eps
    return about, tensors


def _kind(model: Model, method: Method | None) -> str:
    """What the model predicts on the page: places (MP3), dropped places (DropPos), or classes."""
    if isinstance(method, MP3):
        return "places"
    if isinstance(method, DropPos):
        return "dropped"
    if model.classifier and model.backbone.num_classes and isinstance(method, Supervised | MJP | None):
        return "classes"
    kept = " (an export has no position head; give the run instead)" if method is None else ""
    raise SitusError(f"{model.name}: must have a position head or a trained classifier, but has neither{kept}")


def _linear(name: str, layer: Any) -> dict[str, Tensor]:
    return {f"{name}.weight": layer.weight, f"{name}.bias": layer.bias}


def _decoder(decoder: Decoder, tensors: dict[str, Tensor], eps: dict[str, float]) -> dict[str, int]:
    """Adds the tensors of DropPos's decoder; gives the number of its blocks and heads."""
    tensors |= _linear("decoder.enter", decoder.enter) | _linear("decoder.leave", decoder.leave)
    norms: dict[str, Any] = {"decoder.norm": decoder.norm}
    layers: list[Any] = list(decoder.layers)
    for depth, layer in enumerate(layer.read() for layer in layers):
        name, attention = f"decoder.{depth}", layer.attention
        parts = {"qkv": attention.qkv[0], "proj": attention.out, "fc1": layer.mlp.up[0], "fc2": layer.mlp.down}
        for part, module in parts.items():
            tensors |= _linear(f"{name}.{part}", module)
        norms |= {f"{name}.norm1": layer.norm1, f"{name}.norm2": layer.norm2}
    for name, norm in norms.items():
        tensors |= _linear(name, norm)
        eps[name] = norm.eps
    return {"depth": len(layers), "heads": layers[0].heads if layers else 1}


def rounded(trained: T) -> T:
    """A copy with its matrices rounded to 16 bits."""
    other = copy.deepcopy(trained)
    with torch.no_grad():
        for value in other.parameters():
            if is_rounded(value):
                steps, size = _steps(value)
                value.copy_((steps * size).view_as(value))
    return other


def is_rounded(value: Tensor) -> bool:
    """Whether a tensor is stored in 16 bits."""
    return value.dim() >= 2 and value.numel() >= _SMALL


def _steps(value: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [n, …] -> whole numbers of steps [n, m], and the size of a step of each row [n, 1]."""
    rows = value.flatten(1)
    size = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / STEPS
    return (rows / size).round(), size


def packed(tensors: Mapping[str, Tensor], *, short: bool) -> tuple[str, dict[str, Any]]:
    """All tensors in one string of base64, and for each: [first byte, shape, whether in 16 bits].

    A tensor in 16 bits is preceded by the steps of its rows, 32-bit floats.
    """
    parts: list[bytes] = []
    places: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().float()
        coarse = short and is_rounded(value)
        if coarse:
            steps, size = _steps(value)
            data = size.numpy().astype("<f4").tobytes() + steps.numpy().astype("<i2").tobytes()
        else:
            data = np.ascontiguousarray(value.numpy()).astype("<f4").tobytes()
        data += bytes(-len(data) % 4)
        places[name] = [at, list(value.shape), int(coarse)]
        parts.append(data)
        at += len(data)
    return base64.b64encode(b"".join(parts)).decode("ascii"), places
