"""From a path to batches on the device: small sets are resident there, large ones are streamed through workers.

Both give parts of batches as a pipeline's `collate` makes them; its `finish` does the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from situs.data.augment.recipes import AugmentConfig
from situs.data.batch import Batch
from situs.data.blocks import with_order
from situs.data.config import BATCH, NO_DATA, DataConfig
from situs.data.modalities import MODALITIES
from situs.data.modalities.image import PixelPipeline
from situs.data.open import open_source, resolve
from situs.data.pipeline import Pipeline, WorkerBatch
from situs.data.prefetch import Pace, prefetch
from situs.data.resident import Resident, ResidentStream, load_resident
from situs.data.sampler import BatchPlan, StepSampler
from situs.data.sources.base import Source
from situs.data.sources.images import pop_transparency_flag
from situs.data.sources.subset import PerClass, Subset
from situs.data.streaming import WorkerStream
from situs.errors import DataError, none_read
from situs.progress import tracked


class Loader:
    """Batches of one split. The same (epoch, step) always gives the same batch, on any number of ranks.

    workers: processes that read the samples, 0 for this one. order: what a log says of the order. resident: the
    samples, where they are on the device already.

    steps_per_epoch: batches an epoch, the same on every rank. global_batch: samples a step over all ranks. classes:
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
            raise DataError(f"{self.source.name}: holds {self.source.things}, and this looks at pixels")
        return self.pipeline

    def _batches(self, epoch: int, start_step: int) -> Iterator[Batch]:
        make, parts = partial(self._make, epoch), self._parts(epoch, start_step)
        if self.prefetches:
            return prefetch(make, parts, self.device)
        return (batch for step in parts for batch in _steps(make(step), step[0].sizes))

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
            raise DataError(f"{none}; the first: {broken[0].reason}")

    def iterate(self, epoch: int = 0, start_step: int = 0) -> Iterator[Batch]:
        """The epoch's batches from number `start_step` on."""
        batches, pace = self._batches(epoch, start_step), Pace(self.device if self.prefetches else None)
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
        raise DataError(f"{source.name}: holds {source.things}, but {modality.things} are asked for")
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


UPDATES, FEWEST = 10, 8
"""Default for a small set: updates an epoch, and samples of an update at least."""


def default_batch(count: int, world: int, *, training: bool, by_chance: bool = False) -> int:
    """The default number of samples a step, a multiple of the ranks: 256; in training a tenth of a smaller set, because
    100 epochs of one update each would be too few updates.

    by_chance: each step draws its samples by chance (DP-SGD), where large batches hide more: all of a smaller set.
    """
    small = count if by_chance else max(FEWEST, count // UPDATES)
    batch = min(BATCH, count, small) if training else BATCH
    return max(world, batch - batch % world)
