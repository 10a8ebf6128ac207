"""From a path to batches on the device: small sets resident there, large ones streamed through workers."""

from __future__ import annotations

import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from situs.data.ahead import Pace, ahead
from situs.data.augment.recipes import AugmentConfig
from situs.data.batch import Batch
from situs.data.blocks import BlockOrder, with_order
from situs.data.config import BATCH, NO_DATA, DataConfig
from situs.data.modalities import MODALITIES
from situs.data.modalities.base import Place
from situs.data.modalities.pixels import PixelPipeline
from situs.data.open import open_source, settle
from situs.data.pipeline import Pipeline, WorkerBatch
from situs.data.resident import HeldStream, Resident, load_resident
from situs.data.sampler import Balanced, BatchPlan, Drawn, LengthBuckets, batches_for, sample_of
from situs.data.sources.base import Source
from situs.data.sources.images import met_transparency
from situs.data.sources.subset import PerClass, Subset, check_one_class, class_labels
from situs.data.streaming import WorkerStream
from situs.errors import SitusError, counted, none_read
from situs.progress import tracked

# On a GPU smaller batches, counted in numbers, are augmented several at a time: they cost launches, not work.
_AT_ONCE = 1 << 24


class Loader(ABC):
    """Batches of one split. The same (epoch, step) always gives the same batch, on any number of ranks.

    steps_per_epoch: batches an epoch, the same on every rank. global_batch: samples a step over all ranks. classes:
    names in label order; None for a set without labels. data_wait: seconds spent in here so far, preparing or waiting
    for batches. On a GPU the kernels run behind the caller's back: of a set that is held there only their launching
    counts, and of a streamed one what the GPU waits for, since a thread makes its batches beside the steps
    (`situs.data.ahead`): the time of each batch at whose coming the GPU had nothing left to do.
    beside: whether it is so; the same batches.
    """

    def __init__(self, pipeline: Pipeline, plan: BatchPlan, device: torch.device) -> None:
        self.source, self.plan, self.device = pipeline.source, plan, device
        self.pipeline: Any = pipeline.to(device)
        self.steps_per_epoch, self.global_batch, self.classes = plan.steps, plan.batch, pipeline.source.classes
        self.data_wait, self.beside = 0.0, False

    def compile(self) -> Loader:
        """Fuse the augmentation with torch.compile."""
        self.pipeline.compile()
        return self

    @property
    def mark(self) -> str:
        """How many samples there are and how they are shuffled; where it is another, so are the batches."""
        order = self.plan.order
        if self.plan.drawn is not None:
            return f"{self.plan.n} samples, each step by chance"
        if isinstance(order, Balanced):
            mark = zlib.crc32(order.labels.cpu().numpy().tobytes())
            return f"{self.plan.n} samples, each class equally often ({mark:08x})"
        if isinstance(order, LengthBuckets):
            return f"{self.plan.n} samples by their lengths ({int(order.lengths.sum())} in all)"
        return (
            f"{self.plan.n} samples {f'in blocks ({order.mark})' if isinstance(order, BlockOrder) else 'in any order'}"
        )

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
            raise SitusError(f"{self.source.name}: holds {self.source.things}, and this looks at pixels", field="data")
        return self.pipeline

    @abstractmethod
    def _batches(self, epoch: int, start_step: int) -> Iterator[Batch]: ...

    @abstractmethod
    def describe(self) -> str:
        """For the log: what the set is and where it lies, and a line for whatever was left out."""

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

    def close(self) -> None:  # noqa: B027  (most have nothing to end)
        """Ends whatever works for it; the next batch begins anew."""

    def __iter__(self) -> Iterator[Batch]:
        return tracked(self.iterate(), self.source.name, self.steps_per_epoch)


