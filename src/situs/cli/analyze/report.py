"""Several runs side by side on one page: curves, tables, configs, machine, and results left in their folders.

For example: situs report runs/mp3 runs/ft --out look
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from situs.cli.parser.flags import POSITIONAL
from situs.cli.parser.model_args import check_folder
from situs.cli.result import present


@dataclass(frozen=True)
class Args:
    """Runs side by side."""

    runs: Annotated[tuple[Path, ...], POSITIONAL, Parameter(metavar="RUN…")]
    """Run folders: finished, going on or broken off."""

    over: Literal["epoch", "step"] = "epoch"
    """What the curves run over."""

    out: Annotated[Path, Parameter(metavar="FOLDER")] = Path("look")
    """Where the numbers (.json), the page (.html) and the figures (.png) go."""


def run(args: Args) -> None:
    """Reads, prints a line for each run, and writes the page."""
    from situs.measure.runs import analyze_runs

    check_folder(args.out)
    present(analyze_runs(args.runs, over=args.over), args.out)
