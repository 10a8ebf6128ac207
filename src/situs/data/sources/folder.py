"""Folders of files: one subfolder for each class, or flat without labels; with or without train/, val/, test/."""

from __future__ import annotations

import heapq
import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from situs.data.sources.base import (
    ANY,
    SPLIT_WORDS,
    SPLITS,
    EncodedSource,
    Wanted,
    choose_split,
    list_shards,
    split_name,
    splits_of,
)
from situs.data.sources.images import IMAGE_SUFFIXES, is_image, read_bytes
from situs.errors import DataError, counted, verb

_TINY_IMAGENET_LABELS = "val_annotations.txt"
TABLES = ("labels.csv", "list_attr_celeba.txt", "list_attr_celeba.csv")
"""Names of multi-label tables; see `situs.data.sources.table`."""

OTHER, SPECIAL = "other", "pipes, devices or broken links"
AGAIN, CLOSED = "links to a folder that is already read", "folders that cannot be read"
"""Reasons for leaving something out."""

_SHOWN = 5
_FOLDER, _SAMPLE = "folder", "sample"


@dataclass
class LeftOut:
    """What was left out, in numbers. counts: how many, by reason. first: the first of each, by code point.

    kinds: files that are no samples by their name, counted by suffix. things: what samples are called.
    """

    things: str = "images"
    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)

    def add(self, reason: str, name: str) -> None:
        """Counts one more."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.first[reason] = min(self.first.get(reason, name), name)
        if reason == OTHER:
            kind = _suffix(name) or "no ending"
            self.kinds[kind] = self.kinds.get(kind, 0) + 1

    def join(self, other: LeftOut) -> None:
        """Adds what was left out elsewhere."""
        for counts, more in ((self.counts, other.counts), (self.kinds, other.kinds)):
            counts.update({key: counts.get(key, 0) + count for key, count in more.items()})
        self.first |= {reason: min(self.first.get(reason, name), name) for reason, name in other.first.items()}

    def notes(self, where: str) -> list[str]:
        """A sentence for each reason."""
        listed = ", ".join(f"{kind} {count}" for kind, count in Counter(self.kinds).most_common(_SHOWN))
        words = {OTHER: f"their names are not those of {self.things}: {listed}"}
        reasons = [reason for reason in (OTHER, SPECIAL, AGAIN, CLOSED) if reason in self.counts]
        counts = [f"{self.counts[reason]:,} ({words.get(reason, reason)})" for reason in reasons]
        first = [printable(self.first[reason]) for reason in reasons]
        return [f"{where}: left out {count}; the first: {name}" for count, name in zip(counts, first, strict=True)]


def printable(name: str) -> str:
    """A file's name as it can be printed, whatever bytes it is made of."""
    return name.encode("utf-8", "backslashreplace").decode().replace("\n", "\\n")


def walk(
    root: Path, ignored: Collection[str] = (), suffixes: Collection[str] = IMAGE_SUFFIXES, things: str = "images"
) -> tuple[list[str], LeftOut]:
    """Every sample below `root`, sorted by code point so that no locale changes the order, and what was left out.

    Paths are relative to `root`. Hidden files and folders, whose names begin with a dot, and `ignored` ones are in
    neither. suffixes: of samples; an image needs none. Raises OSError where `root` cannot be read.

    Links are followed, but each folder is read once: under its own path where that is below `root`, otherwise under
    the first link to it. Only regular files are taken: opening a pipe would wait forever.
    """
    files, left_out, visited = list[str](), LeftOut(things), set[tuple[int, int]]()
    real, linked = [""], list[str]()  # folders as "a/b/": real ones come first, links in the order of their paths
    while real or linked:
        folder = real.pop() if real else heapq.heappop(linked)
        try:
            state = (root / folder).stat()
            if (state.st_dev, state.st_ino) in visited:
                left_out.add(AGAIN, folder)
                continue
            visited.add((state.st_dev, state.st_ino))
            with os.scandir(root / folder) as entries:
                for entry in entries:
                    name = folder + entry.name
                    kind = _kind(entry, suffixes) if not entry.name.startswith(".") and name not in ignored else None
                    if kind == _FOLDER and entry.is_symlink():
                        heapq.heappush(linked, f"{name}/")
                    elif kind == _FOLDER:
                        real.append(f"{name}/")
                    elif kind == _SAMPLE:
                        files.append(name)
                    elif kind is not None:
                        left_out.add(kind, name)
        except OSError:
            if not folder:
                raise
            left_out.add(CLOSED, folder)
    return sorted(files), left_out


def _kind(entry: os.DirEntry[str], suffixes: Collection[str]) -> str:
    """_FOLDER, _SAMPLE, or the reason for leaving it out."""
    try:
        if entry.is_dir():
            return _FOLDER
        if not entry.is_file():
            return SPECIAL
        bare = suffixes is IMAGE_SUFFIXES and "." not in entry.name
        return _SAMPLE if _suffix(entry.name) in suffixes or (bare and _looks_like_image(entry.path)) else OTHER
    except OSError:  # a link to itself
        return SPECIAL


def _suffix(name: str) -> str:
    _, dot, ending = name.rpartition("/")[2].rpartition(".")
    return dot + ending.lower() if dot else ""


def _looks_like_image(path: str) -> bool:
    try:
        with Path(path).open("rb") as file:
            return is_image(file.read(16))
    except OSError:
        return True  # as with a suffix: the reader names what cannot be read


