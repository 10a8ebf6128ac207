"""Writing a checkpoint in the background: a copy of the tensors at one step, which a thread writes while the run goes
on, on every rank that has a part of it.

On a GPU the copy is made on the device, in stream order: nothing waits, not even for a step that is replayed from a
graph and changes the weights in place. Where the device lacks memory for it, the copy is made on the host.

Rank 0 makes a folder under a temporary name. Each rank writes its files there, hashes them and reports to rank 0.
Rank 0 writes state.json with all checksums, renames the folder and drops the oldest. A rank that cannot write reports
that, and then no rank treats the checkpoint as written.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from situs.errors import SitusError, reason_of
from situs.train import distributed
from situs.train.checkpoint.files import (
    FORMAT,
    SHARDED,
    delete,
    identity,
    remove,
    sync,
    write_state,
    write_tensors,
)

ALIGNED = 256
_torch: Any = torch  # its stubs do not export the foreach kernels


class Snapshot:
    """Copies of what this rank has to write: tensors by name for each file, and the boxes of sharded ones.

    tensors: by file; of sharded ones this rank's part, of others all on rank 0. A file of parts has its rank in its
    name. gpu: the copies' device, if it is a GPU. spare: bytes that a step needs on the device beside what it keeps
    between steps.
    """

    def __init__(self, tensors: Mapping[str, Mapping[str, Tensor]], spare: int = 0) -> None:
        self.files: dict[str, dict[str, Tensor]] = {}
        self.boxes: dict[str, dict[str, distributed.Box]] = {}
        rank = distributed.rank()
        for file, named in tensors.items():
            boxes = {name: box for name, tensor in named.items() if (box := distributed.box_of(tensor)) is not None}
            parts = {
                name: distributed.local(tensor).detach()
                for name, tensor in named.items()
                if (math.prod(boxes[name].size) if name in boxes else rank == 0)
            }
            title = f"{file}.rank{rank}" if boxes else file
            if boxes or rank == 0:
                self.files[title] = parts
            if boxes:
                self.boxes[title] = boxes
        self.gpu: torch.device | None = None
        self._events: list[Any] = []
        self._copy(spare)

    def _copy(self, spare: int) -> None:
        """Replaces the tensors by copies; two names of one tensor stay two names of one copy."""
        sources = {identity(tensor): tensor for named in self.files.values() for tensor in named.values()}
        copies: dict[tuple[object, ...], Tensor] = {}
        for device in {tensor.device for tensor in sources.values()}:
            on_device = {key: tensor for key, tensor in sources.items() if tensor.device == device}
            copies |= self._copies_of(on_device, spare)
        self.files = {
            file: {name: copies[identity(tensor)] for name, tensor in named.items()}
            for file, named in self.files.items()
        }

    def _copies_of(self, sources: Mapping[tuple[object, ...], Tensor], spare: int) -> dict[tuple[object, ...], Tensor]:
        """Copies of one device's tensors, in one allocation."""
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
            for dtype in {copy.dtype for copy in copies}:  # one kernel for all tensors of a dtype
                pairs = [(c, s) for c, s in zip(copies, sources.values(), strict=True) if c.dtype == dtype]
                _torch._foreach_copy_([copy for copy, _ in pairs], [source for _, source in pairs])
        if memory.device.type == "cuda":
            self.gpu = memory.device
            self._events.append(torch.cuda.current_stream(memory.device).record_event())
        return dict(zip(sources, copies, strict=True))

    def wait(self) -> None:
        """Waits until the copies are made; called by the writing thread."""
        for event in self._events:
            event.synchronize()


def spare_of(device: torch.device) -> int:
    """Bytes that a step has needed on a GPU beside what is kept between steps; called before the first snapshot."""
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)


