"""`pack`: any source as shards, ahead of a run.

Worker processes shrink the images; this process writes them in the set's order, so that the same set gives the same
bytes whatever the number of workers and however often the packing was stopped on the way.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from situs.data.open import only_images, open_source, splits_at, unread_labels
from situs.data.pack.shards import IMAGE, Item, PackConfig, Shard, new_shard, store, store_pixels
from situs.data.sources.base import SPLIT_WORDS, EncodedSource, Source
from situs.data.sources.folder import plain
from situs.data.sources.manifest import CLASSES, KIND, MANIFEST, check_size, read_manifest
from situs.data.sources.remote.transfer import RemoteError, is_remote, redacted
from situs.data.work import in_order
from situs.errors import DataError, SitusError, counted
from situs.files import read_json, write_text
from situs.folder_lock import NAME as LOCK
from situs.folder_lock import lock_folder
from situs.results import Figure, Provenance, Result, Summary, Table, Tone

Progress = Callable[[int, int, str], None]
"""Called with images done, images in all and the split."""

BEGUN = ".packing.json"
"""What is done so far, beside the shards, until the folder is whole and its manifest takes this file's place."""

_OLDER = ".packing.jsonl"  # what an older version noted; its packing is not gone on with

_LISTED = 5
_SHARD = re.compile(r"\w+-\d{5,}\.(parquet|tar)")
_UNSPLIT = "part"  # shards of a set without splits; no word for a split, so that all of them are the set


class BrokenImage(NamedTuple):
    """An image that was left out. number: in its split's order."""

    number: int
    name: str
    reason: str


PACKED = """
Each image whose shorter side was longer than the limit was shrunk to it and written anew; the others keep their bytes.
Images that could not be decoded are left out. `manifest.json` beside the shards holds the SHA-256 of each, to which
`situs data check` holds them.
"""


