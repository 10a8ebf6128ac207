"""Images with masks: which numbers in mask files are which classes, the sources that read both, and their batches.

A worker reads and pads; image and mask are augmented together on the device. The geometry is drawn once, by the hash of
(seed, epoch, draw id); the image is resampled and the mask takes the nearest pixel. An evaluation sees images whole,
resized to just cover the model's size, and their masks as in the files.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from situs.config import Checked
from situs.data.augment.recipes import AugmentConfig, apply_masked, as_floats, normalise
from situs.data.batch import VOID, Batch
from situs.data.modalities.image import WITHOUT_CLASSES, Image, PixelPipeline, take_nearest
from situs.data.pipeline import Noise, Pipeline
from situs.data.resize import covering_size, resized
from situs.data.sources.base import EncodedSource, Source, Wanted, choose_split, has_shards, list_shards, splits_of
from situs.data.sources.folder import FileSource, printable, split_folders, walk
from situs.data.sources.images import decode, decode_numbers, read_bytes, size_text
from situs.data.sources.labels import LABEL_COLUMNS
from situs.data.sources.parquet import ParquetSource, check_bytes_column
from situs.errors import BrokenSampleError, DataError, SitusError, counted, none_read, verb
from situs.limits import Natural

if TYPE_CHECKING:
    from situs.data.config import DataConfig


_UNKNOWN = -2
_NUMBERS = 1 << 16  # numbers that a mask file may hold
_OFTEN_VOID = 255
_LISTS = ("objectInfo150.txt", "classes.txt")


@dataclass(frozen=True)
class MaskConfig(Checked):
    """How the pixel values of mask files become classes. Classes are counted from 0."""

    first: Natural | None = None
    """Pixel value of the first class in the mask files (ADE20K: 1). The default is 0, or 1 if the classes have no names
    and no training mask contains 0."""

    void: tuple[Natural, ...] = (255,)
    """Pixel values that mean no class (ADE20K: 0)."""

    classes: tuple[str, ...] = ()
    """Names of the classes, in the order of their pixel values. Default: the list beside the images (ADE20K's
    objectInfo150.txt, or classes.txt). Without a list, every value up to the largest in the training split is a
    class."""

    @property
    def start(self) -> int:
        """The number of the first class."""
        return self.first or 0

    def check(self) -> None:
        if len({*self.classes}) < len(self.classes):
            raise SitusError(field="classes", value=self.classes, allowed="names that differ")


MASKS = MaskConfig()


def class_numbers(config: MaskConfig, count: int) -> list[int]:
    """The numbers of `count` classes in the files: from the first on, without those that mean no class."""
    return list(islice((number for number in itertools.count(config.start) if number not in config.void), count))


def to_classes(numbers: Tensor, config: MaskConfig, count: int, name: str) -> Tensor:
    """A file's numbers [H, W] as classes [H, W] int16, VOID where there is none; a number of no class is refused.

    count: how many classes there are. name: what an error calls the sample.
    """
    table = _table(config.start, config.void, count)
    numbers = numbers.long()
    within = numbers.clamp(0, _NUMBERS - 1)
    classes = table[within].masked_fill_(within != numbers, _UNKNOWN)
    unknown = classes == _UNKNOWN
    if bool(unknown.any()):
        number, last = int(numbers[unknown][0]), class_numbers(config, count)[-1]
        void = f" ({', '.join(map(str, config.void))} {verb(len(config.void), 'mean')} no class)" if config.void else ""
        have = (
            f"the only class is {last}" if count == 1 else f"the {count} classes are numbered {config.start} to {last}"
        )
        reason = f"contains the class number {number:,}, but {have}{void}"
        if number == _OFTEN_VOID:
            reason += "; if 255 means no class, add 255 to the list void"
        raise BrokenSampleError(f"{name}: its mask {reason}", field=("data.masks.first", "data.masks.void"))
    if not bool((classes != VOID).any()):
        raise BrokenSampleError(f"{name}: no pixel of its mask has a class")
    return classes


@lru_cache(maxsize=8)
def _table(first: int, void: tuple[int, ...], count: int) -> Tensor:
    """[65536] int16: the class of each number, VOID or _UNKNOWN."""
    table = torch.full((_NUMBERS,), _UNKNOWN, dtype=torch.int16)
    numbers = class_numbers(MaskConfig(first, void), count)
    if numbers[-1] >= _NUMBERS:
        raise SitusError(
            f"class number {numbers[-1]:,}: numbers in a mask must be below {_NUMBERS:,}", field="masks.first"
        )
    table[numbers] = torch.arange(count, dtype=torch.int16)
    table[[number for number in void if number < _NUMBERS]] = VOID
    return table


def _list_beside(path: Path) -> Path | None:
    """The list of classes in the data's folder, or in the folder of a file."""
    folder = path if path.is_dir() else path.parent
    return next((folder / name for name in _LISTS if (folder / name).is_file()), None)


