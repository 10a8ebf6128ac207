"""`pack`: any source as shards (parquet or WebDataset), before a run.

Worker processes shrink the images; this process writes them in the set's order, so the same set gives the same bytes
with any number of workers and after any number of interruptions. A shard is written whole or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from torch import Tensor

from situs.config import Checked
from situs.data.open import only_images, open_source, splits_at, unread_labels
from situs.data.resize import covering_size, resized
from situs.data.sources.base import SPLIT_WORDS, EncodedSource, Source
from situs.data.sources.folder import printable
from situs.data.sources.images import decode, read_header
from situs.data.sources.manifest import CLASSES, KIND, MANIFEST, check_size, read_manifest
from situs.data.sources.remote import RemoteError, is_remote, redacted
from situs.data.work import in_order
from situs.errors import DataError, SitusError, counted, reason_of
from situs.files import read_json, write_text
from situs.folder_lock import NAME as LOCK
from situs.folder_lock import lock_folder
from situs.limits import Count, Natural, Positive, Within
from situs.results import Figure, Provenance, Result, Summary, Table, Tone

Progress = Callable[[int, int, str], None]
"""Called with images done, images in all and the split."""

BEGUN = ".packing.json"
"""The state of an unfinished packing, beside its shards; the manifest replaces it at the end."""


_LISTED = 5
_SHARD = re.compile(r"\w+-\d{5,}\.(parquet|tar)")
_UNSPLIT = "part"  # the name of shards of a set without splits: not the name of a split


class BrokenImage(NamedTuple):
    """An image that was left out. number: in its split's order."""

    number: int
    name: str
    reason: str


PACKED = """
Images whose shorter side was longer than `short_side` pixels were resized, so that their shorter side has this length,
and encoded again. With a `short_side` of 0, no image was resized. All other images keep their bytes. Images that could
not be decoded are left out. `manifest.json` beside the shards has the SHA-256 of each shard, and `situs data check`
verifies it.
"""


@dataclass(frozen=True, kw_only=True)
class Packed(Result):
    """A folder of shards. manifest: the content of its manifest.json. again: whether it was packed before."""

    file = "pack"
    meaning = PACKED

    manifest: dict[str, Any]
    again: bool = False

    @property
    def broken(self) -> list[dict[str, Any]]:
        """The images that were left out, each with its split, number, name and reason."""
        return self.manifest["broken"]

    def summary(self) -> Summary:
        shards = self.manifest["shards"]
        rows = []
        for split in self.manifest["splits"]:
            parts = [shard for shard in shards if shard["split"] == split]
            images, packed, before = (sum(shard[key] for shard in parts) for key in ("images", "bytes", "source_bytes"))
            broken = sum(image["split"] == split for image in self.broken)
            rows.append([split or "all", images, len(parts), _mib(packed), _mib(before) if before else None, broken])
        header = ["split", "images", "shards", "MiB", "MiB before", "broken"]
        images, size = sum(shard["images"] for shard in shards), _mib(sum(shard["bytes"] for shard in shards))
        left_out = f"; {counted(len(self.broken), 'broken images')} left out" if self.broken else ""
        word = "was packed already" if self.again else "packed"
        packed = f"{counted(images, 'images')} in {counted(len(shards), 'shards')} ({size} MiB){left_out}"
        sentence = f"{self.manifest['data']}: {word}, {packed}."
        notes = [f"broken: {image['reason']}" for image in self.broken[:_LISTED]]
        more = len(self.broken) - _LISTED
        notes += [f"and {more:,} more (see manifest.json)"] if more > 0 else []
        return Summary(sentence, (Table("Packed", header, rows),), tuple(notes), ((f"{images:,}", "images packed"),))

    @property
    def title(self) -> str:
        return f"{self.provenance.facts.get('data', 'images')}: packed"

    @property
    def tone(self) -> Tone:
        return "unsure" if self.broken else "good"

    @property
    def mark(self) -> str:
        return "Some images left out" if self.broken else "All images packed"

    def figures(self) -> list[Figure]:
        """The images of each split."""
        images: dict[str, int] = {}
        for shard in self.manifest["shards"]:
            images[shard["split"] or "all"] = images.get(shard["split"] or "all", 0) + shard["images"]
        return [Figure("", "", "bars", (images, "images"))]

    def details(self) -> list[Table]:
        """Every image that was left out."""
        rows = [[image["split"] or "all", image["name"], image["reason"]] for image in self.broken]
        return [Table("Broken images", ["split", "image", "why"], rows)] if rows else []

    def numbers(self) -> dict[str, Any]:
        return {**self.manifest, "was_packed_already": self.again}


