"""Hugging Face parquet files: `image: {bytes, path}`, `label: int64`, class names in the schema metadata."""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from situs.data.sources.base import (
    ANY,
    SPLITS,
    Blocks,
    EncodedSource,
    Wanted,
    check_state,
    find_shards,
    list_shards,
    split_name,
    split_of,
)
from situs.data.sources.images import read_bytes
from situs.data.sources.labels import (
    LABEL_COLUMNS,
    class_names,
    is_list,
    is_numbered,
    multi_label_columns,
    multi_label_rows,
    note_unseen,
    number_names,
)
from situs.data.sources.remote import check_unchanged, is_remote_shard, open_remote
from situs.errors import BrokenSampleError, DataError, SitusError, counted, first_line

COLUMNS: dict[str, tuple[str, ...]] = {
    "image": ("image", "img", "jpg", "png", "webp"),
    "audio": ("audio", "wav", "flac", "ogg", "opus"),
}
# Sets up to this size are kept in memory, encoded. Of a larger one a row group is read when one of its samples is. In
# training the order reads each group once, and it stays in memory until it is released (`situs.data.sampler`).
_MEMORY_BYTES = 4 << 30
_CACHED_GROUPS, _CACHED_BYTES = 8, 256 << 20  # where groups are not released; at least one
_FOOTERS_AT_ONCE = 16


