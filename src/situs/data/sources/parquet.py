"""Hugging Face parquet files: `image: {bytes, path}`, `label: int64`, class names in the schema metadata."""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
from situs.data.sources.remote import check_unchanged, is_kept, opened
from situs.errors import BrokenSampleError, DataError, SitusError, counted

COLUMNS: dict[str, tuple[str, ...]] = {
    "image": ("image", "img", "jpg", "png", "webp"),
    "audio": ("audio", "wav", "flac", "ogg", "opus"),
}
_MASK_COLUMNS = ("mask", "masks", "annotation", "annotations", "segmentation", "segmentation_mask", *LABEL_COLUMNS)
# Sets up to this size are held in memory, encoded. Of a larger one a row group is read where one of its images is asked
# for. In training the order is one in which each is read once and held until it is released (`situs.data.blocks`).
_HELD_BYTES = 4 << 30
_GROUPS_KEPT, _KEPT_BYTES = 8, 256 << 20  # where nobody releases them; one at least
_FOOTERS_KEPT = 64  # of files, 1 or 2 KB for each of their row groups
_FOOTERS_AT_ONCE = 16


class ParquetSource(EncodedSource):
    """The rows of one split's parquet files, in the order of file names and rows."""

    def __init__(self, path: Path, wanted: Wanted = ANY, *, held_bytes: int = _HELD_BYTES) -> None:
        self._files = find_shards(path, ".parquet", wanted.split)
        self._states = [(state.st_size, state.st_mtime_ns) for state in (file.stat() for file in self._files)]
        footers = _read_footers(self._files, wanted)
        self._image, self._labels, classes = _layout(self._files, footers)
        if wanted.multi_label:
            self._labels = footers[0].labels
            classes = _multi_label_classes(path, self._files[0], self._labels)
        if wanted.target == "mask":
            self._labels = footers[0].labels
        self._numbers = not wanted.multi_label and wanted.target != "mask"  # one class number a row
        rows = np.concatenate([footer.rows for footer in footers])
        self._ends = array("q", np.cumsum(rows).tobytes())  # of the row groups
        self._first = array("q", np.cumsum([0, *(len(footer.rows) for footer in footers)], dtype=np.int64).tobytes())
        if not self._ends or self._ends[-1] == 0:
            raise DataError(f"{path}: its parquet files hold no rows")
        self._bytes = sum(footer.bytes for footer in footers)
        self._fetched = is_kept(self._files[0])
        self._lock = threading.Lock()
        self._held: OrderedDict[int, tuple[Any, Any]] = OrderedDict()
        self._footers: OrderedDict[int, Any] = OrderedDict()
        self._small = self._bytes <= held_bytes
        fitting = _KEPT_BYTES * len(self._ends) // max(1, self._bytes)
        self._keep = len(self._ends) if self._small else max(1, min(_GROUPS_KEPT, fitting))
        chosen = split_of(self._files[0])
        name, many = path.stem + (f" ({chosen})" if chosen else ""), wanted.multi_label
        super().__init__(name, classes, wanted.channels, wanted.strict, multi_label=many)
        labels = []
        if self._small:
            # All at once and before any worker is forked, so that the workers share these pages.
            labels = [self._load(group)[1] for group in range(len(self._ends))]
            self._footers.clear()
        if chosen in (None, *SPLITS["train"]) and self._numbers and is_numbered(classes):
            there = np.concatenate([each.drop_null().to_numpy() for each in labels]) if labels else None
            least = max(0, min(footer.least for footer in footers))
            self.notes += note_unseen(self.name, classes, None if there is None else np.unique(there), least)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_lock"} | {"_footers": OrderedDict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def __len__(self) -> int:
        return self._ends[-1]

    def blocks(self) -> Blocks:
        """The row groups; of a remote set the files, which come whole."""
        ends = np.append(0, np.array(self._ends))
        ends = np.unique(ends[np.array(self._first)] if self._fetched else ends)
        return Blocks(ends[ends > 0], self._bytes, not self._small, "files" if self._fetched else "row groups")

    def release(self, index: int | None = None) -> None:
        """A row group that is not needed for now; a set that is held stays."""
        if self._small:
            return
        with self._lock:
            self._keep = len(self._ends)
            if index is None:
                self._held.clear()
            else:
                group = self._place(index)[0]
                file = self._file(group)[0]
                span = range(self._first[file], self._first[file + 1]) if self._fetched else (group,)
                for each in span:
                    self._held.pop(each, None)

    def _load(self, group: int) -> tuple[Any, Any]:
        with self._lock:
            if group in self._held:
                self._held.move_to_end(group)
                return self._held[group]
        file, number = self._file(group)
        rows = self._ends[group] - (self._ends[group - 1] if group else 0)
        with reading(self._files[file], f"row group {number}"):
            images, labels = self._read_group(file, number)
            if len(images) != rows:
                raise ValueError(f"{len(images)} rows and not {rows}")
            known = labels.drop_null().to_numpy() if labels is not None and self._numbers else np.empty(0)
            if len(known) and self.classes is not None and known.max() >= len(self.classes):
                raise ValueError(f"the label {known.max()}, of {len(self.classes)} classes that the footers tell of")
        with self._lock:
            self._held[group] = (images, labels)
            while len(self._held) > self._keep:
                self._held.popitem(last=False)
        return images, labels

    def _read_group(self, file: int, number: int) -> tuple[Any, Any]:
        opened = open_parquet(self._files[file], self._footer(file))
        check_state(self._files[file], self._files[file].stat(), self._states[file])
        encoded = [self._image, *(() if self._numbers or self.multi_label else self._labels)]
        fields = {name: opened.schema_arrow.field(name).type.num_fields for name in encoded}
        columns = [f"{name}.bytes" if fields.get(name) else name for name in dict.fromkeys([*encoded, *self._labels])]
        table = opened.read_row_group(number, columns=columns, use_threads=False)
        # Nothing else checks what a damaged page unpacks to, and offsets gone wrong would read anywhere.
        table.validate(full=True)
        held = [table[name].combine_chunks() for name in encoded]
        images, *masks = [each.field("bytes") if each.type.num_fields else each for each in held]
        named = fields[self._image] and opened.schema_arrow.field(self._image).type.get_field_index("path") >= 0
        if named and images.null_count == len(images):  # the files lie elsewhere
            beside = opened.read_row_group(number, columns=[f"{self._image}.path"], use_threads=False)
            beside.validate(full=True)
            images = beside[self._image].combine_chunks().field("path")
        if masks:
            return images, masks[0]
        if self.multi_label:
            assert self.classes is not None
            where = f"{self._files[file]}, row group {number}"
            return images, multi_label_rows([table[name] for name in self._labels], self._labels, self.classes, where)
        return images, table[self._labels[0]].combine_chunks() if self._labels else None

    def _footer(self, file: int) -> Any:
        """A file's footer, parsed; those of the files that were read last are kept."""
        with self._lock:
            if file in self._footers:
                self._footers.move_to_end(file)
                return self._footers[file]
        footer = open_parquet(self._files[file]).metadata
        with self._lock:
            self._footers[file] = footer
            if len(self._footers) > _FOOTERS_KEPT:
                self._footers.popitem(last=False)
        return footer

    def _file(self, group: int) -> tuple[int, int]:
        """The file of a row group, and its number there."""
        file = bisect_right(self._first, group) - 1
        return file, group - self._first[file]

    def _place(self, index: int) -> tuple[int, int]:
        group = bisect_right(self._ends, index)
        return group, index - (self._ends[group - 1] if group else 0)

    def payload(self, index: int) -> bytes:
        group, row = self._place(index)
        data = self._load(group)[0][row].as_py()
        if isinstance(data, bytes):
            return data
        # Else a file's name, from the root on or from the parquet file's folder.
        file = self._files[self._file(group)[0]].parent / (data or "")
        if not file.is_file():  # and no pipe, which would be waited for
            named = f", and names {data[:200]!r}, no file here" if data else ""
            raise BrokenSampleError(f"{self.entry(index)}: the row holds no {self.things[:-1]} bytes{named}")
        return read_bytes(file, lambda: str(file))

    def label(self, index: int) -> int | Tensor | None:
        group, row = self._place(index)
        labels = self._load(group)[1]
        if labels is None or self.multi_label:
            return None if labels is None else labels[row]
        number = labels[row].as_py()
        if number is None or number < 0:
            said = "no label" if number is None else f"the label {number}"
            raise BrokenSampleError(f"{self.entry(index)}: the row has {said}, others have one from 0 on")
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
    """One sentence for whatever Arrow says of a damaged file."""
    import pyarrow as pa

    try:
        yield
    except (SitusError, BrokenSampleError):
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError, LookupError, OverflowError, MemoryError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        what = f"{part} is damaged" if part else "is not a readable parquet file"
        raise DataError(f"{file}: {what} ({reason})") from error


