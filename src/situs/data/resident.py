"""Small sets held whole on the device: decoded once, then every batch is an index away."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from situs.data.pipeline import Pipeline, WorkerBatch
from situs.data.sampler import BatchPlan, batches_for, sample_of
from situs.data.sources.base import Source, TensorSource
from situs.data.sources.images import centre_fit, met_transparency, to_channels
from situs.errors import BrokenSampleError, SitusError, counted, none_read
from situs.progress import tracked

DEFAULT_BYTES = 4 << 30
_AT_ONCE = 256  # images a task: enough to make handing out tasks cheap, few enough for a smooth progress bar
_TASK = 32  # of images with masks, which take longer


class Resident(NamedTuple):
    """samples: [n, C, H, W] uint8, or float32 in [0, 1]; of clips [n, T] int16. labels: [n] int64, or [n, K] int8.

    index: [n] source's rows.
    """

    samples: Tensor
    labels: Tensor | None
    index: Tensor


def load_resident(
    source: Source,
    device: torch.device | str = "cpu",
    size: tuple[int, int] | None = None,
    sample: Callable[[dict[str, Any]], Tensor] | None = None,
    *,
    max_bytes: int = DEFAULT_BYTES,
    threads: int | None = None,
) -> Resident:
    """Every readable sample of `source` as one tensor on `device`.

    size:     (height, width) that each image is resized and centre-cropped to; None keeps the images'
              own size, and then all must have the same. sample: what is kept of one, where it is no image.

    Broken ones are left out and noted in `source.skipped`, unless the source is strict.
    """
    if isinstance(source, TensorSource):
        images, labels, index = _from_tensor(source, size, max_bytes)
    else:
        images, labels, index = _decode_all(source, sample or partial(_image, size), max_bytes, threads)
    return Resident(images.to(device), None if labels is None else labels.to(device), index.to(device))


class HeldStream:
    """Batches of a set whose samples are read once and kept on the device as the pipeline's workers would give them.

    For a pipeline that reads the same of a sample in every epoch: then they are a `WorkerStream`'s, bit for bit, with
    the same stand-ins for broken samples. max_bytes: what they may take, by the pipeline's own estimate.
    """

    def __init__(self, pipeline: Pipeline, plan: BatchPlan, device: torch.device, max_bytes: int) -> None:
        self.plan, self.device, source = plan, device, pipeline.source
        _check_bytes(source, (pipeline.row_bytes,), torch.uint8, max_bytes)
        starts = range(0, len(source), _TASK)
        met_transparency()
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            read = pool.map(lambda start: pipeline.read(0, range(start, min(start + _TASK, len(source)))), starts)
            parts = list(tracked(read, f"reading {source.name}", len(starts)))
        for index, reason in (found for part in parts for found in part.broken):
            source.skip(index, reason)
        if any(part.transparent for part in parts):
            source.note_transparency()
        self.values = pipeline.move(pipeline.join([part.values for part in parts]), device)

    def describe(self) -> str:
        """For the log: where they lie."""
        return f"on {self.device}, {sum(value.nbytes for value in self.values.values()) / 2**20:.0f} MiB"

    def batches(self, epoch: int, start_step: int) -> Iterator[list[WorkerBatch]]:
        """As `WorkerStream` gives them, one part each."""
        for ids in batches_for(self.plan, epoch, start_step, self.device):
            rows = sample_of(ids)
            yield [WorkerBatch({name: value[rows] for name, value in self.values.items()}, ids, [])]


def _check_bytes(source: Source, shape: tuple[int, ...], dtype: torch.dtype, max_bytes: int) -> None:
    needed = len(source) * torch.empty(0, dtype=dtype).element_size()
    for side in shape:
        needed *= side
    if needed > max_bytes:
        raise SitusError(
            f"{source.name}: {len(source)} {source.things} take {needed / 2**30:.1f} GiB and "
            f"{max_bytes / 2**30:.1f} GiB are allowed; "
            "allow more or stream them (resident: never)",
            field=("resident_gib", "resident"),
        )


def _from_tensor(
    source: TensorSource, size: tuple[int, int] | None, max_bytes: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    images = source.images
    channels = source.channels or images.shape[1]
    _check_bytes(source, (channels, *(size or images.shape[2:])), images.dtype, max_bytes)
    if channels != images.shape[1]:
        images = torch.stack([to_channels(image, channels, source.name) for image in images])
    if size is not None:
        images = centre_fit(images, *size)
    return images, source.labels, torch.arange(len(source))


def _decode_all(
    source: Source,
    held: Callable[[dict[str, Any]], Tensor],
    max_bytes: int,
    threads: int | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    count = len(source)
    met_transparency()  # what others have met does not count
    first = _first_readable(source, held)
    shape = tuple(first.shape)
    _check_bytes(source, shape, first.dtype, max_bytes)
    images = torch.empty((count, *shape), dtype=first.dtype)
    labels = None
    if source.classes is not None:
        shape = (count, len(source.classes)) if source.multi_label else (count,)
        labels = torch.zeros(shape, dtype=torch.int8 if source.multi_label else torch.int64)
    good = torch.zeros(count, dtype=torch.bool)

    def fill(start: int) -> list[tuple[int, str]]:
        broken = []
        for index in range(start, min(start + _AT_ONCE, count)):
            try:
                sample = source.read(index)
            except BrokenSampleError as error:
                if source.strict:
                    raise
                broken.append((index, str(error)))
                continue
            images[index] = _same_form(held(sample), images, index, source)
            if labels is not None and "label" in sample:
                labels[index] = sample["label"]
            good[index] = True
        return broken

    starts = range(0, count, _AT_ONCE)
    with ThreadPoolExecutor(threads or min(16, os.cpu_count() or 1)) as pool:
        for broken in tracked(pool.map(fill, starts), f"reading {source.name}", len(starts)):
            for index, reason in broken:
                source.skip(index, reason)
    if met_transparency():
        source.note_transparency()
    index = good.nonzero().flatten()
    if len(index) == count:
        return images, labels, index
    return images[index], None if labels is None else labels[index], index


def _image(size: tuple[int, int] | None, sample: dict[str, Any]) -> Tensor:
    """An image as it is held, at the wanted size."""
    return sample["image"] if size is None else centre_fit(sample["image"], *size)


def _first_readable(source: Source, held: Callable[[dict[str, Any]], Tensor]) -> Tensor:
    reason = "it is empty"
    for index in range(len(source)):
        try:
            return held(source.read(index))
        except BrokenSampleError as error:
            if source.strict:
                raise
            reason = str(error)
    raise SitusError(f"{none_read(source.name, len(source), source.things)}; the last: {reason}")


def _same_form(image: Tensor, images: Tensor, index: int, source: Source) -> Tensor:
    """`image` if it fits into the set, in the set's dtype; else the sentence that says what does not fit."""
    if image.shape[0] != images.shape[1]:
        raise SitusError(
            f"{source.name}: image {index} has {counted(image.shape[0], 'channels')}, the first has {images.shape[1]}; "
            "say how many you want",
            field="channels",
        )
    if image.shape != images.shape[1:]:
        raise SitusError(
            f"{source.name}: image {index} is {image.shape[1]} × {image.shape[2]} and the first is "
            f"{images.shape[2]} × {images.shape[3]}; give a size to bring them to, or stream them",
            field="resident",
        )
    if image.dtype == images.dtype:
        return image
    if images.dtype == torch.uint8:
        return (image * 255.0).round().clamp(0, 255).to(torch.uint8)
    return image.to(torch.float32) / 255.0
