"""Folders of image files: one subfolder a class, or flat without labels; with train/, val/, test/ or not."""

from __future__ import annotations

import os
from pathlib import Path

from situs.data.base import EncodedSource, choose_split
from situs.data.images import IMAGE_SUFFIXES, BrokenImageError
from situs.errors import SitusError

_SPLIT_FOLDERS = ("train", "training", "val", "validation", "valid", "test")
_TINY_IMAGENET_LABELS = "val_annotations.txt"


class FolderSource(EncodedSource):
    """Image files under one folder, in the order of their relative paths.

    The subfolders of the split's folder are the classes, in alphabetical order; those of the training split
    where there is one, so that a label means the same in every split. Tiny ImageNet's own layout, whose
    validation images are flat with a table of labels beside them, is read as it is unpacked.
    """

    def __init__(
        self,
        path: Path,
        split: str | None = None,
        *,
        labels: bool = True,
        channels: int | None = None,
        strict: bool = False,
    ) -> None:
        splits = [name for name in _SPLIT_FOLDERS if (path / name).is_dir()]
        if not splits and not any(path.iterdir()):
            raise _no_images(path)  # which is more to the point than that it has no such split
        chosen = choose_split(splits, split, str(path))
        self.root = path / chosen if chosen else path
        self._files = _image_files(self.root)
        if not self._files:
            raise _no_images(self.root)
        classes, self._labels = None, None
        if labels:
            classes, self._labels = self._label_files(path, splits)
        super().__init__(path.name + (f" ({chosen})" if chosen else ""), classes, channels, strict)

    def _label_files(self, path: Path, splits: list[str]) -> tuple[tuple[str, ...] | None, list[int] | None]:
        home = next((path / name for name in ("train", "training") if name in splits), self.root)
        table = self.root / _TINY_IMAGENET_LABELS
        if table.is_file():
            rows = [line.split("\t") for line in table.read_text(encoding="utf-8").splitlines()]
            named = {row[0]: row[1] for row in rows if len(row) > 1}
            names = [named.get(Path(file).name, "") for file in self._files]
        elif any("/" not in file for file in self._files):
            return None, None  # an image beside the subfolders: the subfolders are no classes
        else:
            names = [file.split("/")[0] for file in self._files]
        classes = _class_folders(home) if home != self.root or table.is_file() else tuple(sorted(set(names)))
        number = {name: index for index, name in enumerate(classes)}
        stranger = next((i for i, name in enumerate(names) if name not in number), None)
        if stranger is not None:
            raise SitusError(
                f"{self.root / self._files[stranger]}: class {names[stranger]!r} is not among the "
                f"{len(classes)} classes of {home} (--data)"
            )
        return classes, [number[name] for name in names]

    def __len__(self) -> int:
        return len(self._files)

    def payload(self, index: int) -> bytes:
        """The file's bytes."""
        try:
            return (self.root / self._files[index]).read_bytes()
        except OSError as error:
            raise BrokenImageError(f"{self.entry(index)}: cannot be read ({error.strerror or error})") from error

    def label(self, index: int) -> int | None:
        """The number of the file's class."""
        return None if self._labels is None else self._labels[index]

    def entry(self, index: int) -> str:
        """The file's path."""
        return str(self.root / self._files[index])


def _image_files(root: Path) -> list[str]:
    """Relative paths of all images below `root`, sorted by code point so that no locale changes the order."""
    found = []
    # os.walk and not Path.rglob: on a million files it is several times faster.
    for folder, subfolders, files in os.walk(root, followlinks=True):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        prefix = Path(folder).relative_to(root).as_posix()
        prefix = "" if prefix == "." else f"{prefix}/"
        found += [
            prefix + name
            for name in files
            if not name.startswith(".") and "." + name.rpartition(".")[2].lower() in IMAGE_SUFFIXES
        ]
    return sorted(found)


def _class_folders(root: Path) -> tuple[str, ...]:
    return tuple(sorted(f.name for f in root.iterdir() if f.is_dir() and not f.name.startswith(".")))


def _no_images(folder: Path) -> SitusError:
    kinds = " ".join(sorted(IMAGE_SUFFIXES))
    return SitusError(f"{folder}: holds no images ({kinds}), parquet, tar or CIFAR files (--data)")