class ResidentLoader(Loader):
    """The whole set on the device, images or clips; a batch is an index into it."""

    def __init__(self, pipeline: Pipeline, plan: BatchPlan, held: Resident) -> None:
        super().__init__(pipeline, plan, held.samples.device)
        self.held = held

    def _batches(self, epoch: int, start_step: int) -> Iterator[Batch]:
        waiting: list[Tensor] = []
        at_once = self._steps_at_once()
        for ids in batches_for(self.plan, epoch, start_step, self.device):
            if len(ids):
                waiting.append(ids)
            if len(waiting) >= at_once:
                yield from self._augmented(waiting, epoch)
                waiting = []
        if waiting:  # fewer would be another shape, for which the compiler takes half a minute
            filled = waiting + [waiting[-1]] * (at_once - len(waiting))
            yield from islice(self._augmented(filled, epoch), len(waiting))

    def _steps_at_once(self) -> int:
        """Batches that are augmented together."""
        if self.device.type == "cpu" or not self.pipeline.training:
            return 1
        share = self.plan.batch // self.plan.world
        return max(1, min(self.steps_per_epoch, _AT_ONCE // (share * self.pipeline.row_bytes)))

    def _augmented(self, steps: list[Tensor], epoch: int) -> Iterator[Batch]:
        ids, pipeline = torch.cat(steps), self.pipeline
        rows = sample_of(ids)
        if len(self.held.samples) < len(self.source):  # a broken one must not give its number to the next
            ids = ids - rows + self.held.index[rows]
        targets = {} if self.held.labels is None else {self.source.target: self.held.labels[rows]}
        noise = pipeline.noise(ids, epoch)
        together = Batch(pipeline.view(self.held.samples[rows], noise), ids, targets)
        # Pairs stay within their batch where batches are even, so that all of them are mixed at once.
        even = all(len(part) % 2 == 0 for part in steps)
        if even:
            together = pipeline.mix(together, noise)
        start = 0
        for part in steps:
            span = slice(start, start := start + len(part))
            own = together.part(span)
            yield own if even else pipeline.mix(own, {"mix": noise["mix"][span]} if "mix" in noise else {})

    def describe(self) -> str:
        """Count, size and memory."""
        count, *sides = self.held.samples.shape
        mib, size = self.held.samples.nbytes / 2**20, " × ".join(map(str, sides)) + " samples" * (len(sides) == 1)
        held = f"{counted(count, self.source.things)} of {size} on {self.device}, {mib:.0f} MiB"
        return "\n".join([f"{self.source.name}: {held}", *self.source.notes])


class StreamLoader(Loader):
    """Any modality, read by workers as it is asked for. workers: 0 reads in this process. order: said of the order.

    held: bytes that the samples may take where they are read once and kept on the device.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        plan: BatchPlan,
        device: torch.device,
        workers: int = 0,
        order: str = "",
        *,
        held: int | None = None,
    ) -> None:
        super().__init__(pipeline, plan, device)
        self.order = order
        # What is held lies on the caller's stream. On a CPU a thread would only take the steps' cores.
        self.beside = device.type == "cuda" and held is None and pipeline.beside
        self.stream: WorkerStream | HeldStream
        if held is None:
            self.stream = WorkerStream(pipeline, plan, workers, pin=device.type == "cuda")
        else:
            self.stream = HeldStream(pipeline, plan, device, held)

    def close(self) -> None:
        """Ends the workers."""
        if isinstance(self.stream, WorkerStream):
            self.stream.close()

    def _batches(self, epoch: int, start_step: int) -> Iterator[Batch]:
        make, parts = partial(self._make, epoch), self._parts(epoch, start_step)
        return ahead(make, parts, self.device) if self.beside else map(make, parts)

    def _make(self, epoch: int, parts: list[WorkerBatch]) -> Batch:
        moved = [self.pipeline.move(part.values, self.device) for part in parts]
        ids = torch.cat([part.ids.to(self.device, non_blocking=True) for part in parts])
        return self.pipeline.finish(self.pipeline.join(moved), ids, self.pipeline.noise(ids, epoch))

    def _parts(self, epoch: int, start_step: int) -> Iterator[list[WorkerBatch]]:
        """What the workers read; in the caller's thread, who forks them and hears of their end."""
        met_transparency()  # what others have met does not count
        for parts in self.stream.batches(epoch, start_step):
            for index, reason in (found for part in parts for found in part.broken):
                self.source.skip(index, reason)
            if any(part.transparent for part in parts):
                self.source.note_transparency()
            if any(len(part.ids) for part in parts):
                yield parts
        if not self.pipeline.training and (broken := self.source.skipped) and len(broken) == len(self.source):
            said = none_read(self.source.name, len(broken), self.source.things)
            raise SitusError(f"{said}; the first: {broken[0].reason}", field="data")

    def describe(self) -> str:
        """Count, of masks and objects their classes, and workers or memory."""
        many, how = counted(len(self.source), self.source.things), self.pipeline.at_hand or self.stream.describe()
        many += f" of {counted(len(self.source.classes or ()), 'classes')}," if self.source.dense else ""
        return "\n".join([f"{self.source.name}: {many} {how}{self.order}", *self.source.notes])


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
    device = torch.device(device)
    if source is None:
        if not config.path:
            raise SitusError(NO_DATA, field="data")
        # What an evaluation sees is scaled by the training split, whatever split it looks at.
        settled = settle(config if augment is not None else replace(config, split=None))
        config = replace(settled, split=config.split)
        split = config.split or (None if augment is not None else "val")
        source = open_source(config, split)
    if augment is not None and config.count is not None:
        source = Subset(source, config.count)
    if augment is not None and config.per_class is not None:
        source = PerClass(source, config.per_class)
    modality, training = config.modality, augment is not None
    if source.things in {each.things for each in MODALITIES} - {modality.things}:
        raise SitusError(f"{source.name}: holds {source.things}, and {modality.things} are asked for", field="data")
    if augment is not None:
        modality.check_augment(augment)
    held = None
    if (hold := modality.hold(source, config)) is not None:
        held = load_resident(source, device, hold.size, hold.sample, max_bytes=int(config.resident_gib * 2**30))
    count = len(source) if held is None else len(held.samples)
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
    plan = _balanced(plan, source, config, held)
    pipeline = modality.pipeline(source, config, augment, Place(device, held is not None))
    if held is not None:
        return ResidentLoader(pipeline, plan, held)
    if training and config.resident == "always" and not pipeline.at_hand:  # an evaluation looks at each once
        if modality.kept:
            return StreamLoader(pipeline, plan, device, held=int(config.resident_gib * 2**30))
        source.notes.append(f"{source.name}: is streamed whatever resident says, as {modality.known} are")
    order = ""
    if training and drawn is None:
        chosen = None if isinstance(plan.order, Balanced) else modality.order(source, config, plan)
        plan, order = chosen or with_order(plan, source, config)
    return StreamLoader(pipeline, plan, device, 0 if pipeline.at_hand else config.workers, order)


def _balanced(plan: BatchPlan, source: Source, config: DataConfig, held: Resident | None = None) -> BatchPlan:
    """The plan of a training in which every class comes equally often, where the config asks for that."""
    if not config.balanced or not plan.shuffle:
        return plan
    if plan.drawn is not None:
        asked = "balanced: differential privacy draws each sample by itself, whatever its class; leave one of them out"
        raise SitusError(asked, field="balanced")
    check_one_class(source, "balanced")
    labels = class_labels(source) if held is None or held.labels is None else held.labels
    return replace(plan, order=Balanced(labels, plan.repeated))


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
