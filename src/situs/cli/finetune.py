"""Train a classifier, a segmentation, a detection or a language model, starting from a pretrained one.

For example: situs finetune --from runs/mp3 --positions learned --epochs 3 --out runs/ft

Backbone and image size are the model's own; the log holds top-1 (or mIoU) on the validation split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from situs.api import NAMED, train_finetuning
from situs.backbones.config import PositionKind
from situs.cli.parser.arguments import configured
from situs.cli.pretrain import EVERYDAY, Training, tell
from situs.measure.finetune import FinetuneConfig, data_as_seen


@dataclass(frozen=True, kw_only=True)
class Args(Training):
    """Fine-tune a pretrained model with labels."""

    source: Annotated[str | None, Parameter(name="--from", metavar="MODEL")] = None
    """The pretrained model: a run, an export, a model's folder, a locked one with its --key, or a timm name (NAME=FILE,
    NAME=pretrained)."""

    positions: Annotated[PositionKind | None, Parameter(metavar="KIND")] = None
    """learned, sincos, learned_sincos, relative or none; by default the run's own, and learned after MP3."""

    validate_every: Annotated[int | None, Parameter(metavar="N")] = None
    """Epochs between looks at the validation split, else 5; 0: none."""

    config: FinetuneConfig = configured(
        FinetuneConfig,
        data_as_seen,
        {**EVERYDAY, **{name: (NAMED[name],) for name in ("train", "dp")}},
        without=("probe_every",),
    )


def run(args: Args) -> int:
    """Fine-tunes; the log holds val_top1 and val_balanced, or val_map of multi-label data, val_miou of masks, val_ap of
    objects, and val_perplexity of words."""
    asked = {"source": args.source, "positions": args.positions, "validate_every": args.validate_every}
    return tell(args.out or args.resume, args.config, train_finetuning(args.config, **asked, **args.place()))
