"""Sets kept whole on the device: read once, then a batch is an index."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from situs.data.pipeline import Pipeline, WorkerBatch
from situs.data.sampler import BatchPlan, batches_for, sample_of
from situs.data.sources.base import Source
from situs.data.sources.images import pop_transparency_flag
from situs.errors import SitusError, counted, none_read
from situs.progress import tracked

_TASK = 256  # samples: enough to make handing out tasks cheap, few enough for a smooth progress bar
# On a GPU several batches of up to so many bytes together are augmented at once: small ones cost launches, not work.
_AT_ONCE = 1 << 24


class Resident(NamedTuple):
    """values: what the pipeline's `collate` gives of the readable samples, [n, …] by name. index: [n] their rows in
    the source."""

    values: dict[str, Tensor]
    index: Tensor


def load_resident(pipeline: Pipeline, device: torch.device | str, max_bytes: int) -> Resident:
    """Every readable sample of a pipeline whose `collate` gives the same in every epoch.

    Broken ones are left out and listed in `source.skipped`; a strict source stops at the first.
    """
    if (whole := pipeline.whole()) is not None:
        _check_bytes(pipeline.source, whole, len(pipeline.source), max_bytes)
        values, index = whole, torch.arange(len(pipeline.source))
    else:
        values, index = _read_all(pipeline, max_bytes)
    return Resident(pipeline.move(values, torch.device(device)), index.to(device))


def _read_all(pipeline: Pipeline, max_bytes: int) -> tuple[Mapping[str, Tensor], Tensor]:
    """The values of all readable samples, and their rows in the source. Each part is copied to its place at once: parts
    and a tensor of all of them would take twice the memory."""
    source, count = pipeline.source, len(pipeline.source)
    reader = copy.copy(pipeline)
    reader.stand_in = False
    whole: dict[str, Tensor] = {}

    def read(span: range) -> WorkerBatch:
        part = reader.read(0, span)
        if len(part.ids) and not whole:
            _check_bytes(source, part.values, len(part.ids), max_bytes)
            whole.update({name: value.new_empty((count, *value.shape[1:])) for name, value in part.values.items()})
        if not len(part.ids) or not _fits(part.values, whole):
            return part
        place = slice(span.start, span.start + len(part.ids))
        for name, value in whole.items():
            value[place] = part.values[name]
        return part._replace(values={name: value[place] for name, value in whole.items()})

    spans = [range(start, min(start + _TASK, count)) for start in range(0, count, _TASK)]
    pop_transparency_flag()  # what other loaders have read does not count
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        parts = [read(spans[0])]
        while not whole and len(parts) < len(spans):  # all broken so far
            parts.append(read(spans[len(parts)]))
        later = spans[len(parts) :]
        parts += tracked(pool.map(read, later), f"reading {source.name}", len(later))
    broken = [entry for part in parts for entry in part.broken]
    for row, reason in broken:
        source.skip(row, reason)
    if len(broken) == count:
        raise SitusError(f"{none_read(source.name, count, source.things)}; the last: {broken[-1][1]}")
    if any(part.transparent for part in parts):
        source.note_transparency()
    return pipeline.join(_joined(whole, parts)), torch.cat([part.ids for part in parts])


def _joined(whole: dict[str, Tensor], parts: list[WorkerBatch]) -> list[dict[str, Tensor]]:
    """The rows of `whole` without gaps for broken samples, then the parts from the first on that does not fit in it."""
    parts = [part for part in parts if len(part.ids)]
    placed = [*takewhile(lambda part: _fits(part.values, whole), parts)]
    rows = 0
    for part in placed:
        for name, value in whole.items():
            if value[rows:].data_ptr() != part.values[name].data_ptr():
                value[rows : rows + len(part.ids)] = part.values[name].clone()
        rows += len(part.ids)
    return [{name: value[:rows] for name, value in whole.items()}, *(part.values for part in parts[len(placed) :])]


def _fits(values: dict[str, Tensor], whole: dict[str, Tensor]) -> bool:
    return all(
        values[name].shape[1:] == value.shape[1:] and values[name].dtype == value.dtype for name, value in whole.items()
    )


def _check_bytes(source: Source, values: Mapping[str, Tensor], rows: int, max_bytes: int) -> None:
    """Refuses a set that does not fit, judged by some of its rows; labels do not count, nor do they for `auto`."""
    needed = sum(value.nbytes for name, value in values.items() if name != "label") // max(1, rows) * len(source)
    if needed > max_bytes:
        takes, allowed = (
            f"{size / 2**30:.2f} GiB" if max_bytes >= 1 << 30 else f"{size:,} bytes" for size in (needed, max_bytes)
        )
        raise SitusError(
            f"{source.name}: {len(source)} {source.things} take {takes} and {allowed} are allowed; "
            "allow more or stream them (resident: never)",
            field=("resident_gib", "resident"),
        )


class ResidentStream:
    """The batches of a resident set, from any step of any epoch, several steps together where that is cheaper."""

    def __init__(self, pipeline: Pipeline, plan: BatchPlan, resident: Resident) -> None:
        self.pipeline, self.plan, self.resident, self.device = pipeline, plan, resident, resident.index.device

    def describe(self) -> str:
        """For the log: count, size and memory."""
        count, *sides = next(iter(self.resident.values.values())).shape
        size = " × ".join(map(str, sides)) + " samples" * (len(sides) == 1)
        mib = sum(value.nbytes for value in self.resident.values.values()) / 2**20
        return f"{counted(count, self.pipeline.source.things)} of {size} on {self.device}, {mib:.0f} MiB"

    def close(self) -> None:
        """It has no worker processes."""

    def steps_at_once(self) -> int:
        """Batches that are augmented together."""
        share = self.plan.batch // self.plan.world
        odd = share % 2 or self.plan.step_sampler is not None
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
        if waiting:  # padded: fewer steps would be another shape, for which the compiler takes half a minute
            yield self._together(waiting + [waiting[-1]] * (at_once - len(waiting)), len(waiting))

    def _together(self, steps: list[Tensor], count: int) -> list[WorkerBatch]:
        """count: how many of the steps are handed out."""
        ids = torch.cat(steps)
        rows = sample_of(ids)
        if len(self.resident.index) < len(self.pipeline.source):  # where broken ones are missing, rows are not numbers
            ids = ids - rows + self.resident.index[rows]
        values = {name: value[rows] for name, value in self.resident.values.items()}
        return [WorkerBatch(values, ids, [], sizes=[len(step) for step in steps[:count]])]
