"""`pack`: any source as shards, before a run.

Worker processes shrink the images; this process writes them in the set's order, so the same set gives the same bytes
with any number of workers and after any number of interruptions.
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
from situs.data.sources.folder import printable
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
"""The state of an unfinished packing, beside its shards; the manifest replaces it at the end."""

_OLDER = ".packing.jsonl"  # an older version's state, which cannot be resumed

_LISTED = 5
_SHARD = re.compile(r"\w+-\d{5,}\.(parquet|tar)")
_UNSPLIT = "part"  # the name of shards of a set without splits: not the name of a split


class BrokenImage(NamedTuple):
    """An image that was left out. number: in its split's order."""

    number: int
    name: str
    reason: str


PACKED = """
Each image whose shorter side was longer than the limit was shrunk to it and encoded again; the others keep their bytes.
Images that could not be decoded are left out. `manifest.json` beside the shards has the SHA-256 of each, which
`situs data check` verifies.
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
        left_out = f"; {len(self.broken):,} broken left out" if self.broken else ""
        word = "was packed already" if self.again else "packed"
        packed = f"{counted(images, 'images')} in {counted(len(shards), 'shards')} of {size} MiB{left_out}"
        sentence = f"{self.manifest['data']}: {word}, {packed}."
        notes = [f"broken: {image['reason']}" for image in self.broken[:_LISTED]]
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
        reason = (error.strerror or str(error)).lower()
        raise SitusError(
            f"{out}: could not be written: {reason}; the packed part stays, and the same command continues",
            field="out",
        ) from error


def _check_place(path: str | Path, out: Path) -> None:
    data, target = Path(path).expanduser().resolve(), out.resolve()
    if not is_remote(path) and (target == data or (data.is_dir() and data in target.parents)):
        raise SitusError(field="out", value=str(out), allowed="outside of what is packed")
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
            raise _start_over(f"{self.out}: holds an unfinished packing with another {differs}")
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
            raise _start_over(f"{self.out}: holds a set packed with another {', '.join(differs)}")
        return self._result(manifest, again=True)

    def _check_empty(self) -> None:
        """Refuses a folder with anything but an unfinished packing: readers would take other shards for its part."""
        if (self.out / _OLDER).is_file():
            raise _start_over(f"{self.out}: holds an unfinished packing of an older version")
        begun = (self.out / BEGUN).is_file()
        for file in self.out.iterdir():
            if file.name.startswith(".") and file.name.endswith(".tmp"):
                file.unlink()  # of a packing that was killed
            elif not begun and file.name != LOCK:
                reason = f"holds {printable(file.name)} already; pack into an empty folder"
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
            raise DataError(f"{source.name}: the class {twice!r} cannot be a column of its own")
        others = self.classes or ()
        shorter = min(len(others), len(names))
        if others[:shorter] != names[:shorter]:
            raise DataError(f"{source.name}: its classes differ from those of the other splits")
        self.classes = max(others, names, key=len)
        return names


def _start_over(reason: str) -> SitusError:
    """The error for a folder whose packing cannot be resumed."""
    return SitusError(f"{reason}; start over, or pack elsewhere", field=("start_over", "out"))


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
    if any((folder / state).is_file() for state in (BEGUN, _OLDER)):  # it began in an empty folder
        names |= {file.name for file in folder.iterdir() if _SHARD.fullmatch(file.name)}
    (folder / MANIFEST).unlink(missing_ok=True)  # first: without its shards it would be wrong
    for name in (*names, CLASSES) if names else ():
        (folder / Path(name).name).unlink(missing_ok=True)
    for state in (BEGUN, _OLDER):
        (folder / state).unlink(missing_ok=True)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f}"
