"""Hugging Face parquet files: `image: {bytes, path}`, `label: int64`, class names in the schema metadata."""

from __future__ import annotations

import json
import threading
from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from pathlib import Path
from typing import Any

from situs.data.base import EncodedSource, find_shards, split_of
from situs.data.images import BrokenImageError
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

    def __init__(
        self,
        path: Path,
        split: str | None = None,
        *,
        labels: bool = True,
        channels: int | None = None,
        strict: bool = False,
        held_bytes: int = _HELD_BYTES,
    ) -> None:
        self._files = find_shards(path, ".parquet", split)
        self._image, self._label, classes = _layout(self._files, labels)
        self._groups: list[tuple[Path, int]] = []
        sizes = []
        for file in self._files:
            metadata = _open(file).metadata
            for group in range(metadata.num_row_groups):
                self._groups.append((file, group))
                sizes.append(metadata.row_group(group).num_rows)
        self._ends = list(accumulate(sizes))
        if not self._ends or self._ends[-1] == 0:
            raise SitusError(f"{path}: its parquet files hold no rows (--data)")
        self._lock = threading.Lock()
        self._held: OrderedDict[int, tuple[Any, Any]] = OrderedDict()
        small = sum(file.stat().st_size for file in self._files) <= held_bytes
        self._keep = len(self._groups) if small else _GROUPS_KEPT
        chosen = split_of(self._files[0])
        super().__init__(path.stem + (f" ({chosen})" if chosen else ""), classes, channels, strict)
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
        table = _open(file).read_row_group(number, columns=columns)
        images = table[self._image].combine_chunks()
        if images.type.num_fields:
            images = images.field("bytes")
        labels = table[self._label].to_numpy() if self._label else None
        with self._lock:
            self._held[group] = (images, labels)
            while len(self._held) > self._keep:
                self._held.popitem(last=False)
        return images, labels

    def _place(self, index: int) -> tuple[int, int]:
        group = bisect_right(self._ends, index)
        return group, index - (self._ends[group - 1] if group else 0)

    def payload(self, index: int) -> bytes:
        """The encoded image of one row."""
        group, row = self._place(index)
        data = self._load(group)[0][row].as_py()
        if data is None:
            raise BrokenImageError(f"{self.entry(index)}: the row holds no image bytes")
        return data

    def label(self, index: int) -> int | None:
        """The label of one row."""
        group, row = self._place(index)
        labels = self._load(group)[1]
        return None if labels is None else int(labels[row])

    def entry(self, index: int) -> str:
        """File and row."""
        group, row = self._place(index)
        file, number = self._groups[group]
        return f"{file}, row {row} of row group {number}"


def _open(file: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise SitusError(f"{file}: is not a readable parquet file ({str(error)[:120]}) (--data)") from error


def _layout(files: list[Path], labels: bool) -> tuple[str, str | None, tuple[str, ...] | None]:
    """Image column, label column and class names, from the schema of the first file or from all labels."""
    import pyarrow as pa

    file = files[0]
    schema = _open(file).schema_arrow
    image = next((name for name in _IMAGE_COLUMNS if name in schema.names), None)
    if image is None:
        columns = ", ".join(schema.names)
        raise SitusError(f"{file}: has no image column, one of {', '.join(_IMAGE_COLUMNS)}, only {columns}")
    label = next((name for name in _LABEL_COLUMNS if name in schema.names), None) if labels else None
    if label is None:
        return image, None, None
    if not pa.types.is_integer(schema.field(label).type):
        kind = schema.field(label).type
        raise SitusError(f"{file}: column {label!r} is {kind}, labels must be integers")
    least, most = _label_range(files, label)
    if least < 0:
        return image, None, None  # the hub marks a withheld label with -1
    described = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    names = described.get("info", {}).get("features", {}).get(label, {}).get("names")
    if not names:
        return image, label, tuple(str(number) for number in range(most + 1))
    if most >= len(names):
        raise SitusError(f"{file}: names {len(names)} classes, its column {label!r} goes up to {most} (--data)")
    return image, label, tuple(str(name) for name in names)


def _label_range(files: list[Path], label: str) -> tuple[int, int]:
    """The least and the largest label of all rows: shards may be sorted by class. (0, -1) where there are none."""
    least, most = 0, -1
    for file in files:
        values = _open(file).read(columns=[label])[label].drop_null().to_numpy()
        if len(values):
            least, most = min(least, int(values.min())), max(most, int(values.max()))
    return least, most
