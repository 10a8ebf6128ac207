"""Work on each image of a set, by several processes and in the set's order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from situs.errors import SitusError

T = TypeVar("T")
_AHEAD = 4  # lists each process works ahead


def cores() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


class _Work(Dataset[Any]):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __getitem__(self, task: Any) -> Any:
        return self.__getitems__(task)

    def __getitems__(self, task: Any) -> Any:
        try:
            return self.function(task)
        except SitusError as error:
            return error  # raised by the reader, who would else see it below the worker's traceback


def _as_it_is(value: Any) -> Any:
    return value


def _end_with_parent(_: int) -> None:
    """A worker ends when its parent does, and not before.

    One whose parent was killed would wait for ever until somebody takes what it made. Ctrl-C and a scheduler's SIGTERM
    reach the whole process group: the parent still wants the batches of the step it is in, and ends its workers itself,
    by a second SIGTERM where they do not end.
    """
    for name in ("SIGINT", "SIGHUP"):
        if (number := getattr(signal, name, None)) is not None:
            signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: signal.signal(number, signal.SIG_DFL))
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def made_by(
    function: Callable[[Any], Any], tasks: Iterable[Any], count: int, ahead: int, **more: Any
) -> DataLoader[Any]:
    """An iterator over what `function` makes of each task, in order, in `count` processes.

    ahead: what each process prepares before it is asked for. more: a DataLoader's other options.
    """
    if count:
        more |= {"prefetch_factor": ahead, "worker_init_fn": _end_with_parent}
    if count and sys.platform == "linux":  # forked, and so they share the memory of a set that is held
        more["multiprocessing_context"] = "fork"
    return DataLoader(
        _Work(function),
        batch_sampler=tasks,  # pyright: ignore[reportArgumentType]
        collate_fn=_as_it_is,
        generator=torch.Generator(),  # its own: the DataLoader would draw from torch's global one
        num_workers=count,
        **more,
    )


def checked(made: Any) -> Any:
    """What a task made; its own error is raised."""
    if isinstance(made, SitusError):
        raise made
    return made


@contextmanager
def told_of_the_killed() -> Iterator[None]:
    """One sentence where the system ended a worker process."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        shared = "shared memory (/dev/shm)" if "bus error" in str(error).lower() else "memory"
        raise SitusError(
            f"a worker process was killed, perhaps for want of {shared}; take fewer", field="workers"
        ) from error


def in_order(
    function: Callable[[list[int]], T], numbers: Sequence[int], workers: int | None = None, at_once: int = 32
) -> Iterator[T]:
    """What `function` makes of `numbers`, `at_once` at a time, in their order.

    workers: processes; by default one a core, 0 works in this one. They are only a few lists ahead of the reader, which
    bounds the memory.
    """
    count = cores() if workers is None else min(workers, cores())
    with told_of_the_killed():
        lists = (list(numbers[start : start + at_once]) for start in range(0, len(numbers), at_once))
        for made in made_by(function, lists, count, _AHEAD):
            yield checked(made)
