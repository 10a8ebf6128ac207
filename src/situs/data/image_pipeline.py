"""Images: cut by a worker, brought to one size by it or on the device, augmented, normalised and mixed there.

A crop's box comes from the same hash of (seed, epoch, draw id) in a worker as on the device, so that the number of
workers and their timing change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from situs.core.random import uniform
from situs.data.augment.geometry import CROP_NOISE, resized_crop_boxes
from situs.data.augment.recipes import NONE, AugmentConfig, apply, apply_mix, as_floats, draw, normalise
from situs.data.batch import Batch
from situs.data.pipeline import Noise
from situs.data.pixel_pipeline import PixelPipeline, alike
from situs.data.resize import centre_fit, channels_of, pack, resize_packed, resized
from situs.data.sources.base import Source, TensorSource
from situs.data.sources.images import to_channels

_LARGE = 2  # times the bytes of what the model sees: a larger crop is resized before it travels


class ImagePipeline(PixelPipeline):
    """Images by themselves; evaluation crops their centre.

    held: the size of images that are kept on the device, not cropped by a worker. device_resizes: bytes that a worker
    cut out are left to be resized by `join`.
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
        held: tuple[int, int] | None = None,
        device_resizes: bool = False,
    ) -> None:
        super().__init__(source, size, seed, augment, normalisation)
        self.crop_share = crop_share
        # The worker has made the resized crop; a shift is made on the device.
        cropped = held is None and augment is not None and augment.crop == "resized"
        self.rest = replace(augment, crop="none") if augment is not None and cropped else augment
        self._apply, self.held = apply, held
        self.cuts = device_resizes and cropped
        self.by_rows = not self.cuts
        self.pairs = augment is not None and augment.mixes
        self.row_bytes = (source.channels or 3) * size[0] * size[1] * (_LARGE if self.cuts else 1)

    def collate(self, epoch: int, draws: list[int], samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        images, values = [sample["image"] for sample in samples], {}
        if self.held is not None:
            images = [centre_fit(image, *self.held) for image in images]
        elif self.augment is None:
            images = [centre_crop(image, self.size, self.crop_share) for image in images]
        elif self.augment.crop != "resized":
            images = [centre_fit(image, *self.size) for image in images]
        else:
            images = random_cuts(images, self.augment, self.seed, epoch, draws)
            apart = self.cuts and all(image.dtype == torch.uint8 for image in images)
            most = _LARGE * self.size[0] * self.size[1] if apart else 0
            images = [image if image[0].numel() <= most else self._resized(image) for image in images]
            if apart:
                values["cuts"], values["sides"] = pack(alike(images))
        if not values:
            values["image"] = torch.stack(alike(images))
        if "label" in samples[0]:
            values["label"] = _labels(samples)
        return values

    def whole(self) -> dict[str, Tensor] | None:
        source = self.source
        if not isinstance(source, TensorSource) or tuple(source.images.shape[2:]) != self.held:
            return None
        images, channels = source.images, source.channels or source.images.shape[1]
        if channels != images.shape[1]:
            images = torch.stack([to_channels(image, channels, source.name) for image in images])
        return {"image": images} | ({} if source.labels is None else {"label": source.labels})

    def _resized(self, cut: Tensor) -> Tensor:
        assert self.augment is not None
        return resized(cut, self.size, self.augment.interpolation)

    def move(self, values: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """All but "sides", which stay on the host: it knows by them what to launch."""
        moved = super().move({name: value for name, value in values.items() if name != "sides"}, device)
        return moved | {"sides": values["sides"]} if "sides" in values else moved

    def join(self, parts: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """Resizes what the workers left to it: all of a batch at once, where all of it is bytes of as many channels."""
        counts = {channels_of(part["cuts"], part["sides"]) if "cuts" in part else None for part in parts}
        if len(parts) > 1 and len(counts) == 1 and None not in counts:
            parts = [{name: torch.cat([part[name] for part in parts]) for name in parts[0]}]
        return super().join([self._joined(part) for part in parts])

    def _joined(self, part: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if "cuts" not in part:
            return part
        assert self.augment is not None
        image = resize_packed(part["cuts"], part["sides"], self.size, self.augment.interpolation)
        return {"image": image} | {name: value for name, value in part.items() if name not in ("cuts", "sides")}

    def compile(self) -> None:
        """On a GPU about a quarter of the time, after half a minute once."""
        self._apply = torch.compile(apply, fullgraph=True)

    def noise(self, ids: Tensor, epoch: int) -> Noise:
        return {} if self.rest is None else draw(self.rest, ids, seed=self.seed, epoch=epoch)

    def finish(self, values: Mapping[str, Tensor], ids: Tensor, noise: Noise) -> Batch:
        targets = {self.source.target: values["label"]} if "label" in values else {}
        return self._mix(Batch(self._view(values["image"], noise), ids, targets), noise)

    def _view(self, samples: Tensor, noise: Noise) -> Tensor:
        """Normalised images, augmented in training; each by itself."""
        if self.rest is None:
            if self.held is not None:
                samples = centre_crop(samples, self.size, self.crop_share)
            return normalise(as_floats(samples), self.mean, self.std)
        return self._apply(samples, noise, self.rest, self.size, self.mean, self.std)

    def _mix(self, batch: Batch, noise: Noise) -> Batch:
        """MixUp, CutMix and label smoothing, which look at two samples of a batch."""
        count = len(self.source.classes) if self.source.classes is not None else None
        target = self.source.target
        images, labels = apply_mix(batch.inputs, batch.targets.get(target), noise, self.augment or NONE, count)
        return Batch(images, batch.ids, {} if labels is None else {target: labels})


def crop_boxes(
    sides: Sequence[tuple[int, int]], augment: AugmentConfig, seed: int, epoch: int, draws: list[int]
) -> list[list[int]]:
    """The boxes (top, left, height, width) of some draws in images of these sides: those the device would take."""
    noise = uniform(seed, epoch, torch.tensor(draws), "augment.crop", (CROP_NOISE,))
    heights, widths = torch.tensor(sides).unbind(1)
    return resized_crop_boxes(noise, heights, widths, augment.scale, augment.ratio).long().tolist()


def random_cuts(images: list[Tensor], augment: AugmentConfig, seed: int, epoch: int, draws: list[int]) -> list[Tensor]:
    """The random crops of some draws, not yet resized."""
    boxes = crop_boxes([(i.shape[1], i.shape[2]) for i in images], augment, seed, epoch, draws)
    return [
        image[:, top : top + height, left : left + width]
        for image, (top, left, height, width) in zip(images, boxes, strict=True)
    ]


def centre_crop(images: Tensor, size: tuple[int, int], crop_share: float) -> Tensor:
    """The central `crop_share` of the images [..., C, H, W], brought to `size`."""
    around = round(size[0] / crop_share), round(size[1] / crop_share)
    fitted = centre_fit(images, *around)
    top, left = (around[0] - size[0]) // 2, (around[1] - size[1]) // 2
    return fitted[..., top : top + size[0], left : left + size[1]]


def _labels(samples: list[dict[str, Any]]) -> Tensor:
    """[B] int64, or [B, K] int8 where a sample has any number of classes."""
    return torch.stack([torch.as_tensor(sample["label"]) for sample in samples])