def names_beside(path: Path) -> tuple[str, ...]:
    """The names in the list of classes in the data's folder; empty without a list."""
    file = _list_beside(path)
    if file is None:
        return ()
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    rows = [line.split("\t") for line in lines if line.strip()]
    if file.name == _LISTS[0]:  # under a header one row for each class: its number, counts, its names
        rows = [[row[-1].partition(",")[0].partition(";")[0]] for row in rows if row[0].strip().isdigit()]
    names = tuple(row[0].strip() for row in rows)
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        if file.name != _LISTS[0]:
            raise DataError(f"{file}: names the class {twice!r} twice")
        names = tuple(f"{name} ({number})" if names.count(name) > 1 else name for number, name in enumerate(names, 1))
    return names


def usual_masks(path: str | None, first: int | None, void: tuple[int, ...] | None) -> MaskConfig:
    """How the masks at a path are read, with defaults for None: those of ADE20K where its list of names is there."""
    place = Path(path or "").expanduser()
    file = _list_beside(place) if path and place.exists() else None
    usual = MaskConfig(1, (0,)) if file is not None and file.name == _LISTS[0] else MASKS
    return MaskConfig(usual.first if first is None else first, usual.void if void is None else void)


def numbered(numbers: Iterable[int], config: MaskConfig, where: str) -> tuple[str, ...]:
    """The class numbers up to the largest in masks as names, for classes without names.

    255 is refused where a number before it is in no mask: usually it means no class.
    """
    numbers = sorted({*numbers} - {*config.void})
    most = numbers[-1] if numbers else -1
    before = {*range(config.start, _OFTEN_VOID)} - {*config.void}
    if most == _OFTEN_VOID and (missing := before - {*numbers}):
        raise SitusError(
            f'{where}: its masks contain 255, which probably means "no class", because {len(missing)} of the '
            f"{len(before)} class numbers below 255 never occur. If so, add 255 to the list `void`. If 255 is a class, "
            "list the names of all classes in `classes`",
            field=("data.masks.void", "data.masks.classes"),
        )
    if most < config.start:
        raise SitusError(
            f"{where}: no pixel of its masks has a class number; class numbers start at {config.start}",
            field="data.masks.first",
        )
    return tuple(str(number) for number in range(config.start, most + 1) if number not in config.void)


_IMAGE_FOLDERS = ("images", "image", "imgs")
_MASK_FOLDERS = ("annotations", "masks", "mask", "labels")
_COLUMNS = ("mask", "masks", "annotation", "annotations", "segmentation", "segmentation_mask", *LABEL_COLUMNS)


