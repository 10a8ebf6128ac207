"""Lay the files of `situs study pack` into a study's folder, new or begun: what is done there stays.

For example: situs study unpack parts --out runs/elsewhere
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from situs.cli.parser.flags import POSITIONAL
from situs.cli.shell import answer
from situs.errors import counted


@dataclass(frozen=True)
class Args:
    """A study, unpacked."""

    parts: Annotated[Path, POSITIONAL, Parameter(metavar="FOLDER")]
    """Where the files lie."""

    out: Annotated[Path, Parameter(metavar="FOLDER")]
    """The study's folder."""


def run(args: Args) -> None:
    """Unpacks and says what came."""
    from situs.studies import unpack_study

    come = unpack_study(args.parts, args.out)
    answer({"jobs": come}, f"{args.out}: {counted(len(come), 'jobs')} came{': ' + ', '.join(come) if come else ''}")
