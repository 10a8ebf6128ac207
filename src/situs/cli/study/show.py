"""A study's table as it stands: of a folder that `situs study run` writes, also while it runs, or by a study's name.

For example: situs study show runs/lock
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from situs.cli.parser.flags import POSITIONAL
from situs.cli.result import present
from situs.errors import SitusError


@dataclass(frozen=True)
class Args:
    """A study as it stands."""

    folder: Annotated[str, POSITIONAL, Parameter(metavar="FOLDER|NAME|FILE")]
    """The folder of a study; or a study by its name or file: the paper's numbers, and ours where they were measured."""

    ours: bool = False
    """Print ours of each row instead, as a study's file holds what was measured."""


def run(args: Args) -> None:
    """Prints the table; of a folder it writes the page anew."""
    from situs.pages import publish
    from situs.studies import read_study

    found = read_study(args.folder)
    if args.ours:
        print("\n".join(found.ours()))
        return
    present(found, None)
    if found.tasks:
        try:
            print(publish(found, args.folder))
        except SitusError as error:  # the folder may be another's, to read alone
            print(f"situs: the page was not written anew; {error}", file=sys.stderr)
