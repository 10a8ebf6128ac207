"""Work on every sample of a set, in several processes and in the set's order."""

from __future__ import annotations

import gc
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
_PREFETCH = 4  # tasks that each process prepares ahead


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


class _Work(Dataset[Any]):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __getitems__(self, task: Any) -> Any:
        try:
            return self.function(task)
        except SitusError as error:
            return error  # raised by `raise_error`: torch would print the worker's traceback


def _unchanged(value: Any) -> Any:
    return value


def _end_with_parent(_: int) -> None:
    """Makes a worker end when its parent does, and not before.

    One whose parent was killed would wait forever for a reader of its results. Ctrl-C and a scheduler's SIGTERM reach
    the whole process group, but the parent still needs the batches of its step and ends its workers itself, by a second
    SIGTERM where necessary.
    """
    gc.freeze()  # a fork has its parent's objects; to collect a tensor on a GPU would abort the worker
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


def process_results(
    function: Callable[[Any], Any], tasks: Iterable[Any], count: int, depth: int, **options: Any
) -> DataLoader[Any]:
    """An iterator over `function(task)` for each task, in order, computed by `count` processes.

    depth: tasks that each process prepares ahead. options: further ones of the DataLoader.
    """
    if count:
        options |= {"prefetch_factor": depth, "worker_init_fn": _end_with_parent}
        # Forked processes share the memory of a set; on macOS a fork of a process with threads can hang.
        options["multiprocessing_context"] = "fork" if sys.platform == "linux" else "spawn"
    return DataLoader(
        _Work(function),
        batch_sampler=tasks,  # pyright: ignore[reportArgumentType]
        collate_fn=_unchanged,
        generator=torch.Generator(),  # its own: the DataLoader would draw from torch's global one
        num_workers=count,
        **options,
    )


def raise_error(result: Any) -> Any:
    """The result of a task; a SitusError that it ended with is raised."""
    if isinstance(result, SitusError):
        raise result
    return result


@contextmanager
def worker_death_in_words() -> Iterator[None]:
    """One sentence where the system killed a worker process."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        shared = "shared memory (/dev/shm)" if "bus error" in str(error).lower() else "memory"
        raise SitusError(
            f"a worker process was killed, probably for lack of {shared}; use fewer workers", field="workers"
        ) from error


def in_order(
    function: Callable[[list[int]], T], numbers: Sequence[int], workers: int | None = None, at_once: int = 32
) -> Iterator[T]:
    """`function` of `numbers`, `at_once` at a time, in their order.

    workers: processes; by default one a core, 0 works in this one. They are only a few tasks ahead of the reader, which
    bounds the memory.
    """
    count = cores() if workers is None else min(workers, cores())
    with worker_death_in_words():
        lists = (list(numbers[start : start + at_once]) for start in range(0, len(numbers), at_once))
        for result in process_results(function, lists, count, _PREFETCH):
            yield raise_error(result)
