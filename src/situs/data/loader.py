"""From a path to batches on the device.

Small sets are resident there: read once, then a batch is an index. Of large ones worker processes read and crop the
samples, and in training start the next epoch while the last batches of this one are used. Both give parts of batches as
a pipeline's `collate` makes them; its `finish` does the rest. A broken sample is reported with its batch, once.
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from situs.data.augment.recipes import AugmentConfig
from situs.data.batch import Batch
from situs.data.config import BATCH, NO_DATA, DataConfig
from situs.data.modalities import MODALITIES
from situs.data.modalities.image import PixelPipeline
from situs.data.open import open_source, resolve
from situs.data.pipeline import Pipeline, WorkerBatch
from situs.data.prefetch import Pace, prefetch
from situs.data.sampler import (
    Balanced,
    BatchPlan,
    BlockEpoch,
    BlockOrder,
    LengthBuckets,
    Permutation,
    StepSampler,
    batches_for,
    block_order,
    sample_of,
)
from situs.data.sources.base import Source
from situs.data.sources.images import pop_transparency_flag
from situs.data.sources.subset import PerClass, Subset, check_one_class, class_labels
from situs.data.work import cores, process_results, raise_error, worker_death_in_words
from situs.errors import DataError, SitusError, counted, none_read
from situs.progress import tracked


class Loader:
    """Batches of one split. The same (epoch, step) always gives the same batch, on any number of ranks.

    workers: processes that read the samples, 0 for this one. order: what a log says of the order. resident: the
    samples, where they are on the device already.

    steps_per_epoch: batches an epoch, the same on every rank. global_batch: samples per step over all ranks. classes:
    names in label order; None for a set without labels. data_wait: seconds spent in here so far, preparing or waiting
    for batches; for a resident set on a GPU only launching its kernels counts. prefetches: whether a thread makes the
    batches while steps run (`situs.data.prefetch`); then only waits with an idle GPU count. The batches are the same.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        plan: BatchPlan,
        device: torch.device,
        workers: int = 0,
        order: str = "",
        resident: Resident | None = None,
    ) -> None:
        self.source, self.plan, self.device, self.order = pipeline.source, plan, device, order
        self.pipeline: Any = pipeline.to(device)
        self.steps_per_epoch, self.global_batch, self.classes = plan.steps, plan.batch, pipeline.source.classes
        # A resident set is on the caller's stream. On a CPU a thread would only take the steps' cores.
        self.data_wait, self.prefetches = 0.0, device.type == "cuda" and resident is None and pipeline.thread_safe
        self.stream: WorkerStream | ResidentStream
        if resident is None:
            self.stream = WorkerStream(pipeline, plan, workers, pin=device.type == "cuda")
        else:
            self.stream = ResidentStream(pipeline, plan, resident)

    def compile(self) -> Loader:
        """Fuse the augmentation with torch.compile."""
        self.pipeline.compile()
        return self

    def describe(self) -> str:
        """For the log: what the set is and where it is, and a line for whatever was left out."""
        return "\n".join([f"{self.source.name}: {self.stream.describe()}{self.order}", *self.source.notes])

    @property
    def mark(self) -> str:
        """How many samples there are and how they are shuffled; where it differs, so do the batches."""
        by_chance = self.plan.step_sampler is not None
        order = ", each step by chance" if by_chance else getattr(self.plan.order, "mark", " in any order")
        return f"{self.plan.n} samples{order}"

    def shown(self, inputs: Tensor) -> Tensor:
        """Its inputs as pictures for people, [B, C, H, W] in [0, 1]."""
        return self.pipeline.shown(inputs)

    @property
    def mean(self) -> Tensor:
        """Of images: what was subtracted from each channel."""
        return self._pixels().mean

    @property
    def std(self) -> Tensor:
        """Of images: what each channel was divided by."""
        return self._pixels().std

    def _pixels(self) -> PixelPipeline:
        if not isinstance(self.pipeline, PixelPipeline):
            raise DataError(f"{self.source.name}: contains {self.source.things}, but images are needed")
        return self.pipeline

    def _make(self, epoch: int, parts: list[WorkerBatch]) -> Batch:
        moved = [self.pipeline.move(part.values, self.device) for part in parts]
        ids = [part.ids.to(self.device, non_blocking=True) for part in parts]
        ids = torch.cat(ids) if len(ids) > 1 else ids[0]
        return self.pipeline.finish(self.pipeline.join(moved), ids, self.pipeline.noise(ids, epoch))

    def _parts(self, epoch: int, start_step: int) -> Iterator[list[WorkerBatch]]:
        """What was read; in the caller's thread, which forks the workers and hears of their end."""
        pop_transparency_flag()  # what other loaders have read does not count
        for parts in self.stream.batches(epoch, start_step):
            for index, reason in (broken for part in parts for broken in part.broken):
                self.source.skip(index, reason, replaced=self.pipeline.stand_in)
            if any(part.transparent for part in parts):
                self.source.note_transparency()
            if any(len(part.ids) for part in parts):
                yield parts
        if not self.pipeline.training and (broken := self.source.skipped) and len(broken) == len(self.source):
            none = none_read(self.source.name, len(broken), self.source.things)
            raise DataError(f"{none}; the first: {next(iter(broken.values()))}")

    def iterate(self, epoch: int = 0, start_step: int = 0) -> Iterator[Batch]:
        """The epoch's batches from number `start_step` on."""
        make, parts = partial(self._make, epoch), self._parts(epoch, start_step)
        batches = (batch for step in parts for batch in _steps(make(step), step[0].sizes))
        if self.prefetches:
            batches = prefetch(make, parts, self.device)
        pace = Pace(self.device if self.prefetches else None)
        while True:
            started = time.perf_counter()
            batch = next(batches, None)
            if not pace.busy:
                self.data_wait += time.perf_counter() - started
            if batch is None:
                return
            yield batch
            pace.launched()

    def close(self) -> None:
        """Ends its worker processes; the next batch starts new ones."""
        self.stream.close()

    def __iter__(self) -> Iterator[Batch]:
        return tracked(self.iterate(), self.source.name, self.steps_per_epoch)