class MaskReader(EncodedSource):
    """`read` of images with masks: "image" [C, H, W] and "mask" [H, W] int16, the class of each pixel or VOID."""

    target = "mask"  # pyright: ignore[reportAssignmentType]

    @abstractmethod
    def mask_payload(self, index: int) -> bytes:
        """The encoded mask."""

    def numbers(self, index: int) -> Tensor:
        """The mask as it is in the file, [H, W]."""
        return decode_numbers(self.mask_payload(index), f"{self.entry(index)}, its mask")

    def label(self, index: int) -> Tensor:
        """The mask."""
        assert self.classes is not None
        return to_classes(self.numbers(index), self.settings, len(self.classes), self.entry(index))

    def read(self, index: int) -> dict[str, Any]:
        image = decode(self.payload(index), self.entry(index), self.channels)
        mask = self.label(index)
        if mask.shape != image.shape[1:]:
            size = size_text(image, self.payload(index), self.entry(index))
            raise BrokenSampleError(f"{self.entry(index)}: is {size} and its mask {' × '.join(map(str, mask.shape))}")
        return {"image": image, "mask": mask}

    def all_numbers(self) -> set[int]:
        """The numbers in all masks that can be read; refused where none can."""
        numbers, broken = set(), []
        for index in range(len(self)):
            try:
                numbers |= {*self.numbers(index).unique().tolist()}
            except BrokenSampleError as error:
                broken.append(str(error))
        if len(self) == len(broken):
            raise DataError(f"{none_read(self.name, len(self), 'masks')}; the first: {broken[0]}")
        return numbers


class MaskFiles(MaskReader, FileSource):
    """Files in two folders, of images and of masks, paired by name."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        self.settings = wanted.settings
        self.root, self._mask_root, chosen = _pair(path, wanted.split)
        (self._files, left_out), self._labels = walk(self.root), None
        name = path.name + (f" ({chosen})" if chosen else "")
        if not self._files:
            raise DataError(f"{self.root}: contains no images")
        masks = {_stem(file): file for file in walk(self._mask_root)[0]}
        self._masks = [masks.pop(_stem(file), None) for file in self._files]
        super().__init__(name, wanted.settings.classes or None, wanted.channels, wanted.strict)
        self.notes = left_out.notes(name)
        if masks:
            unpaired = f"{counted(len(masks), 'masks')} without an image; the first is {min(masks.values())}"
            self.notes.append(f"{name}: left out {unpaired}")

    def mask_payload(self, index: int) -> bytes:
        name = self._masks[index]
        if name is None:
            folder = printable(str(self._mask_root))
            raise BrokenSampleError(f"{self.entry(index)}: has no mask of the same name in {folder}")
        return read_bytes(self._mask_root / name, lambda: str(self._mask_root / name))


class MaskRows(MaskReader, ParquetSource):
    """Rows of parquet files with a column of images and one of masks, `{bytes, path}` each."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        super().__init__(path, wanted)
        self.classes = wanted.settings.classes or None

    def find_columns(self, file: Path, schema: Any, wanted: Wanted) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The columns of the images and of the masks."""
        images, _ = super().find_columns(file, schema, wanted._replace(labels=False))
        mask = next((name for name in _COLUMNS if name in schema.names), None)
        if mask is None:
            names = f"(such as {', '.join(_COLUMNS[:6])}), only the columns {', '.join(schema.names)[:200]}"
            raise DataError(f"{file}: has no column of masks {names}")
        check_bytes_column(file, schema, mask, "masks")
        return (*images, mask), ()

    def mask_payload(self, index: int) -> bytes:
        group, row = self._place(index)
        data = self._load(group)[0][1][row].as_py()
        if not data:
            raise BrokenSampleError(f"{self.entry(index)}: the row contains no mask")
        return data


def open_masks(path: Path, wanted: Wanted) -> Source:
    """Images with masks at `path`. Default classes are those of a list beside the data, or the numbers in the masks."""
    masks = wanted.settings
    kind = MaskRows if has_shards(path, ".parquet") else MaskFiles
    others: tuple[str, ...] = ()
    if masks.classes:
        with suppress(SitusError):  # a list that cannot be used names no other classes
            others = names_beside(path)
    elif names := names_beside(path):
        masks = replace(masks, classes=names)
    else:
        learned = "train" if mask_splits(path) & {"train", "training"} else None  # whose masks define the classes
        training = kind(path, wanted._replace(split=learned))
        numbers = training.all_numbers()
        if masks.first is None and numbers and min(numbers - {*masks.void}, default=0) > 0:
            masks = replace(masks, first=1)
        masks = replace(masks, classes=numbered(numbers, masks, training.name))
    source = kind(path, wanted._replace(settings=masks))
    if masks.start and all(name.isdigit() for name in masks.classes):
        last = class_numbers(masks, len(masks.classes))[-1]
        source.notes.append(f"{source.name}: its classes are the numbers {masks.start} to {last} of its masks")
    if others and others != masks.classes:
        listed = f"{', '.join(others[:3])}{' …' * (len(others) > 3)}"
        source.notes.append(
            f"{source.name}: the class list beside its images names other classes ({listed}) and is not used"
        )
    return source


def mask_splits(path: Path) -> set[str]:
    """The splits of images with masks."""
    if shards := list_shards(path, ".parquet"):
        return splits_of(shards)
    images = _first(path, _IMAGE_FOLDERS)
    return {*split_folders(path), *(() if images is None else split_folders(images))}


def has_masks(path: Path) -> bool:
    """Whether there are a folder of images and one of masks at a path, or in a split's folder."""
    folders = [path, *(path / name for name in split_folders(path))] if path.is_dir() else []
    return any(_first(folder, _IMAGE_FOLDERS) and _first(folder, _MASK_FOLDERS) for folder in folders)


