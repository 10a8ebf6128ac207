"""Fine-tune a locked ViT with its key, without it, and from scratch: who can use it?

Without a run to start from, a small ViT is pretrained on the embedded images first; all of it takes minutes on a CPU.
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
from situs.locks.tuning.finetune import TuningConfig


@dataclass(frozen=True)
class Args:
    """Fine-tuning of a locked ViT, in four ways."""

    source: Annotated[str | None, Parameter(name="--from", metavar="RUN")] = None
    """The run whose model is locked; by default a small ViT is pretrained on the embedded images."""

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Labelled images to fine-tune on; by default those of the run."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = None
    """Write report.html and finetuning.json there."""

    config: TuningConfig = configured(TuningConfig)
    """How long, and on how much."""


def run(args: Args) -> None:
    """Trains in all four ways, prints the table, writes the page."""
    from situs.locks import audit_tuning

    check_folder(args.out)
    found = audit_tuning(args.source, args.data, args.config, say=print)
    print()
    present(found, args.out)
