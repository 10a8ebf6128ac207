"""A table of labels among image files, of which each has any number of the classes. In one of three forms:

"file,Bald,Smiling", "a.jpg,1,0"          of each class 1 or 0, or 1 or -1; an empty cell: nobody knows
"file,labels", "a.jpg,Bald;Smiling"       a column of names with ; between them; an empty cell: no class
"202599", "Bald Smiling", "1.jpg -1 1"    CelebA's own text: how many files, the classes, a line a file
"""

from __future__ import annotations

import csv
import io
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from situs.data.sources.base import ANY, SPLITS, Wanted, choose_split
from situs.data.sources.folder import TABLES, FileSource, find_table, plain, split_folders, walk
from situs.data.sources.labels import LISTS, from_flags, from_lists, note_singletons
from situs.errors import DataError, SitusError, counted

PARTITION = "list_eval_partition.txt"
"""CelebA's own splits, beside the table: 0, 1 and 2 for train, val and test."""
SUFFIXES = (".csv", ".txt")

_SPLITS = {"0": "train", "1": "val", "2": "test"}
_VALUES = {
    "1": 1,
    "1.0": 1,
    "true": 1,
    "0": 0,
    "0.0": 0,
    "false": 0,
    "-1": -1,
    "-1.0": -1,
    "": math.nan,
    "nan": math.nan,
}


@dataclass(frozen=True)
class LabelTable:
    """A line a file. names: as the table has them. lines: their numbers. labels: [n, K] int8, 1, 0 or -1 for unknown.

    listed: whether the classes are those that a column of names has, and not the heading's.
    """

    file: Path
    classes: tuple[str, ...]
    names: list[str]
    lines: list[int]
    labels: Tensor
    listed: bool

    def match(self, files: Sequence[str]) -> Tensor:
        """The labels [m, K] of files, relative to the table's folder; each must have its line and each line its file.

        Where the table names no folders, a file's last name counts.
        """
        folder, whole = self.file.parent, any("/" in name for name in self.names)
        keys = [file if whole else file.rpartition("/")[2] for file in files]
        rows: dict[str, int] = {}
        for row, name in enumerate(self.names):
            if rows.setdefault(name, row) != row:
                raise self.wrong(row, f"{name!r} stands in line {self.lines[rows[name]]} already")
        found: dict[str, str] = {}
        for file, name in zip(files, keys, strict=True):
            if name not in rows:
                raise DataError(f"{plain(str(folder / file))}: has no line in {self.file.name}")
            if found.setdefault(name, file) != file:
                both = f"{plain(found[name])} and {plain(file)} have one name"
                raise self.wrong(rows[name], f"{both}, and the table names no folders")
        for row, name in enumerate(self.names):
            if name not in found:
                raise self.wrong(row, f"there is no image {name!r} below {folder}")
        return self.labels[[rows[name] for name in keys]]

    def wrong(self, row: int, said: str) -> SitusError:
        """What is wrong with a row."""
        return _wrong(self.file, self.lines[row], said)


class TableSource(FileSource):
    """Image files below a folder with a table of their labels, in the order of their relative paths.

    The table lies in the folder, or is given itself, or each split's folder has its own: then the classes are those of
    the training split's.
    """

    def __init__(self, path: Path, wanted: Wanted = ANY) -> None:
        folder, splits = path.parent if path.is_file() else path, table_splits(path)
        chosen = choose_split(splits, wanted.split, str(path))
        self.root = folder / chosen if chosen in split_folders(folder) else folder
        file = path if path.is_file() else find_table(self.root) or find_table(folder)
        if file is None:
            raise DataError(f"{self.root}: has no table of labels ({', '.join(TABLES)})")
        home = next((folder / name for name in ("train", "training") if name in splits), folder)
        first = find_table(home) if file.parent not in (home, folder) else None
        table = read_table(file, None if first is None else read_table(first).classes)
        files, left_out = walk(file.parent, (file.name, PARTITION))
        labels = table.match(files)
        rows, prefix = range(len(files)), f"{chosen}/" if self.root != file.parent else ""
        if self.root == folder and chosen is not None:
            splits_of = _partition(folder / PARTITION, files)
            rows = [row for row in rows if splits_of[row] == chosen]
        rows = [row for row in rows if files[row].startswith(prefix)]
        if not rows:
            raise DataError(f"{self.root}: holds no image of the split")
        self._files, self._labels = [files[row].removeprefix(prefix) for row in rows], labels[torch.tensor(rows)]
        name = folder.name + (f" ({chosen})" if chosen else "")
        super().__init__(name, table.classes, wanted.channels, wanted.strict, multi_label=True)
        self.notes = left_out.notes(name)
        if table.listed and chosen in (None, *SPLITS["train"]):
            self.notes += note_singletons(name, table.classes, (self._labels == 1).sum(0).tolist())


def has_table(folder: Path) -> bool:
    """Whether a folder or a split's folder in it has a table of labels."""
    return any(find_table(place) for place in (folder, *(folder / name for name in split_folders(folder))))


