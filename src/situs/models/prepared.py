"""What a model's folder or library says about it: its classes, and how its samples are prepared.

Descriptions are in timm's format: a config.json with `pretrained_cfg`, `num_classes` and `label_names`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from situs.backbones.base import Backbone
from situs.data.config import DataConfig
from situs.data.preparation import Preparation, timm_words
from situs.files import read_json
from situs.train.export import MULTI_LABEL, PREPARED
from situs.train.inputs import takes


def read_prepared(folder: Path) -> dict[str, Any]:
    """transformers' preprocessor_config.json, where the folder has one."""
    return read_json(folder / PREPARED) if (folder / PREPARED).is_file() else {}


def described(folder: Path, backbone: Backbone) -> dict[str, Any]:
    """The description of a model's folder in timm's format, whichever library wrote it."""
    if backbone.source["library"] != "transformers":
        return read_json(folder / "config.json")
    config = backbone.model.config
    words = {"num_classes": backbone.num_classes, "problem_type": config.problem_type}
    words |= {"pretrained_cfg": timm_words(read_prepared(folder)), "situs": getattr(config, "situs", {})}
    names = [config.id2label[number] for number in sorted(config.id2label)]
    if names == [f"LABEL_{number}" for number in range(len(names))]:
        return words
    return words | {"label_names": names if backbone.num_classes else None}


def class_names(described: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The classes in label order, where the folder names them."""
    names = described.get("label_names")
    return tuple(names) if isinstance(names, list) else None


def samples_for(
    backbone: Backbone, described: Mapping[str, Any], path: str = "", *, folder: Path | None = None
) -> DataConfig | None:
    """How the model's samples are prepared; None where unknown. described: a folder's description."""
    settings = {"multi_label": MULTI_LABEL.items() <= described.items(), "path": path}
    model = takes(backbone, str(folder or ""))
    return Preparation.read(model, described.get("pretrained_cfg", {}), described.get("situs", {}), **settings).data
