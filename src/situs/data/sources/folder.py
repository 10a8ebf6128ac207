"""Folders of image files: one subfolder a class, or flat without labels; with train/, val/, test/ or not."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from torch import Tensor

from situs.data.sources.base import ANY, SPLIT_WORDS, EncodedSource, Wanted, choose_split
from situs.data.sources.images import IMAGE_SUFFIXES, read_bytes
from situs.data.sources.walk import plain, walk
from situs.errors import SitusError

_TINY_IMAGENET_LABELS = "val_annotations.txt"
TABLES = ("labels.csv", "list_attr_celeba.txt", "list_attr_celeba.csv")
"""Names of the tables that tell of any number of classes an image; see `situs.data.sources.table`."""


class FileSource(EncodedSource):
    """Image files. root: the folder that `_files` are relative to. _labels: one for each, or None."""

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
    """Image files under one folder, in the order of their relative paths.

    The subfolders of the split's folder are the classes, in alphabetical order; those of the training split
    where there is one, so that a label means the same in every split. Tiny ImageNet's own layout, whose
    validation images are flat with a table of labels beside them, is read as it is unpacked.
    """

    suffixes: Collection[str] = IMAGE_SUFFIXES

    def __init__(self, path: Path, wanted: Wanted = ANY) -> None:
        splits = split_folders(path)
        if not splits and not any(path.iterdir()):
            raise self._nothing(path, [])  # which is more to the point than that it has no such split
        chosen = choose_split(splits, wanted.split, str(path))
        self.root = path / chosen if chosen else path
        self._files, left_out = walk(self.root, (), self.suffixes, self.things)
        name = path.name + (f" ({chosen})" if chosen else "")
        if not self._files:
            raise self._nothing(self.root, left_out.notes(name))
        classes, self._labels = None, None
        if wanted.labels:
            classes, self._labels = self._label_files(path, splits)
        super().__init__(name, classes, wanted.channels, wanted.strict)
        self.notes = left_out.notes(name)

    def _label_files(self, path: Path, splits: list[str]) -> tuple[tuple[str, ...] | None, list[int] | None]:
        home = next((path / name for name in ("train", "training") if name in splits), self.root)
        table = self.root / _TINY_IMAGENET_LABELS
        if table.is_file():
            lines = table.read_text(encoding="utf-8", errors="replace").splitlines()
            rows = [line.split("\t") for line in lines]
            named = {row[0]: row[1] for row in rows if len(row) > 1}
            names = [named.get(Path(file).name, "") for file in self._files]
        elif any("/" not in file for file in self._files):
            return None, None  # an image beside the subfolders: the subfolders are no classes
        else:
            names = [file.split("/")[0] for file in self._files]
        if len({*names}) == 1 and find_table(path):
            return None, None  # a folder for the images alone, as CelebA has one: its table tells of several classes
        own = names
        if home != self.root or table.is_file():  # the subfolder of each image below `home` that lies in one
            own = [file.partition("/")[0] for file in walk(home, (), self.suffixes)[0] if "/" in file]
        classes = tuple(sorted(set(own)))
        number = {name: index for index, name in enumerate(classes)}
        stranger = next((i for i, name in enumerate(names) if name not in number), None)
        if stranger is not None:
            raise SitusError(
                f"{self.root / plain(self._files[stranger])}: class {names[stranger]!r} is not among the "
                f"{len(classes)} classes of {home}",
                field="data",
            )
        return classes, [number[name] for name in names]

    def _nothing(self, folder: Path, notes: list[str]) -> SitusError:
        kinds = " ".join(sorted(self.suffixes))
        more = ", parquet, tar or CIFAR files" if self.suffixes is IMAGE_SUFFIXES else " or parquet files"
        said = "".join(f"; {note}" for note in notes)
        return SitusError(f"{folder}: holds no {self.things} ({kinds}){more}{said}", field="data")


def find_table(folder: Path) -> Path | None:
    """The table of labels in a folder, where there is one."""
    return next((folder / name for name in TABLES if (folder / name).is_file()), None)


def split_folders(path: Path) -> list[str]:
    """The folders of `path` that are splits."""
    return [name for name in SPLIT_WORDS if (path / name).is_dir()]