def pack(
    path: str | Path,
    out: str | Path,
    config: PackConfig | None = None,
    *,
    splits: Sequence[str] | None = None,
    workers: int | None = None,
    start_over: bool = False,
    progress: Progress | None = None,
) -> Packed:
    """Packs the images at `path` into shards in the folder `out`, which `open_source` then reads.

    splits:     those to pack; by default all of the set.
    workers:    processes that shrink images; by default one a core, 0 for none.
    start_over: removes what an earlier packing left in `out`. Without it a packing that was stopped is resumed, and a
                complete one stays as it is.

    Broken images are left out and listed. `manifest.json` is written last and has the SHA-256 of every shard.
    """
    config, out = config or PackConfig(), Path(out).expanduser()
    only_images(path, "only images can be packed", config.multi_label)
    _check_place(path, out)
    packing = _Packing(path, out, config, splits, workers, progress)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with lock_folder(out):
            if start_over:
                clear(out)
            return packing.run()
    except OSError as error:
        reason = reason_of(error)
        raise SitusError(
            f"{out}: could not be written: {reason}; run the same command again to continue after the "
            "last complete shard",
            field="out",
        ) from error


def _check_place(path: str | Path, out: Path) -> None:
    data, target = Path(path).expanduser().resolve(), out.resolve()
    if not is_remote(path) and (target == data or (data.is_dir() and data in target.parents)):
        raise SitusError(field="out", value=str(out), allowed="a folder outside of the data")
    if out.exists() and not out.is_dir():
        raise SitusError(field="out", value=str(out), allowed="a folder")


