"""Which part of the data a run trains on, and the size of the model's inputs."""

from __future__ import annotations

from dataclasses import replace
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
from situs.hub import hub_address, local_folder
from situs.methods import METHODS


def check_held_out(data: DataConfig) -> None:
    """Refuses a held-out share of data that has its own evaluation split, where it would have no effect."""
    if data.held_out and data.path and (splits := own_splits(data)):
        reason = f"held_out={data.held_out:g}: {data.path} has its own evaluation split ({', '.join(splits)})"
        raise SitusError(f"{reason}, so nothing more is held out; leave held_out out", field="held_out")


def share_held_out(data: DataConfig, *, learns: bool) -> float:
    """The share that a run holds out: the config's, or a fifth of data that has no evaluation split.

    learns: whether the run learns labels; a run without labels trains on all the data.
    """
    if data.held_out is not None:
        return data.held_out
    return HELD_OUT if learns and data.split in (None, *SPLITS["train"]) and not own_splits(data) else 0.0


def own_splits(data: DataConfig) -> list[str]:
    """The data's own evaluation splits."""
    return sorted(splits_at(data) & {*SPLITS["val"], *SPLITS["test"]})


def fitted(data: DataConfig, backbone: BackboneConfig, method: str) -> DataConfig:
    """The data as the model takes it: the size of its inputs, or the tokeniser and the longest sentence in ids."""
    if data.modality.ids and not METHODS[method].reads_text:
        able = ", ".join(name for name in METHODS if METHODS[name].reads_text)
        reason = f"{method} learns from images and clips, and {data.path} has {data.modality.things}"
        raise SitusError(f"{reason}; methods for them: {able}", field=("method", "data"))
    return data.modality.fit(data, lambda: _fits(backbone), learns=bool(METHODS[method].needs_targets))


def _fits(config: BackboneConfig) -> ModelInput:
    """What a model takes, from its config alone."""
    backbone, folder = _without_weights(config), local_folder(config.name)
    if not backbone.input.words:
        backbone.require("images")
    described: Any = getattr(backbone.model, "pretrained_cfg", None) or {}
    size = config.img_size or backbone.input.shape or tuple(described.get("input_size", ()))[1:]
    home = config.name if hub_address(config.name) else str(folder.parent if folder.is_file() else folder)
    return takes(backbone, home)._replace(size=pair(size) if size and backbone.input.channels else None)


def takes(backbone: Backbone, home: str = "") -> ModelInput:
    """What a model takes. home: the folder of its tokeniser."""
    spec = backbone.input
    places = backbone.num_tokens if spec.words else 0
    return ModelInput(backbone.name, spec.shape, spec.channels, spec.words, places, home, backbone.next_words)


def _without_weights(config: BackboneConfig) -> Backbone:
    bare = replace(config, img_size=None, weights=None, num_classes=0)
    try:
        with shapes_alone():
            return create_backbone(bare)
    except (SitusError, RuntimeError):  # some families compute while they are built; a user's mistake is raised here
        return create_backbone(bare)
