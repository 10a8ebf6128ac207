"""Small models for the playground with every weight drawn anew, and what Python says of their images."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from builders import small_method, small_vit
from torch import Tensor

from situs.core.when import When
from situs.data.batch import Batch
from situs.data.config import DataConfig
from situs.methods.base import Method
from situs.models.model import Model

SIZE = (12, 16)  # 3 × 4 patches: rows and columns must not be exchanged


class Case(NamedTuple):
    """A method over a ViT of some shape."""

    method: str
    shape: Mapping[str, Any] = MappingProxyType({})
    config: Mapping[str, Any] = MappingProxyType({})
    name: str = "vit_tiny_patch16_224"
    channels: int = 3


CASES = {
    "mp3": Case("mp3", config={"mask_ratio": 0.5}),
    "mp3 without CLS": Case("mp3", {"class_token": False, "global_pool": "avg"}, channels=1),
    "mp3 with a register": Case("mp3", {"reg_tokens": 1}, {"mask_ratio": 0.25}),
    "droppos": Case(
        "droppos",
        {"reg_tokens": 2, "init_values": 0.1},
        {"mask_ratio": 0.25, "position_mask_ratio": 0.5, "decoder_width": 12, "decoder_heads": 3, "decoder_depth": 2},
    ),
    "droppos without CLS": Case(
        "droppos",
        {"act_layer": "relu", "class_token": False, "global_pool": "avg", "qkv_bias": False},
        {"mask_ratio": 0.5, "decoder_width": 8, "decoder_heads": 2, "decoder_depth": 1},
    ),
    "supervised": Case("supervised", {"qk_norm": True, "pre_norm": True}),
    "supervised, mean of the patches": Case(
        "supervised", {"class_token": False, "global_pool": "avg", "fc_norm": True, "init_values": 0.2}
    ),
    "supervised, registers": Case("supervised", {"act_layer": "relu", "reg_tokens": 4, "no_embed_class": True}),
    "supervised, distilled": Case("supervised", {}, name="deit_tiny_distilled_patch16_224"),
    "mjp": Case("mjp", config={"mask_ratio": 0.3}),
    "mjp without positions": Case("mjp", config={"positions": False, "unknown": False, "dal": "none"}),
}


def playing(case: Case, width: int = 16) -> Model:
    """The model of a case, no weight of it at a value that hides a mistake."""
    torch.manual_seed(0)
    classes = {"num_classes": 5} if case.method in ("supervised", "mjp") else {}
    vit = small_vit(
        SIZE, name=case.name, model_args=case.shape, in_chans=case.channels, width=width, heads=2, **classes
    )
    method = small_method(case.method, vit, **case.config).eval()
    with torch.no_grad():
        for value in method.parameters():
            value.add_(torch.randn_like(value) * 0.4)
    names = tuple("abcde") if classes else None
    data = DataConfig(img_size=SIZE, channels=case.channels)
    facts = {"model": case.name, "method": case.method}
    return Model("tiny", vit, method, data, names, facts, classifier=bool(classes), positions=method.sees_positions)


class Asked(NamedTuple):
    """A function of model.js with its arguments behind the picture, and the logits that Python gives."""

    call: str
    arguments: list[Any]
    logits: Tensor


@torch.no_grad()
def asked_of(model: Model, pixels: Tensor) -> list[Asked]:
    """pixels: [H, W, C] bytes of one image. Each question of the page, asked of the method itself."""
    mean, std = (torch.tensor(each).view(-1, 1, 1) for each in model.data.normalisation)
    image = ((pixels.permute(2, 0, 1).double() / 255 - mean) / std).unsqueeze(0)
    method = model.method
    assert isinstance(method, Method)
    method.double()
    try:
        return ASKED[model.facts["method"]](method, image)
    finally:
        method.float()


def _mp3(method: Any, image: Tensor) -> list[Asked]:
    found = []
    for share in (method.config.mask_ratio, 0.4):
        other = method.at(share)
        batch = Batch(image, torch.zeros(1, dtype=torch.int64))
        draws = other.draw(batch, When(seed=3, epoch=0))
        order = draws["order"][0]
        logits = torch.empty(12, 12, dtype=torch.float64)
        logits[order] = other(batch, draws).extras["logits"][0]
        found.append(Asked("places", [order[: other.context].tolist()], logits))
    return found


def _droppos(method: Any, image: Tensor) -> list[Asked]:
    found = []
    for ratios in ((method.config.mask_ratio, method.config.position_mask_ratio), (0.0, 1.0)):
        other = method.at(*ratios)
        batch = Batch(image, torch.zeros(1, dtype=torch.int64))
        draws = other.draw(batch, When(seed=5, epoch=0, progress=1.0))
        seen = draws["visible"][0].tolist()
        found.append(Asked("dropped", [seen, seen, other.anchors], other(batch, draws).extras["logits"][0]))
    return found


def _classes(method: Any, image: Tensor) -> list[Asked]:
    order = torch.tensor([5, 1, 2, 0, 4, 3, 6, 11, 8, 9, 10, 7])
    moved = order != torch.arange(12)
    found = [
        Asked("classes", [list(range(12))], method.backbone.head(method.encode(image))[0]),
        Asked("classes", [order.tolist()], method.backbone.head(method.encode(image, None, order[None]))[0]),
    ]
    if method.unknown_position() is not None:
        logits = method.backbone.head(method.encode(image, moved[None], order[None]))[0]
        found.append(Asked("classes", [order.tolist(), moved.nonzero().flatten().tolist()], logits))
    return found


ASKED = {"mp3": _mp3, "droppos": _droppos, "supervised": _classes, "mjp": _classes}
