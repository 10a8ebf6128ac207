"""The files of a packed set: each is written whole or not at all, and the same images give the same bytes."""

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
    """How images are written, and how large the shards are."""

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
                f"format={self.format}: holds one class an image; several need parquet",
                field=("format", "multi_label"),
            )
        if self.row_group != PackConfig.row_group and self.format != "parquet":
            reason = f"row_group={self.row_group}: applies only to parquet, and format={self.format} is set"
            raise SitusError(reason, field=("row_group", "format"))
        if self.quality != PackConfig.quality and (self.encoding == "png" or not self.short_side):
            other = "encoding=png is lossless" if self.short_side else "short_side=0 keeps the bytes of every image"
            reason = f"quality={self.quality}: applies only to JPEG, and {other}"
            raise SitusError(reason, field=("quality", "encoding" if self.short_side else "short_side"))

    def to_manifest(self) -> dict[str, Any]:
        """Its entries in the manifest; `multi_label`, which older manifests lack, only where it is set."""
        return {name: value for name, value in asdict(self).items() if name != "multi_label" or value}


_BY_NAME = ("PNG", "WEBP", "AVIF", "GIF", "BMP", "DIB", "PPM", "NPY")
SUFFIXES = {"JPEG": ".jpg", "MPO": ".jpg", "HEIF": ".heic", "TIFF": ".tif", "JPEG2000": ".jp2"}
SUFFIXES |= {kind: f".{kind.lower()}" for kind in _BY_NAME}
"""Pillow's name of a format -> its suffix."""

# A JPEG many times too large is decoded at a fraction of its sides, but never below twice the wanted size: resampling
# then hides nearly all of the difference.
_SPARE = 2
_LONGEST_JPEG = 65535


class Stored(NamedTuple):
    """An image as it is written to a shard. suffix: of its format."""

    data: bytes
    suffix: str


def store(data: bytes, name: str, config: PackConfig) -> Stored:
    """An encoded image; raises `BrokenSampleError` under `name` where it cannot be decoded."""
    header = read_header(data, name)
    short = min(header.height, header.width)
    if not config.short_side or short <= config.short_side:
        decode(data, name)
        return Stored(data, SUFFIXES[header.kind])
    reduce = 1
    if config.encoding == "jpeg":  # for a lossless encoding it is decoded in full
        reduce = next((part for part in (8, 4, 2) if short // part >= _SPARE * config.short_side), 1)
    return _encode(_shrink(decode(data, name, config.channels, reduce=reduce), config.short_side), config)


def store_pixels(image: Tensor, config: PackConfig) -> Stored:
    """An image [C, H, W] of a set that holds no files: lossless, or shrunk."""
    if config.short_side and min(image.shape[1:]) > config.short_side:
        return _encode(_shrink(image, config.short_side), config)
    return _encode(image, None)


def _shrink(image: Tensor, short_side: int) -> Tensor:
    return resized(image, covering_size((image.shape[1], image.shape[2]), short_side, short_side))


def _encode(image: Tensor, config: PackConfig | None) -> Stored:
    """config: None is lossless."""
    from PIL import Image

    buffer, channels = io.BytesIO(), image.shape[0]
    deep = image.is_floating_point()
    if channels not in {1, 3, 4} or (deep and (channels != 1 or config is None)):
        np.save(buffer, image.contiguous().numpy())
        return Stored(buffer.getvalue(), ".npy")
    pixels = image.permute(1, 2, 0).contiguous().numpy()
    if deep:
        pixels = np.round(pixels * 65535.0).astype(np.uint16)
    picture = Image.fromarray(pixels[..., 0] if channels == 1 else pixels)
    if config is None or config.encoding == "png" or deep or channels == 4 or max(picture.size) > _LONGEST_JPEG:
        picture.save(buffer, "PNG", compress_level=6)
        return Stored(buffer.getvalue(), ".png")
    picture.save(buffer, "JPEG", quality=config.quality)
    return Stored(buffer.getvalue(), ".jpg")


IMAGE = "image"
"""The column of the images; no class of a multi-label set can have this name."""


class Item(NamedTuple):
    """An image to be written to a shard. number, name: in its set. source_bytes: of its file.

    label: the class number, or [K] of 1, 0 and -1 (unknown) in a multi-label set.
    """

    number: int
    name: str
    stored: Stored
    label: int | Tensor | None
    source_bytes: int


class Shard(ABC):
    """Writes items to a file under a temporary name, until it is whole."""

    def __init__(self, path: Path) -> None:
        self.path, self.temporary = path, path.with_name(f".{path.name}.tmp")
        self.images, self.payload, self.source_bytes = 0, 0, 0

    def add(self, item: Item) -> None:
        """Writes one more image."""
        self._write(item)
        self.images += 1
        self.payload += len(item.stored.data)
        self.source_bytes += item.source_bytes

    @abstractmethod
    def _write(self, item: Item) -> None: ...

    @abstractmethod
    def _end(self) -> None: ...

    def keep(self) -> dict[str, Any]:
        """Ends the file and gives it its name; returns its entry in the manifest."""
        self._end()
        with self.temporary.open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = self.temporary.stat().st_size
        self.temporary.replace(self.path)
        counts = {"source_bytes": self.source_bytes, "images": self.images}
        return {"file": self.path.name, "sha256": digest, "bytes": size, **counts}

    def drop(self) -> None:
        """Removes the unfinished file."""
        with contextlib.suppress(Exception):  # on a full disk its end cannot be written either
            self._end()
        self.temporary.unlink(missing_ok=True)


class TarShard(Shard):
    """WebDataset: 000000012.jpg and 000000012.cls, the number being the image's in the set that was packed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._tar = tarfile.TarFile(self.temporary, "w", format=tarfile.USTAR_FORMAT)

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
    """Hugging Face's layout: image {bytes, path}, label, and the names of the classes in the metadata.

    multi_label: a bool column for each class instead of the label.
    """

    def __init__(self, path: Path, classes: Sequence[str] | None, row_group: int, multi_label: bool = False) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        super().__init__(path)
        self._group, self._waiting, self._flags = row_group, [], tuple(classes or ()) if multi_label else ()
        features: dict[str, Any] = {IMAGE: {"_type": "Image"}}
        columns: list[Any] = [(IMAGE, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))]
        for name in self._flags:
            features[name] = {"dtype": "bool", "_type": "Value"}
            columns.append((name, pa.bool_()))
        if classes is not None and not multi_label:
            features["label"] = {"names": list(classes), "_type": "ClassLabel"}
            columns.append(("label", pa.int64()))
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
        self._schema = pa.schema(columns, metadata=metadata)
        # Images do not compress; readers verify the checksum of each page.
        options: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
        self._writer = pq.ParquetWriter(self.temporary, self._schema, **options)

    def _write(self, item: Item) -> None:
        row: dict[str, Any] = {IMAGE: {"bytes": item.stored.data, "path": item.name}}
        if isinstance(item.label, Tensor):
            flags = (None if flag < 0 else bool(flag) for flag in item.label.tolist())
            row |= dict(zip(self._flags, flags, strict=True))
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


def new_shard(folder: Path, name: str, config: PackConfig, classes: Sequence[str] | None) -> Shard:
    """An empty shard of the format."""
    if config.format == "webdataset":
        return TarShard(folder / f"{name}.tar")
    return ParquetShard(folder / f"{name}.parquet", classes, config.row_group, config.multi_label)