class _Packing:
    """One call of `pack`."""

    def __init__(
        self,
        path: str | Path,
        out: Path,
        config: PackConfig,
        splits: Sequence[str] | None,
        workers: int | None,
        progress: Progress | None,
    ) -> None:
        self.path, self.out, self.config, self.workers = path, out, config, workers
        self.report = progress or (lambda *_: None)
        if splits is None:
            splits = sorted(splits_at(path, multi_label=config.multi_label), key=SPLIT_WORDS.index)
        self.splits = list(splits) or [""]
        self.classes: tuple[str, ...] | None = None
        self.left_out = unread_labels(path, multi_label=config.multi_label)

    def run(self) -> Packed:
        request = {"config": self.config.to_manifest(), "splits": self.splits}
        manifest = read_manifest(self.out)
        if manifest is not None:
            return self._again(manifest, request)
        self._check_empty()
        source = self._open(self.splits[0])  # a mistake in it is reported before anything is written
        self.state = self._begun(request)
        for split in self.splits:
            self._pack_split(split, source or self._open(split))
            source = None
        state = self.state
        if not state["shards"]:
            reason = next((image["reason"] for image in state["broken"]), "it is empty")
            clear(self.out)
            raise DataError(f"{self.path}: none of its images can be read; {reason}")
        if self.classes is not None and self.config.format == "webdataset":
            write_text(self.out / CLASSES, "".join(f"{name}\n" for name in self.classes))
        name = printable(redacted(str(self.path)).rstrip("/").rpartition("/")[2]) or "set"
        facts = {"data": name, "fingerprints": state["fingerprints"], "classes": self.classes}
        shards = [{key: value for key, value in shard.items() if key != "end"} for shard in state["shards"]]
        manifest = {"kind": KIND, "version": 1, **request, **facts, "left_out": self.left_out, "shards": shards}
        manifest["broken"] = state["broken"]
        write_text(self.out / MANIFEST, json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
        (self.out / BEGUN).unlink(missing_ok=True)
        return self._result(manifest, again=False)

    def _begun(self, request: dict[str, Any]) -> dict[str, Any]:
        """The state of the packing: the shards that are there, and for each split the first image that is not done."""
        if not (self.out / BEGUN).is_file():
            state = {**request, "fingerprints": {}, "done": {}, "shards": [], "broken": []}
            write_text(self.out / BEGUN, json.dumps(state))  # before any shard, which would look like another's
            return state
        state = read_json(self.out / BEGUN)
        if differs := ", ".join(key for key in request if request[key] != state.get(key)):
            raise _start_over(f"{self.out}: contains an unfinished packing that differs from this one in {differs}")
        complete = [*takewhile(lambda shard: not check_size(self.out, shard), state["shards"])]
        if len(complete) < len(state["shards"]):  # all after a lost one are made again
            done = {shard["split"]: shard["end"] for shard in complete}
            broken = [image for image in state["broken"] if image["number"] < done.get(image["split"], 0)]
            state |= {"shards": complete, "done": done, "broken": broken}
        return state

    def _result(self, manifest: dict[str, Any], *, again: bool) -> Packed:
        facts = {"data": manifest["data"], **manifest["config"]}
        provenance = Provenance(facts, left_out=tuple(manifest["left_out"]))
        return Packed(manifest=manifest, again=again, provenance=provenance)

    def _again(self, manifest: dict[str, Any], request: dict[str, Any]) -> Packed:
        """The result of a complete packing, which must be of the same images and config."""
        differs = [key for key in request if request[key] != manifest.get(key)]
        for split in [] if differs else self.splits:
            if _fingerprint(self._open(split)) != manifest["fingerprints"].get(split):
                differs.append("data")
                break
        if differs:
            raise _start_over(f"{self.out}: contains a packed set that differs from this one in {', '.join(differs)}")
        return self._result(manifest, again=True)

    def _check_empty(self) -> None:
        """Refuses a folder with anything but an unfinished packing: readers would take other shards for its part."""
        begun = (self.out / BEGUN).is_file()
        for file in self.out.iterdir():
            if file.name.startswith(".") and file.name.endswith(".tmp"):
                file.unlink()  # of a packing that was killed
            elif not begun and file.name != LOCK:
                reason = f"already contains {printable(file.name)}; pack into an empty folder"
                raise SitusError(f"{self.out}: {reason}", field="out")

    def _open(self, split: str) -> Source:
        config = self.config
        return open_source(self.path, split or None, channels=config.channels, multi_label=config.multi_label)

    def _pack_split(self, split: str, source: Source) -> None:
        mark = _fingerprint(source)
        if self.state["fingerprints"].setdefault(split, mark) != mark:
            raise _start_over(f"{source.name}: its images have changed since the packing began")
        self.left_out += source.notes
        names, start = self._share_classes(source), self.state["done"].get(split, 0)
        number = sum(shard["split"] == split for shard in self.state["shards"])
        self.report(start, len(source), split or "images")
        shard: Shard | None = None
        broken: list[BrokenImage] = []
        try:
            for items in in_order(partial(_items, source, self.config), range(start, len(source)), self.workers):
                for item in items:
                    if isinstance(item, BrokenImage):
                        broken.append(item)
                        continue
                    if shard is not None and shard.payload + len(item.stored.data) > self.config.shard_mib * 2**20:
                        self._finish_shard(split, shard, item.number, broken)
                        shard, broken, number = None, [], number + 1
                    shard = shard or new_shard(self.out, f"{split or _UNSPLIT}-{number:05d}", self.config, names)
                    shard.add(item)
                self.report(items[-1].number + 1, len(source), split or "images")
            self._finish_shard(split, shard, len(source), broken)
            shard = None
        finally:
            if shard is not None:
                shard.drop()

    def _finish_shard(self, split: str, shard: Shard | None, end: int, broken: list[BrokenImage]) -> None:
        """Ends a shard before image `end`, and records it: a packing that is killed can be resumed there."""
        if shard is not None:
            self.state["shards"].append({"split": split, **shard.keep(), "end": end})
        self.state["broken"] += [{"split": split, **image._asdict()} for image in broken]
        self.state["done"][split] = end
        write_text(self.out / BEGUN, json.dumps(self.state))

    def _share_classes(self, source: Source) -> tuple[str, ...] | None:
        """The class names as they are written, one line each; they must agree between splits."""
        if source.classes is None:
            return None
        lines = (" ".join(printable(name).splitlines()) for name in source.classes)
        names = tuple(line or str(number) for number, line in enumerate(lines))
        if self.config.multi_label and (len({*names}) < len(names) or IMAGE in names):
            twice = next(name for name in names if names.count(name) > 1 or name == IMAGE)
            raise DataError(
                f"{source.name}: two columns of the output would be called {twice!r}; rename the class of this name"
            )
        others = self.classes or ()
        shorter = min(len(others), len(names))
        if others[:shorter] != names[:shorter]:
            raise DataError(f"{source.name}: its classes differ from those of the other splits")
        self.classes = max(others, names, key=len)
        return names


def _start_over(reason: str) -> SitusError:
    """The error for a folder whose packing cannot be resumed."""
    return SitusError(f"{reason}; start over, or pack into another folder", field=("start_over", "out"))


def _fingerprint(source: Source) -> str:
    """A hash of the images' names in their order, by which a packing is resumed."""
    digest = hashlib.blake2b(f"{len(source)}\n".encode(), digest_size=16)
    for index in range(len(source)):
        digest.update(source.key(index).encode("utf-8", "surrogateescape") + b"\n")
    return digest.hexdigest()


def _items(source: Source, config: PackConfig, numbers: list[int]) -> list[Item | BrokenImage]:
    return [_item(source, config, number) for number in numbers]


def _item(source: Source, config: PackConfig, number: int) -> Item | BrokenImage:
    name = printable(source.key(number))
    try:
        if isinstance(source, EncodedSource):
            data = source.payload(number)
            return Item(number, name, store(data, source.entry(number), config), source.label(number), len(data))
        sample = source.read(number)
        return Item(number, name, store_pixels(sample["image"], config), sample.get("label"), 0)
    except RemoteError:
        raise
    except SitusError as error:
        return BrokenImage(number, name, str(error))


def clear(folder: Path) -> None:
    """Removes what a packing wrote: its state, its manifest and its shards."""
    names = {shard["file"] for shard in (read_manifest(folder) or {"shards": []})["shards"]}
    if (folder / BEGUN).is_file():  # it began in an empty folder
        names |= {file.name for file in folder.iterdir() if _SHARD.fullmatch(file.name)}
    (folder / MANIFEST).unlink(missing_ok=True)  # first: without its shards it would be wrong
    for name in (*names, CLASSES) if names else ():
        (folder / Path(name).name).unlink(missing_ok=True)
    (folder / BEGUN).unlink(missing_ok=True)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f}"


