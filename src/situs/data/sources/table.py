"""A multi-label table among image files, in one of three forms:

"file,Bald,Smiling", "a.jpg,1,0"          for each class 1 or 0, or 1 or -1; an empty cell: unknown
"file,labels", "a.jpg,Bald;Smiling"       a column of names separated by ; an empty cell: no class
"202599", "Bald Smiling", "1.jpg -1 1"    CelebA's own text: how many files, the classes, one line for each file
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

from situs.data.sources.base import ANY, SPLITS, Wanted, choose_split, split_name
from situs.data.sources.folder import TABLES, FileSource, find_table, printable, split_folders, walk
from situs.data.sources.labels import LISTS, from_flags, from_lists, note_singletons
from situs.errors import DataError, SitusError, counted

PARTITION = "list_eval_partition.txt"
"""CelebA's own splits, beside the table: 0, 1 and 2 for train, val and test."""
SUFFIXES = (".csv", ".txt")

_SPLITS = {"0": "train", "1": "val", "2": "test"}
_CELLS = {1: ("1", "1.0", "true"), 0: ("0", "0.0", "false"), -1: ("-1", "-1.0"), math.nan: ("", "nan")}
_VALUES = {cell: value for value, cells in _CELLS.items() for cell in cells}


@dataclass(frozen=True)
class LabelTable:
    """One row for each file. names: as in the table. lines: their line numbers. labels: [n, K] int8, 1, 0 or -1 for
    unknown.

    listed: whether the classes come from a column of names, not from the heading.
    """

    file: Path
    classes: tuple[str, ...]
    names: list[str]
    lines: list[int]
    labels: Tensor
    listed: bool

    def match(self, files: Sequence[str]) -> Tensor:
        """The labels [m, K] of files, relative to the table's folder; each file must have a line and each line a file.

        Where the table names no folders, files are matched by their last name.
        """
        folder, whole = self.file.parent, any("/" in name for name in self.names)
        keys = [file if whole else file.rpartition("/")[2] for file in files]
        rows: dict[str, int] = {}
        for row, name in enumerate(self.names):
            if rows.setdefault(name, row) != row:
                raise self.wrong(row, f"{name!r} is in line {self.lines[rows[name]]} already")
        matches: dict[str, str] = {}
        for file, name in zip(files, keys, strict=True):
            if name not in rows:
                raise DataError(f"{printable(str(folder / file))}: has no line in {self.file.name}")
            if matches.setdefault(name, file) != file:
                both = f"{printable(matches[name])} and {printable(file)} have the same name"
                raise self.wrong(rows[name], f"{both}, but the table does not name their folders")
        for row, name in enumerate(self.names):
            if name not in matches:
                raise self.wrong(row, f"there is no image {name!r} below {folder}")
        return self.labels[[rows[name] for name in keys]]

    def wrong(self, row: int, reason: str) -> SitusError:
        """The error about a row."""
        return _wrong(self.file, self.lines[row], reason)


class TableSource(FileSource):
    """Image files below a folder with a table of their labels, in the order of their relative paths.

    The table is in the folder, or is the path itself, or each split's folder has its own: then the classes are those of
    the training split's.
    """

    def __init__(self, path: Path, wanted: Wanted = ANY) -> None:
        folder, splits = path.parent if path.is_file() else path, table_splits(path)
        chosen = choose_split(splits, wanted.split, str(path))
        self.root = folder / chosen if chosen in split_folders(folder) else folder
        file = path if path.is_file() else find_table(self.root) or find_table(folder)
        if file is None:
            raise DataError(f"{self.root}: has no table of labels ({', '.join(TABLES)})")
        training = next((folder / name for name in SPLITS["train"] if name in splits), folder)
        first = find_table(training) if file.parent not in (training, folder) else None
        table = read_table(file, None if first is None else read_table(first).classes)
        files, left_out = walk(file.parent, (file.name, PARTITION))
        labels = table.match(files)
        rows, prefix = range(len(files)), f"{chosen}/" if self.root != file.parent else ""
        if self.root == folder and chosen is not None:
            splits_of = _partition(folder / PARTITION, files)
            rows = [row for row in rows if splits_of[row] == chosen]
        rows = [row for row in rows if files[row].startswith(prefix)]
        if not rows:
            raise DataError(f"{self.root}: contains no image of the split")
        self._files, self._labels = [files[row].removeprefix(prefix) for row in rows], labels[torch.tensor(rows)]
        name = split_name(folder.name, chosen)
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
    """A table of labels. classes: those of another table, which must be the same; by default the table's own."""
    try:
        text = io.StringIO(file.read_text(encoding="utf-8-sig"), newline="")
        celeba = file.suffix == ".txt"
        cut = enumerate((line.split() for line in text) if celeba else csv.reader(text), 1)
        return _parse(file, celeba, ((line, cells) for line, cells in cut if any(cells)), classes)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file}: must be a table in UTF-8 text ({error})") from error


