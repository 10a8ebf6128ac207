"""Images: cropped to one size by a worker, augmented, normalised and mixed on the device.

A crop's box comes from the same hash of (seed, epoch, draw id) in a worker as on the device, so that the number of
workers and their timing change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from situs.core.random import uniform
from situs.data.augment.geometry import CROP_NOISE, resized_crop_boxes
from situs.data.augment.recipes import NONE, AugmentConfig, apply, apply_mix, as_floats, draw, normalise
from situs.data.batch import Batch
from situs.data.pipeline import Noise, Pipeline
from situs.data.sources.base import EncodedSource, Source
from situs.data.sources.images import centre_fit, decode
from situs.data.sources.jpeg import read_frame
from situs.errors import SitusError

Decoder = Literal["auto", "cpu", "scaled"]
"""How a worker reads a JPEG."""


class ImagePipeline(Pipeline):
    """augment: None for evaluation, which crops the centre. mean, std: of each channel.

    held: the images come as they lie on the device (`ResidentLoader`), not cropped by a worker. decoder: "scaled" reads
    a JPEG at 1/2, 1/4 or 1/8 of its sides where a random crop still gets no fewer pixels than it needs.
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
        decoder: Decoder = "cpu",
    ) -> None:
        super().__init__(source, training=augment is not None)
        self.size, self.seed, self.augment, self.crop_share = size, seed, augment, crop_share
        self.mean, self.std = (torch.tensor(part) for part in normalisation)
        # The worker has made the resized crop; a shift is made on the device.
        cropped = not held and augment is not None and augment.crop == "resized"
        self.rest = replace(augment, crop="none") if augment is not None and cropped else augment
        self._apply = apply
        self.scaled = decoder == "scaled" and cropped and isinstance(source, EncodedSource)

    def fetch(self, index: int, epoch: int, draw: int) -> dict[str, Any]:
        """The image whole, or at the part of its sides that its crop asks for: then "sides" are those it has whole."""
        if not self.scaled:
            return super().fetch(index, epoch, draw)
        source: Any = self.source
        data = source.payload(index)
        sides = self._sides(data)
        reduce = 1 if sides is None else self._reduce(sides, epoch, draw)
        label = source.label(index)
        image = decode(data, source.entry(index), source.channels, reduce=reduce)
        sample = {"image": image} if label is None else {"image": image, "label": label}
        return sample if reduce == 1 else sample | {"sides": sides}

    def _sides(self, data: bytes) -> tuple[int, int] | None:
        """Of a JPEG that may be read at a part of its sides; None where no crop of it could be."""
        frame = read_frame(data)
        large = frame is not None and frame.height >= 2 * self.size[0] and frame.width >= 2 * self.size[1]
        return (frame.height, frame.width) if frame is not None and frame.plain and large else None

    def _reduce(self, sides: tuple[int, int], epoch: int, draw: int) -> int:
        assert self.augment is not None
        box = crop_boxes([sides], self.augment, self.seed, epoch, [draw])[0]
        return next((part for part in (8, 4, 2) if all(box[2 + i] // part >= self.size[i] for i in (0, 1))), 1)

    def collate(self, epoch: int, draws: list[int], samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        images = [sample["image"] for sample in samples]
        if self.augment is None:
            images = [centre_crop(image, self.size, self.crop_share) for image in images]
        elif self.augment.crop != "resized":
            images = [centre_fit(image, *self.size) for image in images]
        else:
            sides = [sample.get("sides", tuple(sample["image"].shape[1:])) for sample in samples]
            images = random_crops(images, self.size, self.augment, self.seed, epoch, draws, sides)
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


def crop_boxes(
    sides: Sequence[tuple[int, int]], augment: AugmentConfig, seed: int, epoch: int, draws: list[int]
) -> list[list[int]]:
    """The boxes (top, left, height, width) of some draws in images of these sides: those the device would take."""
    noise = uniform(seed, epoch, torch.tensor(draws), "augment.crop", (CROP_NOISE,))
    heights, widths = torch.tensor(sides).unbind(1)
    return resized_crop_boxes(noise, heights, widths, augment.scale, augment.ratio).long().tolist()


def random_crops(
    images: list[Tensor],
    size: tuple[int, int],
    augment: AugmentConfig,
    seed: int,
    epoch: int,
    draws: list[int],
    sides: Sequence[tuple[int, int]] | None = None,
) -> list[Tensor]:
    """The random resized crops of some draws, antialiased.

    sides: height and width of each image where it is whole, if some are smaller here; their boxes are rounded to whole
    pixels of what is here.
    """
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as tv

    boxes = crop_boxes(sides or [(i.shape[1], i.shape[2]) for i in images], augment, seed, epoch, draws)
    mode = InterpolationMode(augment.interpolation)
    return [
        tv.resized_crop(image, *_fitted(box, whole, image), size=list(size), interpolation=mode, antialias=True)
        for image, box, whole in zip(images, boxes, sides or [None] * len(images), strict=True)
    ]


def _fitted(box: list[int], whole: tuple[int, int] | None, image: Tensor) -> list[int]:
    """A box in an image of sides `whole`, as a box in `image`, the same one at a part of its sides."""
    have = image.shape[1], image.shape[2]
    if whole is None or whole == have:
        return box
    starts = [round(box[i] * have[i] / whole[i]) for i in (0, 1)]
    ends = [round((box[i] + box[2 + i]) * have[i] / whole[i]) for i in (0, 1)]
    return [*starts, *(max(1, end - start) for start, end in zip(starts, ends, strict=True))]


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