class ParquetSource(EncodedSource):
    """The rows of one split's parquet files, in the order of file names and rows.

    kind: what a row holds, for `COLUMNS`. A source of another kind says by `find_columns` which columns it reads.
    """

    kind = "image"

    def __init__(self, path: Path, wanted: Wanted = ANY, *, memory_bytes: int = _MEMORY_BYTES) -> None:
        self.settings, self._files = wanted.settings, find_shards(path, ".parquet", wanted.split)
        self._states = [(state.st_size, state.st_mtime_ns) for state in (file.stat() for file in self._files)]
        with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
            footers = list(pool.map(lambda file: _read_footer(file, self.find_columns, wanted), self._files))
        self._columns, self._labels = _same_columns(self._files, footers)
        if wanted.multi_label:
            classes = _multi_label_classes(path, self._files[0], self._labels)
        else:
            classes = _classes(self._files[0], self._labels, max(footer.most for footer in footers))
            self._labels = self._labels if classes else ()  # Hugging Face marks a withheld label with -1
        rows = np.concatenate([footer.rows for footer in footers])
        self._ends = array("q", np.cumsum(rows).tobytes())  # of the row groups
        self._first = array("q", np.cumsum([0, *(len(footer.rows) for footer in footers)], dtype=np.int64).tobytes())
        if not self._ends or self._ends[-1] == 0:
            raise DataError(f"{path}: its parquet files contain no rows")
        self._bytes = sum(footer.bytes for footer in footers)
        self._remote = is_remote_shard(self._files[0])
        self._lock = threading.Lock()
        self._groups: OrderedDict[int, tuple[list[Any], Any]] = OrderedDict()
        self._in_memory = self._bytes <= memory_bytes
        fitting = _CACHED_BYTES * len(self._ends) // max(1, self._bytes)
        self._most_groups = len(self._ends) if self._in_memory else max(1, min(_CACHED_GROUPS, fitting))
        chosen = split_of(self._files[0])
        name, many = split_name(path.stem, chosen), wanted.multi_label
        super().__init__(name, classes, wanted.channels, wanted.strict, multi_label=many)
        labels = []
        if self._in_memory:
            # All at once and before any worker is forked, so that the workers share these pages.
            labels = [self._load(group)[1] for group in range(len(self._ends))]
            _footer.cache_clear()
        if chosen in (None, *SPLITS["train"]) and not wanted.multi_label and is_numbered(classes):
            present = np.unique(np.concatenate([part.drop_null().to_numpy() for part in labels])) if labels else None
            least = max(0, min(footer.least for footer in footers))
            self.notes += note_unseen(self.name, classes, present, least)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def __len__(self) -> int:
        return self._ends[-1]

    def blocks(self) -> Blocks:
        """The row groups; of a remote set the files, which are fetched whole."""
        ends = np.append(0, np.array(self._ends))
        ends = np.unique(ends[np.array(self._first)] if self._remote else ends)
        return Blocks(ends[ends > 0], self._bytes, not self._in_memory, "files" if self._remote else "row groups")

    def release(self, index: int | None = None) -> None:
        """Releases the row group of a sample, or all; a set in memory stays."""
        if self._in_memory:
            return
        with self._lock:
            self._most_groups = len(self._ends)
            if index is None:
                self._groups.clear()
            else:
                group = self._place(index)[0]
                file = self._file(group)[0]
                span = range(self._first[file], self._first[file + 1]) if self._remote else (group,)
                for number in span:
                    self._groups.pop(number, None)

    def _load(self, group: int) -> tuple[list[Any], Any]:
        """The columns and the labels of a row group."""
        with self._lock:
            if group in self._groups:
                self._groups.move_to_end(group)
                return self._groups[group]
        file, number = self._file(group)
        rows = self._ends[group] - (self._ends[group - 1] if group else 0)
        with reading(self._files[file], f"row group {number}"):
            values, labels = self._read_group(file, number)
            if len(values[0]) != rows:
                raise ValueError(f"{len(values[0])} rows instead of {rows}")
            known = np.empty(0) if labels is None or self.multi_label else labels.drop_null().to_numpy()
            if len(known) and self.classes is not None and known.max() >= len(self.classes):
                raise ValueError(f"the label {known.max()}, but the file footers name only {len(self.classes)} classes")
        with self._lock:
            self._groups[group] = (values, labels)
            while len(self._groups) > self._most_groups:
                self._groups.popitem(last=False)
        return values, labels

    def find_columns(self, file: Path, schema: Any, wanted: Wanted) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of the columns of samples, and of labels, their types checked."""
        usual = COLUMNS[self.kind]
        name = next((name for name in usual if name in schema.names), None)
        if name is None:
            columns = f"(one of {', '.join(usual)}), only the columns {', '.join(schema.names)[:200]}"
            raise DataError(f"{file}: has no {self.kind} column {columns}")
        check_bytes_column(file, schema, name, self.things)
        return (name,), _label_columns(file, schema, wanted)

    def _read_group(self, file: int, number: int) -> tuple[list[Any], Any]:
        """The values of each column, and the labels, where there are some."""
        import pyarrow as pa

        parquet = open_parquet(self._files[file], _footer(self._files[file], self._states[file]))
        check_state(self._files[file], self._files[file].stat(), self._states[file])
        kinds = {name: parquet.schema_arrow.field(name).type for name in self._columns}
        structs = {name for name, kind in kinds.items() if pa.types.is_struct(kind)}
        columns = [f"{name}.bytes" if name in structs else name for name in self._columns]
        table = parquet.read_row_group(number, columns=[*columns, *self._labels], use_threads=False)
        # Nothing else checks the content of a damaged page, and wrong offsets would read anywhere.
        table.validate(full=True)
        combined = {name: table[name].combine_chunks() for name in self._columns}
        values = [column.field("bytes") if name in structs else column for name, column in combined.items()]
        first = self._columns[0]
        if first in structs and kinds[first].get_field_index("path") >= 0 and values[0].null_count == len(values[0]):
            paths = parquet.read_row_group(number, columns=[f"{first}.path"], use_threads=False)
            paths.validate(full=True)  # the samples are separate files
            values[0] = paths[first].combine_chunks().field("path")
        if self.multi_label:
            assert self.classes is not None
            where = f"{self._files[file]}, row group {number}"
            labels = [table[name] for name in self._labels]
            return values, multi_label_rows(labels, self._labels, self.classes, where)
        return values, table[self._labels[0]].combine_chunks() if self._labels else None

    def _file(self, group: int) -> tuple[int, int]:
        """The file of a row group, and its number there."""
        file = bisect_right(self._first, group) - 1
        return file, group - self._first[file]

    def _place(self, index: int) -> tuple[int, int]:
        group = bisect_right(self._ends, index)
        return group, index - (self._ends[group - 1] if group else 0)

    def payload(self, index: int) -> bytes:
        group, row = self._place(index)
        data = self._load(group)[0][0][row].as_py()
        if isinstance(data, bytes):
            return data
        # Otherwise a file's path, absolute or relative to the parquet file's folder.
        file = self._files[self._file(group)[0]].parent / (data or "")
        if not file.is_file():  # nor a pipe, which would block
            named = f", and the file {data[:200]!r} that it names does not exist" if data else ""
            raise BrokenSampleError(f"{self.entry(index)}: the row contains no {self.things[:-1]} bytes{named}")
        return read_bytes(file, lambda: str(file))

    def label(self, index: int) -> int | Tensor | None:
        group, row = self._place(index)
        labels = self._load(group)[1]
        if labels is None or self.multi_label:
            return None if labels is None else labels[row]
        number = labels[row].as_py()
        if number is None or number < 0:
            label = "no label" if number is None else f"the label {number}"
            raise BrokenSampleError(
                f"{self.entry(index)}: the row has {label}, but other rows have a label of 0 or larger"
            )
        return number

    def entry(self, index: int) -> str:
        group, row = self._place(index)
        file, number = self._file(group)
        return f"{self._files[file]}, row {row} of row group {number}"

    def key(self, index: int) -> str:
        file, _ = self._file(self._place(index)[0])
        first = self._first[file]
        return f"{self._files[file].name}/{index - (self._ends[first - 1] if first else 0)}"


@contextmanager
def reading(file: Path, part: str = "") -> Iterator[None]:
    """Arrow's error on a damaged file as one sentence."""
    import pyarrow as pa

    try:
        yield
    except (SitusError, BrokenSampleError):
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError, LookupError, OverflowError, MemoryError) as error:
        damage = f"{part} is damaged" if part else "is not a readable parquet file"
        raise DataError(f"{file}: {damage} ({first_line(error)})") from error


