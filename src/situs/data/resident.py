"""Sets held whole on the device: read once, then every batch is an index away."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from situs.data.pipeline import Pipeline, WorkerBatch
from situs.data.sampler import BatchPlan, batches_for, sample_of
from situs.data.sources.base import Source
from situs.data.sources.images import met_transparency
from situs.errors import SitusError, counted, none_read
from situs.progress import tracked

_TASK = 256  # samples: enough to make handing out tasks cheap, few enough for a smooth progress bar
# On a GPU smaller batches, counted in numbers, are augmented several at a time: they cost launches, not work.
_AT_ONCE = 1 << 24


class Resident(NamedTuple):
    """values: what the pipeline's `collate` gives of each readable sample, [n, …] by name. index: [n] their rows in the
    source."""

    values: dict[str, Tensor]
    index: Tensor


def hold(pipeline: Pipeline, device: torch.device | str, max_bytes: int) -> Resident:
    """Every readable sample of a pipeline whose `collate` gives the same in every epoch.

    Broken ones are left out and noted in `source.skipped`, unless the source is strict.
    """
    source, count = pipeline.source, len(pipeline.source)
    if (whole := pipeline.whole()) is not None:
        _check_bytes(source, sum(value.nbytes for value in whole.values()), max_bytes)
        values, index = whole, torch.arange(count)
    else:
        reader = copy.copy(pipeline)
        reader.stand_in = False
        spans = [range(start, min(start + _TASK, count)) for start in range(0, count, _TASK)]
        met_transparency()  # what others have met does not count
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            first = reader.read(0, spans[0])
            share = len(first.ids) / count if len(first.ids) else 1.0
            _check_bytes(source, sum(value.nbytes for value in first.values.values()) / share, max_bytes)
            rest = pool.map(lambda span: reader.read(0, span), spans[1:])
            parts = [first, *tracked(rest, f"reading {source.name}", len(spans) - 1)]
        broken = [each for part in parts for each in part.broken]
        for row, reason in broken:
            source.skip(row, reason)
        if len(broken) == count:
            raise SitusError(f"{none_read(source.name, count, source.things)}; the last: {broken[-1][1]}")
        if any(part.transparent for part in parts):
            source.note_transparency()
        values = dict(pipeline.join([part.values for part in parts if len(part.ids)]))
        index = torch.cat([part.ids for part in parts])
    return Resident(pipeline.move(values, torch.device(device)), index.to(device))


def _check_bytes(source: Source, needed: float, max_bytes: int) -> None:
    if needed > max_bytes:
        raise SitusError(
            f"{source.name}: {len(source)} {source.things} take {needed / 2**30:.1f} GiB and "
            f"{max_bytes / 2**30:.1f} GiB are allowed; "
            "allow more or stream them (resident: never)",
            field=("resident_gib", "resident"),
        )


class ResidentStream:
    """The batches of a set that is held, from any step of any epoch, several steps together where that is cheaper."""

    def __init__(self, pipeline: Pipeline, plan: BatchPlan, held: Resident) -> None:
        self.pipeline, self.plan, self.held, self.device = pipeline, plan, held, held.index.device

    def describe(self) -> str:
        """For the log: count, size and memory."""
        count, *sides = next(iter(self.held.values.values())).shape
        size = " × ".join(map(str, sides)) + " samples" * (len(sides) == 1)
        mib = sum(value.nbytes for value in self.held.values.values()) / 2**20
        return f"{counted(count, self.pipeline.source.things)} of {size} on {self.device}, {mib:.0f} MiB"

    def close(self) -> None:
        """Nothing works for it."""

    def steps_at_once(self) -> int:
        """Batches that are augmented together."""
        share = self.plan.batch // self.plan.world
        odd = share % 2 or self.plan.drawn is not None
        if self.device.type == "cpu" or not self.pipeline.training or (self.pipeline.pairs and odd):
            return 1  # pairs stay within their batch, whose rows are even
        return max(1, min(self.plan.steps, _AT_ONCE // (share * self.pipeline.row_bytes)))

    def batches(self, epoch: int, start_step: int) -> Iterator[list[WorkerBatch]]:
        """One part each, of several steps (`sizes`)."""
        waiting: list[Tensor] = []
        at_once = self.steps_at_once()
        for ids in batches_for(self.plan, epoch, start_step, self.device):
            if len(ids):
                waiting.append(ids)
            if len(waiting) >= at_once:
                yield self._together(waiting, len(waiting))
                waiting = []
        if waiting:  # fewer would be another shape, for which the compiler takes half a minute
            yield self._together(waiting + [waiting[-1]] * (at_once - len(waiting)), len(waiting))

    def _together(self, steps: list[Tensor], count: int) -> list[WorkerBatch]:
        """count: how many of the steps are handed out."""
        ids = torch.cat(steps)
        rows = sample_of(ids)
        if len(self.held.index) < len(self.pipeline.source):  # a broken one must not give its number to the next
            ids = ids - rows + self.held.index[rows]
        values = {name: value[rows] for name, value in self.held.values.items()}
        return [WorkerBatch(values, ids, [], sizes=[len(step) for step in steps[:count]])]
