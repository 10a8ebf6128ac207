"""Hugging Face parquet files: `image: {bytes, path}`, `label: int64`, class names in the schema metadata."""

from __future__ import annotations

import json
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

from situs.data.sources.base import ANY, EncodedSource, Wanted, find_shards, number_names, split_of
from situs.data.sources.images import BrokenImageError
from situs.errors import SitusError

_IMAGE_COLUMNS = ("image", "img", "jpg", "png", "webp")
_LABEL_COLUMNS = ("label", "labels", "fine_label", "cls", "class")
# Sets up to this size are held in memory, encoded. A larger one is read by row groups as they are asked for,
# which is slow in shuffled order: a row group is read for each image. Image folders or WebDataset shards
# serve those better.
_HELD_BYTES = 4 << 30
_GROUPS_KEPT = 8


class ParquetSource(EncodedSource):
    """The rows of one split's parquet files, in the order of file names and rows."""

    def __init__(self, path: Path, wanted: Wanted = ANY, *, held_bytes: int = _HELD_BYTES) -> None:
        self._files = find_shards(path, ".parquet", wanted.split)
        self._image, self._label, classes = _layout(self._files, wanted.labels)
        self._groups: list[tuple[Path, int]] = []
        sizes, held = [], 0
        for file in self._files:
            with _reading(file):
                metadata = _open(file).metadata
                for group in range(metadata.num_row_groups):
                    described = metadata.row_group(group)
                    self._groups.append((file, group))
                    sizes.append(described.num_rows)
                    held += described.total_byte_size  # unpacked: a small file may hold much
        self._ends = list(accumulate(sizes))
        if not self._ends or self._ends[-1] == 0:
            raise SitusError(f"{path}: its parquet files hold no rows", field="data")
        self._lock = threading.Lock()
        self._held: OrderedDict[int, tuple[Any, Any]] = OrderedDict()
        small = held <= held_bytes
        self._keep = len(self._groups) if small else _GROUPS_KEPT
        chosen = split_of(self._files[0])
        super().__init__(path.stem + (f" ({chosen})" if chosen else ""), classes, wanted.channels, wanted.strict)
        if small:
            # All at once and before any worker is forked, so that the workers share these pages.
            for group in range(len(self._groups)):
                self._load(group)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def __len__(self) -> int:
        return self._ends[-1]

    def _load(self, group: int) -> tuple[Any, Any]:
        with self._lock:
            if group in self._held:
                self._held.move_to_end(group)
                return self._held[group]
        file, number = self._groups[group]
        columns = [self._image, *([self._label] if self._label else [])]
        with _reading(file, f"row group {number}"):
            table = _open(file).read_row_group(number, columns=columns)
            # Nothing else checks what a damaged page unpacks to, and offsets gone wrong would read anywhere.
            table.validate(full=True)
            images = table[self._image].combine_chunks()
            if images.type.num_fields:
                images = images.field("bytes")
            labels = table[self._label].combine_chunks() if self._label else None
            rows = self._ends[group] - (self._ends[group - 1] if group else 0)
            if len(images) != rows:
                raise ValueError(f"{len(images)} rows and not {rows}")
        with self._lock:
            self._held[group] = (images, labels)
            while len(self._held) > self._keep:
                self._held.popitem(last=False)
        return images, labels

    def _place(self, index: int) -> tuple[int, int]:
        group = bisect_right(self._ends, index)
        return group, index - (self._ends[group - 1] if group else 0)

    def payload(self, index: int) -> bytes:
        group, row = self._place(index)
        data = self._load(group)[0][row].as_py()
        if data is None:
            raise BrokenImageError(f"{self.entry(index)}: the row holds no image bytes")
        return data

    def label(self, index: int) -> int | None:
        group, row = self._place(index)
        labels = self._load(group)[1]
        if labels is None:
            return None
        number = labels[row].as_py()
        if number is None or number < 0:
            said = "no label" if number is None else f"the label {number}"
            raise BrokenImageError(f"{self.entry(index)}: the row has {said}, others have one from 0 on")
        return number

    def entry(self, index: int) -> str:
        group, row = self._place(index)
        file, number = self._groups[group]
        return f"{file}, row {row} of row group {number}"

    def key(self, index: int) -> str:
        group, _ = self._place(index)
        file, number = self._groups[group]
        first = group - number  # the file's first group
        return f"{file.name}/{index - (self._ends[first - 1] if first else 0)}"


