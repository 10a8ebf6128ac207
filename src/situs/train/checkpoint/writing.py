"""A checkpoint on its way to the disk: a thread writes it while the run goes on, on every rank that has a part of it.

The first rank makes a folder aside. Each rank writes its files there, hashing them on the way, and tells the first
what it wrote. The first writes state.json, which vouches for them all, renames the folder and drops the oldest. A
rank that cannot write says so, and then no rank goes on as if the checkpoint were there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from situs.errors import SitusError
from situs.train import distributed
from situs.train.checkpoint.snapshot import Snapshot
from situs.train.checkpoint.storage import FORMAT, SHARDED, delete, reason, remove, sync, vouch
from situs.train.checkpoint.tensors import write_tensors


class Background:
    """One write at a time, in a thread; who asks for the next, or for the end, waits for it and learns how it went."""

    def __init__(self) -> None:
        self.aside = distributed.Aside()
        self._stop = threading.Event()
        self._pending: Future[Path] | None = None
        self._thread: threading.Thread | None = None

    def begin(self, write: Callable[[], Path]) -> None:
        """Starts a write; there must be none under way."""
        assert self._pending is None
        done: Future[Path] = Future()

        def work() -> None:
            try:
                done.set_result(write())
            except BaseException as error:  # noqa: BLE001  (told by `wait`)
                done.set_exception(error)

        self._pending = done
        self._thread = threading.Thread(target=work, name="checkpoint")
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a write is under way."""
        return self._pending is not None and not self._pending.done()

    @property
    def failed(self) -> bool:
        """Whether the write has ended in an error that nobody was told of yet; nothing waits."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def wait(self) -> Path | None:
        """The checkpoint that was under way, when it is on the disk; None where none was. Its error is raised once."""
        if self._pending is None:
            return None
        try:
            return self._pending.result()
        finally:
            if self._pending.done():  # and not a Ctrl-C while we waited
                self._pending = None

    def join(self) -> None:
        """Returns when no write is under way, however it went; in the writing thread itself, at once."""
        if self._pending is not None and threading.current_thread() is not self._thread:
            self._pending.exception()

    def close(self, at_once: bool) -> None:
        """Waits for the write; at once: for no more than the chunk it is at, and what was written is taken away."""
        if at_once:
            self._stop.set()
        self.join()
        self._pending = None

    def check(self) -> None:
        """Called by the writing thread between two chunks."""
        if self._stop.is_set():
            raise InterruptedError("it was given up")


def write_checkpoint(
    final: Path, snapshot: Snapshot, facts: Callable[[], Mapping[str, Any]], background: Background, *, main: bool
) -> None:
    """Writes all ranks' parts aside and gives them their name; an `OSError` on each rank where one of them could not.

    facts: what state.json tells, asked for by the first rank.
    """
    everyone = background.aside.everyone
    alone = background.aside.group is None
    # A rank that a crash left behind must not write where the ranks of the next start do.
    aside = final.with_name(f".writing-{final.name}" + ("" if alone else f"-{everyone(os.getpid())[0]}"))
    try:
        _agreed(everyone, lambda: _empty(aside) if main else None)
        written = _agreed(everyone, lambda: _write(aside, snapshot, background.check))
        files = {name: fact for each in written for name, fact in each.items()}
        sharded = any(".rank" in name for name in files)

        def name_it() -> None:
            vouch(aside, facts(), files, SHARDED if sharded else FORMAT)
            background.check()
            if final.exists():  # a torn one of the same step: the run came past it again
                remove(final)
            aside.rename(final)
            sync(final.parent)

        _agreed(everyone, lambda: name_it() if main else None)
    except OSError:
        if main:
            delete(aside)
        raise


def _agreed(everyone: Callable[[Any], list[Any]], act: Callable[[], Any]) -> list[Any]:
    """Does a thing on every rank and gives what it gave on each; an `OSError` on all where it failed on one."""
    given, error = None, None
    try:
        given = act()
    except Exception as caught:  # noqa: BLE001  (the others must hear of it, whatever it is)
        error = caught
    answers = everyone({"given": given, "failed": None if error is None else _said(error)})
    for rank, answer in enumerate(answers):
        if answer["failed"] is not None:
            where = f" (rank {rank})" if len(answers) > 1 else ""
            raise OSError(answer["failed"] + where) from error
    return [answer["given"] for answer in answers]


def _said(error: Exception) -> str:
    if isinstance(error, OSError):
        return reason(error)
    return str(error) if isinstance(error, SitusError) else f"{type(error).__name__}: {error}"


def _empty(folder: Path) -> None:
    delete(folder)
    folder.mkdir(parents=True)


def _write(folder: Path, snapshot: Snapshot, check: Callable[[], None]) -> dict[str, Any]:
    """This rank's files, and what they are: name -> size and hash."""
    snapshot.wait()
    written = {}
    # On a stream of its own, beside the steps.
    with nullcontext() if snapshot.gpu is None else torch.cuda.stream(torch.cuda.Stream(snapshot.gpu)):
        for name, tensors in snapshot.files.items():
            file = f"{name}.safetensors"
            written[file] = write_tensors(folder / file, tensors, snapshot.boxes.get(name), check)
    if written:
        sync(folder)
    return written