def open_parquet(file: Path, footer: Any = None) -> Any:
    """The file as pyarrow has it. footer: where it was read before."""
    import pyarrow.parquet as pq

    # Of a remote shard that is not here the footer is asked for alone; for its rows it is fetched whole.
    source = opened(file, parts=footer is None) if is_kept(file) else file
    try:
        with reading(file):
            return pq.ParquetFile(source, metadata=footer, page_checksum_verification=True)
    except SitusError:
        check_unchanged(file)  # of another version the end is no footer
        raise


class _Footer(NamedTuple):
    """image, labels: the columns. rows: [g] of each row group. bytes: of these columns, unpacked.

    least, most: the smallest and the largest label of all rows, -1 where there is none; of a column of one class an
    image.
    """

    image: str
    labels: tuple[str, ...]
    rows: np.ndarray
    bytes: int
    least: int
    most: int


def _read_footers(files: list[Path], wanted: Wanted) -> list[_Footer]:
    """What is needed of each file's footer; the footers themselves are large."""
    with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
        return list(pool.map(lambda file: _read_footer(file, wanted), files))


def _read_footer(file: Path, wanted: Wanted) -> _Footer:
    opened = open_parquet(file)
    with reading(file):
        schema, footer = opened.schema_arrow, opened.metadata
    image, labels = _columns(file, schema, wanted)
    label = labels[0] if labels and not wanted.multi_label and wanted.target != "mask" else None
    with reading(file):
        paths = [footer.schema.column(number).path for number in range(footer.num_columns)]
        read = (image, f"{image}.bytes", *labels)
        numbers = [number for number, path in enumerate(paths) if path in read or path.partition(".")[0] in labels]
        groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
        rows = np.array([group.num_rows for group in groups], np.int64)
        if (rows < 0).any():
            raise ValueError("a row group of less than no rows")
        size = sum(group.column(number).total_uncompressed_size for group in groups for number in numbers)
        told = [group.column(paths.index(label)).statistics for group in groups] if label is not None else []
        ends = [(each.min, each.max) for each in told if each is not None and each.has_min_max]
    if len(ends) < len(told):
        ends = _label_ends(file, opened, str(label))
    least, most = min((each for each, _ in ends), default=-1), max((each for _, each in ends), default=-1)
    return _Footer(image, labels, rows, size, int(least), int(most))


