"""Train a classifier on a pretrained model, with the positions of your choice.

For example: situs finetune --from runs/mp3 --positions learned --data PATH --out runs/ft

Backbone and image size are the model's own; the log holds top-1 and top-5 on the validation split.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from cyclopts import Parameter

from situs.backbones.config import PositionKind
from situs.cli.arguments import configured
from situs.cli.pretrain import SHORT, Training, train
from situs.errors import SitusError
from situs.evaluate.finetune import FinetuneConfig, check_labelled, finetune_config, images_of
from situs.methods import METHODS
from situs.train.run import RunConfig

VALIDATED = 5
"""Epochs between two looks at the validation split, where nothing is said."""


@dataclass(frozen=True, kw_only=True)
class Args(Training):
    """Fine-tune a pretrained model with labels."""

    source: Annotated[str | None, Parameter(name="--from", metavar="MODEL")] = None
    """The pretrained model: a run, an export or another model's folder, a locked folder with its --key, or a timm name
    with its weights (NAME=FILE, NAME=pretrained); for weights alone --init and --backbone.name instead."""

    positions: Annotated[PositionKind | None, Parameter(metavar="KIND")] = None
    """learned, sincos, learned_sincos, relative or none; by default the run's own, and learned after MP3."""

    validate_every: Annotated[int | None, Parameter(metavar="N")] = None
    """Epochs between two looks at the validation split, by default 5; 0: none, for data without one."""

    config: FinetuneConfig = configured(FinetuneConfig, run_flag="resume", ground=("from", images_of), short=SHORT)


def run(args: Args) -> int:
    """Fine-tunes; the log holds val_top1 and val_top5."""
    from situs.evaluate.hooks import validation_hooks

    config = begun(args, args.config) if args.resume is None else resumed(args, args.config)
    every = config.probe_every or VALIDATED if args.validate_every is None else args.validate_every
    hooks = validation_hooks(every)
    return train(args, replace(config, probe_every=every), hooks)  # the run remembers it, whatever verb goes on with it


def begun(args: Args, config: RunConfig) -> RunConfig:
    """The config of a new fine-tuning: of a model (--from), or of weights alone (--init)."""
    if args.source is not None:
        if config.init is not None:
            raise SitusError(
                f"give the model to start from (--from {args.source}) or other weights (--init {config.init})"
            )
        return finetune_config(config, args.source, args.positions)
    if config.init is None:
        raise SitusError(
            "give the pretrained model to start from (--from), other weights with their --backbone.name (--init) or a "
            "run to go on with (--resume)"
        )
    check_labelled(config)
    if args.positions is not None:
        backbone = replace(config.backbone, positions=args.positions)
        config = replace(config, backbone=backbone, init_positions=False)
    return config


def resumed(args: Args, config: RunConfig) -> RunConfig:
    """The recorded config of the fine-tuning at --resume; a run of another verb and flags for a new one are refused."""
    if (
        "label" not in METHODS[config.method_name].needs_targets or config.init is None
    ):  # finetune always starts from weights
        raise SitusError(
            f"{args.resume}: is a run of pretrain (method {config.method_name}), not of finetune; go on with "
            f"situs pretrain --resume {args.resume}, or start from it with --from {args.resume} --out DIR"
        )
    for flag, value in (("from", args.source), ("positions", args.positions)):
        if value is not None:
            raise SitusError(f"--{flag} {value}: is for a new fine-tuning; --resume {args.resume} goes on as it began")
    return config