def open_parquet(file: Path, footer: Any = None) -> Any:
    """A file opened by pyarrow. footer: where it was read before."""
    import pyarrow.parquet as pq

    # Of a remote shard that is not here only the footer is fetched; for its rows it is fetched whole.
    source = open_remote(file, parts=footer is None) if is_remote_shard(file) else file
    try:
        with reading(file):
            return pq.ParquetFile(source, metadata=footer, page_checksum_verification=True)
    except SitusError:
        check_unchanged(file)  # in another version the footer is elsewhere
        raise


@lru_cache(maxsize=64)  # of files, 1 or 2 KB for each of their row groups
def _footer(file: Path, state: tuple[int, int]) -> Any:  # noqa: ARG001
    """A file's parsed footer; the last ones are cached. state: size and time of change of the file."""
    return open_parquet(file).metadata


class _Footer(NamedTuple):
    """columns, labels: their names. rows: [g] of each row group. bytes: of these columns, decompressed.

    least, most: the smallest and the largest label of a single-label set, -1 where there is none.
    """

    columns: tuple[str, ...]
    labels: tuple[str, ...]
    rows: np.ndarray
    bytes: int
    least: int
    most: int


def _read_footer(file: Path, find_columns: Callable[..., Any], wanted: Wanted) -> _Footer:
    """The facts needed of a file's footer, which itself is large."""
    parquet = open_parquet(file)
    with reading(file):
        schema, footer = parquet.schema_arrow, parquet.metadata
    columns, labels = find_columns(file, schema, wanted)
    label = labels[0] if labels and not wanted.multi_label else None
    with reading(file):
        paths = [footer.schema.column(number).path for number in range(footer.num_columns)]
        first, others = columns[0], (*columns[1:], *labels)
        heads = (f"{first}.bytes", f"{first}.list.")
        read = [path == first or path.startswith(heads) or path.partition(".")[0] in others for path in paths]
        groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
        rows = np.array([group.num_rows for group in groups], np.int64)
        if (rows < 0).any():
            raise ValueError("a row group with a negative number of rows")
        size = sum(group.column(at).total_uncompressed_size for group in groups for at in np.flatnonzero(read).tolist())
        statistics = [group.column(paths.index(label)).statistics for group in groups] if label is not None else []
        ranges = [(part.min, part.max) for part in statistics if part is not None and part.has_min_max]
    if len(ranges) < len(statistics):  # all rows are read, because shards may be sorted by class
        with reading(file, f"column {label!r}"):
            column = parquet.read(columns=[label])[label]
            column.validate(full=True)
            values = column.drop_null().to_numpy()
        ranges = [(values.min(), values.max())] if len(values) else []
    least, most = min((low for low, _ in ranges), default=-1), max((high for _, high in ranges), default=-1)
    return _Footer(columns, labels, rows, size, int(least), int(most))


