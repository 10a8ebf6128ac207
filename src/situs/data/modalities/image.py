"""Images: cropped by a worker, resized by it or on the device, augmented, normalised and mixed there.

A crop's box comes from the same hash of (seed, epoch, draw id) in a worker as on the device, so the number of workers
and their timing change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.core.kernels import has_kernels
from situs.core.random import uniform
from situs.data.augment.geometry import CROP_NOISE, resized_crop_boxes
from situs.data.augment.recipes import NONE, AugmentConfig, apply, apply_mix, as_floats, denormalise, draw, normalise
from situs.data.batch import Batch
from situs.data.modalities.base import Modality, Scale
from situs.data.pipeline import Noise, Pipeline
from situs.data.resize import centre_fit, channels_of, pack, resize_packed, resized
from situs.data.sources.base import Source, TensorSource, Wanted, has_shards, list_shards
from situs.data.sources.cifar import find_cifar, open_cifar
from situs.data.sources.folder import TABLES, FolderSource, find_splits
from situs.data.sources.images import IMAGE_SUFFIXES, to_channels
from situs.data.sources.memory import is_memory
from situs.data.sources.parquet import COLUMNS, ParquetSource
from situs.data.sources.table import SUFFIXES, TableSource, has_table, table_splits
from situs.data.sources.webdataset import TarSource
from situs.errors import BrokenSampleError, DataError, SitusError, counted

if TYPE_CHECKING:
    from situs.data.config import DataConfig

WITHOUT_CLASSES = frozenset(
    field.name for field in fields(AugmentConfig) if field.name not in ("mixup", "cutmix", "label_smoothing")
)
"""Augmentations of images with masks or objects."""


class PixelPipeline(Pipeline):
    """augment: None for evaluation. fills: padding of the values, other than images, that a batch pads to one shape."""

    fills: ClassVar[dict[str, float]] = {}
    device_tensors = ("mean", "std")

    def __init__(self, source: Source, data: DataConfig, augment: AugmentConfig | None) -> None:
        super().__init__(source, training=augment is not None)
        self.size, self.seed, self.augment = data.size, data.seed, augment
        self.mean, self.std = map(torch.tensor, data.normalisation)

    def join(self, parts: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """Joins parts: floats where any part has floats, padded to the largest."""
        return super().join(self.padded(parts, first=1))

    def padded(self, parts: Sequence[Mapping[str, Any]], first: int) -> list[dict[str, Tensor]]:
        """Samples, or with first=1 parts of a batch, padded to one shape from dimension `first` on: images by their
        last row and column, other values by their `fills`."""
        columns = {name: [part[name] for part in parts] for name in parts[0]}
        columns["image"] = alike(columns["image"])
        for name in ("image", *self.fills):
            if name not in columns:
                continue
            most = [max(lengths) for lengths in zip(*(value.shape[first:] for value in columns[name]), strict=True)]
            if name == "image":
                columns[name] = [repeat_border(image, *most[-2:]) for image in columns[name]]
            else:
                columns[name] = [_pad_end(value, most, self.fills[name]) for value in columns[name]]
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def noise(self, ids: Tensor, epoch: int) -> Noise:
        return {} if self.augment is None else draw(self.augment, ids, seed=self.seed, epoch=epoch)

    def shown(self, inputs: Tensor) -> Tensor:
        return denormalise(inputs, self.mean, self.std)


def alike(images: Sequence[Tensor]) -> list[Tensor]:
    """Images [..., C, H, W] of one batch: floats where one has floats; refused where their channels differ."""
    if len({image.dtype for image in images}) > 1:
        images = [as_floats(image) for image in images]
    if len(counts := sorted({image.shape[-3] for image in images})) > 1:
        raise SitusError(
            f"images of {' and '.join(map(str, counts))} channels cannot be in one batch; set channels to one number "
            "for all images",
            field="channels",
        )
    return list(images)


def take_nearest(masks: Tensor, size: tuple[int, int]) -> Tensor:
    """Masks [..., H, W] resized, each pixel taken from the nearest."""
    rows, columns = (((torch.arange(want) + 0.5) * (have / want)).long()
                     for have, want in zip(masks.shape[-2:], size, strict=True))  # fmt: skip
    return masks[..., rows[:, None], columns]


def _pad_end(value: Tensor, sides: list[int], fill: float) -> Tensor:
    """A value whose last dimensions are padded at their ends to `sides`."""
    if tuple(value.shape[-len(sides) :]) == tuple(sides):
        return value
    missing = [want - have for have, want in zip(value.shape[-len(sides) :], sides, strict=True)]
    return F.pad(value, [amount for short in reversed(missing) for amount in (0, short)], value=fill)


def repeat_border(image: Tensor, height: int, width: int) -> Tensor:
    """An image [..., h, w] padded to a size by repeating its last row and column."""
    if tuple(image.shape[-2:]) == (height, width):
        return image
    rows, columns = torch.arange(height), torch.arange(width)
    rows, columns = rows.clamp(max=image.shape[-2] - 1), columns.clamp(max=image.shape[-1] - 1)
    return image[..., rows[:, None], columns]


_LARGE = 2  # times the bytes of the model's input: a larger crop is resized before it is sent


class ImagePipeline(PixelPipeline):
    """Images without masks or objects; evaluation crops their centre.

    resident: the size of images that are kept on the device, not cropped by a worker. device_resizes: crops of bytes
    are resized on the device, by `join`.
    """

    def __init__(
        self,
        source: Source,
        data: DataConfig,
        augment: AugmentConfig | None,
        *,
        resident: tuple[int, int] | None = None,
        device_resizes: bool = False,
    ) -> None:
        super().__init__(source, data, augment)
        self.crop_share = data.crop_share
        # The worker has made the resized crop; a shift is made on the device.
        cropped = resident is None and augment is not None and augment.crop == "resized"
        self.rest = replace(augment, crop="none") if augment is not None and cropped else augment
        self._apply, self.resident = apply, resident
        self.cuts = device_resizes and cropped
        self.by_rows = not self.cuts
        self.pairs = augment is not None and augment.mixes
        self.row_bytes = (source.channels or 3) * self.size[0] * self.size[1] * (_LARGE if self.cuts else 1)

    def collate(self, epoch: int, draws: list[int], samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        images, values = [sample["image"] for sample in samples], {}
        if self.resident is not None:
            images = [centre_fit(image, *self.resident) for image in images]
        elif self.augment is None:
            images = [centre_crop(image, self.size, self.crop_share) for image in images]
        elif self.augment.crop != "resized":
            images = [centre_fit(image, *self.size) for image in images]
        else:
            images = random_cuts(images, self.augment, self.seed, epoch, draws)
            packed = self.cuts and all(image.dtype == torch.uint8 for image in images)
            most = _LARGE * self.size[0] * self.size[1] if packed else 0
            mode = self.augment.interpolation
            images = [image if image[0].numel() <= most else resized(image, self.size, mode) for image in images]
            if packed:
                values["cuts"], values["sides"] = pack(alike(images))
        if not values:
            values["image"] = torch.stack(alike(images))
        if "label" in samples[0]:
            values["label"] = torch.stack([torch.as_tensor(sample["label"]) for sample in samples])
        return values

    def whole(self) -> dict[str, Tensor] | None:
        source = self.source
        if not isinstance(source, TensorSource) or tuple(source.images.shape[2:]) != self.resident:
            return None
        images, channels = source.images, source.channels or source.images.shape[1]
        if channels != images.shape[1]:
            images = torch.stack([to_channels(image, channels, source.name) for image in images])
        return {"image": images} | ({} if source.labels is None else {"label": source.labels})

    def move(self, values: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """All but "sides", which the host needs to launch kernels."""
        moved = super().move({name: value for name, value in values.items() if name != "sides"}, device)
        return moved | {"sides": values["sides"]} if "sides" in values else moved

    def join(self, parts: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """Resizes the crops that workers left: all of a batch at once, where all are bytes with as many channels."""
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
        """Takes about a quarter of the time on a GPU, after half a minute of compiling."""
        self._apply = torch.compile(apply, fullgraph=True)

    def noise(self, ids: Tensor, epoch: int) -> Noise:
        return {} if self.rest is None else draw(self.rest, ids, seed=self.seed, epoch=epoch)

    def finish(self, values: Mapping[str, Tensor], ids: Tensor, noise: Noise) -> Batch:
        """With MixUp, CutMix and label smoothing."""
        images, count = self._view(values["image"], noise), len(self.source.classes or ())
        images, labels = apply_mix(images, values.get("label"), noise, self.augment or NONE, count)
        return Batch(images, ids, {} if labels is None else {self.source.target: labels})

    def _view(self, samples: Tensor, noise: Noise) -> Tensor:
        """Normalised images, augmented in training; each independently."""
        if self.rest is None:
            if self.resident is not None:
                samples = centre_crop(samples, self.size, self.crop_share)
            return normalise(as_floats(samples), self.mean, self.std)
        return self._apply(samples, noise, self.rest, self.size, self.mean, self.std)


def random_cuts(images: list[Tensor], augment: AugmentConfig, seed: int, epoch: int, draws: list[int]) -> list[Tensor]:
    """The random crops of some draws, as the device draws them, not yet resized."""
    noise = uniform(seed, epoch, torch.tensor(draws), "augment.crop", (CROP_NOISE,))
    heights, widths = torch.tensor([image.shape[1:] for image in images]).unbind(1)
    boxes = resized_crop_boxes(noise, heights, widths, augment.scale).long().tolist()
    return [
        image[:, top : top + height, left : left + width]
        for image, (top, left, height, width) in zip(images, boxes, strict=True)
    ]


def centre_crop(images: Tensor, size: tuple[int, int], crop_share: float) -> Tensor:
    """The central `crop_share` of the images [..., C, H, W], resized to `size`."""
    outer = round(size[0] / crop_share), round(size[1] / crop_share)
    fitted = centre_fit(images, *outer)
    top, left = (outer[0] - size[0]) // 2, (outer[1] - size[1]) // 2
    return fitted[..., top : top + size[0], left : left + size[1]]


_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_PROBES = 16
_LARGEST = 8  # times the model's input


class Image(Modality):
    """Images, each with one class or any number of them."""

    kind, things, suffixes = "image", "images", IMAGE_SUFFIXES
    label_fields, pixels = ("data", "data.multi_label"), True

    def check(self, data: DataConfig) -> None:
        super().check(data)
        check_scale(data, data.channels, "channel")

    def normalisation(self, data: DataConfig) -> Scale:
        """Mean and deviation of each channel; by default ImageNet's for three."""
        mean, std = _IMAGENET if data.channels == 3 else ((0.5,) * data.channels, (0.25,) * data.channels)
        return data.mean or mean, data.std or std

    def facts(self, data: DataConfig | None, shape: tuple[int, ...] | None, channels: int) -> list[str]:
        lines = [] if shape is None else [f"Images: {counted(channels, 'channels')}, {shape[0]} × {shape[1]} pixels"]
        if data is None:
            return lines
        mean, std = (f"[{', '.join(f'{value:.4g}' for value in part)}]" for part in self.normalisation(data))
        return [*lines, f"Normalised by mean {mean} and standard deviation {std}"]

    def without_labels(self, data: DataConfig) -> str:
        if is_memory(data.path):
            return (
                "; each image needs one class: pass (image, label) pairs, (images, labels), or dicts of image and label"
            )
        folders = ": put the images of each class into a separate folder"
        return "" if data.multi_label else f"{folders}; for several classes per image, set multi_label"

    def is_at(self, path: Path, *, multi_label: bool) -> bool:  # noqa: ARG002
        return path.is_dir() and bool(find_cifar(path) or list_shards(path, ".tar"))

    def in_columns(self, schema: Any, *, asked: bool) -> bool:  # noqa: ARG002
        return not {*schema.names}.isdisjoint(COLUMNS["image"])

    def splits(self, path: Path, data: DataConfig) -> set[str]:
        if _has_table(path, data.multi_label):
            return table_splits(path)
        if find_cifar(path) and not any(list_shards(path, suffix) for suffix in (".parquet", ".tar")):
            return {"train", "test"}
        return find_splits(path, ".parquet", ".tar")

    def open(self, path: Path, wanted: Wanted, data: DataConfig) -> Source:  # noqa: ARG002
        if _has_table(path, wanted.multi_label):
            return TableSource(path, wanted)
        for suffix, kind in ((".parquet", ParquetSource), (".tar", TarSource)):
            if has_shards(path, suffix):
                if wanted.multi_label and kind is TarSource:
                    raise one_class(path)
                return kind(path, wanted)
        if not path.is_dir():
            hint = "; to read a table of labels, set multi_label" if path.suffix in SUFFIXES else ""
            raise DataError(f"{path}: must be a folder, a .parquet or a .tar file{hint}")
        if wanted.multi_label:
            raise one_class(path)
        return open_cifar(path, wanted) if find_cifar(path) else FolderSource(path, wanted)

    def pipeline(
        self, source: Source, data: DataConfig, augment: AugmentConfig | None, device: torch.device
    ) -> Pipeline:
        size = resident_size(source, data)
        return ImagePipeline(source, data, augment, resident=size, device_resizes=has_kernels(device))