@dataclass(frozen=True, kw_only=True)
class PackConfig(Checked):
    """The format of the images, and the size of the shards."""

    format: Literal["parquet", "webdataset"] = "parquet"
    """Format of the shards. parquet: as on Hugging Face (image, label, class names). webdataset: tar files with a
    classes.txt."""

    short_side: Natural = 256
    """Maximum length of the short side, in pixels. Larger images are resized to it. With 0, no image changes."""

    encoding: Literal["jpeg", "png"] = "jpeg"
    """Format of resized images: JPEG or lossless PNG. 16-bit images stay 16-bit."""

    quality: Annotated[int, Within("[1, 100]")] = 90
    """JPEG quality."""

    channels: Count | None = None
    """Number of channels of a resized image. By default, the channels stay unchanged, but alpha is dropped. With 4,
    alpha is kept."""

    shard_mib: Positive = 256.0
    """Largest size of a shard, in MiB of image bytes."""

    row_group: Count = 100
    """With format=parquet: number of rows per row group. A reader loads a whole row group at once, so larger groups
    need more memory."""

    multi_label: bool = False
    """Allow several classes per image. The classes come from a table next to the images or, for a data set of parquet
    files, from these files. The output has one bool column per class, with null for unknown. This works only with
    format=parquet."""

    def check(self) -> None:
        if self.multi_label and self.format != "parquet":
            raise SitusError(
                f"format={self.format}: allows one class per image; for several classes, use format=parquet",
                field=("format", "multi_label"),
            )
        if self.row_group != PackConfig.row_group and self.format != "parquet":
            reason = f"row_group={self.row_group}: applies only to parquet, not to format={self.format}"
            raise SitusError(reason, field=("row_group", "format"))
        if self.quality != PackConfig.quality and (self.encoding == "png" or not self.short_side):
            other = "encoding=png is lossless" if self.short_side else "short_side=0 keeps the bytes of every image"
            reason = f"quality={self.quality}: applies only to JPEG, but {other}"
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
