"""The flags of every verb (--quiet, --json), and the one JSON document of --json.

A verb prints lines. With --json they go to stderr, and stdout gets the document that the verb passes to `answer`; if it
passes none, a document of its lines and exit status.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from situs.errors import SitusError
from situs.progress import latest, showing
from situs.results import finite

FLAGS = {"quiet": "only errors", "json": "one JSON document"}
"""Flags of every verb, and what is printed instead: only errors, or one JSON document on stdout."""


@dataclass
class _Answer:
    document: Any = None
    lines: list[str] = field(default_factory=list)


_current: ContextVar[_Answer | None] = ContextVar("situs.cli.shell", default=None)


def has_flag(words: Sequence[str], name: str) -> bool:
    """Whether one of `FLAGS` is among the words of a command."""
    return any(word in (f"--{name}", f"--{name}=true", f"--{name}=yes", f"--{name}=1") for word in words)


def as_document() -> bool:
    """Whether --json was given."""
    return _current.get() is not None


def answer(document: Any, *lines: str) -> None:
    """The answer of a verb: the document with --json, otherwise the lines."""
    current = _current.get()
    if current is not None:
        current.document = document
        return
    for line in lines:
        print(line)


def remark(line: str) -> None:
    """Says what is being done: on a terminal in the progress line, elsewhere as a line."""
    if getattr(sys.stderr, "rich_proxied_file", sys.stderr).isatty():  # what rich before 15 puts there is none
        latest(line)
    else:
        print(line, file=sys.stderr, flush=True)


def next_line(*commands: Sequence[str | Path]) -> str:
    """The last line of a verb: the commands that can follow, as they run in a shell."""
    return "next: " + ", or ".join(shlex.join(["situs", *map(str, words)]) for words in commands)


def new_sibling(folder: Path, suffix: str) -> Path:
    """A path beside `folder` that does not exist: runs/mp3-exported, or runs/mp3-exported-2."""
    names = (f"{folder.name}-{suffix}" + f"-{count}" * (count > 1) for count in itertools.count(1))
    return next(path for name in names if not (path := folder.with_name(name)).exists())


def run_with_output(words: Sequence[str], work: Callable[[], int]) -> int:
    """Does the work of a verb and prints as --quiet and --json ask; gives its exit status."""
    quiet, as_json = has_flag(words, "quiet"), has_flag(words, "json")
    stdout = sys.stdout
    with contextlib.ExitStack() as stack:
        if quiet:
            devnull = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stderr(devnull))
            stack.enter_context(contextlib.redirect_stdout(devnull))
        if not as_json:
            stack.enter_context(showing())
            return work()
        current = stack.enter_context(_collecting())
        try:
            with showing():
                status = work()
        except (SitusError, KeyboardInterrupt) as error:
            current.document = {"error": str(error) or "interrupted"}
            raise
        else:
            if current.document is None:
                current.document = {"status": status, "lines": current.lines}
            return status
        finally:
            if current.document is not None:
                document = finite(current.document)
                print(json.dumps(document, indent=2, ensure_ascii=False, default=str), file=stdout)  # paths as text


@contextlib.contextmanager
def _collecting() -> Iterator[_Answer]:
    current = _Answer()
    token = _current.set(current)
    try:
        with contextlib.redirect_stdout(_LinesToStderr(current.lines)):
            yield current
    finally:
        _current.reset(token)


class _LinesToStderr(io.TextIOBase):
    """A replacement for stdout that collects the printed lines and writes them to stderr."""

    def __init__(self, lines: list[str]) -> None:
        self.lines, self.unfinished = lines, ""

    def write(self, text: str) -> int:
        sys.stderr.write(text)
        *finished, self.unfinished = (self.unfinished + text).split("\n")
        self.lines += finished
        return len(text)

    def flush(self) -> None:
        sys.stderr.flush()
