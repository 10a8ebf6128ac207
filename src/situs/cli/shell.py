"""What every verb takes beside its own flags: --quiet, --json and --example; and how its answer becomes one document.

A verb prints lines. Where one JSON document is asked for, these go to stderr, and stdout gets what the verb hands to
`answer`; of a verb that hands nothing the lines themselves, with its exit status.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from situs.errors import SitusError
from situs.progress import showing

FLAGS = {
    "quiet": "errors alone",
    "json": "one document",
    "example": "a command to run",
}
"""Flags of every verb, and what each gives: nothing but errors (the exit status tells), one JSON document and nothing
else on stdout, or a command that runs as it stands, with those it needs before it."""


@dataclass
class _Answer:
    document: Any = None
    lines: list[str] = field(default_factory=list)


_asked: ContextVar[_Answer | None] = ContextVar("situs.cli.shell", default=None)


def asked_in(words: Sequence[str], name: str) -> bool:
    """Whether one of `FLAGS` is among the words of a command."""
    return any(word in (f"--{name}", f"--{name}=true", f"--{name}=yes", f"--{name}=1") for word in words)


def as_document() -> bool:
    """Whether one JSON document is asked for."""
    return _asked.get() is not None


def answer(document: Any, *lines: str) -> None:
    """What a verb has to say: the document, or the lines for people."""
    held = _asked.get()
    if held is not None:
        held.document = document
    for line in lines if held is None else ():
        print(line)


def next_line(*commands: Sequence[str | Path]) -> str:
    """The line that ends a verb: what can be done next, each command as it runs in a shell."""
    return "next: " + ", or ".join(shlex.join(["situs", *map(str, words)]) for words in commands)


def beside(folder: Path, what: str) -> Path:
    """A name for a new folder beside one: runs/mp3-exported, or runs/mp3-exported-2 where that is taken."""
    names = (f"{folder.name}-{what}" + f"-{count}" * (count > 1) for count in itertools.count(1))
    return next(path for name in names if not (path := folder.with_name(name)).exists())


def speak(words: Sequence[str], work: Callable[[], int]) -> int:
    """Does the work of a verb, heard as its words ask; gives its exit status."""
    quiet, whole = asked_in(words, "quiet"), asked_in(words, "json")
    stdout = sys.stdout
    with contextlib.ExitStack() as stack:
        if quiet:
            nowhere = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        if not whole:
            stack.enter_context(showing())
            return work()
        held = stack.enter_context(_collecting())
        try:
            with showing():
                status = work()
        except (SitusError, KeyboardInterrupt) as error:
            held.document = {"error": str(error) or "interrupted"}
            raise
        else:
            if held.document is None:
                held.document = {"status": status, "lines": held.lines}
            return status
        finally:
            if held.document is not None:
                print(json.dumps(plain(held.document), indent=2, ensure_ascii=False), file=stdout)


@contextlib.contextmanager
def _collecting() -> Iterator[_Answer]:
    held = _Answer()
    before = _asked.set(held)
    try:
        with contextlib.redirect_stdout(_Aside(held.lines)):
            yield held
    finally:
        _asked.reset(before)


class _Aside(io.TextIOBase):
    """In the place of stdout: lines are kept, and go on to stderr."""

    def __init__(self, lines: list[str]) -> None:
        self.lines, self.rest = lines, ""

    def write(self, text: str) -> int:
        sys.stderr.write(text)
        *whole, self.rest = (self.rest + text).split("\n")
        self.lines += whole
        return len(text)

    def flush(self) -> None:
        sys.stderr.flush()


def plain(value: Any) -> Any:
    """What JSON holds of a value: no number that is not finite, and paths as text."""
    from situs.results import finite

    def held(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): held(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [held(each) for each in value]
        return str(value) if isinstance(value, Path) else value

    return finite(held(value))
