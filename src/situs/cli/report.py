"""Several runs side by side on one page: curves, tables, configs, machine, and results left in their folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from cyclopts import Parameter

from situs.cli.flags import POSITIONAL
from situs.cli.result import write_result


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
    from situs.analyze.runs import read_runs
    from situs.analyze.runs_page import STATUS, runs_numbers, runs_page, status_rows
    from situs.cli.tables import print_table
    from situs.models.model import identity_of

    found = read_runs(args.runs)
    page, pictures = runs_page(found, args.over)
    print_table("Runs", [STATUS, *status_rows(found)])
    places = (identity_of(folder.resolve().as_posix()) for folder in args.runs)
    whose = [_Whose(run.name, place) for run, place in zip(found, places, strict=True)]
    print(write_result(args.out, "report", runs_numbers(found), page, pictures, of=whose))


class _Whose(NamedTuple):
    name: str
    identity: str