def _steps(batch: Batch, sizes: Sequence[int]) -> Iterator[Batch]:
    """The batches of several steps, one by one; a single one as it is."""
    if len(sizes) < 2 and (not sizes or sizes[0] == len(batch.ids)):
        yield batch
        return
    start = 0
    for size in sizes:
        yield batch.part(slice(start, start := start + size))


def make_loader(
    config: DataConfig,
    augment: AugmentConfig | None,
    device: torch.device | str = "cpu",
    *,
    rank: int = 0,
    world: int = 1,
    source: Source | None = None,
    step_sampler: StepSampler | None = None,
) -> Loader:
    """A loader for training, with augmentation, or with `augment=None` for evaluation.

    Evaluation keeps the set's order and its last, smaller batch, and crops the centre. source: samples that are open
    already, such as a `TensorSource`; by default those at `config.path`. step_sampler: which samples a step takes,
    where that is no permutation of the set.
    """
    device, training = torch.device(device), augment is not None
    if source is None:
        if not config.path:
            raise DataError(NO_DATA)
        # An evaluation is normalised by the training split, whatever split it looks at.
        resolved = resolve(config if training else replace(config, split=None))
        config = replace(resolved, split=config.split)
        source = open_source(config, config.split or (None if training else "val"))
    if training and config.count is not None:
        source = Subset(source, config.count)
    if training and config.per_class is not None:
        source = PerClass(source, config.per_class)
    modality = config.modality
    if source.things in {other.things for other in MODALITIES} - {modality.things}:
        raise DataError(f"{source.name}: contains {source.things}, but {modality.things} are expected")
    if augment is not None:
        modality.check_augment(augment)
    pipeline = modality.pipeline(source, config, augment, device)
    resident = load_resident(pipeline, device, int(config.resident_gib * 2**30)) if pipeline.resident else None
    count = len(source) if resident is None else len(resident.index)
    plan = BatchPlan(
        count,
        config.batch or default_batch(count, world, training=training, by_chance=step_sampler is not None),
        config.seed,
        rank,
        world,
        augment.repeated if augment is not None else 1,
        shuffle=training,
        drop_last=training,
        step_sampler=step_sampler,
    )
    plan, order = with_order(plan, pipeline, config, None if resident is None else resident.values)
    return Loader(pipeline, plan, device, 0 if pipeline.in_memory else config.workers, order, resident)


