"""Large sets: worker processes read and crop samples, the device does the rest.

Broken samples are reported with their batch and counted once. In training the workers start the next epoch while the
last batches of this one are used.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import DataLoader

from situs.data.blocks import BlockEpoch, BlockOrder
from situs.data.pipeline import Pipeline, WorkerBatch
from situs.data.sampler import BatchPlan, Permutation, batches_for
from situs.data.work import cores, process_results, raise_error, worker_death_in_words
from situs.errors import counted

_PREFETCH = 4  # tasks that each worker prepares ahead at most
_PREFETCH_BYTES = 8 << 30  # of all that the workers of a process prepare ahead


class _Task(NamedTuple):
    """What a worker reads at a time. sizes: how many of the draws belong to each of its batches.

    done: as `Pipeline.read` takes it. fresh: blocks of earlier tasks are released first.
    """

    epoch: int
    draws: list[int]
    sizes: list[int]
    done: dict[int, list[int]] | None
    fresh: bool


def _read(pipeline: Pipeline, tasks: list[_Task]) -> list[WorkerBatch]:
    """The batches of one task, as one batch where it can be divided again: sending a tensor to another process costs
    the same whatever its size."""
    [task] = tasks
    if task.fresh:
        pipeline.source.release()
    if pipeline.by_rows or len(task.sizes) == 1:
        return [pipeline.read(task.epoch, task.draws, task.done)]
    parts, start = [], 0
    for size in task.sizes:
        done = None
        if task.done is not None:
            done = {count - start: rows for count, rows in task.done.items() if start <= count <= start + size}
        parts.append(pipeline.read(task.epoch, task.draws[start : start + size], done))
        start += size
    return parts


class _Schedule:
    """The tasks of the DataLoader, from any epoch and step on; in training one epoch follows another.

    parts: 1 gives a worker whole batches. More give each of so many workers its own rows of every batch, for as many
    batches at a time, so that each block of the set is read by one worker. sizes: for each round of tasks handed out,
    the rows of each of its batches in each task.
    """

    def __init__(self, plan: BatchPlan, parts: int) -> None:
        self.plan, self.parts = plan, parts
        self.sizes: deque[list[list[int]]] = deque()
        self.start_at(0, 0)

    def start_at(self, epoch: int, step: int) -> None:
        self.epoch, self.step = epoch, step
        self.sizes.clear()

    def __iter__(self) -> Iterator[list[_Task]]:
        epoch, start, order = self.epoch, self.step, self.plan.order_of(self.epoch)
        # Sorted during the epoch before: where all cores are busy decoding, sorting would make steps wait.
        pool = ThreadPoolExecutor(1, "situs-order")
        try:
            while True:
                after = pool.submit(self.plan.order_of, epoch + 1) if self.plan.shuffle else None
                yield from self._epoch(epoch, start, order)
                if after is None:
                    return
                epoch, start, order = epoch + 1, 0, after.result()
        finally:  # without waiting: the garbage collector may run this while another thread holds what is waited for
            pool.shutdown(wait=False, cancel_futures=True)

    def _epoch(self, epoch: int, start: int, order: Permutation) -> Iterator[list[_Task]]:
        blocks = order if isinstance(order, BlockEpoch) else None
        batches, step, fresh = batches_for(self.plan, epoch, start, order=order), start, blocks is not None
        while steps := [ids.tensor_split(self.parts) for ids in islice(batches, self.parts)]:
            ended = [blocks.ended(step + number) if blocks else [] for number in range(len(steps))]
            self.sizes.append([[len(ids[part]) for ids in steps] for part in range(self.parts)])
            for part in range(self.parts):
                draws: list[int] = []
                done: dict[int, list[int]] = {}
                for ids, rows in zip(steps, ended, strict=True):
                    for row, sample in rows:
                        count = self._own_rows(ids, part, row)
                        done.setdefault(len(draws) + count, []).append(sample)
                    draws += ids[part].tolist()
                yield [_Task(epoch, draws, self.sizes[-1][part], done if blocks else None, fresh)]
            step, fresh = step + len(steps), False

    def _own_rows(self, ids: Sequence[Tensor], part: int, row: int) -> int:
        """How many of a part's rows of a batch stand before a row of the global batch."""
        if self.plan.repeated > 1:  # a copy of the sample stands further on
            return len(ids[part])
        before = self.plan.rank * (self.plan.batch // self.plan.world) + sum(map(len, ids[:part]))
        return min(max(row - before, 0), len(ids[part]))


def prefetch_depth(row_bytes: int, plan: BatchPlan, workers: int) -> int:
    """How many tasks each worker prepares ahead, as far as memory allows; each has about the rows of a batch."""
    task_bytes = row_bytes * (plan.batch // plan.world)
    return max(1, min(_PREFETCH, _PREFETCH_BYTES // max(1, workers * task_bytes)))


class WorkerStream:
    """The batches of any epoch from any step, in order, read by `workers` processes (0: by this one).

    There are never more workers than cores: beyond that they only take turns.
    """

    def __init__(self, pipeline: Pipeline, plan: BatchPlan, workers: int, pin: bool) -> None:
        self.plan, self.pipeline = plan, pipeline
        self.workers = workers = min(workers, cores())
        self._schedule = _Schedule(plan, max(1, workers) if isinstance(plan.order, BlockOrder) else 1)
        depth = prefetch_depth(pipeline.row_bytes, plan, workers)
        options = {"pin_memory": pin, "persistent_workers": workers > 0}
        self._loader = process_results(partial(_read, pipeline), self._schedule, workers, depth, **options)
        self._tasks: Iterator[list[WorkerBatch]] = iter(())
        self._next: tuple[int, int] | None = None  # epoch and step that the workers prepare next
        # If nobody closes it: in a collected cycle the queues are gone before torch ends the workers.
        weakref.finalize(self, _end_workers, self._loader, os.getpid())

    def describe(self) -> str:
        """For the log: how many samples there are, and who reads them."""
        readers = f"by {counted(self.workers, 'workers')}" if self.workers else "without workers"
        source = self.pipeline.source
        classes = f" of {counted(len(source.classes or ()), 'classes')}," if source.dense else ""
        return f"{counted(len(source), source.things)}{classes} {self.pipeline.in_memory or f'streamed {readers}'}"

    def close(self) -> None:
        """Ends the workers now. When Python ends, torch gives each of them five seconds in turn and stops it then."""
        self._tasks, self._next = iter(()), None
        _end_workers(self._loader)

    def batches(self, epoch: int, start_step: int) -> Iterator[list[WorkerBatch]]:
        """The epoch's batches from `start_step` on, each in parts: the rows that each worker read, in order."""
        if self._next != (epoch, start_step):
            self._schedule.start_at(epoch, start_step)
            self._tasks = iter(self._loader)
        self._next = None  # left halfway, the next call starts anew
        step = start_step
        while step < self.plan.steps:
            with worker_death_in_words():
                round_ = [raise_error(next(self._tasks)) for _ in range(self._schedule.parts)]
            for parts in _by_batch(round_, self._schedule.sizes.popleft()):
                yield parts
                step += 1
        self._next = (epoch + 1, 0) if self.plan.shuffle else None


def _end_workers(loader: DataLoader[Any], owner: int | None = None) -> None:
    """Ends the worker processes. owner: the process they belong to; one that was forked from it leaves them alone."""
    workers: Any = loader._iterator
    loader._iterator = None
    if workers is not None and owner not in (None, os.getpid()):
        workers._shutdown = True  # or torch would look for them when it is collected
    elif workers is not None:  # ended, not only dropped: the traceback of an error may still refer to them
        with contextlib.suppress(RuntimeError):  # also where one was killed
            workers._shutdown_workers()


def _by_batch(tasks: list[list[WorkerBatch]], sizes: list[list[int]]) -> Iterator[list[WorkerBatch]]:
    """The parts of each batch of a round, by task; a batch that one worker read whole stays as it is."""
    if len(tasks) == 1:
        yield tasks[0]
        return
    starts = [0] * len(tasks)
    for step, rows in enumerate(zip(*sizes, strict=True)):
        parts = [
            task[step] if len(task) == len(sizes[0]) else task[0].part(slice(start, start + count))
            for task, start, count in zip(tasks, starts, rows, strict=True)
            if count
        ]
        yield parts or [tasks[0][0].part(slice(0, 0))]
        starts = [start + count for start, count in zip(starts, rows, strict=True)]