def _memory(size: int, device: torch.device, spare: int) -> Tensor:
    """Memory of `size` bytes on the device if `spare` bytes then remain free, else on the host."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        idle = free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if size + spare <= 0.95 * idle:
            try:
                return torch.empty(size, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError:  # idle memory may be reserved for a graph, or fragmented
                pass
    return torch.empty(size, dtype=torch.uint8)


class Background:
    """One write at a time, in a thread; `wait` returns its result or raises its error."""

    def __init__(self) -> None:
        self.channel = distributed.SideChannel()
        self._stop = threading.Event()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[Path] | None = None

    def begin(self, write: Callable[[], Path]) -> None:
        """Starts a write; none may be in progress."""
        assert self._pending is None
        self._pending = self._thread.submit(write)

    @property
    def failed(self) -> bool:
        """Whether the write has failed and its error was not raised yet; does not wait."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def wait(self) -> Path | None:
        """Waits for the write and gives its checkpoint; None where there is none. Its error is raised once."""
        if self._pending is None:
            return None
        try:
            return self._pending.result()
        finally:
            if self._pending.done():  # not so after a Ctrl-C during the wait
                self._pending = None

    def join(self) -> None:
        """Waits until no write is in progress, and ignores its error."""
        if self._pending is not None:
            self._pending.exception()

    def close(self, at_once: bool) -> None:
        """Waits for the write; at_once: aborts it after the current chunk and deletes what was written."""
        if at_once:
            self._stop.set()
        self.join()
        self._pending = None

    def check(self) -> None:
        """Called by the writing thread between two chunks."""
        if self._stop.is_set():
            raise InterruptedError("it was aborted")


def write_checkpoint(
    final: Path, snapshot: Snapshot, facts: Callable[[], Mapping[str, Any]], background: Background, *, main: bool
) -> None:
    """Writes all ranks' parts to a temporary folder and renames it; an `OSError` on every rank where one failed.

    facts: the content of state.json, called on rank 0.
    """
    everyone = background.channel.everyone
    alone = background.channel.group is None
    # A rank left over from a crash must not write into the folder of the restarted ranks.
    draft = final.with_name(f".writing-{final.name}" + ("" if alone else f"-{everyone(os.getpid())[0]}"))
    try:
        _on_all_ranks(everyone, lambda: _empty(draft) if main else None)
        written = _on_all_ranks(everyone, lambda: _write(draft, snapshot, background.check))
        files = {name: fact for of_rank in written for name, fact in of_rank.items()}
        sharded = any(".rank" in name for name in files)

        def rename() -> None:
            write_state(draft, facts(), files, SHARDED if sharded else FORMAT)
            background.check()
            if final.exists():  # a damaged one of the same step, which the run has reached again
                remove(final)
            draft.rename(final)
            sync(final.parent)

        _on_all_ranks(everyone, lambda: rename() if main else None)
    except OSError:
        if main:
            delete(draft)
        raise


def _on_all_ranks(everyone: Callable[[Any], list[Any]], act: Callable[[], Any]) -> list[Any]:
    """Calls `act` on every rank and gives the results of all; an `OSError` on all where it failed on one."""
    result, error = None, None
    try:
        result = act()
    except Exception as caught:  # noqa: BLE001  (the other ranks must learn of any error)
        error = caught
    answers = everyone({"result": result, "failed": None if error is None else _message(error)})
    for rank, answer in enumerate(answers):
        if answer["failed"] is not None:
            where = f" (rank {rank})" if len(answers) > 1 else ""
            raise OSError(answer["failed"] + where) from error
    return [answer["result"] for answer in answers]


def _message(error: Exception) -> str:
    if isinstance(error, OSError):
        return reason_of(error)
    return str(error) if isinstance(error, SitusError) else f"{type(error).__name__}: {error}"


def _empty(folder: Path) -> None:
    delete(folder)
    folder.mkdir(parents=True)


def _write(folder: Path, snapshot: Snapshot, check: Callable[[], None]) -> dict[str, Any]:
    """Writes this rank's files; gives name -> size and hash."""
    snapshot.wait()
    written = {}
    # On a stream of its own, parallel to the steps.
    with nullcontext() if snapshot.gpu is None else torch.cuda.stream(torch.cuda.Stream(snapshot.gpu)):
        for name, tensors in snapshot.files.items():
            file = f"{name}.safetensors"
            written[file] = write_tensors(folder / file, tensors, snapshot.boxes.get(name), check)
    if written:
        sync(folder)
    return written
