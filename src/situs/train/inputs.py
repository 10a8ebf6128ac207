"""What a run's model is given of its data: which part of it, and of what size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from situs.backbones import BackboneConfig, create_backbone
from situs.backbones.base import Backbone
from situs.backbones.shapes import shapes_alone
from situs.core.tokens import pair
from situs.data.config import DataConfig
from situs.data.modalities.base import ModelInput
from situs.data.open import splits_at
from situs.data.sources.base import SPLITS
from situs.data.sources.subset import HELD_OUT
from situs.errors import SitusError
from situs.methods import METHODS


def check_held_out(data: DataConfig) -> None:
    """Refuses a share to hold out of data that brings a split to be judged on, where it would mean nothing."""
    if data.held_out and data.path and (own := own_splits(data)):
        said = f"held_out={data.held_out:g}: {data.path} has its own split to be judged on ({', '.join(own)})"
        raise SitusError(f"{said}, and nothing more is held out; leave it out", field="held_out")


def share_held_out(data: DataConfig, *, learns: bool) -> float:
    """The share that a run holds out: what was asked for, or a fifth of data that has no split to be judged on.

    learns: whether the run learns labels; one that learns none takes all the data.
    """
    if data.held_out is not None:
        return data.held_out
    return HELD_OUT if learns and data.split in (None, *SPLITS["train"]) and not own_splits(data) else 0.0


def own_splits(data: DataConfig) -> list[str]:
    """The splits to be judged on that the data brings."""
    return sorted(splits_at(data) & {*SPLITS["val"], *SPLITS["test"]})


def fitted(data: DataConfig, backbone: BackboneConfig, method: str) -> DataConfig:
    """The data as the model takes it: its size, or the tokeniser and the ids of the longest sentence."""
    if data.modality.ids and not METHODS[method].reads_text:
        able = ", ".join(name for name in METHODS if METHODS[name].reads_text)
        said = f"{method} learns from images and clips, and {data.path} holds {data.modality.things}"
        raise SitusError(f"{said}, from which learn: {able}", field=("method", "data"))
    return data.modality.fit(data, lambda: _fits(backbone), learns=bool(METHODS[method].needs_targets))


def _fits(config: BackboneConfig) -> ModelInput:
    """What a model takes that is not made yet."""
    made, folder = _shaped(config), Path(config.name.removeprefix("hf:"))
    if not made.input.words:
        made.require("images")
    described: Any = getattr(made.model, "pretrained_cfg", None) or {}
    size = config.img_size or made.input.shape or tuple(described.get("input_size", ()))[1:]
    home = str(folder.parent if folder.is_file() else folder)
    return takes(made, home)._replace(size=pair(size) if size and made.input.channels else None)


def takes(backbone: Backbone, home: str = "") -> ModelInput:
    """What a model takes. home: the folder of its tokeniser."""
    given = backbone.input
    places = backbone.num_tokens if given.words else 0
    return ModelInput(backbone.name, given.shape, given.channels, given.words, places, home, backbone.next_words)


def _shaped(config: BackboneConfig) -> Backbone:
    bare = replace(config, img_size=None, weights=None, num_classes=0)
    try:
        with shapes_alone():
            return create_backbone(bare)
    except (SitusError, RuntimeError):  # a family that computes while it is built; a mistake is said here
        return create_backbone(bare)