class FileSource(EncodedSource):
    """Files by their names. root: the folder that `_files` are relative to. _labels: one for each, or None."""

    root: Path
    _files: Sequence[str]
    _labels: Sequence[int] | Tensor | None

    def __len__(self) -> int:
        return len(self._files)

    def payload(self, index: int) -> bytes:
        return read_bytes(self.root / self._files[index], lambda: self.entry(index))

    def label(self, index: int) -> int | Tensor | None:
        return None if self._labels is None else self._labels[index]

    def entry(self, index: int) -> str:
        return printable(str(self.root / self._files[index]))

    def key(self, index: int) -> str:
        return self._files[index]


class FolderSource(FileSource):
    """Files under one folder, in the order of their relative paths.

    The subfolders of the split's folder are the classes, in alphabetical order; those of the training split
    where there is one, so that a label means the same in every split. Tiny ImageNet's own layout, whose
    validation images are flat with a table of labels beside them, is read as it is unpacked.

    suffixes: of samples. ignored: other files of the layout, which are not reported as left out.
    """

    suffixes: Collection[str] = IMAGE_SUFFIXES
    ignored: Collection[str] = ()

    def __init__(self, path: Path, wanted: Wanted = ANY) -> None:
        self.settings, folders = wanted.settings, split_folders(path)
        if not folders and not any(path.iterdir()):
            raise self._no_samples(path, [])  # more helpful than that it has no such split
        chosen = self._choose(path, folders, wanted.split)
        self.root = path / chosen if chosen else path
        files, left_out = walk(self.root, self.ignored, self.suffixes, self.things)
        if not files:
            raise self._no_samples(self.root, left_out.notes(path.name))
        self._files, classes, self._labels, notes = files, None, None, []
        if not folders:
            chosen, self._files, notes = self._divide(path, files, wanted.split)
        if wanted.labels:
            classes, self._labels = self._label_files(path, folders, files)
        name = split_name(path.name, chosen)
        super().__init__(name, classes, wanted.channels, wanted.strict)
        self.notes = [*notes, *left_out.notes(name)]
        if classes is not None and (empty := self._empty(classes)):
            few = ", ".join(map(repr, map(printable, empty[:3]))) + ", …" * (len(empty) > 3)
            lack = f"{counted(len(empty), 'folders')} {verb(len(empty), 'contain')} no {self.things}"
            self.notes.append(f"{name}: {lack} and {verb(len(empty), 'were')} left out: {few}")
        inner, outer = (next((file for file in files if ("/" in file) == inside), None) for inside in (True, False))
        if wanted.labels and classes is None and inner is not None and outer is not None:
            reason = f"{printable(outer)} lies beside folders with samples (such as {printable(inner)})"
            self.notes.append(f"{name}: {reason}, so the folders are not read as classes")

    def _empty(self, classes: Collection[str]) -> list[str]:
        """Folders in which a class was to be expected, and which hold no samples."""
        names = sorted(path.name for path in self.root.iterdir() if path.is_dir() and not path.name.startswith("."))
        return [name for name in names if name not in classes and name not in self.ignored]

    def _choose(self, path: Path, folders: list[str], split: str | None) -> str | None:
        """The folder of the split."""
        return choose_split(folders, split, str(path))

    def _divide(self, path: Path, files: list[str], split: str | None) -> tuple[str | None, list[str], list[str]]:  # noqa: ARG002
        """Without folders of splits: the split that is meant, its files, and notes."""
        return None, files, []

    def _label_files(
        self, path: Path, folders: list[str], files: list[str]
    ) -> tuple[tuple[str, ...] | None, list[int] | None]:
        """The classes, which are those of the training split, and the class of each file."""
        training = next((path / name for name in SPLITS["train"] if name in folders), self.root)
        table = self.root / _TINY_IMAGENET_LABELS
        if table.is_file():
            rows = [line.split("\t") for line in table.read_text(encoding="utf-8", errors="replace").splitlines()]
            named = {row[0]: row[1] for row in rows if len(row) > 1}
            names = [named.get(Path(file).name, "") for file in self._files]
        elif any("/" not in file for file in files):
            return None, None  # a file beside the subfolders: the subfolders are no classes
        else:
            names = [file.partition("/")[0] for file in self._files]
        if len({*names}) == 1 and find_table(path):
            return None, None  # a folder for the images alone, as in CelebA: its multi-label table has the classes
        if training != self.root or table.is_file():
            files = walk(training, self.ignored, self.suffixes)[0]
        classes = tuple(sorted({file.partition("/")[0] for file in files if "/" in file}))
        number = {name: index for index, name in enumerate(classes)}
        unknown = next((index for index, name in enumerate(names) if name not in number), None)
        if unknown is not None:
            reason = f"class {names[unknown]!r} is not among the {len(classes)} classes of {training}"
            raise DataError(f"{self.root / printable(self._files[unknown])}: {reason}")
        return classes, [number[name] for name in names]

    def _no_samples(self, folder: Path, notes: list[str]) -> DataError:
        others = ", parquet, tar or CIFAR files" if self.suffixes is IMAGE_SUFFIXES else " or parquet files"
        notes = [f"contains no {self.things} ({' '.join(sorted(self.suffixes))}){others}", *notes]
        return DataError(f"{folder}: {'; '.join(notes)}")


def find_table(folder: Path) -> Path | None:
    """The table of labels in a folder, where there is one."""
    return next((folder / name for name in TABLES if (folder / name).is_file()), None)


def split_folders(path: Path) -> list[str]:
    """The folders of `path` that are splits."""
    return [name for name in SPLIT_WORDS if (path / name).is_dir()]


def find_splits(path: Path, *suffixes: str) -> set[str]:
    """The splits of a set: those of its shards with the first of the suffixes that it has, or its folders."""
    shards = next((shards for suffix in suffixes if (shards := list_shards(path, suffix))), [])
    return splits_of(shards) if shards else {*split_folders(path)}
