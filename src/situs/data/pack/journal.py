"""What is known of a packed folder: a journal while it is made, a manifest when it is whole.

The journal has one line for what is packed and how, and one for each shard when the shard lies on the disk, so a killed
packing loses the shard it was at and goes on behind the last line. The manifest is written last: where there is one,
the folder is whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from situs.data.sources.manifest import CLASSES, KIND, MANIFEST, read_manifest
from situs.errors import SitusError
from situs.files import write_text

JOURNAL = ".packing.jsonl"


class BrokenImage(NamedTuple):
    """An image that was left out. number: in its split's order."""

    number: int
    name: str
    reason: str


class Entry(NamedTuple):
    """A shard. of: the fingerprint of its split. file: "" where nothing but broken images was left.

    source_bytes: of the images before they were packed. end: number of the first image behind it, in its split. broken:
    those left out since the shard before.
    """

    split: str
    of: str
    file: str
    sha256: str
    bytes: int
    source_bytes: int
    images: int
    end: int
    broken: tuple[BrokenImage, ...]

    @classmethod
    def read(cls, held: dict[str, Any]) -> Entry:
        return cls(**{**held, "broken": tuple(BrokenImage(*each) for each in held["broken"])})


class Journal:
    """The shards that are done, in order. asked: what is packed and how; another packing's journal is refused."""

    def __init__(self, folder: Path, asked: dict[str, Any]) -> None:
        self.path, self.asked = folder / JOURNAL, asked
        self.entries: list[Entry] = []
        lines = [*_whole_lines(self.path)]
        if lines and lines[0] != asked:
            differs = ", ".join(key for key in asked if asked[key] != lines[0].get(key))
            raise SitusError(
                f"{folder}: holds a packing that was begun with another {differs}; start over, or pack elsewhere",
                field=("start_over", "out"),
            )
        for held in lines[1:]:
            entry = Entry.read(held)
            file = folder / entry.file
            if entry.file and not (file.is_file() and file.stat().st_size == entry.bytes):
                break  # it and all behind it are made anew
            self.entries.append(entry)
        text = "".join(map(_line, [asked, *(entry._asdict() for entry in self.entries)]))
        write_text(self.path, text)  # without the torn end that a kill may have left

    def add(self, entry: Entry) -> None:
        """A shard that lies on the disk."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(entry._asdict()))
            file.flush()
            os.fsync(file.fileno())
        self.entries.append(entry)

    def done(self, split: str) -> int:
        """How many images of a split are done."""
        return max((entry.end for entry in self.entries if entry.split == split), default=0)

    def of(self, split: str) -> list[Entry]:
        """The shards of a split."""
        return [entry for entry in self.entries if entry.split == split]

    def finish(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Writes the manifest and takes the journal away."""
        shards = [entry._asdict() for entry in self.entries if entry.file]
        for shard in shards:
            del shard["broken"], shard["end"], shard["of"]
        broken = [{"split": entry.split, **each._asdict()} for entry in self.entries for each in entry.broken]
        manifest = {"kind": KIND, "version": 1, **self.asked, **facts, "shards": shards, "broken": broken}
        write_text(self.path.parent / MANIFEST, json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
        self.path.unlink()
        return manifest


def clear(folder: Path) -> None:
    """Takes away what a packing wrote: its journal, its manifest and the shards that they name."""
    whole, begun = read_manifest(folder), [*_whole_lines(folder / JOURNAL)]
    if whole is None and not begun:
        return
    names = {shard["file"] for shard in whole["shards"]} if whole else set()
    names |= {held.get("file", "") for held in begun[1:]} | {CLASSES}
    (folder / MANIFEST).unlink(missing_ok=True)  # first: without its shards it would be a lie
    for name in filter(None, names):
        (folder / Path(name).name).unlink(missing_ok=True)
    (folder / JOURNAL).unlink(missing_ok=True)


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            held = json.loads(line)
        except ValueError:
            return
        if not line.endswith("\n") or not isinstance(held, dict):
            return
        yield held


def _line(held: dict[str, Any]) -> str:
    return json.dumps(held) + "\n"  # ASCII: a line is what ends in a line feed and in nothing else
