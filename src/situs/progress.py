"""How far a long computation is: told by those who loop, heard by whoever wants to show it.

    for batch in tracked(batches, "val", len(batches)):                # a loop
    with task("attacks", 12) as attacks: attacks.tell(3, "batch 4")    # or told by hand

The command line shows it (`showing`), long audits in Python too, and any program may hear it: `with hearing(listener)`.
Where nobody does, nothing happens. Tasks lie within one another: the third of four attacks, of it the 200th of 1,000
steps.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class Task:
    """What is being done. done: how many of `total`, where that is known, begun at `start`; one that is half done
    counts as a half. now: the latest word."""

    what: str
    total: int | None = None
    done: float = 0
    now: str = ""
    hear: Callable[[], None] = lambda: None
    start: float = 0
    began: float = 0.0

    def tell(self, done: float | None = None, now: str | None = None, *, total: int | None = None) -> None:
        """What has changed."""
        self.done = self.done if done is None else done
        self.now = self.now if now is None else now
        self.total = self.total if total is None else total
        self.hear()

    def count(self, done: int, total: int, now: str) -> None:
        """All of it at once, for those who know a task by its steps alone."""
        self.tell(done, now, total=total)


Listener = Callable[[Sequence[Task]], None]
"""Is given the tasks at work whenever one moves, the outermost first; none when all are over."""


@dataclass
class _Heard:
    listener: Listener
    tasks: list[Task] = field(default_factory=list)

    def tell(self) -> None:
        self.listener(self.tasks)


_NOBODY = _Heard(lambda _: None)
_heard: ContextVar[_Heard | None] = ContextVar("situs.progress", default=_NOBODY)


@contextmanager
def hearing(listener: Listener | None) -> Iterator[None]:
    """Within, the listener hears all tasks of this thread; None: nobody does, for there is a line already."""
    before = _heard.set(None if listener is None else _Heard(listener))
    try:
        yield
    finally:
        _heard.reset(before)


@contextmanager
def task(what: str = "", total: int | None = None, done: int = 0) -> Iterator[Task]:
    """One task, from its beginning to its end. done: where it begins, as one does that was cut."""
    heard = _heard.get()
    if heard is None or heard is _NOBODY:
        yield Task(what, total, done)
        return
    own = Task(what, total, done, hear=heard.tell, start=done, began=time.monotonic())
    heard.tasks.append(own)
    heard.tell()
    try:
        yield own
    finally:
        heard.tasks.remove(own)  # and not what lies within: two loops may go side by side
        if not heard.tasks:  # else the one around it moves next
            heard.tell()


def tracked(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """The items, one done whenever the next is asked for. total: how many, where `items` cannot tell."""
    known = len(items) if total is None and isinstance(items, Sequence) else total
    with task(what, known) as own:
        for number, item in enumerate(items):
            own.tell(number)
            yield item


def latest(text: str) -> None:
    """The latest word on the innermost task."""
    heard = _heard.get()
    if heard is not None and heard.tasks:
        heard.tasks[-1].tell(now=text)


def share(tasks: Sequence[Task]) -> float | None:
    """How much is done of the outermost task whose length is known, with what lies within; None where none is."""
    done, width, known = 0.0, 1.0, False
    for each in tasks:
        if each.total is not None:
            todo = max(1, each.total - each.start)
            done += width * min(todo, each.done - each.start) / todo
            width, known = width / todo, True
    return min(1.0, done) if known else None


def seconds_left(tasks: Sequence[Task]) -> float | None:
    """By the time that the share done has taken; None where that cannot be told yet."""
    done = share(tasks)
    if not done:
        return None
    began = next(each.began for each in tasks if each.total is not None)
    return (time.monotonic() - began) / done * (1 - done)


def in_words(tasks: Sequence[Task]) -> str:
    """What is being done, the outermost first."""
    said = (": ".join(filter(None, (each.what, each.now))) for each in tasks)
    return " › ".join(dict.fromkeys(filter(None, said)))


def took(seconds: float) -> str:
    """What something took, for a sentence: 0.4 s, and never 0.0 s."""
    return "less than 0.1 s" if seconds < 0.1 else f"{seconds:.1f} s"


def clock(seconds: float) -> str:
    """Seconds as 1:02:03 or 2:03."""
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


# --- notes to the user ----------------------------------------------------------------------------------------


def silent(text: str) -> None:
    """Where nobody wants to hear."""


def printed(text: str) -> None:
    """One line on stdout, of the first of torchrun's ranks."""
    if os.environ.get("RANK", "0") == "0":
        try:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError:  # the terminal is gone, and what was at work goes on
            pass


_noted: ContextVar[Callable[[str], None]] = ContextVar("situs.notes", default=printed)


def note(text: str) -> None:
    """A line that the user should read, to whoever listens (`notes_to`)."""
    _noted.get()(text)


@contextmanager
def notes_to(listener: Callable[[str], None]) -> Iterator[None]:
    """Within, the listener is given all notes of this thread; else they are printed."""
    before = _noted.set(listener)
    try:
        yield
    finally:
        _noted.reset(before)


# --- shown on stderr ------------------------------------------------------------------------------------------

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


@contextmanager
def shown() -> Iterator[None]:
    """The same for a function of Python that takes minutes; nothing where somebody hears already, or wants to hear
    nothing (`hearing(None)`)."""
    with showing() if _heard.get() is _NOBODY else nullcontext():
        yield


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
            sys.stderr.write("  ".join(filter(None, facts)) + "\n")
            sys.stderr.flush()


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
