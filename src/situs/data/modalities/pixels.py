"""What the pipelines of images, of images with masks and of images with objects have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Self

import torch
from torch import Tensor

from situs.data.augment.recipes import AugmentConfig, as_floats, denormalise, draw
from situs.data.pipeline import Noise, Pipeline
from situs.data.sources.base import Source
from situs.errors import SitusError

WITHOUT_CLASSES = frozenset(
    each.name for each in fields(AugmentConfig) if each.name not in ("mixup", "cutmix", "label_smoothing")
)
"""What is done to images of which more is known than a class."""


class PixelPipeline(Pipeline):
    """augment: None for evaluation. normalisation: mean and deviation of each channel."""

    def __init__(
        self,
        source: Source,
        size: tuple[int, int],
        seed: int,
        augment: AugmentConfig | None,
        normalisation: tuple[tuple[float, ...], tuple[float, ...]] = ((0.0,), (1.0,)),
    ) -> None:
        super().__init__(source, training=augment is not None)
        self.size, self.seed, self.augment = size, seed, augment
        self.mean, self.std = (torch.tensor(part) for part in normalisation)
        self.prepare()

    def prepare(self) -> None:
        """What else follows from its fields."""

    def to(self, device: torch.device) -> Self:
        moved = super().to(device)
        moved.mean, moved.std = self.mean.to(device), self.std.to(device)
        return moved

    def join(self, parts: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """Floats where any part has floats, as within one."""
        images = alike([part["image"] for part in parts])
        return super().join([{**part, "image": image} for part, image in zip(parts, images, strict=True)])

    def noise(self, ids: Tensor, epoch: int) -> Noise:
        return {} if self.augment is None else draw(self.augment, ids, seed=self.seed, epoch=epoch)

    def shown(self, inputs: Tensor) -> Tensor:
        return denormalise(inputs, self.mean, self.std)


def alike(images: Sequence[Tensor]) -> list[Tensor]:
    """Images [..., C, H, W] of one batch: floats where one has floats; refused where their channels differ."""
    if len({image.dtype for image in images}) > 1:
        images = [as_floats(image) for image in images]
    if len(counts := sorted({image.shape[-3] for image in images})) > 1:
        raise SitusError(f"images of {' and '.join(map(str, counts))} channels in one batch", field="channels")
    return list(images)


def take_nearest(masks: Tensor, size: tuple[int, int]) -> Tensor:
    """Masks [..., H, W] at a size, each pixel taken from the nearest."""
    rows, columns = (((torch.arange(want) + 0.5) * (have / want)).long()
                     for have, want in zip(masks.shape[-2:], size, strict=True))  # fmt: skip
    return masks[..., rows[:, None], columns]


def repeat_border(image: Tensor, height: int, width: int) -> Tensor:
    """[..., h, w] with its last row and column repeated."""
    rows, columns = torch.arange(height), torch.arange(width)
    rows, columns = rows.clamp(max=image.shape[-2] - 1), columns.clamp(max=image.shape[-1] - 1)
    return image[..., rows[:, None], columns]
