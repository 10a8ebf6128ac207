"""Fine-tuning: a pretrained run's backbone, a fresh classifier, the positions of your choice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from situs.backbones.config import PositionKind
from situs.config import choice, from_dict, to_dict
from situs.errors import SitusError
from situs.methods import METHODS
from situs.train.checkpoint import read_config
from situs.train.run import RunConfig, is_run

SAME_IMAGES = (
    "path",
    "held_out",
    "img_size",
    "channels",
    "mean",
    "std",
    "crop_share",
    "workers",
    "resident",
    "resident_gib",
)
"""Fields of `DataConfig` in which fine-tuning follows the pretraining unless told otherwise."""


@dataclass(frozen=True)
class FinetuneConfig(RunConfig):
    """A run's config whose method is supervised unless it says otherwise."""

    method: Any = choice(METHODS, "supervised")
    """What is learned."""


def finetune_config(config: RunConfig, source: Path, positions: PositionKind | None) -> RunConfig:
    """`config` with the backbone of the run at `source`, starting from its weights.

    positions: None keeps the run's own, and takes learned ones where its method never used any (MP3).
    """
    check_labelled(config)
    pretrained = recorded(source)
    if positions is None and not METHODS[pretrained.method_name].uses_positions(pretrained.method):
        positions = "learned"
    backbone = replace(
        pretrained.backbone,
        img_size=config.backbone.img_size,
        positions=positions or pretrained.backbone.positions,
        drop_path=config.backbone.drop_path,
        weights=None,
        model_args={**pretrained.backbone.model_args, **config.backbone.model_args},
    )
    data = replace(config.data, channels=pretrained.data.channels)
    return replace(config, backbone=backbone, data=data, init=str(source), init_positions=positions is None)


def check_labelled(config: RunConfig) -> None:
    """Refuses a method that learns without labels."""
    if "label" not in METHODS[config.method_name].needs_targets:
        raise SitusError(f"method={config.method_name}: fine-tuning needs a method with labels (--method supervised)")


def recorded(source: Path) -> RunConfig:
    """The config of the run at `source`."""
    if not is_run(source):
        raise SitusError(f"{source}: holds no run, there is no config.json with checkpoints beside it (--from)")
    return from_dict(RunConfig, read_config(source), where=f"{source}/config.json")


def images_of(source: Path) -> dict[str, Any]:
    """The tables that a fine-tuning starts from, below any preset: the images as the run at `source` saw them."""
    data = to_dict(recorded(source).data)
    return {"data": {name: data[name] for name in SAME_IMAGES}}
