"""Images with masks: ADE20K's folders, other pairs of folders, Hugging Face parquet with a column of masks.

    images/training/….jpg  annotations/training/….png     ADE20K's own; validation beside training, or no splits
    train/images/….jpg     train/masks/….png              the splits outside

A mask belongs to the image of the same name, whatever their endings.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from situs.data.masks import MaskConfig, class_numbers, names_beside, numbered, to_classes
from situs.data.sources.base import EncodedSource, Source, Wanted, choose_split, list_shards, splits_of
from situs.data.sources.folder import FileSource, plain, split_folders, walk
from situs.data.sources.images import decode, decode_numbers, read_bytes, said_size
from situs.data.sources.parquet import ParquetSource
from situs.errors import BrokenSampleError, DataError, SitusError, counted, none_read

IMAGES = ("images", "image", "imgs")
MASKS = ("annotations", "masks", "mask", "labels")


class MaskReader(EncodedSource):
    """`read` of images with masks: "image" [C, H, W] and "mask" [H, W] int16, the class of each pixel or VOID."""

    masks: MaskConfig
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
        return to_classes(self.numbers(index), self.masks, len(self.classes), self.entry(index))

    def read(self, index: int) -> dict[str, Any]:
        image = decode(self.payload(index), self.entry(index), self.channels)
        mask = self.label(index)
        if mask.shape != image.shape[1:]:
            own = said_size(image, self.payload(index), self.entry(index))
            raise BrokenSampleError(f"{self.entry(index)}: is {own} and its mask {' × '.join(map(str, mask.shape))}")
        return {"image": image, "mask": mask}

    def all_numbers(self) -> set[int]:
        """The numbers in all masks that can be read; refused where none can."""
        found, broken = set(), []
        for index in range(len(self)):
            try:
                found |= {*self.numbers(index).unique().tolist()}
            except BrokenSampleError as error:
                broken.append(str(error))
        if len(self) == len(broken):
            raise DataError(f"{none_read(self.name, len(self), 'masks')}; the first: {broken[0]}")
        return found


class MaskFiles(MaskReader, FileSource):
    """Files in two folders, paired by their names below them."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        self.masks = wanted.settings
        self.root, self._mask_root, chosen = _pair(path, wanted.split)
        (self._files, left_out), self._labels = walk(self.root), None
        name = path.name + (f" ({chosen})" if chosen else "")
        if not self._files:
            raise DataError(f"{self.root}: holds no images")
        masks = {_stem(file): file for file in walk(self._mask_root)[0]}
        self._masks = [masks.pop(_stem(file), None) for file in self._files]
        super().__init__(name, wanted.settings.classes or None, wanted.channels, wanted.strict)
        self.notes = left_out.notes(name)
        if masks:
            more = f"{counted(len(masks), 'masks')} without an image, the first {min(masks.values())}"
            self.notes.append(f"{name}: left out {more}")

    def mask_payload(self, index: int) -> bytes:
        name = self._masks[index]
        if name is None:
            raise BrokenSampleError(f"{self.entry(index)}: has no mask of its name in {plain(str(self._mask_root))}")
        return read_bytes(self._mask_root / name, lambda: str(self._mask_root / name))


class MaskRows(MaskReader, ParquetSource):
    """Rows of parquet files with a column of images and one of masks, `{bytes, path}` each."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        self.masks = wanted.settings
        super().__init__(path, wanted)
        self.classes = wanted.settings.classes or None

    def mask_payload(self, index: int) -> bytes:
        group, row = self._place(index)
        data = self._load(group)[1][row].as_py()
        if not data:
            raise BrokenSampleError(f"{self.entry(index)}: the row holds no mask")
        return data


def open_masks(path: Path, wanted: Wanted) -> Source:
    """Images with masks at `path`. Classes that nobody names are those of a list beside the data, or are counted."""
    masks = wanted.settings
    kind = MaskRows if path.suffix == ".parquet" or (path.is_dir() and list_shards(path, ".parquet")) else MaskFiles
    if masks.classes:
        source, others = _noted(kind(path, wanted)), ()
        with suppress(SitusError):  # a list that cannot be used names no other classes
            others = names_beside(path)
        if others and others != masks.classes:
            said = f"names other classes, {', '.join(others[:3])}{' …' * (len(others) > 3)}; those given are taken"
            source.notes.append(f"{source.name}: the list beside its images {said}")
        return source
    names = names_beside(path)
    if not names:
        learned = "train" if mask_splits(path) & {"train", "training"} else None  # whose masks tell the classes
        bare = kind(path, wanted._replace(split=learned))
        numbers = bare.all_numbers()
        if masks.first is None and numbers and min(numbers - {*masks.void}, default=0) > 0:
            masks = replace(masks, first=1)
        names = numbered(numbers, masks, bare.name)
    return _noted(kind(path, wanted._replace(settings=replace(masks, classes=names))))


def _noted(source: MaskRows | MaskFiles) -> MaskRows | MaskFiles:
    """The source, which says what its classes are where they have no names but their numbers from 1 on."""
    masks = source.masks
    if masks.start and all(name.isdigit() for name in masks.classes):
        last = class_numbers(masks, len(masks.classes))[-1]
        source.notes.append(f"{source.name}: its classes are the numbers {masks.start} to {last} of its masks")
    return source


def mask_splits(path: Path) -> set[str]:
    """The splits of images with masks."""
    if shards := [path] if path.is_file() else list_shards(path, ".parquet"):
        return splits_of(shards)
    home = _first(path, IMAGES)
    return {*split_folders(path), *(() if home is None else split_folders(home))}


def has_masks(path: Path) -> bool:
    """Whether folders at a path hold images and masks beside each other."""
    homes = [path, *(path / name for name in split_folders(path))] if path.is_dir() else []
    return any(_first(home, IMAGES) is not None and _first(home, MASKS) is not None for home in homes)


def _pair(path: Path, split: str | None) -> tuple[Path, Path, str | None]:
    """The folders of images and masks of a split, and its name."""
    if not path.is_dir():
        raise DataError(f"{path}: must be a folder or a .parquet file, with images and masks")
    chosen = choose_split(mask_splits(path), split, str(path))
    home = path / chosen if chosen is not None and (path / chosen).is_dir() else path
    images, masks = _first(home, IMAGES), _first(home, MASKS)
    if images is None or masks is None:
        said = f"a folder of images ({', '.join(IMAGES)}) and one of masks ({', '.join(MASKS)}), or parquet files"
        raise DataError(f"{home}: holds no images with masks: {said}")
    if chosen is None or home != path:
        return images, masks, chosen
    if not (masks / chosen).is_dir():
        raise DataError(f"{masks}: has no split {chosen!r}, and {images} has")
    return images / chosen, masks / chosen, chosen


def _first(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_dir()), None)


def _stem(file: str) -> str:
    return Path(file).with_suffix("").as_posix()
