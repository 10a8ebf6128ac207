"""Images with objects: read, shrunk and padded by a worker, and augmented with boxes and masks on the device.

A worker shrinks an image to the size that its draw needs, antialiased, and the device does the rest of the same draw,
by the same hash of (seed, epoch, draw id). An evaluation sees images whole, resized so that they fit the model's size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from situs.config import from_dict
from situs.core.random import uniform
from situs.data.augment.geometry import CROP_NOISE
from situs.data.augment.recipes import AugmentConfig, apply_objects, as_floats, normalise
from situs.data.batch import VOID, Batch
from situs.data.modalities.base import ModelInput
from situs.data.modalities.image import WITHOUT_CLASSES, Image, PixelPipeline, alike, repeat_border, take_nearest
from situs.data.objects import ObjectConfig
from situs.data.pipeline import Noise, Pipeline
from situs.data.resize import resized
from situs.data.sources.base import Source, Wanted
from situs.data.sources.coco import CocoSource, coco_splits

if TYPE_CHECKING:
    from situs.data.config import DataConfig


class ObjectPipeline(PixelPipeline):
    """A source of images with objects to batches of both.

    Training: inputs [B, C, *size] and the targets that `situs.data.objects.objects_of` reads. Evaluation: inputs
    [B, C, *size], "sides" [B, 2] of what is image in them, from the top left on, and "whole" [B, 2] of the files.
    """

    fills: ClassVar = {"boxes": 0.0, "classes": VOID, "crowd": False, "masks": 0}

    def prepare(self) -> None:
        """Without a crop an image stays whole, as in evaluation."""
        if self.augment is not None and self.augment.crop == "none":
            self.augment = replace(self.augment, crop="fitted", scales=(1.0, 1.0))
        self.row_bytes = ((self.source.channels or 3) + 2) * self.size[0] * self.size[1]

    def fetch(self, index: int, epoch: int, draw: int) -> dict[str, Any]:
        """In training no larger than its draw needs; in evaluation resized to fit the model's size."""
        sample = super().fetch(index, epoch, draw)
        have = sample["image"].shape[1], sample["image"].shape[2]
        ratio = self._scale(epoch, draw) * min(want / side for want, side in zip(self.size, have, strict=True))
        fitted = max(1, round(have[0] * ratio)), max(1, round(have[1] * ratio))
        if not self.training:
            return {"image": resized(sample["image"], fitted), "whole": have}
        if ratio >= 1:
            return sample
        factors = torch.tensor([fitted[1] / have[1], fitted[0] / have[0]])
        masks, boxes = take_nearest(sample["masks"], fitted), sample["boxes"] * factors.repeat(2)
        return sample | {"image": resized(sample["image"], fitted), "masks": masks, "boxes": boxes}

    def _scale(self, epoch: int, draw: int) -> float:
        """The factor by which the device scales the image of a draw."""
        if self.augment is None:
            return 1.0
        low, high = self.augment.scales
        share = float(uniform(self.seed, epoch, torch.tensor([draw]), "augment.crop", (CROP_NOISE,))[0, 0])
        return low + share * (high - low)

    def collate(self, epoch: int, draws: list[int], samples: list[dict[str, Any]]) -> dict[str, Tensor]:  # noqa: ARG002
        values = {"sides": torch.tensor([sample["image"].shape[1:] for sample in samples])}
        if not self.training:
            images = [repeat_border(image, *self.size) for image in alike([sample["image"] for sample in samples])]
            whole = torch.tensor([sample["whole"] for sample in samples])
            return {"image": torch.stack(images), **values, "whole": whole}
        padded = self.padded(samples, first=0)
        return {name: torch.stack([sample[name] for sample in padded]) for name in padded[0]} | values

    def finish(self, values: Mapping[str, Tensor], ids: Tensor, noise: Noise) -> Batch:
        if self.augment is None:
            images = normalise(as_floats(values["image"]), self.mean, self.std)
            high, wide = values["sides"].view(-1, 2, 1, 1, 1).unbind(1)
            rows, columns = (torch.arange(side, device=images.device) for side in self.size)
            inside = (rows[:, None] < high) & (columns < wide)
            return Batch(images * inside, ids, {name: values[name] for name in ("sides", "whole")})
        images, targets = apply_objects(values, noise, self.augment, self.size, (self.mean, self.std))
        return Batch(images, ids, targets)


class Objects(Image):
    """Images with objects: their boxes, classes and outlines."""

    labelled_unit, annotations, targets = "object (detection)", "objects", ("objects",)
    table, Config = "objects", ObjectConfig
    unused = ("multi_label", "per_class", "balanced")
    augments = WITHOUT_CLASSES
    crops = ("none", "fitted")

    def resolve(self, data: DataConfig, opened: Callable[[DataConfig], Source]) -> DataConfig:
        """With the names of the classes."""
        if data.objects.classes:
            return data
        return replace(data, objects=replace(data.objects, classes=opened(data).classes or ()))

    def from_prepared(self, data: DataConfig, table: dict[str, Any], model: ModelInput) -> DataConfig:  # noqa: ARG002
        return replace(data, target="objects", objects=from_dict(ObjectConfig, table, where="objects"))

    def splits(self, path: Path, data: DataConfig) -> set[str]:  # noqa: ARG002
        return coco_splits(path)

    def open(self, path: Path, wanted: Wanted, data: DataConfig) -> Source:
        return CocoSource(path, wanted._replace(settings=data.objects))

    def pipeline(self, source: Source, data: DataConfig, augment: AugmentConfig | None, *_: Any) -> Pipeline:
        if augment is not None and data.resident == "always":
            source.notes.append(f"{source.name}: is streamed, although resident=always: images with objects always are")
        return ObjectPipeline(source, self.size(data), data.seed, augment, self.normalisation(data))