@contextmanager
def _reading(file: Path, part: str = "") -> Iterator[None]:
    """One sentence for whatever Arrow says of a damaged file."""
    import pyarrow as pa

    try:
        yield
    except (SitusError, BrokenImageError):
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError, LookupError, OverflowError, MemoryError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        what = f"{part} is damaged" if part else "is not a readable parquet file"
        raise SitusError(f"{file}: {what} ({reason})", field="data") from error


def _open(file: Path) -> Any:
    import pyarrow.parquet as pq

    with _reading(file):
        return pq.ParquetFile(file, page_checksum_verification=True)


def _layout(files: list[Path], labels: bool) -> tuple[str, str | None, tuple[str, ...] | None]:
    """Image column, label column and class names, from the schema of the first file or from all labels."""
    schema = _open(files[0]).schema_arrow
    image, label = _columns(files[0], schema, labels)
    for file in files[1:]:
        found = _columns(file, _open(file).schema_arrow, labels)
        if found != (image, label):
            said, wanted = (", ".join(repr(name) for name in pair if name) for pair in (found, (image, label)))
            raise SitusError(f"{file}: its images and labels are {said}, in {files[0].name} {wanted}", field="data")
    if label is None:
        return image, None, None
    most = _largest_label(files, label)
    if most < 0:
        return image, None, None  # the hub marks a withheld label with -1
    names = _class_names(files[0], schema, label)
    if not names:
        return image, label, number_names(most, f"{files[0]}, column {label!r}")
    if most >= len(names):
        raise SitusError(
            f"{files[0]}: names {len(names)} classes, its column {label!r} goes up to {most}", field="data"
        )
    return image, label, names


def _columns(file: Path, schema: Any, labels: bool) -> tuple[str, str | None]:
    """The names of the image column and of the label column (None without one), their types checked."""
    import pyarrow as pa

    image = next((name for name in _IMAGE_COLUMNS if name in schema.names), None)
    if image is None:
        columns = ", ".join(schema.names)[:200]
        raise SitusError(f"{file}: has no image column, one of {', '.join(_IMAGE_COLUMNS)}, only {columns}")
    with _reading(file):
        kind = schema.field(image).type
    if pa.types.is_struct(kind):
        place = kind.get_field_index("bytes")
        kind = kind.field(place).type if place >= 0 else kind
    if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise SitusError(f"{file}: column {image!r} is {str(kind)[:80]}, images must be bytes or {{bytes, path}}")
    label = next((name for name in _LABEL_COLUMNS if name in schema.names), None) if labels else None
    if label is not None:
        with _reading(file):
            kind = schema.field(label).type
        if not pa.types.is_integer(kind):
            raise SitusError(f"{file}: column {label!r} is {str(kind)[:80]}, labels must be integers")
    return image, label


def _class_names(file: Path, schema: Any, label: str) -> tuple[str, ...]:
    """The names that Hugging Face writes beside the schema; none where it wrote none."""
    written = (schema.metadata or {}).get(b"huggingface")
    if written is None:
        return ()
    try:
        described: Any = json.loads(written)
        for key in ("info", "features", label, "names"):
            described = described.get(key) or {}
        return tuple(str(name) for name in described)
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise SitusError(f"{file}: its 'huggingface' metadata is damaged ({str(error)[:80]})", field="data") from error


def _largest_label(files: list[Path], label: str) -> int:
    """Of all rows: shards may be sorted by class. -1 where there are none."""
    most = -1
    for file in files:
        with _reading(file, f"column {label!r}"):
            column = _open(file).read(columns=[label])[label]
            column.validate(full=True)
            values = column.drop_null().to_numpy()
        if len(values):
            most = max(most, int(values.max()))
    return most