def _pair(path: Path, split: str | None) -> tuple[Path, Path, str | None]:
    """The folders of images and masks of a split, and its name."""
    if not path.is_dir():
        raise DataError(f"{path}: must be a folder or a .parquet file, with images and masks")
    chosen = choose_split(mask_splits(path), split, str(path))
    home = path / chosen if chosen is not None and (path / chosen).is_dir() else path
    images, masks = _first(home, _IMAGE_FOLDERS), _first(home, _MASK_FOLDERS)
    if images is None or masks is None:
        folders = f"a folder of images ({', '.join(_IMAGE_FOLDERS)}) and a folder of masks ({', '.join(_MASK_FOLDERS)})"
        raise DataError(f"{home}: must contain {folders}, or parquet files")
    if chosen is None or home != path:
        return images, masks, chosen
    if not (masks / chosen).is_dir():
        raise DataError(f"{masks}: has no split {chosen!r}, but {images} has")
    return images / chosen, masks / chosen, chosen


def _first(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_dir()), None)


def _stem(file: str) -> str:
    return Path(file).with_suffix("").as_posix()


_LONGEST = 16  # times its shorter side


class MaskPipeline(PixelPipeline):
    """A source of images with masks to batches of both.

    Training: inputs [B, C, *size], and the target "mask" [B, *size]. Evaluation: inputs [B, C, H, W] as large as the
    largest, "sides" [B, 2] of what is image in them, "mask" [B, h, w] as large as the largest of the files, VOID behind
    the smaller ones, and their "whole" [B, 2].
    """

    fills: ClassVar = {"mask": VOID}

    def __init__(self, source: Source, data: DataConfig, augment: AugmentConfig | None) -> None:
        super().__init__(source, data, augment)
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
        return replace(data, masks=whole.settings)

    def read_as(self, data: DataConfig, value: Any) -> DataConfig:
        return replace(data, masks=value)

    def splits(self, path: Path, data: DataConfig) -> set[str]:  # noqa: ARG002
        return mask_splits(path)

    def open(self, path: Path, wanted: Wanted, data: DataConfig) -> Source:  # noqa: ARG002
        return open_masks(path, wanted)

    def pipeline(self, source: Source, data: DataConfig, augment: AugmentConfig | None, *_: Any) -> Pipeline:
        pipeline = MaskPipeline(source, data, augment)
        pipeline.resident = augment is not None and data.resident == "always"  # an evaluation reads each once
        return pipeline
