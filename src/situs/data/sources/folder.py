"""Folders of files: one subfolder a class, or flat without labels; with train/, val/, test/ or not."""

from __future__ import annotations

import heapq
import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from situs.data.sources.base import ANY, SPLIT_WORDS, SPLITS, EncodedSource, Wanted, choose_split
from situs.data.sources.images import IMAGE_SUFFIXES, is_image, read_bytes
from situs.errors import DataError

_TINY_IMAGENET_LABELS = "val_annotations.txt"
TABLES = ("labels.csv", "list_attr_celeba.txt", "list_attr_celeba.csv")
"""Names of the tables that tell of any number of classes an image; see `situs.data.sources.table`."""

OTHER, SPECIAL = "other", "pipes, devices or links to nothing"
AGAIN, CLOSED = "links to a folder that is read already", "folders that cannot be read"
"""Why something is left out."""

_SHOWN = 5
_FOLDER, _SAMPLE = "folder", "sample"


@dataclass
class LeftOut:
    """What was left out, without a list of it. counts: how many, by why. first: of each the first by code point.

    kinds: how many of each ending, of what is no sample by its name. things: what samples are called.
    """

    things: str = "images"
    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)

    def add(self, why: str, name: str) -> None:
        """One more."""
        self.counts[why] = self.counts.get(why, 0) + 1
        self.first[why] = min(self.first.get(why, name), name)
        if why == OTHER:
            kind = _suffix(name) or "no ending"
            self.kinds[kind] = self.kinds.get(kind, 0) + 1

    def join(self, other: LeftOut) -> None:
        """With what was left out elsewhere."""
        for mine, more in ((self.counts, other.counts), (self.kinds, other.kinds)):
            mine.update({key: mine.get(key, 0) + count for key, count in more.items()})
        self.first |= {why: min(self.first.get(why, name), name) for why, name in other.first.items()}

    def notes(self, where: str) -> list[str]:
        """A sentence for each reason."""
        listed = ", ".join(f"{kind} {count}" for kind, count in Counter(self.kinds).most_common(_SHOWN))
        words = {OTHER: f"no {self.things} by their names: {listed}"}
        return [
            f"{where}: left out {self.counts[why]:,} ({words.get(why, why)}); the first: {plain(self.first[why])}"
            for why in (OTHER, SPECIAL, AGAIN, CLOSED)
            if why in self.counts
        ]


def plain(name: str) -> str:
    """A file's name as it can be printed, whatever bytes it is made of."""
    return name.encode("utf-8", "backslashreplace").decode().replace("\n", "\\n")


def walk(
    root: Path, known: Collection[str] = (), suffixes: Collection[str] = IMAGE_SUFFIXES, things: str = "images"
) -> tuple[list[str], LeftOut]:
    """Every sample below `root`, sorted by code point so that no locale changes the order, and what was left out.

    Paths are relative to `root`. Hidden files and folders, whose names open with a dot, are in neither, nor is what is
    `known` to be none. suffixes: of samples; an image needs none. Raises OSError where `root` cannot be read.

    Links are followed, but each folder is read once: under its own path where that lies below, else under the first
    link that leads to it. Only regular files are taken: opening a pipe would wait for ever.
    """
    files, left_out, seen = list[str](), LeftOut(things), set[tuple[int, int]]()
    own, linked = [""], list[str]()  # folders as "a/b/": real ones come first, links in the order of their paths
    while own or linked:
        folder = own.pop() if own else heapq.heappop(linked)
        try:
            state = (root / folder).stat()
            if (state.st_dev, state.st_ino) in seen:
                left_out.add(AGAIN, folder)
                continue
            seen.add((state.st_dev, state.st_ino))
            with os.scandir(root / folder) as entries:
                for entry in entries:
                    name = folder + entry.name
                    kind = _kind(entry, suffixes) if not entry.name.startswith(".") and name not in known else None
                    if kind == _FOLDER and entry.is_symlink():
                        heapq.heappush(linked, f"{name}/")
                    elif kind == _FOLDER:
                        own.append(f"{name}/")
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
    """A folder, a sample, or why it is left out."""
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
        return True  # as with an ending: the reader names what cannot be read


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
        return plain(str(self.root / self._files[index]))

    def key(self, index: int) -> str:
        return self._files[index]