def _same_columns(files: list[Path], footers: list[_Footer]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The columns of samples and of labels, which must be the same in every file."""
    first = footers[0].columns + footers[0].labels
    for file, footer in zip(files, footers, strict=True):
        if (columns := footer.columns + footer.labels) != first:
            listed, others = (", ".join(map(repr, names)) for names in (columns, first))
            raise DataError(f"{file}: its columns are {listed}, but those of {files[0].name} are {others}")
    return footers[0].columns, footers[0].labels


def _classes(file: Path, labels: tuple[str, ...], most: int) -> tuple[str, ...] | None:
    """The class names in a file's metadata, or the numbers up to the largest label; None without a label."""
    if most < 0:
        return None
    names = class_names(file, open_parquet(file).schema_arrow, labels[0])
    if not names:
        return number_names(most, f"{file}, column {labels[0]!r}")
    if most >= len(names):
        raise DataError(
            f"{file}: names {counted(len(names), 'classes')}, but its column {labels[0]!r} has the label {most}"
        )
    return names


def _multi_label_classes(path: Path, file: Path, labels: tuple[str, ...]) -> tuple[str, ...]:
    """The class names of a multi-label set: the 0/1 columns, those in the metadata, or all labels of any shard."""
    schema = open_parquet(file).schema_arrow
    if not is_list(schema.field(labels[0]).type):
        return labels
    if names := class_names(file, schema, labels[0]):
        return names
    values: set[Any] = set()
    for shard in list_shards(path, ".parquet"):
        with reading(shard, f"column {labels[0]!r}"):
            column = open_parquet(shard).read(columns=[labels[0]])[labels[0]]
            for chunk in column.chunks:
                values.update(chunk.flatten().unique().to_pylist())
    values -= {None}
    if any(isinstance(value, int) for value in values):
        return number_names(max(values), f"{path}, column {labels[0]!r}")
    return tuple(sorted(values))


def _label_columns(file: Path, schema: Any, wanted: Wanted) -> tuple[str, ...]:
    """The column of class numbers, where there is one; for a multi-label set all label columns."""
    import pyarrow as pa

    if wanted.multi_label:
        with reading(file):
            return multi_label_columns(file, schema)
    label = next((name for name in LABEL_COLUMNS if name in schema.names), None) if wanted.labels else None
    if label is None:
        return ()
    with reading(file):
        kind = schema.field(label).type
    if not pa.types.is_integer(kind):
        hint = "; for several labels per image, set multi_label" if pa.types.is_nested(kind) else ""
        raise DataError(f"{file}: column {label!r} has the type {str(kind)[:80]}, but labels must be integers{hint}")
    return (label,)


def check_bytes_column(file: Path, schema: Any, name: str, things: str) -> None:
    """Refuses a column that holds no encoded samples; for clips it may hold paths."""
    import pyarrow as pa

    with reading(file):
        kind = schema.field(name).type
    if pa.types.is_struct(kind) and (place := kind.get_field_index("bytes")) >= 0:
        kind = kind.field(place).type
    is_path = things == "clips" and pa.types.is_string(kind)
    if not (is_path or pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)):
        raise DataError(
            f"{file}: column {name!r} has the type {str(kind)[:80]}, but {things} must be bytes or {{bytes, path}}"
        )
