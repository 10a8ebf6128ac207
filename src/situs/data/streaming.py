"""Large sets: worker processes read and cut samples to one size, the device does the rest.

What a worker finds broken travels back with its batch to be counted once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from situs.data.pipeline import Pipeline, WorkerBatch
from situs.data.sampler import BatchPlan, batches_for
from situs.errors import SitusError

_PREFETCH = 4  # batches each worker prepares ahead


class _Reader(Dataset[WorkerBatch]):
    """A pipeline as the DataLoader wants it: keys (epoch, draw id), asked for a whole batch at a time."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline

    def __getitem__(self, key: tuple[int, int]) -> WorkerBatch:
        return self.__getitems__([key])

    def __getitems__(self, keys: list[tuple[int, int]]) -> WorkerBatch:
        return self.pipeline.read(keys[0][0], [draw for _, draw in keys])


def _as_it_is(batch: Any) -> Any:
    return batch


class _Schedule:
    """What the DataLoader asks for: lists of (epoch, draw id); told before each pass where to start."""

    def __init__(self, plan: BatchPlan) -> None:
        self.plan, self.epoch, self.start = plan, 0, 0

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for ids in batches_for(self.plan, self.epoch, self.start):
            if len(ids):
                yield [(self.epoch, draw) for draw in ids.tolist()]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


class WorkerStream:
    """The batches of any epoch from any step, in order, read by `workers` processes (0: by this one).

    There are never more workers than cores: beyond that they only take turns.
    """

    def __init__(self, pipeline: Pipeline, plan: BatchPlan, workers: int, pin: bool) -> None:
        self._schedule = _Schedule(plan)
        self.workers = workers = min(workers, _cores())
        options: dict[str, Any] = {"prefetch_factor": _PREFETCH, "persistent_workers": True} if workers else {}
        self._loader = DataLoader(
            _Reader(pipeline),
            batch_sampler=self._schedule,  # pyright: ignore[reportArgumentType]
            collate_fn=_as_it_is,
            num_workers=workers,
            pin_memory=pin,
            generator=torch.Generator(),  # its own: the DataLoader would draw from torch's global one
            **options,
        )

    def batches(self, epoch: int, start_step: int) -> Iterator[WorkerBatch]:
        """The epoch's batches from `start_step` on."""
        self._schedule.epoch, self._schedule.start = epoch, start_step
        try:
            yield from self._loader
        except SitusError as error:
            raise type(error)(_own_words(str(error))) from error


def _own_words(text: str) -> str:
    """The sentence of an error from a worker, which the DataLoader buries under the worker's traceback."""
    last = text.strip().rpartition("\n")[2]
    return last.partition(": ")[2] if last != text.strip() else text