@dataclass(frozen=True, kw_only=True)
class Packed(Result):
    """A folder of shards. manifest: what its manifest.json says. again: whether it was there already, and was left."""

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
        return Summary(sentence, (Table("Packed", header, rows),), tuple(notes), ((f"{images:,}", "images packed"),))

    @property
    def title(self) -> str:
        return f"{self.provenance.facts.get('data', 'images')}: packed"

    @property
    def tone(self) -> Tone:
        return "unsure" if self.broken else "good"

    @property
    def mark(self) -> str:
        return "Some left out" if self.broken else "All packed"

    def figures(self) -> list[Figure]:
        """The images of each split."""
        images: dict[str, int] = {}
        for shard in self.manifest["shards"]:
            images[shard["split"] or "all"] = images.get(shard["split"] or "all", 0) + shard["images"]
        return [Figure("", "", "bars", (images, "images"))]

    def details(self) -> list[Table]:
        """Every image that was left out."""
        rows = [[each["split"] or "all", each["name"], each["reason"]] for each in self.broken]
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
        with lock_folder(out):
            if start_over:
                clear(out)
            return packing.run()
    except OSError as error:
        said = (error.strerror or str(error)).lower()
        raise SitusError(
            f"{out}: could not be written: {said}; the packed part stays, and the same command continues",
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

    def run(self) -> Packed:
        asked = {"config": self.how.told(), "splits": self.splits}
        whole = read_manifest(self.out)
        if whole is not None:
            return self._again(whole, asked)
        self._check_empty()
        source = self._open(self.splits[0])  # whatever is wrong with it is told before anything is written
        self.state = self._begun(asked)
        for split in self.splits:
            self._pack_split(split, source or self._open(split))
            source = None
        state = self.state
        if not state["shards"]:
            reason = next((each["reason"] for each in state["broken"]), "it is empty")
            clear(self.out)
            raise DataError(f"{self.path}: none of its images can be read; {reason}")
        if self.classes is not None and self.how.format == "webdataset":
            write_text(self.out / CLASSES, "".join(f"{name}\n" for name in self.classes))
        facts = {"data": self._name(), "fingerprints": state["fingerprints"], "classes": self.classes}
        shards = [{key: value for key, value in shard.items() if key != "end"} for shard in state["shards"]]
        manifest = {"kind": KIND, "version": 1, **asked, **facts, "left_out": self.left_out, "shards": shards}
        manifest["broken"] = state["broken"]
        write_text(self.out / MANIFEST, json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
        (self.out / BEGUN).unlink(missing_ok=True)
        return self._result(manifest, again=False)

    def _begun(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What is packed already: the shards that lie there, and of each split the first image that is not done."""
        if not (self.out / BEGUN).is_file():
            state = {**asked, "fingerprints": {}, "done": {}, "shards": [], "broken": []}
            write_text(self.out / BEGUN, json.dumps(state))  # before any shard, which else would be a stranger's
            return state
        state = read_json(self.out / BEGUN)
        if differs := ", ".join(key for key in asked if asked[key] != state.get(key)):
            raise SitusError(
                f"{self.out}: holds an unfinished packing with another {differs}; start over, or pack elsewhere",
                field=("start_over", "out"),
            )
        there = [*takewhile(lambda shard: not check_size(self.out, shard), state["shards"])]
        if len(there) < len(state["shards"]):  # all behind a lost one are made anew
            done = {shard["split"]: shard["end"] for shard in there}
            broken = [each for each in state["broken"] if each["number"] < done.get(each["split"], 0)]
            state |= {"shards": there, "done": done, "broken": broken}
        return state

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
        if (self.out / _OLDER).is_file():
            raise SitusError(
                f"{self.out}: holds an unfinished packing of an older version; start over, or pack elsewhere",
                field=("start_over", "out"),
            )
        begun = (self.out / BEGUN).is_file()
        for file in self.out.iterdir():
            if file.name.startswith(".") and file.name.endswith(".tmp"):
                file.unlink()  # of a packing that was killed
            elif not begun and file.name != LOCK:
                raise SitusError(
                    f"{self.out}: holds {plain(file.name)} already; pack into an empty folder", field="out"
                )

    def _open(self, split: str) -> Source:
        return open_source(self.path, split or None, channels=self.how.channels, multi_label=self.how.multi_label)

    def _pack_split(self, split: str, source: Source) -> None:
        mark = _fingerprint(source)
        if self.state["fingerprints"].setdefault(split, mark) != mark:
            raise SitusError(
                f"{source.name}: its images have changed since the packing began; start over, or pack elsewhere",
                field=("start_over", "out"),
            )
        self.left_out += source.notes
        names, start = self._share_classes(source), self.state["done"].get(split, 0)
        number = sum(shard["split"] == split for shard in self.state["shards"])
        self.tell(start, len(source), split or "images")
        shard: Shard | None = None
        broken: list[BrokenImage] = []
        try:
            for items in in_order(partial(_items, source, self.how), range(start, len(source)), self.workers):
                for item in items:
                    if isinstance(item, BrokenImage):
                        broken.append(item)
                        continue
                    if shard is not None and shard.payload + len(item.stored.data) > self.how.shard_mib * 2**20:
                        self._keep(split, shard, item.number, broken)
                        shard, broken, number = None, [], number + 1
                    shard = shard or new_shard(self.out, f"{split or _UNSPLIT}-{number:05d}", self.how, names)
                    shard.add(item)
                self.tell(items[-1].number + 1, len(source), split or "images")
            self._keep(split, shard, len(source), broken)
            shard = None
        finally:
            if shard is not None:
                shard.drop()

    def _keep(self, split: str, shard: Shard | None, end: int, broken: list[BrokenImage]) -> None:
        """Ends a shard before image `end`, and notes it: a packing that is killed goes on from there."""
        if shard is not None:
            self.state["shards"].append({"split": split, **shard.keep(), "end": end})
        self.state["broken"] += [{"split": split, **each._asdict()} for each in broken]
        self.state["done"][split] = end
        write_text(self.out / BEGUN, json.dumps(self.state))

    def _share_classes(self, source: Source) -> tuple[str, ...] | None:
        """The class names as they are written: one line each."""
        if source.classes is None:
            return None
        lines = (" ".join(plain(name).splitlines()) for name in source.classes)
        names = tuple(line or str(number) for number, line in enumerate(lines))
        if self.how.multi_label and (len({*names}) < len(names) or IMAGE in names):
            twice = next(name for name in names if names.count(name) > 1 or name == IMAGE)
            raise DataError(f"{source.name}: the class {twice!r} cannot be a column beside the others")
        known = self.classes or ()
        shorter = min(len(known), len(names))
        if known[:shorter] != names[:shorter]:
            raise DataError(f"{source.name}: its classes differ from those of the other splits")
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


def clear(folder: Path) -> None:
    """Takes away what a packing wrote: what it noted, its manifest and its shards."""
    names = {shard["file"] for shard in (read_manifest(folder) or {"shards": []})["shards"]}
    if any((folder / noted).is_file() for noted in (BEGUN, _OLDER)):  # it began in an empty folder
        names |= {file.name for file in folder.iterdir() if _SHARD.fullmatch(file.name)}
    (folder / MANIFEST).unlink(missing_ok=True)  # first: without its shards it would be a lie
    for name in (*names, CLASSES) if names else ():
        (folder / Path(name).name).unlink(missing_ok=True)
    for noted in (BEGUN, _OLDER):
        (folder / noted).unlink(missing_ok=True)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f}"
