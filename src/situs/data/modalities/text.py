"""Sentences or pairs of them with labels from tables (parquet, csv, tsv, jsonl), and plain text in blocks of ids.

A set is one file, or a folder of files whose names or folders tell their split. The labels are numbers or names; the
classes are those of the training split. In memory: the sentences as text and as compact ids. A batch is [B, N] int64,
padded to the longest of the batch, with the mask of the real ids; for pairs [B, 2, N], the ids and which of the two
sentences they belong to. N is a multiple of 8, so that a compiled step meets few lengths.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from situs.config import from_dict
from situs.data.augment.recipes import AugmentConfig
from situs.data.batch import Batch
from situs.data.modalities.base import Modality, ModelInput
from situs.data.pipeline import Noise, Pipeline
from situs.data.sources.base import SPLITS, Source, Wanted, choose_split, list_shards, split_name, split_of, splits_of
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
from situs.data.text import COLUMNS, LONGEST, Columns, TextConfig
from situs.data.tokeniser import Ids, Tokeniser
from situs.errors import BrokenSampleError, DataError, SitusError, counted, verb
from situs.files import absolute

if TYPE_CHECKING:
    from situs.data.config import DataConfig


SUFFIXES = (".parquet", ".csv", ".tsv", ".jsonl")
SENTENCES = ("text", "sentence")


@dataclass(frozen=True)
class TextTable:
    """The rows of one file. columns: the values of each, None where one is missing. class_names: in the metadata of a
    column. others: columns that hold neither text nor numbers, and what they hold."""

    file: Path
    columns: dict[str, list[Any]]
    class_names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)

    @property
    def text_columns(self) -> list[str]:
        """The columns that hold text."""
        return [name for name, cells in self.columns.items() if any(isinstance(cell, str) for cell in cells)]

    @property
    def has_heading(self) -> bool:
        """Whether its columns certainly have names: the first row of csv and tsv may be data."""
        names = {name.strip().lower() for name in self.columns}
        return self.file.suffix not in (".csv", ".tsv") or not names.isdisjoint((*SENTENCES, *LABEL_COLUMNS))

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))


def read_table(file: Path) -> TextTable:
    """The rows of a file, by its suffix; one without any is refused."""
    if file.suffix not in SUFFIXES:
        raise DataError(f"{file}: sentences are read from {', '.join(SUFFIXES)}")
    try:
        table = {".parquet": _read_parquet, ".jsonl": _read_jsonl}.get(file.suffix, _read_csv)(file)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file}: cannot be read ({str(error)[:80]})") from error
    if not len(table):
        others = ", ".join(f"{name} ({kind})" for name, kind in table.others.items())[:200]
        content = f"neither text nor numbers, only {others}" if others and not table.columns else "no rows"
        raise DataError(f"{file}: contains {content}")
    return table


def _read_parquet(file: Path) -> TextTable:
    import pyarrow as pa

    parquet = open_parquet(file)
    with reading(file):
        schema = parquet.schema_arrow
        readable = (is_text, pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
        kinds = {column.name: column.type for column in schema}  # a category, as pandas writes it, counts as its values
        kinds = {name: kind.value_type if pa.types.is_dictionary(kind) else kind for name, kind in kinds.items()}
        names = [name for name, kind in kinds.items() if any(check(kind) for check in readable)]
        table = parquet.read(columns=names)
        table.validate(full=True)
        columns = {name: table[name].to_pylist() for name in names}
        classes = {name: class_names(file, schema, name) for name in LABEL_COLUMNS if name in names}
    others = {name: str(kind)[:40] for name, kind in kinds.items() if name not in names}
    return TextTable(file, columns, classes, others)


def _read_csv(file: Path) -> TextTable:
    csv.field_size_limit(1 << 30)  # a text may be a book
    with file.open(encoding="utf-8-sig", newline="") as lines:
        heading = lines.readline()
        lines.seek(0)
        # A quotation mark in a tsv file belongs to the sentence: GLUE's files open quotes that they never close.
        form: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if file.suffix == ".tsv" else {}
        if not form and "," not in heading:  # as spreadsheets write them where the comma is for decimals
            form = {"delimiter": next((sign for sign in ";\t" if sign in heading), ",")}
        reader = csv.reader(lines, strict=True, **form)
        names = [name.strip() for name in next(reader, [])]
        if len({*names}) < len(names):
            raise DataError(f"{file}: two of its columns have the same name ({', '.join(names)[:100]})")
        rows = []
        for row in filter(None, reader):  # a blank line is no row
            if len(row) != len(names):
                sizes = f"has {counted(len(row), 'cells')}, but the heading has {len(names)}"
                raise DataError(f"{file}, line {reader.line_num}: {sizes}")
            rows.append(row)
    return TextTable(file, {name: _numbers([row[column] for row in rows]) for column, name in enumerate(names)})


def _numbers(cells: list[str]) -> list[Any]:
    """Cells as numbers where all non-empty ones are numbers; otherwise unchanged."""
    try:
        numbers = [float(cell) if cell.strip() else None for cell in cells]
    except ValueError:
        return list(cells)
    return [int(number) if number is not None and number.is_integer() else number for number in numbers]


def _read_jsonl(file: Path) -> TextTable:
    rows = []
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{file}, line {number}: is not JSON ({str(error)[:80]})") from error
            if not isinstance(row, dict):
                raise DataError(f"{file}, line {number}: must be a JSON object with a name for each value")
            if "\\u" in line and any("\ud800" <= char <= "\udfff" for char in json.dumps(row, ensure_ascii=False)):
                raise DataError(f"{file}, line {number}: has a lone surrogate (half a character), which is not text")
            rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    return TextTable(file, {name: [row.get(name) for row in rows] for name in names})


PLAIN = ".txt"


def text_files(path: Path, *, words: bool, unlabelled: bool = False) -> list[Path]:
    """The files of a set of text, of every split. words: plain text, or else tables. unlabelled: both."""
    if path.is_file():
        return [path]
    plain = list_shards(path, PLAIN) if words or unlabelled else []
    tables = next((files for suffix in SUFFIXES if (files := list_shards(path, suffix))), [])
    files = [*plain, *tables] if unlabelled else plain or tables
    if not files:
        allowed = ", ".join((*SUFFIXES, *((PLAIN,) if words or unlabelled else ())))
        raise DataError(f"{path}: contains no files of sentences ({allowed})")
    return files


def text_splits(path: Path, *, words: bool, unlabelled: bool = False) -> set[str]:
    """The splits of a set of text; empty for one file."""
    return set() if path.is_file() else splits_of(text_files(path, words=words, unlabelled=unlabelled))


def open_text(path: Path, wanted: Wanted, text: TextConfig, *, words: bool = False) -> Source:
    """The sentences at `path`; words: all of them as one text, in blocks."""
    if text.pair is not None and (words or text.unlabelled):
        reason = "only classifiers accept pairs of sentences, but this method reads single sentences"
        raise SitusError(f"pair={text.pair!r}: {reason}", field="text.pair")
    files = text_files(path, words=words, unlabelled=text.unlabelled)
    chosen = None
    if not path.is_file() or wanted.split not in (None, *SPLITS["train"]):
        splits = text_splits(path, words=words, unlabelled=text.unlabelled)
        chosen = choose_split(splits, wanted.split, str(path))
    split_files = [file for file in files if chosen is None or split_of(file) == chosen]
    name = split_name(path.stem, chosen)
    tokeniser = None if text.tokeniser is None else Tokeniser(text.tokeniser)
    if words:
        if tokeniser is None:
            raise SitusError(
                f"{path}: a tokeniser is needed to cut the text into blocks of ids", field="text.tokeniser"
            )
        return BlockSource(name, [part for file in split_files for part in _texts(file, text)], tokeniser, text, wanted)
    if text.unlabelled:
        return _unlabelled(name, split_files, tokeniser, text, wanted)
    if any(file.suffix == PLAIN for file in split_files):
        raise DataError(f"{split_files[0]}: is plain text without labels; only a language model learns from plain text")
    train_files = [file for file in files if split_of(file) in SPLITS["train"]] or split_files
    tables = [read_table(file) for file in split_files]
    column, label = _columns(tables, text)
    texts = [sentence for table in tables for sentence in _sentences(table, column)]
    pairs = None
    if text.pair is not None:
        pairs = [sentence for table in tables for sentence in _sentences(table, text.pair, "text.pair")]
    entries = [(table.file, row) for table in tables for row in range(len(table))]
    numbers, classes = None, None
    if label is not None and wanted.labels:
        training = tables if train_files == split_files else [read_table(file) for file in train_files]
        classes, numbers = _numbered(tables, training, label)
    longest = text.longest or LONGEST
    source = TextSource(name, texts, numbers, classes, entries, tokeniser, longest, pairs=pairs, strict=wanted.strict)
    if numbers is not None and train_files == split_files:
        labels = [number for number in numbers if number is not None]
        source.notes += note_unseen(name, classes, {*labels})
        counts = np.bincount(labels, minlength=len(classes or ())).tolist()
        source.notes += note_singletons(name, classes or (), counts)
    if label is None and wanted.labels:
        source.notes += [
            f"{name}: its column {other!r} has the type {tables[0].others[other]}, so it is not used as labels"
            for other in LABEL_COLUMNS
            if other in tables[0].others
        ]
    return source


def _unlabelled(
    name: str, files: list[Path], tokeniser: Tokeniser | None, text: TextConfig, wanted: Wanted
) -> TextSource:
    """The sentences of tables and the lines of plain text, long ones in pieces."""
    longest, texts, entries = text.longest or LONGEST, [], []
    for file in files:
        lines = _texts(file, text)
        if file.suffix == PLAIN:
            lines = [line for part in lines for line in part.splitlines()]
        pieces = [[line] for line in lines] if tokeniser is None else tokeniser.pieces(lines, longest)
        for row, parts in enumerate(pieces):
            filled = [part for part in parts if part.strip()]
            texts += filled
            entries += [(file, row)] * len(filled)
    return TextSource(name, texts, None, None, entries, tokeniser, longest, strict=wanted.strict)


class TextSource(Source):
    """Sentences, each with its class where there are labels. A sample is "ids" [n] (for a pair [2, n], as in `Ids`) and
    "label".

    texts: of each row, None if missing. numbers: its class; None if missing. entries: its file and row.
    tokeniser: None where no model reads the sentences; a sample is then "text" and "label".
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
        first = [sentence or "" for sentence in texts]
        second = first if pairs is None else [sentence or "" for sentence in pairs]
        self._whole = np.array([bool(a.strip() and b.strip()) for a, b in zip(first, second, strict=True)], bool)
        self._labels = None if numbers is None else np.array([-1 if label is None else label for label in numbers])
        self.ids: Ids | None = None
        if tokeniser is not None:
            both = first if pairs is None else list(zip(first, second, strict=True))
            self.ids = tokeniser.encode(both, longest)
            if self.ids.cut:
                things = "sentences" if pairs is None else "pairs"
                cut = f"{self.ids.cut:,} of {len(texts):,} {things} {verb(self.ids.cut, 'were')}"
                self.notes.append(f"{name}: {cut} cut at {longest} tokens (text.longest)")

    def __len__(self) -> int:
        return len(self.texts)

    def text(self, index: int) -> str:
        """The sentence; for a pair both, separated by a tab."""
        first = self.texts[index].as_py() or ""
        return first if self.pairs is None else f"{first}\t{self.pairs[index].as_py() or ''}"

    def length(self, index: int) -> int:
        """How many ids the sentence has."""
        assert self.ids is not None
        return self.ids.length(index)

    def read(self, index: int) -> dict[str, Any]:
        if not self._whole[index]:
            sentence = "the sentence" if self.pairs is None else "a sentence of the pair"
            raise BrokenSampleError(f"{self.entry(index)}: {sentence} is empty")
        sample: dict[str, Any] = {"text": self.text(index)} if self.ids is None else {"ids": _tensor(self.ids[index])}
        if self.ids is not None and not self.length(index):
            raise BrokenSampleError(f"{self.entry(index)}: the sentence has no word that the tokeniser knows")
        return self.labelled(sample, index)

    def label(self, index: int) -> int | None:
        if self._labels is None:
            return None
        number = int(self._labels[index])
        if number < 0:
            raise BrokenSampleError(f"{self.entry(index)}: the row has no label, but other rows have one")
        return number

    def classes_present(self) -> Sequence[str]:
        if self._labels is None or self.classes is None:
            return []
        return [self.classes[number] for number in np.unique(self._labels).tolist() if number >= 0]

    def key(self, index: int) -> str:
        """The sentence or the pair itself, so that equal ones are on the same side of a split."""
        return self.text(index)

    def entry(self, index: int) -> str:
        """What an error calls this sentence."""
        file, row = self._entries[index]
        return f"{file}, row {row}"


