"""The features and outputs of an exported folder, loaded by its library without Situs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from situs.backbones.base import Backbone


class Reloaded(NamedTuple):
    """tokens: features after the final norm, in the library's own shape. logits: None without a classifier."""

    tokens: Tensor
    logits: Tensor | None


@torch.no_grad()
def run_reloaded(folder: Path, backbone: Backbone, images: Tensor, *, headed: bool) -> Reloaded:
    """Runs images through the model that timm or transformers loads from a folder. headed: with its classifier."""
    if backbone.source["library"] == "timm":
        import timm

        model: Any = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        return Reloaded(model.forward_features(images), model(images) if headed else None)
    from transformers import AutoModel, AutoModelForImageClassification

    from situs.backbones.hf.names import quietly

    with quietly():
        base: Any = AutoModel.from_pretrained(folder).eval()
        whole: Any = AutoModelForImageClassification.from_pretrained(folder).eval() if headed else None
    tokens = base(pixel_values=images).last_hidden_state
    return Reloaded(tokens, None if whole is None else whole(pixel_values=images).logits)
