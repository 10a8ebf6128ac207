"""What every data source is: a numbered list of samples in an order that never changes."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from situs.data.sources.images import decode, to_channels
from situs.errors import DataError, SitusError, counted, verb

# The names of each split; where the first is absent the next is used (ImageNet has no labelled test split, CIFAR no
# validation split).
SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "dev", "test"),
    "test": ("test", "val", "validation", "valid", "dev"),
}
SPLIT_WORDS = ("train", "training", "val", "validation", "valid", "test")


class Wanted(NamedTuple):
    """How a set is to be read; `open_source` explains the fields. settings: the modality's own table of the config."""

    split: str | None = None
    labels: bool = True
    channels: int | None = None
    strict: bool = False
    multi_label: bool = False
    settings: Any = None


ANY = Wanted()


class Blocks(NamedTuple):
    """Consecutive samples that a source reads at once.

    ends: [m] int64, where each block ends; none is empty. bytes: of all of them in memory. slow_random_access: whether
    reading a single sample costs reading its block. name: what blocks are called, in the plural.
    """

    ends: np.ndarray
    bytes: int
    slow_random_access: bool
    name: str


class Source(ABC):
    """Samples by number. `read` gives the values of one, or raises `BrokenSampleError` naming the file.

    name:         what reports call the set
    classes:      the class names in label order, or None for a set without labels
    strict:       whether a loader stops at a broken sample instead of skipping it
    multi_label:  whether a sample has any number of the classes, not exactly one
    skipped:      the reason of each broken sample met so far, by its number; filled by the loaders
    notes:        what was left out when the set was opened, a sentence each
    things:       what its samples are called, in the plural
    """

    things = "images"

    def __init__(
        self,
        name: str,
        classes: tuple[str, ...] | None,
        channels: int | None,
        strict: bool,
        *,
        multi_label: bool = False,
    ) -> None:
        self.name, self.classes, self.channels, self.strict = name, classes, channels, strict
        self.multi_label = multi_label
        self.skipped: dict[int, str] = {}
        self._replaced = self._white = False
        self.notes: list[str] = []

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> dict[str, Any]:
        """The values of sample `index`, by name: "image" [C, H, W] (uint8, or float32 in [0, 1]), and "label" where
        the set has labels: the class number, or for a multi-label set [K] int8, 1 and 0 for classes that the image has
        and has not, -1 for unknown. A set with masks has "mask" [H, W] int16 instead. Objects and other modalities have
        names of their own, which their pipelines read."""

    def label(self, index: int) -> Any:
        """The label as `read` gives it, or None; subclasses give it without reading the sample where they can."""
        return self.read(index).get("label")

    def labelled(self, sample: dict[str, Any], index: int) -> dict[str, Any]:
        """The values of sample `index`, with its label where there is one."""
        label = self.label(index)
        return sample if label is None else sample | {"label": label}

    def classes_present(self) -> Sequence[str]:
        """The classes that have a sample, as far as the set knows without reading all of it."""
        return self.classes or ()

    @property
    def target(self) -> str:
        """The name of the labels in `Batch.targets`: another for several classes and for a mask than for one class.
        "objects" have several names there."""
        return "labels" if self.multi_label else "label"

    @property
    def dense(self) -> bool:
        """Whether a sample has a mask or objects, and not only classes."""
        return self.target not in ("label", "labels")

    def key(self, index: int) -> str:
        """The sample's own name, which stays the same when samples are added or the set is moved."""
        return str(index)

    def origin(self, index: int) -> tuple[Source, int]:
        """The whole set that sample `index` is read from, and its number there; differs for parts of a set."""
        return self, index

    def blocks(self) -> Blocks | None:
        """The blocks that are read at once, where there are any."""
        return None

    def release(self, index: int | None = None) -> None:  # noqa: B027  (those that read by blocks use it)
        """Releases the block of sample `index`, or all blocks.

        From the first call on blocks stay in memory until they are released.
        """

    def skip(self, index: int, reason: str, *, replaced: bool = False) -> None:
        """Notes that sample `index` is broken; once, however often it is met. replaced: another stood in for it."""
        self._replaced = self._replaced or replaced
        self.skipped.setdefault(index, reason)

    def note_transparency(self) -> None:
        """Notes, once, that some of the images were laid over white."""
        if not self._white:
            self._white = True
            self.notes.append(f"{self.name}: some images are transparent and get a white background")

    def skip_report(self) -> str | None:
        """One sentence on the broken samples, or None: how many, what became of them, and the first."""
        if not self.skipped:
            return None
        count = len(self.skipped)
        fate = (
            ("replaced by the next readable one" if count == 1 else "replaced by others")
            if self._replaced
            else "skipped"
        )
        broken = f"{count} of {counted(len(self), self.things)} of {self.name} could not be read"
        return f"{broken} and {verb(count, 'were')} {fate}; the first: {next(iter(self.skipped.values()))}"

    def label_known(self) -> bool:
        """Whether any label of a multi-label set is known."""
        return any(bool((self.label(index) >= 0).any()) for index in range(len(self)))

    def left_out(self) -> list[str]:
        """All that was left out so far, a sentence each: files that are no samples, and broken samples."""
        report = self.skip_report()
        return [*self.notes, report] if report else [*self.notes]


