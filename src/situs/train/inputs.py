"""What a run's model is given: the size of its images or clips, or how many ids of a sentence."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from situs.backbones import BackboneConfig, create_backbone
from situs.backbones.base import Backbone
from situs.backbones.shapes import shapes_alone
from situs.data.config import DataConfig
from situs.data.loader import Loader
from situs.data.sources.base import SPLITS
from situs.data.sources.open import splits_at
from situs.data.sources.subset import HELD_OUT
from situs.data.sources.text import TextSource
from situs.data.text import LONGEST
from situs.data.text_pipeline import text_of
from situs.errors import SitusError
from situs.methods import METHODS
from situs.methods.base import Method

Reader = TypeVar("Reader", Method, Backbone)


def absolute(text: str) -> str:
    """A path that is there, from the root on; other text as it is."""
    path = Path(text).expanduser()
    return os.path.abspath(path) if path.exists() else text  # noqa: PTH100  (links stay links)


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
    return sorted(splits_at(data.path, **data.split_by()) & {*SPLITS["val"], *SPLITS["test"]})


def own_size(config: BackboneConfig) -> tuple[int, int]:
    """Height and width of the inputs that a model is made for."""
    made = _shaped(config)
    if made.input.words:
        raise SitusError(f"{made.name} reads sentences, and the data is taken for images: say text", field="data.kind")
    made.require("images")
    described: Any = getattr(made.model, "pretrained_cfg", None) or {}
    size = made.input.shape or tuple(described.get("input_size", ()))[1:]
    if len(size) != 2 or not made.input.channels:
        raise SitusError(
            f"img_size: {config.name} is made for no size of its own, so one must be given", field="data.img_size"
        )
    return size


def _shaped(config: BackboneConfig) -> Backbone:
    bare = replace(config, img_size=None, weights=None, num_classes=0)
    try:
        with shapes_alone():
            return create_backbone(bare)
    except (SitusError, RuntimeError):  # a family that computes while it is built; a mistake is said here
        return create_backbone(bare)


def settle_text(data: DataConfig, backbone: BackboneConfig, method: str) -> DataConfig:
    """The data of sentences with the tokeniser that reads them and the ids of the longest: the model's own."""
    if not METHODS[method].reads_text:
        said = f"{method} learns from images and clips, and {data.path} holds sentences"
        able = ", ".join(name for name in METHODS if METHODS[name].reads_text)
        raise SitusError(f"{said}, from which learn: {able}", field=("method", "data"))
    made = _shaped(backbone)
    if not made.input.words:
        raise SitusError(f"{made.name} takes images, and {data.path} holds sentences", field="data")
    folder = Path(backbone.name.removeprefix("hf:"))
    own = folder.parent if folder.is_file() else folder
    longest = data.text.longest or min(LONGEST, made.num_tokens)
    if longest > made.num_tokens:
        allowed = f"at most {made.num_tokens}, the places that {made.name} knows"
        raise SitusError(field="data.text.longest", value=longest, allowed=allowed)
    told = {"tokeniser": absolute(data.text.tokeniser or str(own)), "longest": longest}
    return replace(data, text=replace(data.text, unlabelled=not METHODS[method].needs_targets, **told))


def check_words(model: Reader, loader: Loader) -> Reader:
    """The method or backbone itself; refused are sentences whose ids mean words that it does not have, and those of one
    class, of which none can be learned."""
    backbone = model.backbone if isinstance(model, Method) else model
    if not backbone.input.words:
        return model
    source = text_of(loader.source)
    learns = isinstance(model, Method) and "label" in model.needs_targets
    if learns and isinstance(source, TextSource) and len(seen := source.seen()) == 1:
        said = f"all its sentences are of one class, {seen[0]!r}, so that there is nothing to tell apart"
        raise SitusError(f"{loader.source.name}: {said}", field=("data", "data.text.label"))
    tokeniser = source.tokeniser
    assert tokeniser is not None
    if tokeniser.words > backbone.input.words:
        said = f"its tokeniser has {tokeniser.words:,} words, and {backbone.name} knows {backbone.input.words:,}"
        raise SitusError(f"{tokeniser.folder}: {said}; name the folder of the model's own", field="data.text.tokeniser")
    return model