def _layout(files: list[Path], footers: list[_Footer]) -> tuple[str, tuple[str, ...], tuple[str, ...] | None]:
    """Image column, label columns and class names: those of the first file, or the numbers up to the largest of all."""
    image, labels = footers[0].image, footers[0].labels
    for file, footer in zip(files, footers, strict=True):
        if (footer.image, footer.labels) != (image, labels):
            pairs = ((footer.image, *footer.labels), (image, *labels))
            said, wanted = (", ".join(map(repr, pair)) for pair in pairs)
            raise DataError(f"{file}: its columns are {said}, in {files[0].name} {wanted}")
    most = max(footer.most for footer in footers)
    if most < 0:
        return image, (), None  # the hub marks a withheld label with -1
    names = class_names(files[0], open_parquet(files[0]).schema_arrow, labels[0])
    if not names:
        return image, labels, number_names(most, f"{files[0]}, column {labels[0]!r}")
    if most >= len(names):
        raise DataError(f"{files[0]}: names {counted(len(names), 'classes')}, its column {labels[0]!r} has {most}")
    return image, labels, names


def _multi_label_classes(path: Path, file: Path, labels: tuple[str, ...]) -> tuple[str, ...]:
    """The class names of a multi-label set: the 0/1 columns, those beside the schema, or all that any shard has."""
    schema = open_parquet(file).schema_arrow
    if not is_list(schema.field(labels[0]).type):
        return labels
    if names := class_names(file, schema, labels[0]):
        return names
    found: set[Any] = set()
    for shard in list_shards(path, ".parquet"):
        with reading(shard, f"column {labels[0]!r}"):
            column = open_parquet(shard).read(columns=[labels[0]])[labels[0]]
            found |= {each for part in column.chunks for each in part.flatten().unique().to_pylist()} - {None}
    if any(isinstance(each, int) for each in found):
        return number_names(max(found), f"{path}, column {labels[0]!r}")
    return tuple(sorted(found))


