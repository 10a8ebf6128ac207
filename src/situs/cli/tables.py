"""Tables for people: rich on a terminal, aligned plain text where the output is read by something else."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from situs.results import Table

Rows = Sequence[Sequence[str]]

COLOURS = {
    "yes": "green",
    "ok": "green",
    "no": "yellow",
    "missing": "yellow",
    "warning": "yellow",
    "broken": "red",
}
"""Cells that are one of these words are coloured on a terminal."""


def print_table(title: str, rows: Rows) -> None:
    """Prints rows of equal length under a title; the last column may be long."""
    if sys.stdout.isatty():
        _rich(title, rows)
    else:
        print(Table(title, (), rows))


def _rich(title: str, rows: Rows) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(title=title, title_justify="left", title_style="bold", box=box.SIMPLE, show_header=False)
    for row in rows:
        table.add_row(*(Text(cell, style=COLOURS.get(cell, "")) for cell in row))
    Console().print(table)
