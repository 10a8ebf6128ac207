"""How far a long measurement is, on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tell = Callable[[int, int, str], None]


@contextmanager
def progress_bar() -> Iterator[Tell]:
    """A bar on a terminal; elsewhere a line at every tenth."""
    if not sys.stderr.isatty():
        told = -1

        def line(done: int, steps: int, what: str) -> None:
            nonlocal told
            tenth = 10 * done // max(1, steps)
            if tenth != told or steps == 1:
                print(f"{100 * done // max(1, steps):3d} %  {what}", file=sys.stderr, flush=True)
            told = tenth

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description:<22}"), BarColumn(), TextColumn("{task.percentage:3.0f} %")
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, steps, what: bar.update(task, completed=done, total=steps, description=what)
