"""A study's folder as a few small files, to go on with on another machine or to bring its results back.

For example: situs study pack runs/lock --out parts

Results and logs go along, and the models that other jobs still start from, in half precision. Checkpoints stay behind:
a job that was cut begins again where the files are unpacked.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from situs.cli.parser.flags import POSITIONAL
from situs.cli.shell import answer


@dataclass(frozen=True)
class Args:
    """A study, packed."""

    folder: Annotated[Path, POSITIONAL, Parameter(metavar="FOLDER")]
    """The study's folder."""

    out: Annotated[Path, Parameter(metavar="FOLDER")]
    """Where the files go."""

    mib: Annotated[int, Parameter(metavar="MIB")] = 15
    """The size of a file at most."""

    encoders: bool = True
    """Take the models along that jobs which are not done start from."""

    only: Annotated[tuple[str, ...], Parameter(metavar="JOB,…")] = ()
    """The models of these jobs alone, by name or pattern."""


def run(args: Args) -> None:
    """Writes the files and says which."""
    from situs.studies import pack_study

    made = pack_study(args.folder, args.out, mib=args.mib, models=args.encoders, only=args.only)
    answer({"files": made}, *(f"{path} ({path.stat().st_size / 1024**2:.1f} MiB)" for path in made))
