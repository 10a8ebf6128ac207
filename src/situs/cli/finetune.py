"""Train a classifier on a pretrained run, with the positions of your choice.

For example: situs finetune --from runs/mp3 --positions learned --data PATH --out runs/ft

Backbone and image size are the run's own; the log holds top-1 and top-5 on the validation split.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from situs.backbones.config import PositionKind
from situs.cli.arguments import configured
from situs.cli.pretrain import Training, shortened, train
from situs.errors import SitusError
from situs.evaluate.finetune import FinetuneConfig, finetune_config, images_of


@dataclass(frozen=True, kw_only=True)
class Args(Training):
    """Fine-tune a pretrained run with labels."""

    source: Annotated[Path | None, tyro.conf.arg(name="from", metavar="RUN")] = None
    """The pretrained run."""

    positions: Annotated[PositionKind | None, tyro.conf.arg(metavar="KIND")] = None
    """learned, sincos, learned_sincos, relative or none; by default the run's own, and learned after MP3."""

    validate_every: Annotated[int, tyro.conf.arg(metavar="N")] = 5
    """Epochs between two looks at the validation split; 0: none, for data without one."""

    config: FinetuneConfig = configured(FinetuneConfig, run_flag="resume", ground=("from", images_of))


def run(args: Args) -> int:
    """Fine-tunes; the log holds val_top1 and val_top5."""
    from situs.evaluate.hooks import validation_hooks

    config = shortened(args, args.config)
    if args.resume is None:
        if args.source is None:
            raise SitusError("give the pretrained run to start from (--from) or a run to go on with (--resume)")
        config = finetune_config(config, args.source, args.positions)
    return train(args, config, validation_hooks(args.validate_every))
