"""Tables for people: rich on a terminal, aligned plain text where the output is read by something else."""

from __future__ import annotations

import sys

from situs.results import Table, Tone

COLOURS = {
    "yes": "green",
    "ok": "green",
    "no": "yellow",
    "missing": "yellow",
    "warning": "yellow",
    "broken": "red",
}
"""Cells that are one of these words are coloured on a terminal."""

SIGNS: dict[Tone, tuple[str, str]] = {"good": ("✓", "green"), "bad": ("✗", "red"), "unsure": ("?", "yellow")}
"""A verdict's sign on a terminal, and its colour where there is one (NO_COLOR)."""


def print_verdict(sentence: str, tone: Tone | None) -> None:
    """Prints a result's sentence, on a terminal with its sign; elsewhere the words alone."""
    if tone is None or not sys.stdout.isatty():
        print(sentence)
        return
    from rich.console import Console
    from rich.text import Text

    sign, colour = SIGNS[tone]
    Console(highlight=False, soft_wrap=True).print(Text(f"{sign} {sentence}", style=colour))


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
