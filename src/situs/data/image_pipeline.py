"""Images: cropped to one size by a worker, augmented, normalised and mixed on the device.

A crop's box comes from the same hash of (seed, epoch, draw id) in a worker as on the device, so that the number of
workers and their timing change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from situs.core.random import uniform
from situs.data.augment.geometry import CROP_NOISE, resized_crop_boxes
from situs.data.augment.recipes import NONE, AugmentConfig, apply, apply_mix, as_floats, draw, normalise
from situs.data.batch import Batch
from situs.data.pipeline import Noise, Pipeline
from situs.data.sources.base import Source
from situs.data.sources.images import centre_fit
from situs.errors import SitusError


class ImagePipeline(Pipeline):
    """augment: None for evaluation, which crops the centre. mean, std: of each channel.

    held: the images come as they lie on the device (`ResidentLoader`), not cropped by a worker.
    """

    def __init__(
        self,
        source: Source,
        size: tuple[int, int],
        seed: int,
        augment: AugmentConfig | None,
        *,
        crop_share: float = 1.0,
        normalisation: tuple[tuple[float, ...], tuple[float, ...]] = ((0.0,), (1.0,)),
        held: bool = False,
    ) -> None:
        super().__init__(source, training=augment is not None)
        self.size, self.seed, self.augment, self.crop_share = size, seed, augment, crop_share
        self.mean, self.std = (torch.tensor(part) for part in normalisation)
        # The worker has made the resized crop; a shift is made on the device.
        cropped = not held and augment is not None and augment.crop == "resized"
        self.rest = replace(augment, crop="none") if augment is not None and cropped else augment
        self._apply = apply

    def collate(self, epoch: int, draws: list[int], samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        images = [sample["image"] for sample in samples]
        if self.augment is None:
            images = [centre_crop(image, self.size, self.crop_share) for image in images]
        elif self.augment.crop != "resized":
            images = [centre_fit(image, *self.size) for image in images]
        else:
            images = random_crops(images, self.size, self.augment, self.seed, epoch, draws)
        values = {"image": _stack(images)}
        if "label" in samples[0]:
            values["label"] = torch.tensor([sample["label"] for sample in samples])
        return values

    def join(self, parts: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """Floats where any part has floats, as within one."""
        if len({part["image"].dtype for part in parts}) > 1:
            parts = [{**part, "image": as_floats(part["image"])} for part in parts]
        _same_channels([part["image"] for part in parts])
        return super().join(parts)

    def to(self, device: torch.device) -> Self:
        moved = super().to(device)
        moved.mean, moved.std = self.mean.to(device), self.std.to(device)
        return moved

    def compile(self) -> None:
        """On a GPU about a quarter of the time, after half a minute once."""
        self._apply = torch.compile(apply, fullgraph=True)

    def noise(self, ids: Tensor, epoch: int) -> Noise:
        return {} if self.rest is None else draw(self.rest, ids, seed=self.seed, epoch=epoch)

    def finish(self, values: Mapping[str, Tensor], ids: Tensor, noise: Noise) -> Batch:
        targets = {"label": values["label"]} if "label" in values else {}
        return self.mix(Batch(self.view(values["image"], noise), ids, targets), noise)

    def view(self, images: Tensor, noise: Noise) -> Tensor:
        """Normalised images, augmented in training; each by itself."""
        if self.rest is None:
            return normalise(as_floats(images), self.mean, self.std)
        return self._apply(images, noise, self.rest, self.size, self.mean, self.std)

    def mix(self, batch: Batch, noise: Noise) -> Batch:
        """MixUp, CutMix and label smoothing, which look at two samples of a batch."""
        count = len(self.source.classes) if self.source.classes is not None else None
        images, labels = apply_mix(batch.inputs, batch.targets.get("label"), noise, self.augment or NONE, count)
        return Batch(images, batch.ids, {} if labels is None else {"label": labels})


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


def _stack(images: list[Tensor]) -> Tensor:
    if len({image.dtype for image in images}) > 1:
        images = [as_floats(image) for image in images]
    _same_channels(images)
    return torch.stack(images)


def _same_channels(images: Sequence[Tensor]) -> None:
    """images: [..., C, H, W]."""
    if len(counts := sorted({image.shape[-3] for image in images})) > 1:
        raise SitusError(f"images of {' and '.join(map(str, counts))} channels in one batch", field="channels")
