"""From a path to batches on the device: small sets resident there, large ones streamed through workers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from situs.config import Checked
from situs.data.augment.recipes import AugmentConfig
from situs.data.batch import Batch
from situs.data.blocks import BlockOrder, block_order
from situs.data.image_pipeline import Decoder, ImagePipeline, Resizer, centre_crop
from situs.data.pipeline import Pipeline
from situs.data.resident import Progress, Resident, load_resident
from situs.data.sampler import BatchPlan, batches_for, sample_of
from situs.data.sources import open_source
from situs.data.sources.base import Source, TensorSource
from situs.data.sources.images import BrokenImageError
from situs.data.sources.subset import Subset
from situs.data.streaming import WorkerStream
from situs.errors import SitusError
from situs.limits import Count, Natural, Positive, Within

_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# On a GPU, batches smaller than this many numbers are augmented several at a time: a sample's view does not depend on
# its batch, and a small batch costs the launching of its kernels, not their work.
_AT_ONCE = 1 << 24
_PROBES = 16
_LARGEST = 8  # times the size the model sees
BATCH = 256
NO_DATA = "give the images, or samples for the embedded set of 9,000 pictures of clothes"


@dataclass(frozen=True)
class DataConfig(Checked):
    """Where the images are and how they come to the model."""

    path: str = ""
    """Image folder, folder of parquet or tar files, CIFAR batches, or "samples" for the embedded set."""

    split: str | None = None
    """train, val or test; by default the training split where there is one, and val for evaluation."""

    multi_label: bool = False
    """Whether an image has any number of the classes: by a table among the files, or by a list or 0/1 columns of
    parquet files. By default it has one."""

    held_out: Annotated[float, Within("[0, 1)")] = 0.0
    """Share of data without a val or test split that is held out as both, by the images' names; train is the rest."""

    img_size: Count | tuple[Count, Count] | None = None
    """Side of the square, or height and width, that the model sees; by default the model's own."""

    channels: Count = 3
    """Channels the model sees: grey is repeated to 3, RGB weighed to 1, others must match."""

    count: Count | None = None
    """Train on at most so many of the images, chosen at random and the same every time; by default on all."""

    batch: Count | None = None
    """Images a step over all ranks; by default 256, or all of a smaller set."""

    workers: Natural = 4
    """Processes that decode a streamed set, at most one a core; 0 decodes in the main process."""

    decode: Decoder = "auto"
    """How a streamed JPEG is read for training. cpu: whole. scaled: at 1/2, 1/4 or 1/8 of its sides where its crop asks
    for no more, which saves time on large photographs and changes their pixels a little. gpu: by nvJPEG on the device,
    whose pixels differ from libjpeg's by a level or two; for hosts with few cores. auto: cpu."""

    resize: Resizer = "worker"
    """Who brings the random crops of a streamed set to their size: the workers, or the device, to the same bits; for
    hosts whose cores cannot keep up."""

    resident: Literal["auto", "always", "never"] = "auto"
    """Whether the set is decoded once and kept on the device; auto: small images of one size that fit."""

    resident_gib: Positive = 4.0
    """Memory that a resident set may take."""

    order: Literal["auto", "exact", "blocks"] = "auto"
    """How a streamed set is shuffled: any sample anywhere, or mixed within a window of blocks, each read once; auto:
    blocks for parquet files that memory does not hold, and for remote shards of more than 64 GiB."""

    window_gib: Positive = 2.0
    """Memory of the blocks that are mixed at a time, over all workers and ranks."""

    crop_share: Annotated[float, Within("(0, 1]")] = 1.0
    """Evaluation: share of the image's shorter side that the centre crop keeps (ImageNet: 0.875)."""

    mean: tuple[float, ...] = ()
    """Mean of each channel, subtracted; default: ImageNet's for three channels, else 0.5."""

    std: tuple[Positive, ...] = ()
    """Deviation of each channel, divided by; default: ImageNet's for three channels, else 0.25."""

    seed: int = 0
    """Seed of order and augmentation."""

    strict: bool = False
    """Stop at a broken image instead of skipping it."""

    def check(self) -> None:
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in {0, self.channels}:
                allowed = f"{self.channels} numbers, one a channel"
                raise SitusError(field=(name, "channels"), value=getattr(self, name), allowed=allowed)

    def wanted(self) -> dict[str, Any]:
        """How the set is asked for, by the arguments of `open_source`."""
        return {name: getattr(self, name) for name in ("channels", "strict", "held_out", "multi_label")}

    @property
    def size(self) -> tuple[int, int]:
        """Height and width that the model sees."""
        if self.img_size is None:
            raise SitusError("img_size: must be given where no model says it", field="img_size")
        return (self.img_size, self.img_size) if isinstance(self.img_size, int) else self.img_size

    @property
    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation of each channel, with the defaults filled in."""
        mean, std = _IMAGENET if self.channels == 3 else ((0.5,) * self.channels, (0.25,) * self.channels)
        return self.mean or mean, self.std or std


class Loader(ABC):
    """Batches of one split. The same (epoch, step) always gives the same batch, on any number of ranks.

    steps_per_epoch: batches an epoch, the same on every rank. global_batch: samples a step over all ranks. classes:
    names in label order; None for a set without labels. data_wait: seconds spent in here so far, preparing or waiting
    for batches; on a GPU the augmentation itself runs behind the caller's back and only its launching counts.
    """

    def __init__(self, pipeline: Pipeline, plan: BatchPlan, device: torch.device) -> None:
        self.source, self.plan, self.device = pipeline.source, plan, device
        self.pipeline: Any = pipeline.to(device)
        self.steps_per_epoch, self.global_batch, self.classes = plan.steps, plan.batch, pipeline.source.classes
        self.data_wait = 0.0

    def compile(self) -> Loader:
        """Fuse the augmentation with torch.compile."""
        self.pipeline.compile()
        return self

    @property
    def mark(self) -> str:
        """How many samples there are and how they are shuffled; where it is another, so are the batches."""
        order = self.plan.order
        return (
            f"{self.plan.n} samples {f'in blocks ({order.mark})' if isinstance(order, BlockOrder) else 'in any order'}"
        )

    @property
    def mean(self) -> Tensor:
        """Of images: what was subtracted from each channel."""
        return self.pipeline.mean

    @property
    def std(self) -> Tensor:
        """Of images: what each channel was divided by."""
        return self.pipeline.std

    @abstractmethod
    def _batches(self, epoch: int, start_step: int) -> Iterator[Batch]: ...

    @abstractmethod
    def describe(self) -> str:
        """For the log: what the set is and where it lies, and a line for whatever was left out."""

    def iterate(self, epoch: int = 0, start_step: int = 0) -> Iterator[Batch]:
        """The epoch's batches from number `start_step` on."""
        batches = self._batches(epoch, start_step)
        while True:
            started = time.perf_counter()
            batch = next(batches, None)
            self.data_wait += time.perf_counter() - started
            if batch is None:
                return
            yield batch

    def __iter__(self) -> Iterator[Batch]:
        return self.iterate()