def check_scale(data: DataConfig, count: int, unit: str) -> None:
    """Refuses a mean or deviation that has not `count` numbers. unit: what each is for."""
    for name in ("mean", "std"):
        if len(getattr(data, name)) not in {0, count}:
            allowed = f"{counted(count, 'numbers')}, one per {unit}"
            raise SitusError(field=(name, "channels"), value=getattr(data, name), allowed=allowed)


def resident_size(source: Source, data: DataConfig) -> tuple[int, int] | None:
    """The size at which the images are kept on the device, or None to stream them."""
    if data.resident == "never":
        return None
    size, sizes = data.size, _probe(source)
    common = sizes.pop() if len(sizes) == 1 else None
    if data.resident == "always":
        # Images of many sizes are kept a little larger than the model's input, as ImageNet's 256 for 224.
        # So are large ones of one size: shrinking them for each view would cost more than it gains.
        if common is not None and max(common[0] / size[0], common[1] / size[1]) <= _LARGEST:
            return common
        return round(size[0] * 8 / 7), round(size[1] * 8 / 7)
    if common is None or common[0] > 2 * size[0] or common[1] > 2 * size[1]:
        return None
    fits = len(source) * data.channels * common[0] * common[1] <= data.resident_gib * 2**30
    return common if fits else None


def _probe(source: Source) -> set[tuple[int, int]]:
    """The sizes (height, width) of some images spread over the set."""
    if isinstance(source, TensorSource):
        return {(source.images.shape[2], source.images.shape[3])}
    sizes = set()
    for index in range(0, len(source), max(1, len(source) // _PROBES)):
        try:
            sizes.add(tuple(source.read(index)["image"].shape[1:]))
        except BrokenSampleError:
            continue
    return sizes


def _has_table(path: Path, multi_label: bool) -> bool:
    """Whether multi-label reading is asked for and the labels are a table among the files."""
    return multi_label and (path.suffix in SUFFIXES if path.is_file() else has_table(path))


def one_class(path: str | Path) -> SitusError:
    """The error for a set without multi-label data."""
    return SitusError(
        f"{path}: has one class per image; for several classes per image, use parquet, or image files "
        f"with a table of labels ({', '.join(TABLES)})",
        field="multi_label",
    )
