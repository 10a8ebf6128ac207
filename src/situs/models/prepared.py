"""How a model wants its images, by what its library says of it: size, channels, normalisation, the share that is kept.

What a folder says stands in timm's words: config.json with `pretrained_cfg`, `num_classes` and `label_names`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from situs.backbones.base import Backbone
from situs.config import from_dict
from situs.data.config import DataConfig
from situs.data.masks import MaskConfig
from situs.data.modalities import KINDS
from situs.data.objects import ObjectConfig
from situs.data.text import COLUMNS, LONGEST, TextConfig
from situs.files import read_json
from situs.train.export import MULTI_LABEL, PREPARED


def read_prepared(folder: Path) -> dict[str, Any]:
    """transformers' preprocessor_config.json, where the folder has one."""
    return read_json(folder / PREPARED) if (folder / PREPARED).is_file() else {}


def described(folder: Path, backbone: Backbone) -> dict[str, Any]:
    """What a model's folder says of it, in timm's words, whichever library wrote it."""
    if backbone.source["library"] == "transformers":
        return _as_timm_says(backbone, read_prepared(folder))
    return read_json(folder / "config.json")


def class_names(described: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The classes in label order, where the folder names them."""
    names = described.get("label_names")
    return tuple(names) if isinstance(names, list) else None


def is_multi_label(described: Mapping[str, Any]) -> bool:
    """Whether the folder says that an image has any number of the classes."""
    return MULTI_LABEL.items() <= described.items()


def images_for(
    backbone: Backbone,
    described: Mapping[str, Any],
    path: str = "",
    *,
    multi_label: bool = False,
    told: Mapping[str, Any] = MappingProxyType({}),
) -> DataConfig | None:
    """How the model's images are prepared, by timm's description of it; None for one that takes none.

    told: what Situs wrote beside that: "audio" of a model of clips, "masks" of one that tells the class of each pixel,
    "objects" of one that finds objects.
    """
    channels = backbone.input.channels
    if not channels:
        return None
    if "audio" in told:
        return KINDS["audio"].from_prepared(DataConfig(path), told["audio"])
    dense: dict[str, Any] = {}
    for target, things, config in (("mask", "masks", MaskConfig), ("objects", "objects", ObjectConfig)):
        if things in told:
            dense = {"target": target, things: from_dict(config, told[things], where=things)}
    size = backbone.input.shape or tuple(described.get("input_size", (3, 224, 224))[1:])
    mean, std = (tuple(described.get(key, ())) for key in ("mean", "std"))
    fits = len(mean) == len(std) == channels
    return DataConfig(
        path=path,
        img_size=(size[0], size[1]),
        channels=channels,
        crop_share=min(1.0, described.get("crop_pct") or 1.0),
        mean=mean if fits else (),
        std=std if fits else (),
        multi_label=multi_label,
        **dense,
    )


def sentences_for(backbone: Backbone, folder: Path, told: Mapping[str, Any]) -> DataConfig:
    """How the sentences of a model in a folder are prepared. told: what Situs wrote there of them."""
    own = told.get("text", {})
    longest, columns = own.get("longest"), {name: own.get(name) for name in COLUMNS}
    text = TextConfig(tokeniser=str(folder), longest=longest or min(LONGEST, backbone.num_tokens), **columns)
    return DataConfig(kind="text", target="words" if backbone.next_words else "class", text=text)


def _as_timm_says(backbone: Backbone, prepared: Mapping[str, Any]) -> dict[str, Any]:
    config = backbone.model.config
    sizes = (prepared.get(key) for key in ("size", "crop_size"))
    around, crop = (size if isinstance(size, Mapping) else {} for size in sizes)
    shown, kept = around.get("shortest_edge", around.get("height")), crop.get("height")
    share = kept / shown if prepared.get("do_center_crop", True) and shown and kept else 1.0
    images = {"mean": prepared.get("image_mean") or (), "std": prepared.get("image_std") or (), "crop_pct": share}
    told = {"num_classes": backbone.num_classes, "pretrained_cfg": images, "problem_type": config.problem_type}
    told["situs"] = getattr(config, "situs", {})
    names = [config.id2label[number] for number in sorted(config.id2label)]
    if names == [f"LABEL_{number}" for number in range(len(names))]:
        return told
    return told | {"label_names": names if backbone.num_classes else None}