def _columns(file: Path, schema: Any, wanted: Wanted) -> tuple[str, tuple[str, ...]]:
    """The names of the image column and of the label columns, their types checked."""
    import pyarrow as pa

    usual = COLUMNS[wanted.kind]
    image = next((name for name in usual if name in schema.names), None)
    if image is None:
        said = f"one of {', '.join(usual)}, only {', '.join(schema.names)[:200]}"
        raise DataError(f"{file}: has no {wanted.kind} column, {said}")
    _check_bytes_column(file, schema, image, "images" if wanted.kind == "image" else "clips")
    if wanted.target == "mask":
        mask = next((name for name in _MASK_COLUMNS if name in schema.names), None)
        if mask is None:
            listed, columns = ", ".join(_MASK_COLUMNS[:6]), ", ".join(schema.names)[:200]
            raise DataError(f"{file}: has no column of masks, one of {listed}, only {columns}")
        _check_bytes_column(file, schema, mask, "masks")
        return image, (mask,)
    if wanted.multi_label:
        with reading(file):
            return image, multi_label_columns(file, schema)
    label = next((name for name in LABEL_COLUMNS if name in schema.names), None) if wanted.labels else None
    if label is None:
        return image, ()
    with reading(file):
        kind = schema.field(label).type
    if not pa.types.is_integer(kind):
        more = "; several an image are multi-label" if pa.types.is_nested(kind) else ""
        raise DataError(f"{file}: column {label!r} is {str(kind)[:80]}, labels must be integers{more}")
    return image, (label,)


def _check_bytes_column(file: Path, schema: Any, name: str, what: str) -> None:
    import pyarrow as pa

    with reading(file):
        kind = schema.field(name).type
    if pa.types.is_struct(kind) and (place := kind.get_field_index("bytes")) >= 0:
        kind = kind.field(place).type
    named = what == "clips" and pa.types.is_string(kind)
    if not (named or any(own(kind) for own in (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view))):
        said = f"{file}: column {name!r} is {str(kind)[:80]}, {what} must be bytes or {{bytes, path}}"
        raise DataError(said)


def _label_ends(file: Path, opened: Any, label: str) -> list[tuple[int, int]]:
    """The smallest and the largest label of all rows, for shards may be sorted by class. None where there are none."""
    with reading(file, f"column {label!r}"):
        column = opened.read(columns=[label])[label]
        column.validate(full=True)
        values = column.drop_null().to_numpy()
    return [(int(values.min()), int(values.max()))] if len(values) else []