_Lines = Iterator[tuple[int, list[str]]]


def _parse(file: Path, celeba: bool, rows: _Lines, classes: tuple[str, ...] | None) -> LabelTable:
    """rows: the number and the cells of each non-empty line, as an iterator: a list of them would fill a gigabyte."""
    count = next(rows, (0, [""]))[1] if celeba else None
    header = [cell.strip() for cell in next(rows, (0, [""]))[1]][0 if celeba else 1 :]
    if not any(header) or (count is not None and not count[0].isdecimal()):
        form = (
            "the number of files, and line 2 must name the classes"
            if celeba
            else "a heading: first the name of the column of files, then the names of the classes"
        )
        raise _wrong(file, 1, f"must be {form}")
    if len({*header}) < len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise _wrong(file, 1, f"has the column {twice!r} twice")
    names: list[str] = []
    lines: list[int] = []

    def labelled() -> _Lines:
        for line, cells in rows:
            names.append(cells[0].strip().replace("\\", "/").removeprefix("./"))
            lines.append(line)
            yield line, cells[1:]

    listed = len(header) == 1 and header[0].lower() in LISTS
    columns, labels = (_from_names if listed else _from_flags)(file, header, labelled(), lines, classes)
    if classes is not None and columns != classes:
        if different := {*columns} ^ {*classes}:
            raise _wrong(file, 1, f"{min(different)!r} is a class in only one of the splits")
        labels = labels[:, [columns.index(name) for name in classes]]
    if not names or not columns:
        raise DataError(f"{file}: {'names no class in any line' if names else 'has no line for any image'}")
    if count is not None and int(count[0]) != len(names):
        raise _wrong(file, 1, f"announces {int(count[0]):,} files, but {len(names):,} follow")
    return LabelTable(file, classes or columns, names, lines, labels, listed)


def _from_flags(
    file: Path, header: list[str], rows: _Lines, lines: list[int], _: tuple[str, ...] | None
) -> tuple[tuple[str, ...], Tensor]:
    """The classes and the labels of one column for each class."""
    values = array("f")
    for line, cells in rows:
        if len(cells) != len(header):
            raise _wrong(file, line, f"has {counted(len(cells), 'labels')} for {counted(len(header), 'classes')}")
        for name, cell in zip(header, cells, strict=True):
            if (value := _VALUES.get(cell.strip().lower())) is None:
                allowed = "0 and 1, or -1 and 1; an empty cell means unknown"
                raise _wrong(file, line, f"{cell!r} of {name!r} is not a label; labels must be {allowed}")
            values.append(value)
    table = np.array(values).reshape(-1, len(header))
    return tuple(header), from_flags(table, header, lambda row: f"{file}, line {lines[row]}")


def _from_names(
    file: Path, _: list[str], rows: _Lines, lines: list[int], classes: tuple[str, ...] | None
) -> tuple[tuple[str, ...], Tensor]:
    """The classes, sorted, and the labels of a column of names."""
    lists: list[list[str] | None] = []
    for line, cells in rows:
        if len(cells) > 1:
            raise _wrong(file, line, f"has {len(cells) + 1} values: put all class names into one value, separated by ;")
        text = cells[0].strip() if cells else ""
        names = [name for part in text.split(";") if (name := part.strip())]
        lists.append(None if text.lower() == "nan" else names)
    classes = classes or tuple(sorted({name for names in lists for name in names or ()}))
    number = {name: index for index, name in enumerate(classes)}
    return classes, from_lists(lists, number, lambda row: f"{file}, line {lines[row]}")


def _partition(file: Path, files: Sequence[str]) -> list[str]:
    """CelebA's own split of each file."""
    splits: dict[str, str] = {}
    for line, text in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        name, _, number = text.strip().rpartition(" ")
        if text.strip() and number not in _SPLITS:
            raise _wrong(file, line, f"{number!r} is not a split: 0, 1 and 2 are train, val and test")
        splits[name.strip()] = _SPLITS.get(number, "")
    names = [path.rpartition("/")[2] for path in files]
    if missing := next((name for name in names if name not in splits), None):
        raise DataError(f"{missing}: has no line in {file}")
    return [splits[name] for name in names]


def _wrong(file: Path, line: int, reason: str) -> SitusError:
    return DataError(f"{file}, line {line}: {reason}")
