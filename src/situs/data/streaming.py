"""Large sets: worker processes decode and crop to a fixed size, the device does the rest.

Workers draw nothing themselves: the crop's box comes from the same hash of (seed, epoch, draw id) as on the device, so
their number and timing change nothing. What a worker finds broken travels back with its batch to be counted once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from situs.core.random import uniform
from situs.data.augment import AugmentConfig, as_floats
from situs.data.base import Source
from situs.data.geometry import CROP_NOISE, resized_crop_boxes
from situs.data.images import BrokenImageError, centre_fit
from situs.data.sampler import BatchPlan, batches_for, sample_of
from situs.errors import SitusError

_PREFETCH = 4  # batches each worker prepares ahead


class View(NamedTuple):
    """One sample as a worker gives it. broken: (row, reason) for each image found broken on the way."""

    image: Tensor | None
    label: int | None
    draw: int
    broken: list[tuple[int, str]]


class Chunk(NamedTuple):
    """A batch as the workers give it: images [b, C, H, W] uint8 or float32, labels and ids [b]."""

    images: Tensor
    labels: Tensor | None
    ids: Tensor
    broken: list[tuple[int, str]]


class Views(Dataset[View]):
    """Item (epoch, draw id) is that draw's cropped image. Plain data: it can be sent to a worker process.

    augment: None for evaluation, which crops the centre and leaves a broken image out. In training the next readable
    image stands in for a broken one, under the broken one's draw, so that batches keep their size.
    """

    def __init__(
        self, source: Source, size: tuple[int, int], seed: int, augment: AugmentConfig | None, crop_share: float = 1.0
    ) -> None:
        self.source, self.size, self.seed, self.augment, self.crop_share = source, size, seed, augment, crop_share

    def __getitem__(self, key: tuple[int, int]) -> View:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[View]:
        """A whole batch, which the DataLoader asks for by this name: the hash then runs once for all of it."""
        views = [self._read(draw) for _, draw in keys]
        found = [number for number, view in enumerate(views) if view.image is not None]
        images = [image for view in views if (image := view.image) is not None]
        if self.augment is None:
            images = [centre_crop(image, self.size, self.crop_share) for image in images]
        elif self.augment.crop != "resized":
            images = [centre_fit(image, *self.size) for image in images]
        else:
            draws = [views[number].draw for number in found]
            images = random_crops(images, self.size, self.augment, self.seed, keys[0][0], draws)
        for number, image in zip(found, images, strict=True):
            views[number] = views[number]._replace(image=image)
        return views

    def _read(self, draw: int) -> View:
        row, broken = sample_of(draw), []
        for offset in range(len(self.source) if self.augment is not None else 1):
            index = (row + offset) % len(self.source)
            try:
                image, label = self.source.read(index)
            except BrokenImageError as error:
                if self.source.strict:
                    raise
                broken.append((index, str(error)))
                continue
            return View(image, label, draw, broken)
        if self.augment is not None:
            raise SitusError(f"{self.source.name}: none of its {len(self.source)} images can be read; {broken[-1][1]}")
        return View(None, None, draw, broken)


def random_crops(
    images: list[Tensor], size: tuple[int, int], augment: AugmentConfig, seed: int, epoch: int, draws: list[int]
) -> list[Tensor]:
    """The random resized crops of some draws, antialiased; their boxes are those the device would take."""
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as tv

    noise = uniform(seed, epoch, torch.tensor(draws), "augment.crop", (CROP_NOISE,))
    heights, widths = (torch.tensor([image.shape[side] for image in images]) for side in (1, 2))
    boxes = resized_crop_boxes(noise, heights, widths, augment.scale, augment.ratio).long().tolist()
    mode = InterpolationMode(augment.interpolation)
    return [
        tv.resized_crop(image, *box, size=list(size), interpolation=mode, antialias=True)
        for image, box in zip(images, boxes, strict=True)
    ]


def centre_crop(images: Tensor, size: tuple[int, int], crop_share: float) -> Tensor:
    """The central `crop_share` of the images [..., C, H, W], brought to `size`."""
    around = round(size[0] / crop_share), round(size[1] / crop_share)
    fitted = centre_fit(images, *around)
    top, left = (around[0] - size[0]) // 2, (around[1] - size[1]) // 2
    return fitted[..., top : top + size[0], left : left + size[1]]


def collate(views: list[View]) -> Chunk:
    """Views into one chunk; without rows where every image was broken."""
    broken = [entry for view in views for entry in view.broken]
    good = [view for view in views if view.image is not None]
    images = [view.image for view in good if view.image is not None]
    if len({image.dtype for image in images}) > 1:
        images = [as_floats(image) for image in images]
    if len({image.shape for image in images}) > 1:
        counts = sorted({image.shape[0] for image in images})
        raise SitusError(f"images of {' and '.join(map(str, counts))} channels in one batch (--data.channels)")
    if not images:
        return Chunk(torch.empty(0), None, torch.empty(0, dtype=torch.int64), broken)
    labels = None if good[0].label is None else torch.tensor([view.label for view in good])
    return Chunk(torch.stack(images), labels, torch.tensor([view.draw for view in good]), broken)


class _Schedule:
    """What the DataLoader asks for: lists of (epoch, draw id); told before each pass where to start."""

    def __init__(self, plan: BatchPlan) -> None:
        self.plan, self.epoch, self.start = plan, 0, 0

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for rows in batches_for(self.plan, self.epoch, self.start):
            if len(rows.ids):
                yield [(self.epoch, draw) for draw in rows.ids.tolist()]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


class Stream:
    """The chunks of any epoch from any step, in order, decoded by `workers` processes (0: by this one).

    There are never more workers than cores: beyond that they only take turns.
    """

    def __init__(self, views: Views, plan: BatchPlan, workers: int, pin: bool) -> None:
        self._schedule = _Schedule(plan)
        self.workers = workers = min(workers, _cores())
        options: dict[str, Any] = {"prefetch_factor": _PREFETCH, "persistent_workers": True} if workers else {}
        self._loader = DataLoader(
            views,
            batch_sampler=self._schedule,  # pyright: ignore[reportArgumentType]
            collate_fn=collate,
            num_workers=workers,
            pin_memory=pin,
            generator=torch.Generator(),  # its own: the DataLoader would draw from torch's global one
            **options,
        )

    def chunks(self, epoch: int, start_step: int) -> Iterator[Chunk]:
        """The epoch's chunks from `start_step` on."""
        self._schedule.epoch, self._schedule.start = epoch, start_step
        try:
            yield from self._loader
        except SitusError as error:
            raise type(error)(_own_words(str(error))) from error


def _own_words(text: str) -> str:
    """The sentence of an error from a worker, which the DataLoader buries under the worker's traceback."""
    last = text.strip().rpartition("\n")[2]
    return last.partition(": ")[2] if last != text.strip() else text
