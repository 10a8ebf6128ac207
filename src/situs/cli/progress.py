"""How far a verb is, on stderr: one line that moves on a terminal; elsewhere a line now and then, and none for what is
quick."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from situs.progress import Task, clock, hearing, in_words, note, seconds_left, share

FIRST, PATIENCE = 10.0, 30.0
"""Seconds until the first line where there is no terminal, and between two lines."""


@contextmanager
def showing() -> Iterator[None]:
    """Shows what is told within, by this thread."""
    line: _Line | _Lines = _Line() if sys.stderr.isatty() else _Lines()
    try:
        with hearing(line.hear if os.environ.get("RANK", "0") == "0" else None):  # one of torchrun's ranks speaks
            yield
    finally:
        line.hear(())


def remark(line: str) -> None:
    """A word on what is being done: on a terminal in the line that moves, elsewhere a line of its own."""
    if sys.stderr.isatty():
        note(line)
    else:
        print(line, file=sys.stderr, flush=True)


class _Lines:
    """Plain lines."""

    def __init__(self) -> None:
        self.next = time.monotonic() + FIRST

    def hear(self, tasks: Sequence[Task]) -> None:
        if tasks and time.monotonic() >= self.next:
            self.next = time.monotonic() + PATIENCE
            done, left = share(tasks), seconds_left(tasks)
            facts = (
                "" if done is None else f"{100 * done:3.0f} %",
                in_words(tasks),
                "" if left is None else f"{clock(left)} left",
            )
            print("  ".join(filter(None, facts)), file=sys.stderr, flush=True)


class _Line:
    """rich's line, redrawn by a thread of its own so that it moves while a step takes long."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.bar_task: Any = None

    def hear(self, tasks: Sequence[Task]) -> None:
        if not tasks:
            if self.bar is not None:
                self.bar.stop()
            self.bar = None
            return
        if self.bar is None:
            self._open()
        done, left = share(tasks), seconds_left(tasks)
        self.bar.update(  # pyright: ignore[reportOptionalMemberAccess]
            self.bar_task,
            total=None if done is None else 1.0,
            completed=done or 0.0,
            description=in_words(tasks),
            facts="" if done is None else f"{100 * done:3.0f} %" + ("" if left is None else f" · {clock(left)} left"),
        )

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.table import Column

        words = TextColumn(
            "{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
        )
        columns = (words, BarColumn(bar_width=12), TextColumn("{task.fields[facts]}"), TimeElapsedColumn())
        # What is printed to stdout meanwhile goes above the line, but where it is a file it stays there.
        self.bar = Progress(
            *columns,
            console=Console(stderr=True),
            transient=True,
            expand=True,
            redirect_stdout=sys.stdout.isatty(),
            refresh_per_second=4,
        )
        self.bar_task = self.bar.add_task("", total=None, facts="")
        self.bar.start()
