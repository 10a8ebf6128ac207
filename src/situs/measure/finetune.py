"""The config of a fine-tuning: a pretrained backbone, a new classifier, the chosen kind of positions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from situs.backbones.config import PositionKind
from situs.config import choice
from situs.errors import SitusError
from situs.files import absolute
from situs.methods import METHODS
from situs.models.start import finetune_source
from situs.train.assemble import RunConfig, own_splits


@dataclass(frozen=True)
class FinetuneConfig(RunConfig):
    """The config of a run. Its default method is supervised."""

    method: Any = choice(METHODS, "supervised")
    """The training method."""


def finetune_config(config: RunConfig, source: str | Path, positions: PositionKind | None) -> RunConfig:
    """`config` with the backbone of the model at `source`, starting from its weights.

    positions: None keeps the model's own, and takes learned ones where its method never used any (MP3).
    """
    check_labelled(config)
    start = finetune_source(source)
    if positions is None and not start.sees and start.data["kind"] != "text":  # a text model keeps its positions
        positions = "learned"
    backbone = replace(
        start.backbone,
        img_size=config.backbone.img_size,
        positions=positions or start.backbone.positions,
        drop_path=config.backbone.drop_path,
        model_args={**start.backbone.model_args, **config.backbone.model_args},
    )
    data = config.data
    if start.named:
        backbone = replace(backbone, patch_size=config.backbone.patch_size)
    else:
        data = replace(data, channels=start.data["channels"])
    if data.held_out and data.held_out == start.data.get("held_out") and data.path and own_splits(data):
        data = replace(data, held_out=None)  # it belonged to the model's own data
    if data.held_out is None and data.path and absolute(data.path) == start.learned:
        data = replace(data, held_out=0.0)  # the labels of all of it were learned already
    return replace(config, backbone=backbone, data=data, init=start.init, init_positions=positions is None)


def check_labelled(config: RunConfig) -> None:
    """Refuses a method that learns without labels."""
    if not METHODS[config.method_name].needs_targets:
        raise SitusError(
            f"method={config.method_name}: fine-tuning needs a method that learns from labels", field="method"
        )


def data_as_seen(source: str | Path) -> dict[str, Any]:
    """The lowest layer of a fine-tuning's config: samples prepared as for the model at `source`."""
    return {"data": finetune_source(source).data}
