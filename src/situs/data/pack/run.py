"""`pack`: any source as shards, ahead of a run.

Worker processes shrink the images; this process writes them in the set's order, so that the same set gives the same
bytes whatever the number of workers and however often the packing was stopped on the way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from situs.data.open import only_images, open_source, splits_at, unread_labels
from situs.data.pack.config import PackConfig
from situs.data.pack.journal import JOURNAL, BrokenImage, Entry, Journal, clear
from situs.data.pack.shards import IMAGE, Item, Shard, ShardFile, new_shard
from situs.data.pack.store import store, store_pixels
from situs.data.sources.base import SPLIT_WORDS, EncodedSource, Source
from situs.data.sources.manifest import CLASSES, read_manifest
from situs.data.sources.remote.names import is_remote, redacted
from situs.data.sources.remote.transfer import RemoteError
from situs.data.sources.walk import plain
from situs.data.work import in_order
from situs.errors import SitusError, counted
from situs.files import write_text
from situs.hold import NAME as LOCK
from situs.hold import only_one
from situs.results import Provenance, Result, Summary, Table

Progress = Callable[[int, int, str], None]
"""Called with images done, images in all and the split."""

_LISTED = 5
_UNSPLIT = "part"  # shards of a set without splits; no word for a split, so that all of them are the set


@dataclass(frozen=True, kw_only=True)
class Packed(Result):
    """A folder of shards. manifest: what its manifest.json says. again: whether it was there already, and was left."""

    file = "pack"

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
            own = [shard for shard in shards if shard["split"] == split]
            images, packed, before = (sum(shard[key] for shard in own) for key in ("images", "bytes", "source_bytes"))
            left_out = sum(each["split"] == split for each in self.broken)
            rows.append([split or "all", images, len(own), _mib(packed), _mib(before) if before else None, left_out])
        header = ["split", "images", "shards", "MiB", "MiB before", "broken"]
        images, size = sum(shard["images"] for shard in shards), _mib(sum(shard["bytes"] for shard in shards))
        left = f"; {len(self.broken):,} broken left out" if self.broken else ""
        word = "was packed already" if self.again else "packed"
        packed = f"{counted(images, 'images')} in {counted(len(shards), 'shards')} of {size} MiB{left}"
        sentence = f"{self.manifest['data']}: {word}, {packed}."
        notes = [f"broken: {each['reason']}" for each in self.broken[:_LISTED]]
        more = len(self.broken) - _LISTED
        notes += [f"and {more:,} more, which manifest.json lists"] if more > 0 else []
        return Summary(sentence, (Table("Packed", header, rows),), tuple(notes))

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

    splits:     those to pack; by default all that the set has.
    workers:    processes that shrink images; by default one a core, 0 for none.
    start_over: takes away what an earlier packing left in `out`. Without it a packing that was stopped goes on, and one
                that is whole is left as it is.

    Broken images are left out and listed. `manifest.json` is written last and holds the SHA-256 of every shard.
    """
    how, out = config or PackConfig(), Path(out).expanduser()
    only_images(path, "packing shrinks images", how.multi_label)
    _check_place(path, out)
    packing = _Packing(path, out, how, splits, workers, progress)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with only_one(out):
            if start_over:
                clear(out)
            return packing.run()
    except OSError as error:
        said = (error.strerror or str(error)).lower()
        raise SitusError(
            f"{out}: could not be written: {said}; what is packed stays, and the same command goes on from there",
            field="out",
        ) from error


def _check_place(path: str | Path, out: Path) -> None:
    here, there = Path(path).expanduser().resolve(), out.resolve()
    if not is_remote(path) and (there == here or (here.is_dir() and here in there.parents)):
        raise SitusError(field="out", value=str(out), allowed="outside of what is packed")
    if out.exists() and not out.is_dir():
        raise SitusError(field="out", value=str(out), allowed="a folder")


