"""From a path to batches on the device: small sets resident there, large ones streamed through workers.

Both ways give parts of batches as a pipeline's `collate` makes them, and its `finish` does the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from situs.core.kernels import has_kernels
from situs.data.ahead import Pace, ahead
from situs.data.audio_pipeline import AudioPipeline, Scale, measure_scale
from situs.data.augment.recipes import AugmentConfig
from situs.data.batch import Batch
from situs.data.blocks import with_order
from situs.data.config import BATCH, DENSE, NO_DATA, DataConfig
from situs.data.image_pipeline import ImagePipeline
from situs.data.mask_pipeline import MaskPipeline
from situs.data.object_pipeline import ObjectPipeline
from situs.data.pipeline import Pipeline, WorkerBatch
from situs.data.resident import Resident, ResidentStream, hold, holds_clips, resident_size
from situs.data.sampler import BatchPlan, Drawn
from situs.data.sources import kind_of, open_source
from situs.data.sources.audio import noise_folder, read_noise
from situs.data.sources.base import Source
from situs.data.sources.images import met_transparency
from situs.data.sources.speech import part_of
from situs.data.sources.subset import PerClass, Subset
from situs.data.streaming import WorkerStream
from situs.data.text_pipeline import TextPipeline, check_augment
from situs.errors import SitusError, none_read
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

    def _pixels(self) -> ImagePipeline:
        if not isinstance(self.pipeline, ImagePipeline):
            raise SitusError(f"{self.source.name}: holds {self.source.things}, and this looks at pixels", field="data")
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
                self.source.skip(index, reason)
            if any(part.transparent for part in parts):
                self.source.note_transparency()
            if any(len(part.ids) for part in parts):
                yield parts
        if not self.pipeline.training and (broken := self.source.skipped) and len(broken) == len(self.source):
            none = none_read(self.source.name, len(broken), self.source.things)
            raise SitusError(f"{none}; the first: {broken[0].reason}", field="data")

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
            raise SitusError(NO_DATA, field="data")
        # What an evaluation sees is scaled by the training split, whatever split it looks at.
        settled = settle(config if training else replace(config, split=None))
        config = replace(settled, split=config.split)
        source = open_source(config.path, config.split or (None if training else "val"), **config.wanted())
    if training and config.count is not None:
        source = Subset(source, config.count)
    if training and config.per_class is not None:
        source = PerClass(source, config.per_class)
    pipeline = _PIPELINES[config.kind or "image"](source, config, augment, device)
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


def settle(config: DataConfig) -> DataConfig:
    """The config with what its data says: that it is text; that it is clips, of one channel, and the mean and deviation
    of their frames; of images with masks or objects the names of the classes.

    The same data always gives the same config. Other images are left as they are.
    """
    if (things := DENSE.get(config.target)) and config.path and not getattr(config, things).classes:
        source = open_source(config.path, config.split, **config.wanted())
        whole: Any = source.origin(0)[0]
        known = whole.masks if things == "masks" else replace(config.objects, classes=source.classes or ())
        return replace(config, **{things: known})
    kind = kind_of(config.path, config.kind, multi_label=config.multi_label) if config.path else "image"
    if kind != "audio":
        return replace(config, kind=kind) if kind == "text" else config
    try:  # the size is checked by the config itself, and the channels of clips are no choice
        told = replace(config, kind="audio", channels=1, img_size=config.img_size or config.audio.size)
    except SitusError as error:
        if config.kind is None:
            raise error.said_of(f"{config.path}: holds clips, and images are asked for") from error
        raise
    config = told
    if config.mean and config.std:
        return config
    scale = measure_scale(open_source(config.path, config.split, **config.wanted()), config.audio)
    mean, std = (tuple(round(value, 4) for value in part.tolist()) for part in scale)
    return replace(config, mean=config.mean or mean, std=config.std or std)


def _images(source: Source, config: DataConfig, augment: AugmentConfig | None, device: torch.device) -> Pipeline:
    if source.things == "clips":
        raise SitusError(f"{source.name}: holds clips, and images are asked for", field="data")
    given = source, config.size, config.seed, augment
    always = augment is not None and config.resident == "always"  # an evaluation looks at each once
    if source.target == "mask":
        pipeline = MaskPipeline(*given, config.normalisation)
        pipeline.held = always
        return pipeline
    if source.target == "objects":
        if always:
            source.notes.append(f"{source.name}: is streamed whatever resident says, as images with objects are")
        return ObjectPipeline(*given, config.normalisation)
    if augment is not None and augment.crop in ("scaled", "fitted"):
        allowed = "none, resized or pad without masks or objects"
        raise SitusError(field="augment.crop", value=augment.crop, allowed=allowed)
    return ImagePipeline(
        *given,
        crop_share=config.crop_share,
        normalisation=config.normalisation,
        held=resident_size(source, config),
        device_resizes=has_kernels(device),
    )


def _clips(source: Source, config: DataConfig, augment: AugmentConfig | None, _: torch.device) -> Pipeline:
    """Noise is read where training or the evaluation mixes some in; a split has its own part of it."""
    bank, noisy = None, config.audio.snr_db is not None
    if augment is not None:
        noisy = augment.audio.noise_share > 0 and augment.audio.noise_level > 0
    if noisy and (config.path or config.audio.noise):
        folder = noise_folder(Path(config.path).expanduser(), config.audio)
        bank, notes = read_noise(folder, part_of(config.split or ("val" if augment is None else None)), config.audio)
        source.notes += notes
        if bank is None:
            source.notes.append(f"{source.name}: has no background noise, so that none is mixed in")
    scale = Scale(*(torch.tensor(part) for part in config.normalisation))
    pipeline = AudioPipeline(source, config.audio, scale, augment=augment, noise_bank=bank, seed=config.seed)
    pipeline.held = holds_clips(source, config)
    return pipeline


def _sentences(source: Source, config: DataConfig, augment: AugmentConfig | None, _: torch.device) -> Pipeline:
    if augment is not None:
        check_augment(augment)
    return TextPipeline(source, config.longest, training=augment is not None, words=config.target == "words")


_PIPELINES = {"image": _images, "audio": _clips, "text": _sentences}


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