class FolderSource(FileSource):
    """Files under one folder, in the order of their relative paths.

    The subfolders of the split's folder are the classes, in alphabetical order; those of the training split
    where there is one, so that a label means the same in every split. Tiny ImageNet's own layout, whose
    validation images are flat with a table of labels beside them, is read as it is unpacked.

    suffixes: of samples. known: what else lies in the folder, and need not be told of.
    """

    suffixes: Collection[str] = IMAGE_SUFFIXES
    known: Collection[str] = ()

    def __init__(self, path: Path, wanted: Wanted = ANY) -> None:
        folders = split_folders(path)
        if not folders and not any(path.iterdir()):
            raise self._nothing(path, [])  # which is more to the point than that it has no such split
        chosen = self._choose(path, folders, wanted.split)
        self.root = path / chosen if chosen else path
        every, left_out = walk(self.root, self.known, self.suffixes, self.things)
        name = path.name
        if not every:
            raise self._nothing(self.root, left_out.notes(name))
        self._files, classes, self._labels, notes = every, None, None, []
        if not folders:
            chosen, self._files, notes = self._divide(path, every, wanted.split)
        if wanted.labels:
            classes, self._labels = self._label_files(path, folders, every)
        name += f" ({chosen})" if chosen else ""
        super().__init__(name, classes, wanted.channels, wanted.strict)
        self.notes = [*notes, *left_out.notes(name)]
        if wanted.labels and classes is None and (inner := next((file for file in every if "/" in file), None)):
            beside = next((file for file in every if "/" not in file), None)
            if beside is not None:
                told = f"{plain(beside)} lies beside the folders, as of {plain(inner)}, so that they are no labels"
                self.notes.append(f"{name}: {told}")

    def _choose(self, path: Path, folders: list[str], split: str | None) -> str | None:
        """The folder of the split."""
        return choose_split(folders, split, str(path))

    def _divide(self, path: Path, files: list[str], split: str | None) -> tuple[str | None, list[str], list[str]]:  # noqa: ARG002
        """Without folders of splits: which split is meant, its files, and what is to be said."""
        return None, files, []

    def _label_files(
        self, path: Path, folders: list[str], every: list[str]
    ) -> tuple[tuple[str, ...] | None, list[int] | None]:
        """The classes, those of all files of the training split, and the class of each file."""
        home = next((path / name for name in SPLITS["train"] if name in folders), self.root)
        table = self.root / _TINY_IMAGENET_LABELS
        if table.is_file():
            rows = [line.split("\t") for line in table.read_text(encoding="utf-8", errors="replace").splitlines()]
            named = {row[0]: row[1] for row in rows if len(row) > 1}
            names = [named.get(Path(file).name, "") for file in self._files]
        elif any("/" not in file for file in every):
            return None, None  # a file beside the subfolders: the subfolders are no classes
        else:
            names = [file.partition("/")[0] for file in self._files]
        if len({*names}) == 1 and find_table(path):
            return None, None  # a folder for the images alone, as CelebA has one: its table tells of several classes
        if home != self.root or table.is_file():
            every = walk(home, self.known, self.suffixes)[0]
        classes = tuple(sorted({file.partition("/")[0] for file in every if "/" in file}))
        number = {name: index for index, name in enumerate(classes)}
        stranger = next((i for i, name in enumerate(names) if name not in number), None)
        if stranger is not None:
            told = f"class {names[stranger]!r} is not among the {len(classes)} classes of {home}"
            raise DataError(f"{self.root / plain(self._files[stranger])}: {told}")
        return classes, [number[name] for name in names]

    def _nothing(self, folder: Path, notes: list[str]) -> DataError:
        more = ", parquet, tar or CIFAR files" if self.suffixes is IMAGE_SUFFIXES else " or parquet files"
        said = "".join(f"; {note}" for note in notes)
        return DataError(f"{folder}: holds no {self.things} ({' '.join(sorted(self.suffixes))}){more}{said}")


def find_table(folder: Path) -> Path | None:
    """The table of labels in a folder, where there is one."""
    return next((folder / name for name in TABLES if (folder / name).is_file()), None)


def split_folders(path: Path) -> list[str]:
    """The folders of `path` that are splits."""
    return [name for name in SPLIT_WORDS if (path / name).is_dir()]