class EncodedSource(Source):
    """A source of encoded files: a subclass gives the bytes, the label and the name of item `index`.

    settings: see `Wanted`.
    """

    settings: Any = None

    @abstractmethod
    def payload(self, index: int) -> bytes:
        """The encoded bytes."""

    @abstractmethod
    def label(self, index: int) -> Any:
        """The label as `read` gives it, or None."""

    @abstractmethod
    def entry(self, index: int) -> str:
        """What an error calls this item: its file, or its shard and row."""

    def read(self, index: int) -> dict[str, Any]:
        return self.labelled({"image": decode(self.payload(index), self.entry(index), self.channels)}, index)


class TensorSource(Source):
    """Images that are one tensor: the embedded samples, CIFAR batches, or a user's own arrays.

    images: [n, C, H, W] uint8, or float32 in [0, 1]. labels: [n], [n, K] int8 of a multi-label set, or None.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor | None,
        classes: tuple[str, ...] | None,
        name: str = "tensors",
        channels: int | None = None,
    ) -> None:
        many, count = labels is not None and labels.dim() == 2, len(classes or ())
        super().__init__(name, classes if labels is not None else None, channels, strict=False, multi_label=many)
        if images.ndim != 4:
            raise SitusError(f"images of shape {tuple(images.shape)}: must be [n, C, H, W]")
        if labels is not None and not many and labels.shape != images.shape[:1]:
            raise SitusError(f"labels of shape {tuple(labels.shape)}: must be [{images.shape[0]}], one per image")
        if labels is not None and many and (labels.shape, labels.dtype) != ((len(images), count), torch.int8):
            allowed = f"[{len(images)}, {count}] int8, with 1, 0 or -1 (unknown) for each class"
            raise SitusError(f"labels of shape {tuple(labels.shape)} and type {labels.dtype}: must be {allowed}")
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return self.images.shape[0]

    def label(self, index: int) -> int | Tensor | None:
        return None if self.labels is None else self.labels[index] if self.multi_label else int(self.labels[index])

    def read(self, index: int) -> dict[str, Any]:
        image = to_channels(self.images[index], self.channels, f"{self.name}, image {index}")
        return self.labelled({"image": image}, index)


def choose_split(available: Iterable[str], split: str | None, where: str) -> str | None:
    """Which of the `available` splits `split` means; None when the data is not split and no other is asked for.

    By default the training split, where there is one. `train` of data without splits is all of it.
    """
    names = sorted(set(available))
    family = next((family for family in SPLITS.values() if (split or "train") in family), None)
    if family is None:
        raise SitusError(field="split", value=split, allowed=f"one of {', '.join(SPLITS)}, all")
    for name in SPLITS.get(split or "train") or (split, *family):
        if name in names:
            return name
    if not names and split in {None, *SPLITS["train"]}:
        return None
    if split is None:
        return names[0]
    others = f"it has only {', '.join(names)}" if names else "it has no splits, so 'train' means all samples"
    raise SitusError(
        f"{where}: has no split {split!r}; {others}; hold out a fraction of the data (such as 0.1), "
        "or choose another split",
        field=("held_out", "split"),
    )


def split_name(name: str, split: str | None) -> str:
    """The name of a set with its split, where it has one: `pets (train)`."""
    return f"{name} ({split})" if split else name


def split_of(file: Path) -> str | None:
    """A shard's split, by its folder (`train/1.tar`) or the start of its name (`train-1.tar`), or None."""
    if file.parent.name in SPLIT_WORDS:
        return file.parent.name
    match = re.match(r"(train(?:ing)?|validation|valid|val|dev|test)(?![a-zA-Z])", file.name)
    return match[1] if match else None


def check_state(file: Path, state: os.stat_result, opened: tuple[int, int]) -> None:
    """Refuses a shard whose size or time of change differs from when the set was opened."""
    if (state.st_size, state.st_mtime_ns) != opened:
        raise DataError(f"{file}: has changed since the set was opened; start again")


def list_shards(path: Path, suffix: str) -> list[Path]:
    """The files of every split ending in `suffix`: `path` itself, or in it, in `data/` or split folders."""
    if path.is_file():
        return [path]
    folders = [path, path / "data", *(path / word for word in SPLIT_WORDS)]
    return sorted(file for folder in folders for file in folder.glob(f"*{suffix}") if file.is_file())


def has_shards(path: Path, suffix: str) -> bool:
    """Whether a set consists of files of this suffix, in any split."""
    return path.suffix == suffix if path.is_file() else bool(list_shards(path, suffix))


def splits_of(files: Iterable[Path]) -> set[str]:
    """The splits that shards name."""
    return {split for file in files if (split := split_of(file))}


def find_shards(path: Path, suffix: str, split: str | None) -> list[Path]:
    """The shards of one split."""
    files = list_shards(path, suffix)
    if not files or path.is_file():
        return files
    chosen = choose_split(splits_of(files), split, str(path))
    return [file for file in files if chosen is None or split_of(file) == chosen]
