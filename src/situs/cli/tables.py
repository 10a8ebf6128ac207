"""Tables for people: rich on a terminal, aligned plain text where the output is read by something else."""

from __future__ import annotations

import sys

from situs.results import Table

COLOURS = {
    "yes": "green",
    "ok": "green",
    "no": "yellow",
    "missing": "yellow",
    "warning": "yellow",
    "broken": "red",
}
"""Cells that are one of these words are coloured on a terminal."""


def print_table(table: Table) -> None:
    """Prints a table; its last column may be long."""
    if not sys.stdout.isatty():
        print(table)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(title=table.title, title_justify="left", title_style="bold", box=box.SIMPLE, show_header=False)
    for row in table.cells():
        drawn.add_row(*(Text(cell, style=COLOURS.get(cell, "")) for cell in row))
    Console().print(drawn)