def table_splits(path: Path) -> set[str]:
    """The splits of a set with a table: those of CelebA's own partition, or the folders."""
    folder = path.parent if path.is_file() else path
    return {*_SPLITS.values()} if (folder / PARTITION).is_file() else {*split_folders(folder)}


def read_table(file: Path, classes: tuple[str, ...] | None = None) -> LabelTable:
    """A table of labels. classes: what they must be, where another table has said it; else the table's own."""
    try:
        text = io.StringIO(file.read_text(encoding="utf-8-sig"), newline="")
        celeba = file.suffix == ".txt"
        cut = enumerate((line.split() for line in text) if celeba else csv.reader(text), 1)
        return _parse(file, celeba, ((line, cells) for line, cells in cut if any(cells)), classes)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file}: must be a table in UTF-8 text ({error})") from error


_Lines = Iterator[tuple[int, list[str]]]


def _parse(file: Path, celeba: bool, rows: _Lines, classes: tuple[str, ...] | None) -> LabelTable:
    """rows: the number and the cells of each line that is not empty, one by one: all at once would fill a gigabyte."""
    count = next(rows, (0, [""]))[1] if celeba else None
    header = [cell.strip() for cell in next(rows, (0, [""]))[1]][0 if celeba else 1 :]
    if not any(header) or (count is not None and not count[0].isdecimal()):
        form = "the number of files, then the classes, then a line a file" if celeba else "a file, then its classes"
        raise _wrong(file, 1, f"must be {form}")
    if len({*header}) < len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise _wrong(file, 1, f"the column {twice!r} stands there twice")
    names: list[str] = []
    lines: list[int] = []

    def labelled() -> _Lines:
        for line, cells in rows:
            names.append(cells[0].strip().replace("\\", "/").removeprefix("./"))
            lines.append(line)
            yield line, cells[1:]

    listed = len(header) == 1 and header[0].lower() in LISTS
    found, labels = (_listed if listed else _coded)(file, header, labelled(), lines, classes)
    if classes is not None and found != classes:
        if strange := {*found} ^ {*classes}:
            raise _wrong(file, 1, f"{min(strange)!r} is a class of one split and not of the other")
        labels = labels[:, [found.index(name) for name in classes]]
    if not names or not found:
        raise DataError(f"{file}: {'names no class in any line' if names else 'has no line for any image'}")
    if count is not None and int(count[0]) != len(names):
        raise _wrong(file, 1, f"tells of {int(count[0]):,} files, and {len(names):,} follow")
    return LabelTable(file, classes or found, names, lines, labels, listed)


def _coded(
    file: Path, header: list[str], rows: _Lines, lines: list[int], _: tuple[str, ...] | None
) -> tuple[tuple[str, ...], Tensor]:
    """The labels of a column a class."""
    values = array("f")
    for line, cells in rows:
        if len(cells) != len(header):
            raise _wrong(file, line, f"has {counted(len(cells), 'labels')} for {counted(len(header), 'classes')}")
        for name, cell in zip(header, cells, strict=True):
            if (value := _VALUES.get(cell.strip().lower())) is None:
                raise _wrong(file, line, f"{cell!r} of {name!r} is neither 0 nor 1, nor -1 or 1, nor empty")
            values.append(value)
    table = np.array(values).reshape(-1, len(header))
    return tuple(header), from_flags(table, header, lambda row: f"{file}, line {lines[row]}")


def _listed(
    file: Path, _: list[str], rows: _Lines, lines: list[int], classes: tuple[str, ...] | None
) -> tuple[tuple[str, ...], Tensor]:
    """The classes, sorted, and the labels of a column of names."""
    lists: list[list[str] | None] = []
    for line, cells in rows:
        if len(cells) > 1:
            raise _wrong(file, line, f"has {len(cells) + 1} values: names stand in one, with ; between them")
        text = cells[0].strip() if cells else ""
        names = [name for part in text.split(";") if (name := part.strip())]
        lists.append(None if text.lower() == "nan" else names)
    known = classes or tuple(sorted({name for names in lists for name in names or ()}))
    number = {name: index for index, name in enumerate(known)}
    return known, from_lists(lists, number, lambda row: f"{file}, line {lines[row]}")


def _partition(file: Path, files: Sequence[str]) -> list[str]:
    """CelebA's own split of each file."""
    told: dict[str, str] = {}
    for line, text in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        name, _, number = text.strip().rpartition(" ")
        if text.strip() and number not in _SPLITS:
            raise _wrong(file, line, f"{number!r} is no split: 0, 1 and 2 are train, val and test")
        told[name.strip()] = _SPLITS.get(number, "")
    names = [each.rpartition("/")[2] for each in files]
    if strange := next((each for each in names if each not in told), None):
        raise DataError(f"{strange}: has no line in {file}")
    return [told[each] for each in names]


def _wrong(file: Path, line: int, said: str) -> SitusError:
    return DataError(f"{file}, line {line}: {said}")
