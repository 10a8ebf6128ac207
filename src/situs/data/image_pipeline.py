"""Images: cut by a worker, brought to one size by it or on the device, augmented, normalised and mixed there.

A crop's box comes from the same hash of (seed, epoch, draw id) in a worker as on the device, so that the number of
workers and their timing change nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from situs.core.random import uniform
from situs.data.augment.geometry import CROP_NOISE, resized_crop_boxes
from situs.data.augment.recipes import NONE, AugmentConfig, apply, apply_mix, as_floats, draw, normalise
from situs.data.batch import Batch
from situs.data.late import beside, decode_on
from situs.data.pipeline import Noise
from situs.data.pixel_pipeline import PixelPipeline, alike
from situs.data.resize import channels_of, pack, resize_all, resize_packed, resized
from situs.data.sources.base import EncodedSource, Source
from situs.data.sources.images import centre_fit, decode
from situs.data.sources.jpeg import read_frame

Decoder = Literal["auto", "cpu", "scaled", "gpu"]
"""How a JPEG is read for training: by a worker, whole or at a part of its sides, or on the device."""

Resizer = Literal["auto", "worker", "device"]
"""Who brings a random crop to its size."""

_LARGE = 2  # times the bytes of what the model sees: a larger crop is resized before it travels


class ImagePipeline(PixelPipeline):
    """Images by themselves; evaluation crops their centre.

    held: the images come as they lie on the device (`ResidentLoader`), not cropped by a worker. decoder: "scaled" reads
    a JPEG at 1/2, 1/4 or 1/8 of its sides where a random crop still gets no fewer pixels than it needs; "gpu" leaves
    plain ones encoded for `move`, and what else there is to the workers. resizer: "device" leaves bytes that a worker
    cut out to be resized by `join`.
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
        resizer: Resizer = "worker",
    ) -> None:
        super().__init__(source, size, seed, augment, normalisation)
        self.crop_share = crop_share
        # The worker has made the resized crop; a shift is made on the device.
        cropped = not held and augment is not None and augment.crop == "resized"
        self.rest = replace(augment, crop="none") if augment is not None and cropped else augment
        self._apply, self.held = apply, held
        apart = cropped and len(source) > 0 and isinstance(source.origin(0)[0], EncodedSource)
        self.scaled, self.late = decoder == "scaled" and apart, decoder == "gpu" and apart and source.channels == 3
        self.cuts = resizer == "device" and cropped
        self.by_rows = not self.late and not self.cuts
        self.row_bytes = (source.channels or 3) * size[0] * size[1] * (_LARGE if self.cuts else 1)

    def fetch(self, index: int, epoch: int, draw: int) -> dict[str, Any]:
        """The image whole, or at the part of its sides that its crop asks for, or "encoded". "sides": of the whole."""
        if not self.scaled and not self.late:
            return super().fetch(index, epoch, draw)
        source: Any
        source, index = self.source.origin(index)
        data, label = source.payload(index), source.label(index)
        sample: dict[str, Any] = {} if label is None else {"label": label}
        frame = read_frame(data)
        if frame is None or not frame.plain:
            return sample | {"image": decode(data, source.entry(index), source.channels)}
        sides = frame.height, frame.width
        if self.late:
            return sample | {"encoded": data, "sides": sides}
        reduce = self._reduce(sides, epoch, draw)
        image = decode(data, source.entry(index), source.channels, reduce=reduce)
        return sample | {"image": image, "sides": sides}

    def _reduce(self, sides: tuple[int, int], epoch: int, draw: int) -> int:
        assert self.augment is not None
        if any(sides[i] < 2 * self.size[i] for i in (0, 1)):
            return 1  # whatever its crop is
        box = crop_boxes([sides], self.augment, self.seed, epoch, [draw])[0]
        return next((part for part in (8, 4, 2) if all(box[2 + i] // part >= self.size[i] for i in (0, 1))), 1)

    def collate(self, epoch: int, draws: list[int], samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        if self.late:
            return self._collate_late(epoch, draws, samples)
        images, values = [sample["image"] for sample in samples], {}
        if self.augment is None:
            images = [centre_crop(image, self.size, self.crop_share) for image in images]
        elif self.augment.crop != "resized":
            images = [centre_fit(image, *self.size) for image in images]
        else:
            sides = [sample.get("sides", tuple(sample["image"].shape[1:])) for sample in samples]
            images = random_cuts(images, self.augment, self.seed, epoch, draws, sides)
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

    def _collate_late(self, epoch: int, draws: list[int], samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """What is decoded here is cropped here; the rest goes on encoded, one behind the other, with its boxes."""
        assert self.augment is not None
        rows = [row for row, sample in enumerate(samples) if "encoded" in sample]
        files = [samples[row]["encoded"] for row in rows]
        sides = [sample.get("sides") or tuple(sample["image"].shape[1:]) for sample in samples]
        boxes = torch.tensor(crop_boxes(sides, self.augment, self.seed, epoch, draws))
        early = [row for row, sample in enumerate(samples) if "image" in sample]
        images, own = [samples[row]["image"] for row in early], [draws[row] for row in early]
        values = {
            "rows": torch.tensor(rows, dtype=torch.int64),
            "boxes": boxes[rows],
            "lengths": torch.tensor([len(file) for file in files], dtype=torch.int64),
            "encoded": torch.frombuffer(bytearray(b"".join(files) or b"\0"), dtype=torch.uint8),
            "draws": torch.tensor([epoch, *(draws[row] for row in rows)]),
        }
        if early:
            cuts = random_cuts(images, self.augment, self.seed, epoch, own)
            values["image"] = torch.stack(alike([self._resized(cut) for cut in cuts]))
        if "label" in samples[0]:
            values["label"] = _labels(samples)
        return values

    def _resized(self, cut: Tensor) -> Tensor:
        assert self.augment is not None
        return resized(cut, self.size, self.augment.interpolation)

    def move(self, values: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Decodes there what the workers left to it. "sides" stay on the host, who knows by them what to launch."""
        if "encoded" not in values:
            moved = super().move({name: value for name, value in values.items() if name != "sides"}, device)
            return moved | {"sides": values["sides"]} if "sides" in values else moved
        with beside(device):
            moved = self._move_encoded(values, device)
        if device.type == "cuda":
            for value in moved.values():
                value.record_stream(torch.cuda.current_stream(device))
        return moved

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

    def _move_encoded(self, values: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        assert self.augment is not None
        rows, labels = values["rows"], values.get("label")
        files = values["encoded"][: int(values["lengths"].sum())].split(values["lengths"].tolist())
        boxes, epoch, *draws = values["boxes"], *values["draws"].tolist()
        pixels, instead = self._decoded(files, boxes, device), {}
        for number, image in enumerate(pixels):
            if image is None:  # as a worker would: the next readable one stands in for it
                instead[number] = self._by_hand(epoch, draws[number])
        good = [number for number in range(len(pixels)) if number not in instead]
        parts = [values["image"].to(device, non_blocking=True)] if "image" in values else []
        if good:
            cuts = [
                image[:, top : top + height, left : left + width]
                for image, (top, left, height, width) in zip(pixels, boxes.tolist(), strict=True)
                if image is not None
            ]
            parts.append(resize_all(cuts, self.size, self.augment.interpolation))
        parts += [made["image"].to(device) for made in instead.values()]
        count = len(rows) + (len(values["image"]) if "image" in values else 0)
        early = torch.ones(count, dtype=torch.bool).index_fill_(0, rows, False).nonzero().flatten()
        order = torch.cat([early, rows[good], rows[list(instead)]]).argsort()
        if len({part.dtype for part in parts}) > 1:
            parts = [as_floats(part) for part in parts]
        moved = {"image": torch.cat(parts)[order.to(device, non_blocking=True)]}
        if labels is not None:
            for number, made in instead.items():
                labels[rows[number]] = made["label"][0]
            moved["label"] = labels.to(device, non_blocking=True)
        return moved

    def _decoded(self, files: Sequence[Tensor], boxes: Tensor, device: torch.device) -> list[Tensor | None]:
        """The images; None for one that is damaged, or has not the sides that its box was drawn for."""
        made: list[Tensor | None]
        try:
            made = [*decode_on(device, files)] if files else []
        except RuntimeError:  # which of them, it does not say
            made = []
            for file in files:
                try:
                    made += decode_on(device, [file])
                except RuntimeError:
                    made.append(None)
        ends = boxes[:, :2] + boxes[:, 2:]
        fits = [
            image is not None and image.shape[1] >= end[0] and image.shape[2] >= end[1]
            for image, end in zip(made, ends.tolist(), strict=True)
        ]
        return [image if fit else None for image, fit in zip(made, fits, strict=True)]

    def _by_hand(self, epoch: int, draw: int) -> dict[str, Tensor]:
        """A sample as the workers make it where nothing is left to the device."""
        plain = copy.copy(self)
        plain.late = plain.cuts = False
        part = plain.read(epoch, [draw])
        for index, reason in part.broken:
            self.source.skip(index, reason)
        return part.values

    def compile(self) -> None:
        """On a GPU about a quarter of the time, after half a minute once."""
        self._apply = torch.compile(apply, fullgraph=True)

    def noise(self, ids: Tensor, epoch: int) -> Noise:
        return {} if self.rest is None else draw(self.rest, ids, seed=self.seed, epoch=epoch)

    def finish(self, values: Mapping[str, Tensor], ids: Tensor, noise: Noise) -> Batch:
        targets = {self.source.target: values["label"]} if "label" in values else {}
        return self.mix(Batch(self.view(values["image"], noise), ids, targets), noise)

    def view(self, samples: Tensor, noise: Noise) -> Tensor:
        """Normalised images, augmented in training; each by itself."""
        if self.rest is None:
            if self.held:
                samples = centre_crop(samples, self.size, self.crop_share)
            return normalise(as_floats(samples), self.mean, self.std)
        return self._apply(samples, noise, self.rest, self.size, self.mean, self.std)

    def mix(self, batch: Batch, noise: Noise) -> Batch:
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


def random_cuts(
    images: list[Tensor],
    augment: AugmentConfig,
    seed: int,
    epoch: int,
    draws: list[int],
    sides: Sequence[tuple[int, int]] | None = None,
) -> list[Tensor]:
    """The random crops of some draws, not yet resized.

    sides: height and width of each image where it is whole, if some are smaller here; their boxes are rounded to whole
    pixels of what is here.
    """
    boxes = crop_boxes(sides or [(i.shape[1], i.shape[2]) for i in images], augment, seed, epoch, draws)
    cuts = []
    for image, box, whole in zip(images, boxes, sides or [None] * len(images), strict=True):
        top, left, height, width = _fitted(box, whole, image)
        cuts.append(image[:, top : top + height, left : left + width])
    return cuts


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


def _labels(samples: list[dict[str, Any]]) -> Tensor:
    """[B] int64, or [B, K] int8 where a sample has any number of classes."""
    return torch.stack([torch.as_tensor(sample["label"]) for sample in samples])
