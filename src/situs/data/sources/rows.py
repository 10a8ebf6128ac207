"""Tables of sentences: parquet, csv, tsv and jsonl, as columns by name."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from situs.data.sources.columns import class_names, is_text
from situs.data.sources.parquet import LABEL_COLUMNS, open_parquet, reading
from situs.errors import DataError, counted

SUFFIXES = (".parquet", ".csv", ".tsv", ".jsonl")
LABELS = LABEL_COLUMNS
SENTENCES = ("text", "sentence")


class Columns:
    """The rows of one file. names: its columns. words: those that hold text. others: those that hold neither words nor
    numbers, and what they hold."""

    def __init__(
        self,
        file: Path,
        columns: dict[str, list[Any]],
        written: dict[str, tuple[str, ...]],
        others: dict[str, str] | None = None,
    ) -> None:
        self.file, self._columns, self._written, self.others = file, columns, written, others or {}
        self.names = list(columns)
        self.words = [name for name, values in columns.items() if any(isinstance(each, str) for each in values)]

    @property
    def headed(self) -> bool:
        """Whether its columns have names for sure: the first row of csv and tsv may be data."""
        told = {name.strip().lower() for name in self.names}
        return self.file.suffix not in (".csv", ".tsv") or not told.isdisjoint((*SENTENCES, *LABELS))

    def __len__(self) -> int:
        return len(next(iter(self._columns.values()), ()))

    def column(self, name: str) -> list[Any]:
        """Its values, None where there is none."""
        return self._columns[name]

    def class_names(self, name: str) -> tuple[str, ...]:
        """The names of the classes that are written beside a column of numbers."""
        return self._written.get(name, ())


def read_columns(file: Path) -> Columns:
    """The rows of a file, by its ending; one without any is refused."""
    table = _read_parquet(file) if file.suffix == ".parquet" else _read_plain(file)
    if not len(table):
        others = ", ".join(f"{name} ({kind})" for name, kind in table.others.items())[:200]
        said = f"neither words nor numbers, only {others}" if others and not table.names else "no rows"
        raise DataError(f"{file}: holds {said}")
    return table


def _read_plain(file: Path) -> Columns:
    if file.suffix not in SUFFIXES:
        raise DataError(f"{file}: sentences are read from {', '.join(SUFFIXES)}")
    try:
        columns = _read_lines(file) if file.suffix == ".jsonl" else _read_cells(file)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file}: cannot be read ({str(error)[:80]})") from error
    return Columns(file, columns, {})


def _read_parquet(file: Path) -> Columns:
    import pyarrow as pa

    opened = open_parquet(file)
    with reading(file):
        schema = opened.schema_arrow
        kinds = (is_text, pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
        held_as = {each.name: each.type for each in schema}  # a category, as pandas writes them, is what it stands for
        held_as = {n: kind.value_type if pa.types.is_dictionary(kind) else kind for n, kind in held_as.items()}
        plain = [name for name, own in held_as.items() if any(kind(own) for kind in kinds)]
        held = opened.read(columns=plain)
        held.validate(full=True)
        columns = {name: held[name].to_pylist() for name in plain}
        written = {name: class_names(file, schema, name) for name in LABELS if name in plain}
    return Columns(file, columns, written, {name: str(own)[:40] for name, own in held_as.items() if name not in plain})


def _read_cells(file: Path) -> dict[str, list[Any]]:
    csv.field_size_limit(1 << 30)  # a text may be a book
    with file.open(encoding="utf-8-sig", newline="") as lines:
        heading = lines.readline()
        lines.seek(0)
        # A quotation mark in a tsv file is one of the sentence: GLUE's open quotes that they never close.
        form: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if file.suffix == ".tsv" else {}
        if not form and "," not in heading:  # as spreadsheets write them where a comma is for decimals
            form = {"delimiter": next((each for each in ";\t" if each in heading), ",")}
        reader = csv.reader(lines, strict=True, **form)
        names = [name.strip() for name in next(reader, [])]
        if len({*names}) < len(names):
            raise DataError(f"{file}: two of its columns have one name ({', '.join(names)[:100]})")
        rows = []
        for row in filter(None, reader):  # a blank line is no row
            if len(row) != len(names):
                said = f"has {counted(len(row), 'cells')}, and the heading {len(names)}"
                raise DataError(f"{file}, line {reader.line_num}: {said}")
            rows.append(row)
    return {name: _numbers([row[at] for row in rows]) for at, name in enumerate(names)}


def _numbers(cells: list[str]) -> list[Any]:
    """Cells as numbers where all that are not empty are; else as they are."""
    try:
        found = [float(each) if each.strip() else None for each in cells]
    except ValueError:
        return list(cells)
    return [int(each) if each is not None and each.is_integer() else each for each in found]


def _read_lines(file: Path) -> dict[str, list[Any]]:
    rows = []
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{file}, line {number}: is no JSON ({str(error)[:80]})") from error
            if not isinstance(row, dict):
                raise DataError(f"{file}, line {number}: must be an object with a name for each value")
            if "\\u" in line and any("\ud800" <= each <= "\udfff" for each in json.dumps(row, ensure_ascii=False)):
                said = "half a character is written there (a surrogate alone), which is no text"
                raise DataError(f"{file}, line {number}: {said}")
            rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
