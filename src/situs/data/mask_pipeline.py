"""Images with masks: read and padded by a worker, and moved together on the device by one geometry for both.

What is drawn is drawn once, by the hash of (seed, epoch, draw id); the image is resampled there and the mask takes the
nearest pixel. An evaluation sees images whole: brought to just cover the model's size, in their own shape, and beside
them their masks as they lie in the files.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.data.augment.recipes import AugmentConfig, apply_masked, as_floats, denormalise, draw, normalise
from situs.data.batch import Batch
from situs.data.masks import VOID
from situs.data.pipeline import Noise, Pipeline
from situs.data.sources.base import Source
from situs.data.sources.images import covering_size
from situs.errors import BrokenSampleError, SitusError

_NOT_OF_MASKS = {"mixup", "cutmix", "label_smoothing"}
_LONGEST = 16  # times its shorter side


def check_augment(augment: AugmentConfig) -> None:
    """Refuses what is done to a class alone."""
    for each in fields(augment):
        if each.name in _NOT_OF_MASKS and getattr(augment, each.name) != each.default:
            said = f"{each.name}={getattr(augment, each.name)}: is for a class an image, and not for masks"
            raise SitusError(said, field=f"augment.{each.name}")


class MaskPipeline(Pipeline):
    """A source of images with masks to batches of both. augment: None for evaluation. mean, std: of each channel.

    Training: inputs [B, C, *size], and the target "mask" [B, *size]. Evaluation: inputs [B, C, H, W] as large as the
    largest, "sides" [B, 2] of what is image in them, "mask" [B, h, w] as large as the largest of the files, VOID behind
    the smaller ones, and their "whole" [B, 2].
    """

    def __init__(
        self,
        source: Source,
        size: tuple[int, int],
        seed: int,
        augment: AugmentConfig | None,
        normalisation: tuple[tuple[float, ...], tuple[float, ...]] = ((0.0,), (1.0,)),
    ) -> None:
        super().__init__(source, training=augment is not None)
        if augment is not None:
            check_augment(augment)
        self.size, self.seed, self.augment = size, seed, augment
        self.mean, self.std = (torch.tensor(part) for part in normalisation)
        self.most, self.finer = (1.0, 1) if augment is None else _extent(augment)
        self.row_bytes = int(((source.channels or 3) + 2) * size[0] * size[1] * self.most**2)

    def to(self, device: torch.device) -> Self:
        moved = copy.copy(self)
        moved.mean, moved.std = self.mean.to(device), self.std.to(device)
        return moved

    def fetch(self, index: int, epoch: int, draw: int) -> dict[str, Any]:
        """In training no larger than any crop can use, in evaluation just covering the model's size."""
        sample = super().fetch(index, epoch, draw)
        image, mask = sample["image"], sample["mask"]
        have = image.shape[1], image.shape[2]
        if max(have) > _LONGEST * min(have):
            said = f"is {have[0]} × {have[1]}, more than {_LONGEST} times as long as wide"
            raise BrokenSampleError(f"{self.source.name}, image {self.source.key(index)}: {said}")
        most = covering_size(have, *(round(side * self.most) for side in self.size))
        if not self.training or most[0] < have[0]:
            image = _resized(image, most)
        if self.training and most[0] < have[0]:
            mask = mask[_nearest(have[0], most[0])][:, _nearest(have[1], most[1])]
        return {"image": image, "mask": mask}

    def collate(self, epoch: int, draws: list[int], samples: list[dict[str, Any]]) -> dict[str, Tensor]:  # noqa: ARG002
        images, masks = [sample["image"] for sample in samples], [sample["mask"] for sample in samples]
        if len({image.dtype for image in images}) > 1:
            images = [as_floats(image) for image in images]
        if len(counts := sorted({len(image) for image in images})) > 1:
            raise SitusError(f"images of {' and '.join(map(str, counts))} channels in one batch", field="channels")
        high, wide = (max(image.shape[side] for image in images) for side in (1, 2))
        tall, long = (max(mask.shape[side] for mask in masks) for side in (0, 1))
        return {
            "image": torch.stack([_repeated(image, high, wide) for image in images]),
            "sides": torch.tensor([image.shape[1:] for image in images]),
            "mask": torch.stack([_void_behind(mask, tall, long) for mask in masks]),
            "whole": torch.tensor([mask.shape for mask in masks]),
        }

    def join(self, parts: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """Padded to the largest of all parts."""
        if len(parts) == 1:
            return parts[0]
        sides = {name: [max(part[name].shape[at] for part in parts) for at in (-2, -1)] for name in ("image", "mask")}
        floats = len({part["image"].dtype for part in parts}) > 1
        return super().join([
            {
                **part,
                "image": _repeated(as_floats(part["image"]) if floats else part["image"], *sides["image"]),
                "mask": _void_behind(part["mask"], *sides["mask"]),
            }
            for part in parts
        ])  # fmt: skip

    def noise(self, ids: Tensor, epoch: int) -> Noise:
        return {} if self.augment is None else draw(self.augment, ids, seed=self.seed, epoch=epoch)

    def finish(self, values: Mapping[str, Tensor], ids: Tensor, noise: Noise) -> Batch:
        if self.augment is None:
            targets = {name: values[name] for name in ("mask", "sides", "whole")}
            return Batch(normalise(as_floats(values["image"]), self.mean, self.std), ids, targets)
        images, masks = apply_masked(
            values["image"], values["mask"], values["sides"], noise, self.augment, self.size, (self.mean, self.std),
            self.finer,
        )  # fmt: skip
        return Batch(images, ids, {"mask": masks})

    def shown(self, inputs: Tensor) -> Tensor:
        return denormalise(inputs, self.mean, self.std)


def _extent(augment: AugmentConfig) -> tuple[float, int]:
    """How large an image is kept at most, over the model's size: midway between what its narrowest and its widest crop
    ask for. And the samples along a side of a pixel that the widest then takes."""
    if augment.crop == "scaled":
        low, high = augment.scales
    elif augment.crop == "resized":
        low, high = 1 / augment.scale[1] ** 0.5, 1 / augment.scale[0] ** 0.5
    else:
        return 1.0, 1
    most = max(1.0, (low * high) ** 0.5)
    return most, max(1, min(4, round(most / low)))


def _resized(image: Tensor, size: tuple[int, int]) -> Tensor:
    """Bicubic and antialiased, as `centre_fit` brings images to a size."""
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as tv

    if tuple(image.shape[1:]) == size:
        return image
    made = tv.resize(image, list(size), InterpolationMode.BICUBIC, antialias=True)
    return made.clamp(0.0, 1.0) if made.is_floating_point() else made


def _nearest(have: int, want: int) -> Tensor:
    return ((torch.arange(want) + 0.5) * (have / want)).long()


def _repeated(image: Tensor, height: int, width: int) -> Tensor:
    """[..., h, w] with its last row and column repeated."""
    rows, columns = torch.arange(height), torch.arange(width)
    rows, columns = rows.clamp(max=image.shape[-2] - 1), columns.clamp(max=image.shape[-1] - 1)
    return image[..., rows[:, None], columns]


def _void_behind(mask: Tensor, height: int, width: int) -> Tensor:
    return F.pad(mask, (0, width - mask.shape[-1], 0, height - mask.shape[-2]), value=VOID)
