"""Prints tables: with rich on a terminal, elsewhere as aligned plain text."""

from __future__ import annotations

import sys

from situs.results import Table, Tone, show

COLOURS = {
    "yes": "green",
    "ok": "green",
    "no": "yellow",
    "missing": "yellow",
    "warning": "yellow",
    "broken": "red",
}
"""Words that are coloured when a cell on a terminal is exactly that word."""

SIGNS: dict[Tone, tuple[str, str]] = {"good": ("✓", "green"), "bad": ("✗", "red"), "unsure": ("?", "yellow")}
"""A verdict's sign and colour on a terminal (NO_COLOR switches the colour off)."""


def print_verdict(sentence: str, tone: Tone | None) -> None:
    """Prints a result's sentence, on a terminal with its sign."""
    if tone is None or not sys.stdout.isatty():
        print(sentence)
        return
    from rich.console import Console
    from rich.text import Text

    sign, colour = SIGNS[tone]
    Console(highlight=False, soft_wrap=True).print(Text(f"{sign} {sentence}", style=colour))


def print_table(table: Table) -> None:
    """Prints a table; if the terminal is too narrow, each row as lines, one per cell."""
    if not sys.stdout.isatty():
        print(table)
        return
    from rich import box
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(title=table.title, title_justify="left", title_style="bold", box=box.SIMPLE, show_header=False)
    header, console = list(table.header), Console()
    for column in range(len(table.cells()[0]) if table.cells() else 0):  # names stay on one line, other cells wrap
        drawn.add_column(no_wrap=not column and bool(header), overflow="fold")
    for number, row in enumerate(table.cells()):
        style = "bold" if header and not number else None
        drawn.add_row(*(Text(cell, style=style or COLOURS.get(cell, "")) for cell in row))
    unbounded = console.options.update(max_width=10_000)
    if not header or console.measure(drawn, options=unbounded).minimum <= console.width:
        console.print(drawn)
        return
    console.print(Text(table.title, style="bold"))
    for first, *others in table.cells()[1:]:
        console.print(Text(f"\n{first}", style="bold", overflow="fold"))
        for name, cell in zip(header[1:], others, strict=True):
            if cell != show(None):
                console.print(Padding(Text(f"{name}: {cell}", overflow="fold"), (0, 0, 0, 2), expand=False))
    console.print()