class ResidentLoader(Loader):
    """The whole set of images on the device; a batch is an index into it."""

    pipeline: ImagePipeline

    def __init__(self, pipeline: ImagePipeline, plan: BatchPlan, held: Resident) -> None:
        super().__init__(pipeline, plan, held.images.device)
        self.held = held

    def _batches(self, epoch: int, start_step: int) -> Iterator[Batch]:
        waiting: list[Tensor] = []
        for ids in batches_for(self.plan, epoch, start_step, self.device):
            if len(ids):
                waiting.append(ids)
            if len(waiting) >= self._steps_at_once():
                yield from self._augmented(waiting, epoch)
                waiting = []
        if waiting:
            yield from self._augmented(waiting, epoch)

    def _steps_at_once(self) -> int:
        if self.device.type == "cpu" or not self.pipeline.training:
            return 1
        height, width = self.pipeline.size
        share = self.plan.batch // self.plan.world
        return max(1, _AT_ONCE // (share * self.held.images.shape[1] * height * width))

    def _augmented(self, steps: list[Tensor], epoch: int) -> Iterator[Batch]:
        ids, pipeline = torch.cat(steps), self.pipeline
        rows = sample_of(ids)
        if len(self.held.images) < len(self.source):  # a broken image must not give its number to the next
            ids = ids - rows + self.held.index[rows]
        images = self.held.images[rows]
        targets = {} if self.held.labels is None else {self.source.target: self.held.labels[rows]}
        if not pipeline.training:
            images = centre_crop(images, pipeline.size, pipeline.crop_share)
        noise = pipeline.noise(ids, epoch)
        together = Batch(pipeline.view(images, noise), ids, targets)
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
        count, channels, height, width = self.held.images.shape
        mib = self.held.images.nbytes / 2**20
        held = f"{count} images of {channels} × {height} × {width} on {self.device}, {mib:.0f} MiB"
        return "\n".join([f"{self.source.name}: {held}", *self.source.notes])


class StreamLoader(Loader):
    """Any modality, read by workers as it is asked for. workers: 0 reads in this process. order: said of the order."""

    def __init__(
        self, pipeline: Pipeline, plan: BatchPlan, device: torch.device, workers: int = 0, order: str = ""
    ) -> None:
        super().__init__(pipeline, plan, device)
        self.order = order
        self.stream = WorkerStream(pipeline, plan, workers, pin=device.type == "cuda")

    def _batches(self, epoch: int, start_step: int) -> Iterator[Batch]:
        for parts in self.stream.batches(epoch, start_step):
            for index, reason in (found for part in parts for found in part.broken):
                self.source.skip(index, reason)
            if not any(len(part.ids) for part in parts):
                continue
            moved = [self.pipeline.move(part.values, self.device) for part in parts]
            ids = torch.cat([part.ids.to(self.device, non_blocking=True) for part in parts])
            yield self.pipeline.finish(self.pipeline.join(moved), ids, self.pipeline.noise(ids, epoch))

    def describe(self) -> str:
        """Count and workers."""
        count = self.stream.workers
        by = f"by {count} worker{'s' if count > 1 else ''}" if count else "without workers"
        said = f"{self.source.name}: {len(self.source)} images streamed {by}{self.order}"
        return "\n".join([said, *self.source.notes])


def make_loader(
    config: DataConfig,
    augment: AugmentConfig | None,
    device: torch.device | str = "cpu",
    *,
    rank: int = 0,
    world: int = 1,
    source: Source | None = None,
    progress: Progress | None = None,
) -> Loader:
    """A loader for training, with augmentation, or with `augment=None` for evaluation.

    Evaluation keeps the set's order and its last, smaller batch, and crops the centre. source: images that are open
    already, such as a `TensorSource`; else those at `config.path`.
    """
    device = torch.device(device)
    if source is None:
        if not config.path:
            raise SitusError(NO_DATA, field="data")
        split = config.split or (None if augment is not None else "val")
        source = open_source(config.path, split, **config.wanted())
    if augment is not None and config.count is not None:
        source = Subset(source, config.count)
    size = _resident_size(source, config)
    held = None
    if size is not None:
        held = load_resident(source, device, size, max_bytes=int(config.resident_gib * 2**30), progress=progress)
    training = augment is not None
    count = len(source) if held is None else len(held.images)
    plan = BatchPlan(
        count,
        config.batch or default_batch(count, world, training=training),
        config.seed,
        rank,
        world,
        augment.repeated if augment is not None else 1,
        shuffle=training,
        drop_last=training,
    )
    pipeline = ImagePipeline(
        source,
        config.size,
        config.seed,
        augment,
        crop_share=config.crop_share,
        normalisation=config.normalisation,
        held=held is not None,
        decoder=config.decode,
        resizer=config.resize,
    )
    if held is not None:
        return ResidentLoader(pipeline, plan, held)
    if config.decode == "gpu" and device.type != "cuda":
        raise SitusError(field="decode", value="gpu", allowed="auto, cpu or scaled without a CUDA device")
    plan, said = with_order(plan, source, config) if training else (plan, "")
    return StreamLoader(pipeline, plan, device, config.workers, said)


def with_order(plan: BatchPlan, source: Source, config: DataConfig) -> tuple[BatchPlan, str]:
    """The plan in the order that the config wants of a streamed set, and what a log says of it."""
    blocks = source.blocks()
    if config.order == "blocks" and blocks is None:
        raise SitusError(field="order", value="blocks", allowed=f"exact for {source.name}, which is not read by blocks")
    if blocks is None or config.order == "exact" or (config.order == "auto" and not blocks.dear):
        slow = f"; each reads one of its {len(blocks.ends):,} {blocks.name}" if blocks and blocks.dear else ""
        return plan, f", shuffled exactly{slow}"
    order = block_order(blocks, config.window_gib * 2**30, plan.distinct, plan.n // plan.batch)
    gib = blocks.bytes / len(blocks.ends) * order.open / 2**30
    why = " which memory does not hold," if blocks.dear else ""
    said = f", shuffled in blocks: of {len(blocks.ends):,} {blocks.name},{why} {order.open:,} at a time ({gib:.2g} GiB)"
    return replace(plan, order=order), said


def default_batch(count: int, world: int, *, training: bool) -> int:
    """Images a step where nobody said how many: 256, or for training all of a smaller set; a multiple of the ranks."""
    batch = min(BATCH, count) if training else BATCH
    return max(world, batch - batch % world)


def _resident_size(source: Source, config: DataConfig) -> tuple[int, int] | None:
    """The size to hold the images at, or None to stream them."""
    if config.resident == "never":
        return None
    sizes = _probe(source)
    own = sizes.pop() if len(sizes) == 1 else None
    if config.resident == "always":
        # Images of many sizes are held a little larger than the model sees them, as ImageNet's 256 for 224.
        # So are large ones of one size: to shrink them anew for each view would cost more than it keeps.
        if own is not None and max(own[0] / config.size[0], own[1] / config.size[1]) <= _LARGEST:
            return own
        return round(config.size[0] * 8 / 7), round(config.size[1] * 8 / 7)
    if own is None or own[0] > 2 * config.size[0] or own[1] > 2 * config.size[1]:
        return None
    fits = len(source) * config.channels * own[0] * own[1] <= config.resident_gib * 2**30
    return own if fits else None


def _probe(source: Source) -> set[tuple[int, int]]:
    """The sizes (height, width) of some images spread over the set."""
    if isinstance(source, TensorSource):
        return {(source.images.shape[2], source.images.shape[3])}
    found = set()
    for index in range(0, len(source), max(1, len(source) // _PROBES)):
        try:
            found.add(tuple(source.read(index)["image"].shape[1:]))
        except BrokenImageError:
            continue
    return found