def with_order(
    plan: BatchPlan, pipeline: Pipeline, config: DataConfig, resident: Mapping[str, Tensor] | None = None
) -> tuple[BatchPlan, str]:
    """The plan with the order that the config asks for, and what a log says of it. resident: the values of all samples,
    where they are on the device."""
    source = pipeline.source
    if not plan.shuffle:
        return plan, ""
    if config.balanced:
        if plan.step_sampler is not None:
            reason = "cannot be used with differential privacy, which draws samples independently of their class"
            raise SitusError(f"balanced: {reason}", field="balanced")
        check_one_class(source, "balanced")
        labels = class_labels(source) if resident is None or "label" not in resident else resident["label"]
        return replace(plan, order=Balanced(labels, plan.repeated)), ", each class equally often"
    if plan.step_sampler is not None or resident is not None:
        return plan, ""
    if pipeline.in_memory:
        lengths = pipeline.lengths()
        if lengths is None:
            return plan, ""
        return replace(plan, order=LengthBuckets(lengths, plan.batch)), ", in batches of similar length"
    blocks = source.blocks()
    if config.order == "blocks" and blocks is None:
        raise SitusError(field="order", value="blocks", allowed=f"exact, because {source.name} is not read in blocks")
    if blocks is None or config.order == "exact" or (config.order == "auto" and not blocks.slow_random_access):
        slow = blocks is not None and blocks.slow_random_access
        cost = ""
        if blocks is not None and slow:
            whole = f"a whole {blocks.name.removesuffix('s')} is read for each sample"
            cost = f"; slow, because {whole} ({counted(len(blocks.ends), blocks.name)})"
        return plan, f", shuffled exactly{cost}"
    order = block_order(blocks, config.window_gib * 2**30, plan.distinct, plan.n // plan.batch)
    gib = blocks.bytes / len(blocks.ends) * order.open / 2**30
    reason = ", because the set is too large for a fully random order" if blocks.slow_random_access else ""
    shuffled = f"{order.open:,} of {len(blocks.ends):,} {blocks.name} at a time ({gib:.2g} GiB){reason}"
    return replace(plan, order=order), f", shuffled in blocks: {shuffled}"


UPDATES, FEWEST = 10, 8
"""Default for a small set: updates per epoch, and samples of an update at least."""


def default_batch(count: int, world: int, *, training: bool, by_chance: bool = False) -> int:
    """The default number of samples per step, a multiple of the ranks: 256; in training a tenth of a smaller set,
    because 100 epochs of one update each would be too few updates.

    by_chance: each step draws its samples by chance (DP-SGD), where large batches hide more: all of a smaller set.
    """
    small = count if by_chance else max(FEWEST, count // UPDATES)
    batch = min(BATCH, count, small) if training else BATCH
    return max(world, batch - batch % world)


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
    and a tensor of all of them take twice the memory, as they do where a sample is broken."""
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
    gaps = bool(broken) or not all(_fits(part.values, whole) for part in parts)
    values = [part.values for part in parts if len(part.ids)] if gaps else [whole]
    return pipeline.join(values), torch.cat([part.ids for part in parts])


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
            f"{source.name}: {len(source)} {source.things} need {takes} of memory, but the limit is {allowed}; raise "
            "the limit (resident_gib), or stream the data (resident=never)",
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
