"""Sentences or pairs of them with labels from tables (parquet, csv, tsv, jsonl), and plain text in blocks of words.

A set is one file, or a folder of files whose names or folders say their split. The labels are numbers or names; the
classes are those of the training split. Held in memory: the sentences as they are and as compact ids.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from situs.data.sources.base import SPLITS, Source, Wanted, choose_split, list_shards, split_of, splits_of
from situs.data.sources.labels import (
    LABEL_COLUMNS,
    class_names,
    classes_of,
    is_missing,
    is_text,
    note_singletons,
    note_unseen,
)
from situs.data.sources.parquet import open_parquet, reading
from situs.data.text import LONGEST, TextConfig
from situs.data.tokeniser import Ids, Tokeniser
from situs.errors import BrokenSampleError, DataError, SitusError, counted, verb

SUFFIXES = (".parquet", ".csv", ".tsv", ".jsonl")
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
        return self.file.suffix not in (".csv", ".tsv") or not told.isdisjoint((*SENTENCES, *LABEL_COLUMNS))

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
        written = {name: class_names(file, schema, name) for name in LABEL_COLUMNS if name in plain}
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


PLAIN = ".txt"


def text_files(path: Path, *, words: bool, unlabelled: bool = False) -> list[Path]:
    """The files of a set of text, of every split. words: plain text before tables. unlabelled: both."""
    if path.is_file():
        return [path]
    plain = list_shards(path, PLAIN) if words or unlabelled else []
    tables = next((files for suffix in SUFFIXES if (files := list_shards(path, suffix))), [])
    found = [*plain, *tables] if unlabelled else plain or tables
    if not found:
        allowed = ", ".join((*SUFFIXES, *((PLAIN,) if words or unlabelled else ())))
        raise DataError(f"{path}: holds no sentences, in files that end in {allowed}")
    return found


def text_splits(path: Path, *, words: bool, unlabelled: bool = False) -> set[str]:
    """The splits of a set of text; none of one file."""
    return set() if path.is_file() else splits_of(text_files(path, words=words, unlabelled=unlabelled))


def open_text(path: Path, wanted: Wanted, text: TextConfig, *, words: bool = False) -> Source:
    """The sentences at `path`; words: all of them as one text, in blocks."""
    if text.pair is not None and (words or text.unlabelled):
        said = "pairs of sentences are for a classifier, and what is learned here is read from one at a time"
        raise SitusError(f"pair={text.pair!r}: {said}", field="text.pair")
    files = text_files(path, words=words, unlabelled=text.unlabelled)
    chosen = None if path.is_file() and wanted.split in (None, *SPLITS["train"]) else choose_split(
        text_splits(path, words=words, unlabelled=text.unlabelled), wanted.split, str(path)
    )  # fmt: skip
    own = [file for file in files if chosen is None or split_of(file) == chosen]
    name = path.stem + (f" ({chosen})" if chosen else "")
    tokeniser = None if text.tokeniser is None else Tokeniser(text.tokeniser)
    if words:
        if tokeniser is None:
            raise SitusError(f"{path}: is cut in blocks of ids, and no tokeniser is named", field="text.tokeniser")
        return BlockSource(name, [part for file in own for part in _plain(file, text)], tokeniser, text, wanted)
    if text.unlabelled:
        return _unlabelled(name, own, tokeniser, text, wanted)
    if any(file.suffix == PLAIN for file in own):
        raise DataError(f"{own[0]}: is plain text without labels, which a language model learns from")
    home = [file for file in files if split_of(file) in SPLITS["train"]] or own
    tables = [read_columns(file) for file in own]
    column, label = _columns(tables, text)
    texts = [each for table in tables for each in _sentences(table, column)]
    pairs = (
        None if text.pair is None else [each for table in tables for each in _sentences(table, text.pair, "text.pair")]
    )
    entries = [(table.file, row) for table in tables for row in range(len(table))]
    numbers, classes = None, None
    if label is not None and wanted.labels:
        classes, numbers = _numbered(tables, tables if home == own else [read_columns(file) for file in home], label)
    more = {"pairs": pairs, "strict": wanted.strict}
    found = TextSource(name, texts, numbers, classes, entries, tokeniser, text.longest or LONGEST, **more)
    if numbers is not None and home == own:
        there = [each for each in numbers if each is not None]
        found.notes += note_unseen(name, classes, {*there})
        found.notes += note_singletons(name, classes or (), np.bincount(there, minlength=len(classes or ())).tolist())
    if label is None and wanted.labels:
        found.notes += [
            f"{name}: its column {each!r} holds {tables[0].others[each]}, which is no label"
            for each in LABEL_COLUMNS
            if each in tables[0].others
        ]
    return found


def _unlabelled(
    name: str, files: list[Path], tokeniser: Tokeniser | None, text: TextConfig, wanted: Wanted
) -> TextSource:
    """The sentences of tables and the lines of plain text, those longer than a sample in pieces."""
    longest, texts, entries = text.longest or LONGEST, [], []
    for file in files:
        found = _plain(file, text)
        lines = [line for each in found for line in each.splitlines()] if file.suffix == PLAIN else found
        pieces = [[line] for line in lines] if tokeniser is None else tokeniser.pieces(lines, longest)
        for row, each in enumerate(pieces):
            texts += each
            entries += [(file, row)] * len(each)
    kept = [at for at, each in enumerate(texts) if each.strip()]
    rows = [texts[at] for at in kept], None, None, [entries[at] for at in kept]
    return TextSource(name, *rows, tokeniser, longest, strict=wanted.strict)


class TextSource(Source):
    """Sentences, each with its class where they have some. A sample is "ids" [n] (of a pair [2, n], as `Ids` has them)
    and "label".

    texts: of each row, None where there is none. numbers: its class; None where it has none. entries: its file and row.
    tokeniser: None where the sentences are looked at and no model reads them; a sample is then "text" and "label".
    pairs: the second sentence of each row, where they are pairs.
    """

    things = "sentences"

    def __init__(
        self,
        name: str,
        texts: list[str | None],
        numbers: list[int | None] | None,
        classes: tuple[str, ...] | None,
        entries: list[tuple[Path, int]],
        tokeniser: Tokeniser | None,
        longest: int,
        *,
        pairs: list[str | None] | None = None,
        strict: bool = False,
    ) -> None:
        import pyarrow as pa

        super().__init__(name, classes, None, strict)
        self._entries, self.tokeniser, self.longest = entries, tokeniser, longest
        self.texts = pa.array(texts, pa.large_string())
        self.pairs = None if pairs is None else pa.array(pairs, pa.large_string())
        first, second = ([each or "" for each in own] for own in (texts, texts if pairs is None else pairs))
        self._whole = np.array([bool(a.strip() and b.strip()) for a, b in zip(first, second, strict=True)], bool)
        self._labels = None if numbers is None else np.array([-1 if each is None else each for each in numbers])
        self.ids: Ids | None = None
        if tokeniser is not None:
            both = first if pairs is None else list(zip(first, second, strict=True))
            self.ids = tokeniser.encode(both, longest)
            if self.ids.cut:
                things = "sentences" if pairs is None else "pairs"
                said = (
                    f"of its {len(texts):,} {things} {self.ids.cut:,} {verb(self.ids.cut, 'were')} cut at {longest} ids"
                )
                self.notes.append(f"{name}: {said} (text.longest)")

    def __len__(self) -> int:
        return len(self.texts)

    def text(self, index: int) -> str:
        """The sentence itself; of a pair both, a tab between them."""
        first = self.texts[index].as_py() or ""
        return first if self.pairs is None else f"{first}\t{self.pairs[index].as_py() or ''}"

    def length(self, index: int) -> int:
        """How many ids the sentence has."""
        assert self.ids is not None
        return self.ids.length(index)

    def read(self, index: int) -> dict[str, Any]:
        if not self._whole[index]:
            said = "the sentence is" if self.pairs is None else "a sentence of the pair is"
            raise BrokenSampleError(f"{self.entry(index)}: {said} empty")
        sample: dict[str, Any] = {"text": self.text(index)} if self.ids is None else {"ids": _tensor(self.ids[index])}
        if self.ids is not None and not self.length(index):
            raise BrokenSampleError(f"{self.entry(index)}: the sentence has no word that the tokeniser knows")
        return self.labelled(sample, index)

    def label(self, index: int) -> int | None:
        if self._labels is None:
            return None
        number = int(self._labels[index])
        if number < 0:
            raise BrokenSampleError(f"{self.entry(index)}: the row has no label, others have one")
        return number

    def seen(self) -> Sequence[str]:
        if self._labels is None or self.classes is None:
            return []
        return [self.classes[number] for number in np.unique(self._labels).tolist() if number >= 0]

    def key(self, index: int) -> str:
        """The sentence or the pair: where it stands twice, both go to one side of a split."""
        return self.text(index)

    def entry(self, index: int) -> str:
        """What an error calls this sentence."""
        file, row = self._entries[index]
        return f"{file}, row {row}"


class BlockSource(Source):
    """Texts one behind another, the tokeniser's end between them, in blocks of `longest` ids. A sample is "ids"."""

    things = "blocks"

    def __init__(self, name: str, texts: list[str], tokeniser: Tokeniser, text: TextConfig, wanted: Wanted) -> None:
        super().__init__(name, None, None, wanted.strict)
        self.tokeniser, self.longest = tokeniser, text.longest or LONGEST
        if self.longest < 2:
            allowed = "at least 2: a language model learns the next word from the one before"
            raise SitusError(field="text.longest", value=self.longest, allowed=allowed)
        coded = tokeniser.encode([each for each in texts if each.strip()], special=False)
        ends = [] if tokeniser.end is None else [tokeniser.end]
        parts = [
            part for number in range(len(coded.ends)) for part in (coded[number], np.array(ends, coded.flat.dtype))
        ]
        flat = np.concatenate(parts) if parts else coded.flat
        if len(flat) < 2:
            raise DataError(f"{name}: has {counted(len(flat), 'words')}; a language model needs at least two")
        count = -(-len(flat) // self.longest)
        if len(flat) - (count - 1) * self.longest < 2:  # a last word alone has nothing behind it
            count -= 1
        last = min(len(flat), count * self.longest)
        self.ids = Ids(flat[:last], np.minimum(np.arange(1, count + 1) * self.longest, last), 0)
        self.notes.append(f"{name}: {last:,} ids in {counted(count, 'blocks')} of {self.longest}")

    def __len__(self) -> int:
        return len(self.ids.ends)

    def length(self, index: int) -> int:
        """How many ids the block has: the last has fewer."""
        return self.ids.length(index)

    def read(self, index: int) -> dict[str, Any]:
        return {"ids": _tensor(self.ids[index])}


def _tensor(ids: np.ndarray) -> Tensor:
    return torch.from_numpy(ids.astype(np.int64))


def _plain(file: Path, text: TextConfig) -> list[str]:
    """The texts of a file: plain text as a whole, of a table one a row."""
    if file.suffix != PLAIN:
        table = read_columns(file)
        return [each for each in _sentences(table, _columns([table], text)[0]) if each]
    try:
        return [file.read_text(encoding="utf-8-sig")]
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: is no text in UTF-8 ({str(error)[:80]})") from error


def _sentences(table: Columns, column: str, field: str = "text.column") -> list[str | None]:
    for row, value in enumerate(table.column(column)):
        if not isinstance(value, str | None):
            said = f"column {column!r} holds {str(value)[:40]}, which is no sentence"
            raise SitusError(f"{table.file}, row {row}: {said}", field=field)
    return table.column(column)


def _columns(tables: list[Columns], text: TextConfig) -> tuple[str, str | None]:
    """The columns of sentences and labels, the same in every file."""
    found = [_columns_of(table, text) for table in tables]
    for table, each in zip(tables, found, strict=True):
        if each != found[0]:
            raise DataError(f"{table.file}: its columns are {each}, in {tables[0].file.name} {found[0]}")
    return found[0]


def _columns_of(table: Columns, text: TextConfig) -> tuple[str, str | None]:
    listed = ", ".join([*table.names, *(f"{name} ({kind})" for name, kind in table.others.items())])[:200]
    for field, asked in (("text.column", text.column), ("text.pair", text.pair), ("text.label", text.label)):
        if asked in table.others:
            said = f"column {asked!r} holds {table.others[asked]}, which is neither words nor numbers"
            raise SitusError(f"{table.file}: {said}", field=field)
        if asked is not None and asked not in table.names:
            where = "only" if table.headed else "and must have a heading; its first row is"
            raise SitusError(f"{table.file}: has no column {asked!r}, {where} {listed}", field=field)
    if not table.headed and (text.column, text.pair, text.label) == (None, None, None):
        known = ", ".join((*SENTENCES, *LABEL_COLUMNS))
        said = f"its first row must be a heading, and reads {listed}, with none of {known}: put a heading above it"
        raise SitusError(f"{table.file}: {said}, or if it is one name the column of sentences", field="text.column")
    label = next((name for name in LABEL_COLUMNS if name in table.names and name not in (text.column, text.pair)), None)
    label = text.label or label
    if text.column is not None:
        return text.column, label
    words = [name for name in table.words if name not in (label, text.pair)]
    if not words:
        raise SitusError(f"{table.file}: has no column of sentences, only {listed}", field="text.column")
    if len(words) > 1:
        said = f"several columns hold words, {', '.join(words)[:200]}: say which holds the sentences, or both of a pair"
        raise SitusError(f"{table.file}: {said}", field="text.column")
    return words[0], label


def _numbered(
    tables: list[Columns], training: list[Columns], label: str
) -> tuple[tuple[str, ...] | None, list[int | None] | None]:
    """The classes, which are those of training, and the class of each row; None of both where every label is hidden."""
    for table in training:
        if label not in table.names:
            raise SitusError(f"{table.file}: has no column {label!r} of labels, other files have", field="text.label")
    named = next((names for table in training if (names := table.class_names(label))), ())
    labels = (_label(table, label, row) for table in training for row in range(len(table)))
    classes, number = classes_of(labels, named, f"{training[0].file}, column {label!r}")
    if classes is None:
        return None, None
    number |= {name: at for at, name in enumerate(classes)} | {at: at for at in range(len(named))}
    numbers: list[int | None] = []
    for table in tables:
        for row in range(len(table)):
            value = _label(table, label, row)  # a number may be a name: 5 of 1, 5 and "6+"
            numbers.append(None if value is None else number.get(value, number.get(str(value))))
            if value is not None and numbers[-1] is None:
                told = f"the label {value!r} is not among the {len(classes):,} of the training split"
                raise DataError(f"{table.file}, row {row}: {told}")
    return classes, numbers


def _label(table: Columns, label: str, row: int) -> int | str | None:
    """A row's label: a number from 0 on, a name, or None where it is missing or hidden (-1)."""
    value = table.column(label)[row]
    value = value.strip() if isinstance(value, str) else value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if is_missing(value) or value in ("", -1):
        return None
    if isinstance(value, str):
        return value
    if isinstance(value, int) and value >= 0:
        return int(value)
    raise SitusError(f"{table.file}, row {row}: the label {value!r} is no class number and no name", field="text.label")