class _Packing:
    """One call of `pack`."""

    def __init__(
        self,
        path: str | Path,
        out: Path,
        how: PackConfig,
        splits: Sequence[str] | None,
        workers: int | None,
        progress: Progress | None,
    ) -> None:
        self.path, self.out, self.how, self.workers = path, out, how, workers
        self.tell = progress or (lambda *_: None)
        found = (
            splits
            if splits is not None
            else sorted(splits_at(path, multi_label=how.multi_label), key=SPLIT_WORDS.index)
        )
        self.splits = list(found) or [""]
        self.classes: tuple[str, ...] | None = None
        self.left_out = unread_labels(path, multi_label=how.multi_label)
        self.fingerprints: dict[str, str] = {}

    def run(self) -> Packed:
        asked = {"config": self.how.told(), "splits": self.splits}
        whole = read_manifest(self.out)
        if whole is not None:
            return self._again(whole, asked)
        self._check_empty()
        source = self._open(self.splits[0])  # whatever is wrong with it is told before anything is written
        journal, images = Journal(self.out, asked), 0
        for split in self.splits:
            images += self._pack_split(split, source or self._open(split), journal)
            source = None
        if not images:
            reason = next((each.reason for entry in journal.entries for each in entry.broken), "it is empty")
            clear(self.out)
            raise SitusError(f"{self.path}: none of its images can be read; {reason}", field="data")
        if self.classes is not None and self.how.format == "webdataset":
            write_text(self.out / CLASSES, "".join(f"{name}\n" for name in self.classes))
        facts = {
            "data": self._name(),
            "fingerprints": self.fingerprints,
            "classes": self.classes,
            "left_out": self.left_out,
        }
        return self._result(journal.finish(facts), again=False)

    def _name(self) -> str:
        return plain(redacted(str(self.path)).rstrip("/").rpartition("/")[2]) or "set"

    def _result(self, manifest: dict[str, Any], *, again: bool) -> Packed:
        facts = {"data": manifest["data"], **manifest["config"]}
        return Packed(
            manifest=manifest, again=again, provenance=Provenance(facts, left_out=tuple(manifest["left_out"]))
        )

    def _again(self, whole: dict[str, Any], asked: dict[str, Any]) -> Packed:
        """The folder is whole; left as it is, where it is of the same images."""
        differs = [key for key in asked if asked[key] != whole.get(key)]
        for split in [] if differs else self.splits:
            if _fingerprint(self._open(split)) != whole["fingerprints"].get(split):
                differs.append("data")
                break
        if differs:
            raise SitusError(
                f"{self.out}: holds a set packed with another {', '.join(differs)}; start over, or pack elsewhere",
                field=("start_over", "out"),
            )
        return self._result(whole, again=True)

    def _check_empty(self) -> None:
        """Nothing but what a packing leaves: a reader would take other shards for part of the set."""
        begun = (self.out / JOURNAL).is_file()
        for file in self.out.iterdir():
            if file.name.startswith(".") and file.name.endswith(".tmp"):
                file.unlink()  # of a packing that was killed
            elif not begun and file.name != LOCK:
                raise SitusError(
                    f"{self.out}: holds {plain(file.name)} already; pack into an empty folder", field="out"
                )

    def _open(self, split: str) -> Source:
        return open_source(self.path, split or None, channels=self.how.channels, multi_label=self.how.multi_label)

    def _pack_split(self, split: str, source: Source, journal: Journal) -> int:
        """Gives how many images of the split are packed."""
        of = self.fingerprints[split] = _fingerprint(source)
        if any(entry.of != of for entry in journal.of(split)):
            raise SitusError(
                f"{source.name}: has other images than when its packing began; start over, or pack elsewhere",
                field=("start_over", "out"),
            )
        self.left_out += source.notes
        names = self._share_classes(source)
        writer, start = _Writer(self.out, self.how, split, of, names, journal), journal.done(split)
        self.tell(start, len(source), split or "images")
        made = in_order(partial(_items, source, self.how), range(start, len(source)), self.workers)
        try:
            for items in made:
                for item in items:
                    writer.add(item)
                self.tell(items[-1].number + 1, len(source), split or "images")
            writer.close(len(source))
        finally:
            writer.drop()
        return sum(entry.images for entry in journal.of(split))

    def _share_classes(self, source: Source) -> tuple[str, ...] | None:
        """The class names as they are written: one line each."""
        if source.classes is None:
            return None
        lines = (" ".join(plain(name).splitlines()) for name in source.classes)
        names = tuple(line or str(number) for number, line in enumerate(lines))
        if self.how.multi_label and (len({*names}) < len(names) or IMAGE in names):
            twice = next(name for name in names if names.count(name) > 1 or name == IMAGE)
            raise SitusError(f"{source.name}: the class {twice!r} cannot be a column beside the others", field="data")
        known = self.classes or ()
        shorter = min(len(known), len(names))
        if known[:shorter] != names[:shorter]:
            raise SitusError(f"{source.name}: its classes differ from those of the other splits", field="data")
        self.classes = max(known, names, key=len)
        return names


