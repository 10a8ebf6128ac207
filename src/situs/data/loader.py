"""From a path to batches on the device: small sets resident there, large ones streamed through workers.

Both ways give parts of batches as a pipeline's `collate` makes them, and its `finish` does the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from situs.data.ahead import Pace, ahead
from situs.data.augment.recipes import AugmentConfig
from situs.data.batch import Batch
from situs.data.blocks import with_order
from situs.data.config import BATCH, NO_DATA, DataConfig
from situs.data.modalities import MODALITIES
from situs.data.modalities.image import PixelPipeline
from situs.data.open import open_source, settle
from situs.data.pipeline import Pipeline, WorkerBatch
from situs.data.resident import Resident, ResidentStream, hold
from situs.data.sampler import BatchPlan, Drawn
from situs.data.sources.base import Source
from situs.data.sources.images import met_transparency
from situs.data.sources.subset import PerClass, Subset
from situs.data.streaming import WorkerStream
from situs.errors import DataError, none_read
from situs.progress import tracked


class Loader:
    """Batches of one split. The same (epoch, step) always gives the same batch, on any number of ranks.

    workers: processes that read the samples, 0 for this one. order: what a log says of the order. held: the samples,
    where they lie on the device already.

    steps_per_epoch: batches an epoch, the same on every rank. global_batch: samples a step over all ranks. classes:
    names in label order; None for a set without labels. data_wait: seconds spent in here so far, preparing or waiting
    for batches. On a GPU a resident set's kernels run behind the caller's back, and only their launching counts; of a
    streamed set a thread makes the batches beside the steps (`situs.data.ahead`), and only those count at whose coming
    the GPU had nothing left to do. beside: whether it is so; the same batches.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        plan: BatchPlan,
        device: torch.device,
        workers: int = 0,
        order: str = "",
        held: Resident | None = None,
    ) -> None:
        self.source, self.plan, self.device, self.order = pipeline.source, plan, device, order
        self.pipeline: Any = pipeline.to(device)
        self.steps_per_epoch, self.global_batch, self.classes = plan.steps, plan.batch, pipeline.source.classes
        # What is held lies on the caller's stream. On a CPU a thread would only take the steps' cores.
        self.data_wait, self.beside = 0.0, device.type == "cuda" and held is None and pipeline.beside
        self.stream: WorkerStream | ResidentStream
        if held is None:
            self.stream = WorkerStream(pipeline, plan, workers, pin=device.type == "cuda")
        else:
            self.stream = ResidentStream(pipeline, plan, held)

    def compile(self) -> Loader:
        """Fuse the augmentation with torch.compile."""
        self.pipeline.compile()
        return self

    def describe(self) -> str:
        """For the log: what the set is and where it lies, and a line for whatever was left out."""
        return "\n".join([f"{self.source.name}: {self.stream.describe()}{self.order}", *self.source.notes])

    @property
    def mark(self) -> str:
        """How many samples there are and how they are shuffled; where it is another, so are the batches."""
        order = ", each step by chance" if self.plan.drawn else getattr(self.plan.order, "mark", " in any order")
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
        if self.beside:
            return ahead(make, parts, self.device)
        return (batch for each in parts for batch in _steps(make(each), each[0].sizes))

    def _make(self, epoch: int, parts: list[WorkerBatch]) -> Batch:
        moved = [self.pipeline.move(part.values, self.device) for part in parts]
        ids = [part.ids.to(self.device, non_blocking=True) for part in parts]
        ids = torch.cat(ids) if len(ids) > 1 else ids[0]
        return self.pipeline.finish(self.pipeline.join(moved), ids, self.pipeline.noise(ids, epoch))

    def _parts(self, epoch: int, start_step: int) -> Iterator[list[WorkerBatch]]:
        """What was read; in the caller's thread, who forks the workers and hears of their end."""
        met_transparency()  # what others have met does not count
        for parts in self.stream.batches(epoch, start_step):
            for index, reason in (each for part in parts for each in part.broken):
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
        batches, pace = self._batches(epoch, start_step), Pace(self.device if self.beside else None)
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
        """Ends whatever works for it; the next batch begins anew."""
        self.stream.close()

    def __iter__(self) -> Iterator[Batch]:
        return tracked(self.iterate(), self.source.name, self.steps_per_epoch)


def _steps(batch: Batch, sizes: Sequence[int]) -> Iterator[Batch]:
    """A batch of several steps, one by one; one step as it is."""
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
    drawn: Drawn | None = None,
) -> Loader:
    """A loader for training, with augmentation, or with `augment=None` for evaluation.

    Evaluation keeps the set's order and its last, smaller batch, and crops the centre. source: images that are open
    already, such as a `TensorSource`; else those at `config.path`. drawn: which samples a step takes, where that is not
    an order of theirs.
    """
    device, training = torch.device(device), augment is not None
    if source is None:
        if not config.path:
            raise DataError(NO_DATA)
        # What an evaluation sees is scaled by the training split, whatever split it looks at.
        settled = settle(config if training else replace(config, split=None))
        config = replace(settled, split=config.split)
        source = open_source(config, config.split or (None if training else "val"))
    if training and config.count is not None:
        source = Subset(source, config.count)
    if training and config.per_class is not None:
        source = PerClass(source, config.per_class)
    modality = config.modality
    if source.things in {each.things for each in MODALITIES} - {modality.things}:
        raise DataError(f"{source.name}: holds {source.things}, and {modality.things} are asked for")
    if augment is not None:
        modality.check_augment(augment)
    pipeline = modality.pipeline(source, config, augment, device)
    held = hold(pipeline, device, int(config.resident_gib * 2**30)) if pipeline.held else None
    count = len(source) if held is None else len(held.index)
    plan = BatchPlan(
        count,
        config.batch or default_batch(count, world, training=training, drawn=drawn is not None),
        config.seed,
        rank,
        world,
        augment.repeated if augment is not None else 1,
        shuffle=training,
        drop_last=training,
        drawn=drawn,
    )
    plan, order = with_order(plan, pipeline, config, None if held is None else held.values)
    return Loader(pipeline, plan, device, 0 if pipeline.in_memory else config.workers, order, held)


UPDATES, FEWEST = 10, 8
"""Updates an epoch that a small set is cut in, by default, and the samples of one at least."""


def default_batch(count: int, world: int, *, training: bool, drawn: bool = False) -> int:
    """Samples a step where nobody said how many: 256, or for training a tenth of a smaller set, for what is learned
    depends on the updates, and 100 epochs of one update each are few; a multiple of the ranks.

    drawn: each step draws its samples by chance (DP-SGD), where large batches hide more: all of a smaller set.
    """
    small = count if drawn else max(FEWEST, count // UPDATES)
    batch = min(BATCH, count, small) if training else BATCH
    return max(world, batch - batch % world)
