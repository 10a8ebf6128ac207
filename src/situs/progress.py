"""Progress of long computations, and notes to the user.

    for batch in tracked(batches, "val", len(batches)):                # a loop
    with task("attacks", 12) as attacks: attacks.tell(3, "batch 4")    # or by hand

The command line shows progress (`showing`), long audits in Python too, and any program may listen to it:
`with listening(listener)`. Without a listener nothing happens. Tasks are nested: the third of four attacks, and in it
the 200th of 1,000 steps.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class Task:
    """A computation in progress. done: steps done of `total` (None: unknown), which may be a fraction; start: those
    done before it began. now: what it is doing."""

    what: str
    total: int | None = None
    done: float = 0
    now: str = ""
    notify: Callable[[], None] = lambda: None
    start: float = 0
    began: float = 0.0

    def tell(self, done: float | None = None, now: str | None = None, *, total: int | None = None) -> None:
        """Updates what has changed and notifies the listener."""
        self.done = self.done if done is None else done
        self.now = self.now if now is None else now
        self.total = self.total if total is None else total
        self.notify()

    def restart(self) -> None:
        """Estimates the time left by what follows: the first steps compile and warm up."""
        self.start, self.began = self.done, time.monotonic()

    def count(self, done: int, total: int, now: str) -> None:
        """`tell` as a callback of (done, total, now)."""
        self.tell(done, now, total=total)


Listener = Callable[[Sequence[Task]], None]
"""A function that is called with the open tasks, the outermost first, whenever a task changes, and with no task when
all have ended."""


@dataclass
class _Open:
    """The open tasks of a thread and their listener."""

    listener: Listener
    tasks: list[Task] = field(default_factory=list)

    def notify(self) -> None:
        self.listener(self.tasks)


_NO_LISTENER = _Open(lambda _: None)
_current: ContextVar[_Open | None] = ContextVar("situs.progress", default=_NO_LISTENER)


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Sends all tasks of this thread to a listener; None: to nobody, where something else shows the progress."""
    before = _current.set(None if listener is None else _Open(listener))
    try:
        yield
    finally:
        _current.reset(before)


@contextmanager
def task(what: str = "", total: int | None = None, done: int = 0) -> Iterator[Task]:
    """One task, from its beginning to its end. done: steps done before, as in a resumed run."""
    current = _current.get()
    if current is None or current is _NO_LISTENER:
        yield Task(what, total, done)
        return
    new = Task(what, total, done, notify=current.notify, start=done, began=time.monotonic())
    current.tasks.append(new)
    current.notify()
    try:
        yield new
    finally:
        current.tasks.remove(new)  # not simply the last: two loops may run side by side
        if not current.tasks:  # else the outer one notifies next
            current.notify()


def tracked(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """The items, as a task that counts them. total: their number, where `items` has no length."""
    length = len(items) if total is None and isinstance(items, Sequence) else total
    with task(what, length) as progress:
        for number, item in enumerate(items):
            progress.tell(number)
            yield item


def latest(text: str) -> None:
    """Sets what the innermost task is doing."""
    current = _current.get()
    if current is not None and current.tasks:
        current.tasks[-1].tell(now=text)


def share(tasks: Sequence[Task], *, lately: bool = False) -> float | None:
    """The completed ratio of the outermost task with a known length, inner tasks included; None if no task has a known
    length. lately: without the steps that were done before a task began."""
    done, width, known = 0.0, 1.0, False
    for work in tasks:
        if work.total is not None:
            whole = max(1, work.total)
            done += width * (min(whole, work.done) - lately * work.start) / whole
            width, known = width / whole, True
    return min(1.0, done) if known else None


def seconds_left(tasks: Sequence[Task]) -> float | None:
    """The remaining time, estimated from the time so far; None if nothing is done yet."""
    done, lately = share(tasks), share(tasks, lately=True)
    if done is None or not lately:
        return None
    began = next(work.began for work in tasks if work.total is not None)
    return (time.monotonic() - began) / lately * (1 - done)


def in_words(tasks: Sequence[Task]) -> str:
    """What the tasks are doing, the outermost first."""
    words = (": ".join(filter(None, (work.what, work.now))) for work in tasks)
    return " › ".join(dict.fromkeys(filter(None, words)))


def took(seconds: float) -> str:
    """A duration, for a sentence: 0.4 s, and never 0.0 s."""
    return "less than 0.1 s" if seconds < 0.1 else f"{seconds:.1f} s"


def clock(seconds: float) -> str:
    """Seconds as 1:02:03 or 2:03."""
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


# --- notes to the user ----------------------------------------------------------------------------------------


def silent(text: str) -> None:
    """A listener for `notes_to` that drops all notes."""


def printed(text: str) -> None:
    """One line on stdout, on torchrun's first rank only."""
    if os.environ.get("RANK", "0") == "0":
        try:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError:  # a closed terminal ends nothing
            pass


_note_listener: ContextVar[Callable[[str], None]] = ContextVar("situs.notes", default=printed)


def note(text: str) -> None:
    """A line that the user should read; printed, or sent to a listener (`notes_to`)."""
    _note_listener.get()(text)


@contextmanager
def notes_to(listener: Callable[[str], None]) -> Iterator[None]:
    """Sends all notes of this thread to a listener instead of printing them."""
    before = _note_listener.set(listener)
    try:
        yield
    finally:
        _note_listener.reset(before)


# --- shown on stderr ------------------------------------------------------------------------------------------

FIRST, PATIENCE = 10.0, 30.0
"""Seconds until the first line where there is no terminal, and between two lines."""


@contextmanager
def showing() -> Iterator[None]:
    """Shows the progress of this thread on stderr."""
    line: _Line | _Lines = _Line() if sys.stderr.isatty() else _Lines()

    def show(tasks: Sequence[Task]) -> None:
        with suppress(OSError):  # a closed terminal ends nothing
            line.show(tasks)

    try:
        with listening(show if os.environ.get("RANK", "0") == "0" else None):  # one of torchrun's ranks
            yield
    finally:
        show(())


@contextmanager
def shown() -> Iterator[None]:
    """`showing` for a Python function that takes minutes; nothing where there is a listener already, or where
    `listening(None)` turned progress off."""
    with showing() if _current.get() is _NO_LISTENER else nullcontext():
        yield


class _Lines:
    """Progress as plain lines."""

    def __init__(self) -> None:
        self.next = time.monotonic() + FIRST

    def show(self, tasks: Sequence[Task]) -> None:
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
    """Progress as rich's live line, redrawn by its own thread so it moves during a long step."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.bar_task: Any = None

    def show(self, tasks: Sequence[Task]) -> None:
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
        # Output to stdout goes above the line; if stdout is a file, it stays there.
        self.bar = Progress(
            *columns,
            console=Console(stderr=True),
            transient=True,
            expand=True,
            redirect_stdout=sys.stdout.isatty(),
            refresh_per_second=1,  # its thread competes with the work for the interpreter
        )
        self.bar_task = self.bar.add_task("", total=None, facts="")
        self.bar.start()