def _fingerprint(source: Source) -> str:
    """Of the images' names in their order: a packing goes on by their numbers."""
    hashed = hashlib.blake2b(f"{len(source)}\n".encode(), digest_size=16)
    for index in range(len(source)):
        hashed.update(source.key(index).encode("utf-8", "surrogateescape") + b"\n")
    return hashed.hexdigest()


def _items(source: Source, how: PackConfig, numbers: list[int]) -> list[Item | BrokenImage]:
    return [_item(source, how, number) for number in numbers]


def _item(source: Source, how: PackConfig, number: int) -> Item | BrokenImage:
    name = plain(source.key(number))
    try:
        if isinstance(source, EncodedSource):
            data = source.payload(number)
            return Item(number, name, store(data, source.entry(number), how), source.label(number), len(data))
        sample = source.read(number)
        return Item(number, name, store_pixels(sample["image"], how), sample.get("label"), 0)
    except RemoteError:
        raise
    except SitusError as error:
        return BrokenImage(number, name, str(error))


class _Writer:
    """The shards of one split, one after the other."""

    def __init__(
        self, out: Path, how: PackConfig, split: str, of: str, classes: Sequence[str] | None, journal: Journal
    ) -> None:
        self.out, self.how, self.split, self.of = out, how, split, of
        self.classes, self.journal = classes, journal
        self.shard: Shard | None = None
        self.broken: list[BrokenImage] = []

    def add(self, item: Item | BrokenImage) -> None:
        """The next image of the set."""
        if isinstance(item, BrokenImage):
            self.broken.append(item)
            return
        limit = self.how.shard_mib * 2**20
        if self.shard is not None and self.shard.payload + len(item.stored.data) > limit:
            self.close(item.number)
        if self.shard is None:
            number = sum(bool(entry.file) for entry in self.journal.of(self.split))
            suffix = ".tar" if self.how.format == "webdataset" else ".parquet"
            file = ShardFile(self.out / f"{self.split or _UNSPLIT}-{number:05d}{suffix}")
            self.shard = new_shard(file, self.how, self.classes)
        self.shard.add(item)

    def close(self, end: int) -> None:
        """Ends the shard before image `end`, and notes it."""
        entry = Entry(self.split, self.of, "", "", 0, 0, 0, end, tuple(self.broken))
        if self.shard is not None:
            self.shard.end()
            digest, file = self.shard.file.keep(), self.shard.file
            entry = entry._replace(file=file.path.name, sha256=digest, bytes=file.bytes)
            entry = entry._replace(source_bytes=self.shard.source_bytes, images=self.shard.images)
        if entry.file or entry.broken:
            self.journal.add(entry)
        self.shard, self.broken = None, []

    def drop(self) -> None:
        """Whatever is not closed."""
        if self.shard is not None:
            self.shard.drop()
            self.shard = None


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f}"
