"""A checkpoint on its way to the disk: a copy of the tensors as they are at one step, which a thread writes while the
run goes on, on every rank that has a part of it.

On a GPU the copy is made on the device, in the order of its work: nothing waits, not even for a step that is replayed
from a graph and moves the weights in place. Where the device has no memory left for it, it is made on the host.

The first rank makes a folder aside. Each rank writes its files there, hashing them on the way, and tells the first what
it wrote. The first writes state.json with all checksums, renames the folder and drops the oldest. A rank that cannot
write says so, and then no rank goes on as if the checkpoint were there.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from situs.errors import SitusError
from situs.train import distributed
from situs.train.checkpoint.files import (
    FORMAT,
    SHARDED,
    delete,
    identity,
    reason,
    remove,
    sync,
    write_state,
    write_tensors,
)

ALIGNED = 256
_torch: Any = torch  # its stubs do not export the foreach kernels


class Snapshot:
    """What this rank has to write: file by file tensors by name, and the boxes of those that are parts.

    tensors: file by file; sharded ones are taken in this rank's part, others by the first rank alone. A file of parts
    bears its rank in its name. gpu: where the copies lie, if they lie on one. spare: bytes that the device needs for a
    step beside what it holds between steps.
    """

    def __init__(self, tensors: Mapping[str, Mapping[str, Tensor]], spare: int = 0) -> None:
        self.files: dict[str, dict[str, Tensor]] = {}
        self.boxes: dict[str, dict[str, distributed.Box]] = {}
        rank = distributed.rank()
        for file, held in tensors.items():
            boxes = {name: box for name, tensor in held.items() if (box := distributed.box_of(tensor)) is not None}
            own = {
                name: distributed.local(tensor).detach()
                for name, tensor in held.items()
                if (math.prod(boxes[name].size) if name in boxes else rank == 0)
            }
            title = f"{file}.rank{rank}" if boxes else file
            if boxes or rank == 0:
                self.files[title] = own
            if boxes:
                self.boxes[title] = boxes
        self.sharded = bool(self.boxes)
        self.gpu: torch.device | None = None
        self._events: list[Any] = []
        self._hold(spare)

    def _hold(self, spare: int) -> None:
        """Puts copies in the place of the tensors; two names of one tensor are two names of one copy."""
        found = {identity(tensor): tensor for held in self.files.values() for tensor in held.values()}
        copies: dict[tuple[object, ...], Tensor] = {}
        for device in {tensor.device for tensor in found.values()}:
            copies |= self._copied({key: tensor for key, tensor in found.items() if tensor.device == device}, spare)
        self.files = {
            file: {name: copies[identity(tensor)] for name, tensor in held.items()} for file, held in self.files.items()
        }

    def _copied(self, sources: Mapping[tuple[object, ...], Tensor], spare: int) -> dict[tuple[object, ...], Tensor]:
        """Copies of one device's tensors, in one piece of memory: nothing to allocate tensor by tensor."""
        starts, end = [], 0
        for source in sources.values():
            starts.append(end)
            end += -(-source.numel() * source.element_size() // ALIGNED) * ALIGNED
        memory = _memory(end, next(iter(sources.values())).device, spare)
        copies = [
            memory[start : start + s.numel() * s.element_size()].view(s.dtype).view(s.shape)
            for start, s in zip(starts, sources.values(), strict=True)
        ]
        with torch.no_grad():
            for dtype in {copy.dtype for copy in copies}:  # one kernel for many tensors, where they are of a kind
                pairs = [(c, s) for c, s in zip(copies, sources.values(), strict=True) if c.dtype == dtype]
                _torch._foreach_copy_([copy for copy, _ in pairs], [source for _, source in pairs])
        if memory.device.type == "cuda":
            self.gpu = memory.device
            self._events.append(torch.cuda.current_stream(memory.device).record_event())
        return dict(zip(sources, copies, strict=True))

    def wait(self) -> None:
        """Returns when the copies are made; called by who writes them."""
        for event in self._events:
            event.synchronize()


def spare_of(device: torch.device) -> int:
    """Bytes that a step has needed so far on a GPU beside what is held between steps; ask before the first snapshot."""
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)


def _memory(size: int, device: torch.device, spare: int) -> Tensor:
    """So many bytes on the device, where it then still has `spare`; else on the host."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        idle = free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if size + spare <= 0.95 * idle:
            try:
                return torch.empty(size, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError:  # what is idle may be kept for a graph, or in pieces
                pass
    return torch.empty(size, dtype=torch.uint8)


class Background:
    """One write at a time, in a thread; who asks for the next, or for the end, waits for it and learns how it went."""

    def __init__(self) -> None:
        self.aside = distributed.Aside()
        self._stop = threading.Event()
        self._pending: Future[Path] | None = None

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
        threading.Thread(target=work, name="checkpoint").start()

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
        """Returns when no write is under way, however it went."""
        if self._pending is not None:
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
            write_state(aside, facts(), files, SHARDED if sharded else FORMAT)
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
