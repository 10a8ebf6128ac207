"""The files of a packed set: each appears whole or not at all, and the same images give the same bytes."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from situs.data.pack.config import PackConfig
from situs.data.pack.store import Stored

IMAGE = "image"
"""The column of the images; no class of a multi-label set can have its name."""


class Item(NamedTuple):
    """An image on its way to a shard. number, name: in its set. source_bytes: of its file.

    label: the class's number, or [K] of 1, 0 and -1 (nobody knows) where it may have several.
    """

    number: int
    name: str
    stored: Stored
    label: int | Tensor | None
    source_bytes: int


class ShardFile:
    """A file under a temporary name, hashed as it is written; a shard's writer needs no more of one than this."""

    closed = False

    def __init__(self, path: Path) -> None:
        self.path, self.aside = path, path.with_name(f".{path.name}.tmp")
        self._hash, self.bytes = hashlib.sha256(), 0
        self._file = self.aside.open("wb", buffering=1 << 20)

    def write(self, data: Any) -> int:
        """Bytes at the end of the file."""
        if self.closed:  # what a writer still has to say of a file that is dropped
            return len(data)
        count = self._file.write(data)
        self._hash.update(data)
        self.bytes += count
        return count

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        self._file.flush()

    def keep(self) -> str:
        """On the disk, and under its name; gives its SHA-256."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()
        self.aside.replace(self.path)
        return self._hash.hexdigest()

    def drop(self) -> None:
        """As if it had never been."""
        with contextlib.suppress(OSError):  # what was still to be written does not fit either
            self.close()
        self.aside.unlink(missing_ok=True)

    def close(self) -> None:
        self.closed = True
        self._file.close()


class Shard(ABC):
    """Writes items to a file; `end` writes what closes it."""

    suffix: str

    def __init__(self, file: ShardFile) -> None:
        self.file, self.images, self.payload, self.source_bytes = file, 0, 0, 0

    def add(self, item: Item) -> None:
        """One more image."""
        self._write(item)
        self.images += 1
        self.payload += len(item.stored.data)
        self.source_bytes += item.source_bytes

    @abstractmethod
    def _write(self, item: Item) -> None: ...

    @abstractmethod
    def end(self) -> None: ...

    def drop(self) -> None:
        """Leaves nothing of it."""
        self.file.drop()
        with contextlib.suppress(Exception):  # the writer's last words go nowhere
            self.end()


class TarShard(Shard):
    """WebDataset: 000000012.jpg and 000000012.cls, the number being the image's in the set that was packed."""

    suffix = ".tar"

    def __init__(self, file: ShardFile) -> None:
        super().__init__(file)
        self._tar = tarfile.TarFile(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT)  # pyright: ignore[reportArgumentType]

    def _write(self, item: Item) -> None:
        self._member(f"{item.number:09d}{item.stored.suffix}", item.stored.data)
        if item.label is not None:
            self._member(f"{item.number:09d}.cls", str(item.label).encode())

    def _member(self, name: str, data: bytes) -> None:
        info = tarfile.TarInfo(name)  # without owner and time: the same images give the same bytes
        info.size = len(data)
        self._tar.addfile(info, io.BytesIO(data))

    def end(self) -> None:
        self._tar.close()


class ParquetShard(Shard):
    """Hugging Face's layout: image {bytes, path}, label, and the names of the classes beside the schema.

    several: a bool column a class instead.
    """

    suffix = ".parquet"

    def __init__(self, file: ShardFile, classes: Sequence[str] | None, row_group: int, several: bool = False) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        super().__init__(file)
        self._group, self._waiting, self._flags = row_group, [], tuple(classes or ()) if several else ()
        features: dict[str, Any] = {IMAGE: {"_type": "Image"}}
        columns: list[Any] = [(IMAGE, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))]
        for name in self._flags:
            features[name] = {"dtype": "bool", "_type": "Value"}
            columns.append((name, pa.bool_()))
        if classes is not None and not several:
            features["label"] = {"names": list(classes), "_type": "ClassLabel"}
            columns.append(("label", pa.int64()))
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
        self._schema = pa.schema(columns, metadata=metadata)
        # Images do not compress; readers hold each page to its checksum.
        options: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
        self._writer = pq.ParquetWriter(pa.PythonFile(file, mode="w"), self._schema, **options)

    def _write(self, item: Item) -> None:
        row: dict[str, Any] = {IMAGE: {"bytes": item.stored.data, "path": item.name}}
        if isinstance(item.label, Tensor):
            known = (None if each < 0 else bool(each) for each in item.label.tolist())
            row |= dict(zip(self._flags, known, strict=True))
        elif item.label is not None:
            row["label"] = item.label
        self._waiting.append(row)
        if len(self._waiting) == self._group:
            self._write_group()

    def _write_group(self) -> None:
        import pyarrow as pa

        self._writer.write_table(pa.Table.from_pylist(self._waiting, self._schema))
        self._waiting = []

    def end(self) -> None:
        if self._waiting:
            self._write_group()
        self._writer.close()


def new_shard(file: ShardFile, how: PackConfig, classes: Sequence[str] | None) -> Shard:
    """An empty shard of the format."""
    try:
        if how.format == "webdataset":
            return TarShard(file)
        return ParquetShard(file, classes, how.row_group, how.multi_label)
    except BaseException:  # a parquet file begins with four bytes, for which the disk may be full
        file.drop()
        raise
