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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from torch import Tensor

from situs.config import Checked
from situs.data.resize import covering_size, resized
from situs.data.sources.images import decode, read_header
from situs.errors import SitusError
from situs.limits import Count, Natural, Positive, Within


@dataclass(frozen=True, kw_only=True)
class PackConfig(Checked):
    """What becomes of each image, and how the shards are cut."""

    format: Literal["parquet", "webdataset"] = "parquet"
    """Hugging Face parquet (image, label, class names), or tar files with a classes.txt."""

    short_side: Natural = 256
    """Resize images to this shorter side if theirs is longer; 0: keep all images as they are."""

    encoding: Literal["jpeg", "png"] = "jpeg"
    """Format of resized images: JPEG, or lossless PNG. 16-bit images stay 16-bit."""

    quality: Annotated[int, Within("[1, 100]")] = 90
    """JPEG quality."""

    channels: Count | None = None
    """Channels of a resized image. Default: unchanged, without alpha (4 keeps alpha)."""

    shard_mib: Positive = 256.0
    """Largest size of a shard, in MiB of image bytes."""

    row_group: Count = 100
    """Parquet: rows per row group, the unit that a reader loads at once."""

    multi_label: bool = False
    """Images may have several classes, from a table beside the images or from parquet; written as one bool column
    per class (null: unknown). Parquet only."""

    def check(self) -> None:
        if self.multi_label and self.format != "parquet":
            raise SitusError(
                f"format={self.format}: holds one class an image, and several go into parquet",
                field=("format", "multi_label"),
            )
        if self.row_group != PackConfig.row_group and self.format != "parquet":
            said = f"row_group={self.row_group}: is for parquet, and format={self.format} has no groups of rows"
            raise SitusError(said, field=("row_group", "format"))
        if self.quality != PackConfig.quality and (self.encoding == "png" or not self.short_side):
            why = "short_side=0 keeps the bytes of every image" if not self.short_side else "encoding=png loses nothing"
            said = f"quality={self.quality}: is for JPEG that is written here, and {why}"
            raise SitusError(said, field=("quality", "encoding" if self.short_side else "short_side"))

    def told(self) -> dict[str, Any]:
        """As the manifest and the journal hold it; what came later stands there only where it is asked for."""
        return {name: value for name, value in asdict(self).items() if name != "multi_label" or value}


_OWN = ("PNG", "WEBP", "AVIF", "GIF", "BMP", "DIB", "PPM", "NPY")
SUFFIXES = {"JPEG": ".jpg", "MPO": ".jpg", "HEIF": ".heic", "TIFF": ".tif", "JPEG2000": ".jp2"}
SUFFIXES |= {kind: f".{kind.lower()}" for kind in _OWN}
"""Pillow's name of a format -> the ending by which readers know it."""

# A JPEG many times too large is read at a part of its sides, but never below twice what is wanted: what is left to the
# resampling then hides nearly all of the difference.
_SPARE = 2
_LONGEST_JPEG = 65535


class Stored(NamedTuple):
    """An image as it stands in a shard. suffix: of its format."""

    data: bytes
    suffix: str


def store(data: bytes, name: str, how: PackConfig) -> Stored:
    """An encoded image; raises `BrokenSampleError` under `name` where it cannot be decoded."""
    header = read_header(data, name)
    short = min(header.height, header.width)
    if not how.short_side or short <= how.short_side:
        decode(data, name)
        return Stored(data, SUFFIXES[header.kind])
    reduce = 1
    if how.encoding == "jpeg":  # what is written without loss is also read without
        reduce = next((part for part in (8, 4, 2) if short // part >= _SPARE * how.short_side), 1)
    return _encode(_shrink(decode(data, name, how.channels, reduce=reduce), how.short_side), how)


def store_pixels(image: Tensor, how: PackConfig) -> Stored:
    """An image [C, H, W] of a set that holds no files: as it is without loss, or shrunk."""
    if how.short_side and min(image.shape[1:]) > how.short_side:
        return _encode(_shrink(image, how.short_side), how)
    return _encode(image, None)


def _shrink(image: Tensor, short_side: int) -> Tensor:
    return resized(image, covering_size((image.shape[1], image.shape[2]), short_side, short_side))


def _encode(image: Tensor, how: PackConfig | None) -> Stored:
    """how: None writes without loss."""
    from PIL import Image

    buffer, channels = io.BytesIO(), image.shape[0]
    deep = image.is_floating_point()
    if channels not in {1, 3, 4} or (deep and (channels != 1 or how is None)):
        np.save(buffer, image.contiguous().numpy())
        return Stored(buffer.getvalue(), ".npy")
    pixels = image.permute(1, 2, 0).contiguous().numpy()
    if deep:
        pixels = np.round(pixels * 65535.0).astype(np.uint16)
    picture = Image.fromarray(pixels[..., 0] if channels == 1 else pixels)
    if how is None or how.encoding == "png" or deep or channels == 4 or max(picture.size) > _LONGEST_JPEG:
        picture.save(buffer, "PNG", compress_level=6)
        return Stored(buffer.getvalue(), ".png")
    picture.save(buffer, "JPEG", quality=how.quality)
    return Stored(buffer.getvalue(), ".jpg")


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