class BlockSource(Source):
    """Texts concatenated, the tokeniser's end id between them, in blocks of `longest` ids. A sample is "ids"."""

    things = "blocks"

    def __init__(self, name: str, texts: list[str], tokeniser: Tokeniser, text: TextConfig, wanted: Wanted) -> None:
        super().__init__(name, None, None, wanted.strict)
        self.tokeniser, self.longest = tokeniser, text.longest or LONGEST
        if self.longest < 2:
            allowed = "at least 2, because a language model learns the next word from the word before"
            raise SitusError(field="text.longest", value=self.longest, allowed=allowed)
        coded = tokeniser.encode([part for part in texts if part.strip()], special=False)
        ends = [] if tokeniser.end is None else [tokeniser.end]
        parts = [
            part for number in range(len(coded.ends)) for part in (coded[number], np.array(ends, coded.flat.dtype))
        ]
        flat = np.concatenate(parts) if parts else coded.flat
        if len(flat) < 2:
            raise DataError(f"{name}: has {counted(len(flat), 'words')}; a language model needs at least two")
        count = -(-len(flat) // self.longest)
        if len(flat) - (count - 1) * self.longest < 2:  # a single last word has no next one
            count -= 1
        last = min(len(flat), count * self.longest)
        self.ids = Ids(flat[:last], np.minimum(np.arange(1, count + 1) * self.longest, last), 0)
        self.notes.append(f"{name}: {last:,} tokens in {counted(count, 'blocks')} of {self.longest}")

    def __len__(self) -> int:
        return len(self.ids.ends)

    def length(self, index: int) -> int:
        """How many ids the block has; the last may have fewer."""
        return self.ids.length(index)

    def read(self, index: int) -> dict[str, Any]:
        return {"ids": _tensor(self.ids[index])}


def _tensor(ids: np.ndarray) -> Tensor:
    return torch.from_numpy(ids.astype(np.int64))


def _texts(file: Path, text: TextConfig) -> list[str]:
    """The texts of a file: plain text as a whole, or the rows of a table."""
    if file.suffix != PLAIN:
        table = read_table(file)
        return [sentence for sentence in _sentences(table, _columns([table], text)[0]) if sentence]
    try:
        return [file.read_text(encoding="utf-8-sig")]
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: is not text in UTF-8 ({str(error)[:80]})") from error


def _sentences(table: TextTable, column: str, field: str = "text.column") -> list[str | None]:
    for row, value in enumerate(table.columns[column]):
        if not isinstance(value, str | None):
            reason = f"column {column!r} contains {str(value)[:40]}, which is not a sentence"
            raise SitusError(f"{table.file}, row {row}: {reason}", field=field)
    return table.columns[column]


def _columns(tables: list[TextTable], text: TextConfig) -> tuple[str, str | None]:
    """The columns of sentences and labels, the same in every file."""
    first = _columns_of(tables[0], text)
    for table in tables[1:]:
        if (columns := _columns_of(table, text)) != first:
            raise DataError(f"{table.file}: its columns are {columns}, but those of {tables[0].file.name} are {first}")
    return first


def _columns_of(table: TextTable, text: TextConfig) -> tuple[str, str | None]:
    listed = ", ".join([*table.columns, *(f"{name} ({kind})" for name, kind in table.others.items())])[:200]
    for setting in ("column", "pair", "label"):
        name, path = getattr(text, setting), f"text.{setting}"
        if name in table.others:
            reason = f"column {name!r} has the type {table.others[name]}, which is neither text nor numbers"
            raise SitusError(f"{table.file}: {reason}", field=path)
        if name is not None and name not in table.columns:
            present = ", only" if table.has_heading else "; its first row is not a known heading:"
            raise SitusError(f"{table.file}: has no column {name!r}{present} {listed}", field=path)
    if not table.has_heading and (text.column, text.pair, text.label) == (None, None, None):
        usual = ", ".join((*SENTENCES, *LABEL_COLUMNS))
        raise SitusError(
            f"{table.file}: its first row must be a heading with one of the names {usual}, but the row is {listed}. "
            "If the file has no heading, add one. If this row is the heading, set `column` to the name of the column "
            "of sentences",
            field="text.column",
        )
    free = [name for name in LABEL_COLUMNS if name in table.columns and name not in (text.column, text.pair)]
    label = text.label or next(iter(free), None)
    if text.column is not None:
        return text.column, label
    candidates = [name for name in table.text_columns if name not in (label, text.pair)]
    if not candidates:
        raise SitusError(f"{table.file}: has no column of sentences, only {listed}", field="text.column")
    if len(candidates) > 1:
        raise SitusError(
            f"{table.file}: several columns contain text ({', '.join(candidates)[:200]}); set `column` to the "
            "column of sentences. For pairs of sentences, also set `pair` to the column of the second sentences",
            field="text.column",
        )
    return candidates[0], label


def _numbered(
    tables: list[TextTable], training: list[TextTable], label: str
) -> tuple[tuple[str, ...] | None, list[int | None] | None]:
    """The classes, which are those of training, and the class of each row; both None where all labels are hidden."""
    for table in training:
        if label not in table.columns:
            raise SitusError(
                f"{table.file}: has no column {label!r} of labels, but other files have one", field="text.label"
            )
    names = next((names for table in training if (names := table.class_names.get(label, ()))), ())
    labels = (_label(table, label, row) for table in training for row in range(len(table)))
    classes, number = classes_of(labels, names, f"{training[0].file}, column {label!r}")
    if classes is None:
        return None, None
    number |= {name: index for index, name in enumerate(classes)} | {index: index for index in range(len(names))}
    numbers: list[int | None] = []
    for table in tables:
        for row in range(len(table)):
            value = _label(table, label, row)  # a number may be a name: 5 of 1, 5 and "6+"
            numbers.append(None if value is None else number.get(value, number.get(str(value))))
            if value is not None and numbers[-1] is None:
                reason = f"the label {value!r} is not among the {len(classes):,} labels of the training split"
                raise DataError(f"{table.file}, row {row}: {reason}")
    return classes, numbers


def _label(table: TextTable, label: str, row: int) -> int | str | None:
    """A row's label: a number from 0 on, a name, or None where it is missing or hidden (-1)."""
    value = table.columns[label][row]
    value = value.strip() if isinstance(value, str) else value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if is_missing(value) or value in ("", -1):
        return None
    if isinstance(value, str):
        return value
    if isinstance(value, int) and value >= 0:
        return int(value)
    raise SitusError(
        f"{table.file}, row {row}: the label {value!r} is neither a class number nor a class name", field="text.label"
    )


_MULTIPLE = 8


def text_of(source: Source) -> TextSource | BlockSource:
    """The set of text that a source is, or is a part of."""
    whole = source.origin(0)[0] if len(source) else source
    if not isinstance(whole, (TextSource, BlockSource)) or whole.ids is None or whole.tokeniser is None:
        raise DataError(f"{source.name}: its sentences were not tokenised")
    return whole


class TextPipeline(Pipeline):
    """A source of ids ("ids", and "label" where there is one) to batches of them.

    longest: the most ids of a sample. words: the ids themselves are the targets.
    """

    by_rows = False  # each batch has a width of its own
    in_memory = "in memory as token ids"

    def __init__(self, source: Source, data: DataConfig, augment: AugmentConfig | None) -> None:
        super().__init__(source, training=augment is not None)
        whole = text_of(source)
        assert whole.tokeniser is not None
        assert whole.ids is not None
        self.longest, self.words, self.pad = data.size[1], data.target == "words", whole.tokeniser.pad
        self.row_bytes = 8 * self.longest * whole.ids.flat.ndim

    @property
    def facts(self) -> dict[str, Any]:
        """The most ids of a sample."""
        return {"longest": self.longest}

    def check_model(self, words: int, name: str) -> None:
        tokeniser = text_of(self.source).tokeniser
        assert tokeniser is not None
        if tokeniser.words > words:
            sizes = f"its tokeniser has {tokeniser.words:,} words, but {name} knows {words:,}"
            reason = f"{tokeniser.folder}: {sizes}; use the tokeniser in the model's own folder"
            raise SitusError(reason, field="data.text.tokeniser")

    def lengths(self) -> Tensor | None:
        """How many ids each sample has, [n]; None for blocks, which are equally long."""
        if self.words:
            return None
        whole = text_of(self.source)
        return torch.tensor([whole.length(self.source.origin(index)[1]) for index in range(len(self.source))])

    def collate(self, epoch: int, draws: list[int], samples: list[dict[str, Any]]) -> dict[str, Tensor]:  # noqa: ARG002
        """ "ids" ([b, N], of pairs [b, 2, N]), "mask" [b, N], and the labels."""
        lengths = torch.tensor([sample["ids"].shape[-1] for sample in samples])
        width = self.longest if self.words else min(self.longest, -(-int(lengths.max()) // _MULTIPLE) * _MULTIPLE)
        ids = torch.full((len(samples), *samples[0]["ids"].shape[:-1], width), self.pad)
        if ids.dim() == 3:  # padding belongs to the first sentence, as in transformers
            ids[:, 1] = 0
        for row, sample in enumerate(samples):
            ids[row, ..., : lengths[row]] = sample["ids"]
        values = {"ids": ids, "mask": torch.arange(width) < lengths[:, None]}
        if "label" in samples[0]:
            values["label"] = torch.tensor([sample["label"] for sample in samples])
        return values

    def finish(self, values: Mapping[str, Tensor], ids: Tensor, noise: Noise) -> Batch:  # noqa: ARG002
        """A batch; for a language model its ids are the targets, -1 at padding."""
        mask = values["mask"]
        targets = {"label": values["label"]} if "label" in values else {}
        if self.words:
            targets = {"words": torch.where(mask, values["ids"], -1)}
        return Batch(values["ids"], ids, targets, mask)


class Text(Modality):
    """Sentences or pairs of them, each with its class; or one text in blocks, for a language model."""

    kind, things, targets, table, Config = "text", "sentences", ("class", "words"), "text", TextConfig
    low_priority = ids = True
    unused = ("multi_label", "crop_share", "img_size", "channels", "mean", "std")
    augments, reading_option, label_fields = frozenset(), "text", ("data", "data.text.label")

    def fit(self, data: DataConfig, model: Callable[[], ModelInput], *, learns: bool) -> DataConfig:
        """With the model's tokeniser and the most ids of a sample, where they are not set."""
        takes, text = model(), data.text
        if not takes.words:
            raise DataError(f"{takes.name} takes images, but {data.path} contains sentences")
        longest = text.longest or min(LONGEST, takes.places)
        if longest > takes.places:
            allowed = f"at most {takes.places}, the longest input of {takes.name}"
            raise SitusError(field="data.text.longest", value=longest, allowed=allowed)
        tokeniser = absolute(text.tokeniser or takes.home)
        return replace(data, text=replace(text, tokeniser=tokeniser, longest=longest, unlabelled=not learns))

    def size(self, data: DataConfig) -> tuple[int, int]:
        """1, and the most ids of a sample."""
        return 1, data.text.longest or LONGEST

    def read_as(self, data: DataConfig, value: Any) -> DataConfig:
        columns = value if isinstance(value, Columns) else from_dict(Columns, value, where="text")
        return replace(data, text=columns.over(data.text))

    def unlabelled(self, data: DataConfig) -> DataConfig:
        return replace(data, text=replace(data.text, label=None))

    def prepared(self, data: DataConfig) -> dict[str, Any]:
        """The most ids of a sample, and the columns that were set."""
        columns = {name: value for name in COLUMNS if (value := getattr(data.text, name))}
        return {"longest": self.size(data)[1], **columns}

    def from_prepared(self, data: DataConfig, table: dict[str, Any], model: ModelInput) -> DataConfig:
        longest: int | None = table.get("longest")
        columns: dict[str, Any] = {name: table.get(name) for name in COLUMNS}
        text = TextConfig(tokeniser=model.home, longest=longest or min(LONGEST, model.places), **columns)
        return replace(data, kind="text", target="words" if model.next_words else "class", text=text)

    def facts(self, data: DataConfig | None, shape: tuple[int, ...] | None, channels: int) -> list[str]:  # noqa: ARG002
        assert data is not None
        return [f"Sentences: at most {self.size(data)[1]} tokens each, made by the tokeniser in this folder"]

    def is_at(self, path: Path, *, multi_label: bool) -> bool:
        """Whether it is a file of text or a folder of tables; with `multi_label` a table is one of labels."""
        if multi_label:
            return False
        if path.is_file():
            return path.suffix in (*SUFFIXES, PLAIN)
        return any(list_shards(path, suffix) for suffix in SUFFIXES)

    def in_columns(self, schema: Any, *, asked: bool) -> bool:  # noqa: ARG002
        return any(is_text(column.type) for column in schema)

    def splits(self, path: Path, data: DataConfig) -> set[str]:
        return text_splits(path, words=data.target == "words")

    def open(self, path: Path, wanted: Wanted, data: DataConfig) -> Source:
        return open_text(path, wanted, data.text, words=data.target == "words")

    def pipeline(self, source: Source, data: DataConfig, augment: AugmentConfig | None, *_: Any) -> Pipeline:
        return TextPipeline(source, data, augment)
