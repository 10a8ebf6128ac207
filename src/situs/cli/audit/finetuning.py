"""Fine-tune a locked model with its key, without it, and from scratch: who can use it?

Without a model to start from, a small ViT is pretrained on the embedded images first; all of it takes minutes on a CPU.

For example: situs audit finetuning --from runs/ft --out tuned

The paper's numbers beside: situs study run lock --out DIR
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from situs.cli.parser.arguments import configured
from situs.cli.parser.model_args import check_folder
from situs.cli.result import present
from situs.locks.tuning.result import TuningConfig


@dataclass(frozen=True)
class Args:
    """Fine-tuning of a locked model, in four ways."""

    source: Annotated[str | None, Parameter(name="--from", metavar="MODEL")] = None
    """The model that is locked here, by a random key: a run, a model's folder, or NAME=FILE; by default a small ViT is
    pretrained on the embedded images."""

    key: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """For a folder that is locked already: its model is opened first."""

    withheld: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """For such a folder: the owner's second file, beside --key."""

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Labelled images or sentences to fine-tune on, or plain text (--method language); by default those of the run."""

    test_data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """What the curves are measured on; by default the val split of the data."""

    device: Annotated[str | None, Parameter(metavar="NAME")] = None
    """cpu, cuda or cuda:N; by default a GPU where there is one."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = None
    """Write finetuning.html and finetuning.json there."""

    config: TuningConfig = configured(TuningConfig)
    """How long, and on how much."""


def run(args: Args) -> None:
    """Trains in all four ways, prints the table, writes the page."""
    from situs.cli.locks.passphrase import read_key
    from situs.locks import audit_tuning

    check_folder(args.out, "finetuning")
    asked = {name: getattr(args, name) for name in ("test_data", "withheld", "device")}
    key = None if args.key is None else read_key(args.key)
    found = audit_tuning(args.source, args.data, args.config, key=key, say=print, **asked)
    print()
    present(found, args.out)
