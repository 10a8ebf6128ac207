"""Every table and figure of the papers: what it shows, the data and GPU hours it needs, the paper's numbers and ours.

For example: situs study list --paper mp3 --numbers
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from situs.cli.shell import answer, as_document
from situs.cli.tables import print_table


@dataclass(frozen=True)
class Args:
    """Studies that come with situs."""

    paper: Literal["mp3", "droppos", "mjp", "st"] | None = None
    """Those of one paper alone."""

    numbers: bool = False
    """Every table with the paper's numbers and ours as well."""


def run(args: Args) -> None:
    """Prints a row a study; with --numbers their tables."""
    from situs.studies.listing import list_studies

    found = list_studies(args.paper)
    tables = (found.table(), *(found.tables() if args.numbers else ()))
    answer([{"title": each.title, "rows": each.cells()} for each in tables])
    for table in () if as_document() else tables:
        print_table(table)
    print(found.sentence())
