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


class Shard(ABC):
    """Writes items to a file under a temporary name, until it is whole."""

    def __init__(self, path: Path) -> None:
        self.path, self.aside = path, path.with_name(f".{path.name}.tmp")
        self.images, self.payload, self.source_bytes = 0, 0, 0

    def add(self, item: Item) -> None:
        """One more image."""
        self._write(item)
        self.images += 1
        self.payload += len(item.stored.data)
        self.source_bytes += item.source_bytes

    @abstractmethod
    def _write(self, item: Item) -> None: ...

    @abstractmethod
    def _end(self) -> None: ...

    def keep(self) -> dict[str, Any]:
        """On the disk, and under its name; gives what a manifest says of it."""
        self._end()
        with self.aside.open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = self.aside.stat().st_size
        self.aside.replace(self.path)
        counts = {"source_bytes": self.source_bytes, "images": self.images}
        return {"file": self.path.name, "sha256": digest, "bytes": size, **counts}

    def drop(self) -> None:
        """As if it had never been."""
        with contextlib.suppress(Exception):  # what was still to be written does not fit either
            self._end()
        self.aside.unlink(missing_ok=True)


class TarShard(Shard):
    """WebDataset: 000000012.jpg and 000000012.cls, the number being the image's in the set that was packed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._tar = tarfile.TarFile(self.aside, "w", format=tarfile.USTAR_FORMAT)

    def _write(self, item: Item) -> None:
        self._member(f"{item.number:09d}{item.stored.suffix}", item.stored.data)
        if item.label is not None:
            self._member(f"{item.number:09d}.cls", str(item.label).encode())

    def _member(self, name: str, data: bytes) -> None:
        info = tarfile.TarInfo(name)  # without owner and time: the same images give the same bytes
        info.size = len(data)
        self._tar.addfile(info, io.BytesIO(data))

    def _end(self) -> None:
        self._tar.close()


class ParquetShard(Shard):
    """Hugging Face's layout: image {bytes, path}, label, and the names of the classes beside the schema.

    several: a bool column a class instead.
    """

    def __init__(self, path: Path, classes: Sequence[str] | None, row_group: int, several: bool = False) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        super().__init__(path)
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
        self._writer = pq.ParquetWriter(self.aside, self._schema, **options)

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

    def _end(self) -> None:
        if self._waiting:
            self._write_group()
        self._writer.close()


def new_shard(folder: Path, name: str, how: PackConfig, classes: Sequence[str] | None) -> Shard:
    """An empty shard of the format."""
    if how.format == "webdataset":
        return TarShard(folder / f"{name}.tar")
    return ParquetShard(folder / f"{name}.parquet", classes, how.row_group, how.multi_label)
