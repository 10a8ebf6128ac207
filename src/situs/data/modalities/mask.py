"""Images with masks: read and padded by a worker, and augmented together on the device by one geometry for both.

The geometry is drawn once, by the hash of (seed, epoch, draw id); the image is resampled and the mask takes the nearest
pixel. An evaluation sees images whole, resized to just cover the model's size, and their masks as in the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from situs.config import from_dict
from situs.data.augment.recipes import AugmentConfig, apply_masked, as_floats, normalise
from situs.data.batch import VOID, Batch
from situs.data.masks import MaskConfig, mask_splits, open_masks
from situs.data.modalities.base import ModelInput
from situs.data.modalities.image import WITHOUT_CLASSES, Image, PixelPipeline, take_nearest
from situs.data.pipeline import Noise, Pipeline
from situs.data.resize import covering_size, resized
from situs.data.sources.base import Source, Wanted
from situs.errors import BrokenSampleError

if TYPE_CHECKING:
    from situs.data.config import DataConfig

_LONGEST = 16  # times its shorter side


class MaskPipeline(PixelPipeline):
    """A source of images with masks to batches of both.

    Training: inputs [B, C, *size], and the target "mask" [B, *size]. Evaluation: inputs [B, C, H, W] as large as the
    largest, "sides" [B, 2] of what is image in them, "mask" [B, h, w] as large as the largest of the files, VOID behind
    the smaller ones, and their "whole" [B, 2].
    """

    fills: ClassVar = {"mask": VOID}

    def prepare(self) -> None:
        """Sets how large images are kept."""
        self.most, self.finer = (1.0, 1) if self.augment is None else _extent(self.augment)
        self.row_bytes = int(((self.source.channels or 3) + 2) * self.size[0] * self.size[1] * self.most**2)

    def fetch(self, index: int, epoch: int, draw: int) -> dict[str, Any]:
        """In training no larger than any crop can use, in evaluation just covering the model's size."""
        sample = super().fetch(index, epoch, draw)
        image, mask = sample["image"], sample["mask"]
        have = image.shape[1], image.shape[2]
        if max(have) > _LONGEST * min(have):
            shape = f"is {have[0]} × {have[1]}, more than {_LONGEST} times as long as wide"
            raise BrokenSampleError(f"{self.source.name}, image {self.source.key(index)}: {shape}")
        most = covering_size(have, *(round(side * self.most) for side in self.size))
        if not self.training or most[0] < have[0]:
            image = resized(image, most)
        if self.training and most[0] < have[0]:
            mask = take_nearest(mask, most)
        return {"image": image, "mask": mask}

    def collate(self, epoch: int, draws: list[int], samples: list[dict[str, Any]]) -> dict[str, Tensor]:  # noqa: ARG002
        values = {"sides": torch.tensor([sample["image"].shape[1:] for sample in samples])}
        values["whole"] = torch.tensor([sample["mask"].shape for sample in samples])
        padded = self.padded(samples, first=0)
        return {name: torch.stack([sample[name] for sample in padded]) for name in ("image", "mask")} | values

    def finish(self, values: Mapping[str, Tensor], ids: Tensor, noise: Noise) -> Batch:
        if self.augment is None:
            targets = {name: values[name] for name in ("mask", "sides", "whole")}
            return Batch(normalise(as_floats(values["image"]), self.mean, self.std), ids, targets)
        images, masks = apply_masked(
            values["image"], values["mask"], values["sides"], noise, self.augment, self.size, (self.mean, self.std),
            self.finer,
        )  # fmt: skip
        return Batch(images, ids, {"mask": masks})


def _extent(augment: AugmentConfig) -> tuple[float, int]:
    """The largest size at which an image is kept, as a multiple of the model's size: midway between what its narrowest
    and its widest crop need. And the samples along a side of a pixel that the widest then takes."""
    if augment.crop == "scaled":
        low, high = augment.scales
    elif augment.crop == "resized":
        low, high = 1 / augment.scale[1] ** 0.5, 1 / augment.scale[0] ** 0.5
    else:
        return 1.0, 1
    most = max(1.0, (low * high) ** 0.5)
    return most, max(1, min(4, round(most / low)))


class Mask(Image):
    """Images with a mask each, which has the class of every pixel."""

    labelled_unit, annotations, targets = "pixel (segmentation)", "masks", ("mask",)
    table, Config, reading_option = "masks", MaskConfig, "masks"
    unused = ("multi_label", "per_class", "balanced")
    augments = WITHOUT_CLASSES
    crops = ("none", "resized", "pad", "scaled")

    def resolve(self, data: DataConfig, opened: Callable[[DataConfig], Source]) -> DataConfig:
        """With the names of the classes."""
        if data.masks.classes:
            return data
        whole: Any = opened(data).origin(0)[0]
        return replace(data, masks=whole.masks)

    def read_as(self, data: DataConfig, value: Any) -> DataConfig:
        return replace(data, masks=value)

    def from_prepared(self, data: DataConfig, table: dict[str, Any], model: ModelInput) -> DataConfig:  # noqa: ARG002
        return replace(data, target="mask", masks=from_dict(MaskConfig, table, where="masks"))

    def splits(self, path: Path, data: DataConfig) -> set[str]:  # noqa: ARG002
        return mask_splits(path)

    def open(self, path: Path, wanted: Wanted, data: DataConfig) -> Source:
        return open_masks(path, wanted._replace(settings=data.masks))

    def pipeline(self, source: Source, data: DataConfig, augment: AugmentConfig | None, *_: Any) -> Pipeline:
        pipeline = MaskPipeline(source, self.size(data), data.seed, augment, self.normalisation(data))
        pipeline.resident = augment is not None and data.resident == "always"  # an evaluation reads each once
        return pipeline
