"""The image files below a folder, and what else lies there.

Links are followed, but each folder is read once: under its own path where that lies below, else under the first link
that leads to it. So a link in a circle adds nothing. Only regular files are taken: opening a pipe would wait for ever.
"""

from __future__ import annotations

import heapq
import os
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from situs.data.sources.images import IMAGE_SUFFIXES, is_image

OTHER, SPECIAL = "other", "pipes, devices or links to nothing"
AGAIN, CLOSED = "links to a folder that is read already", "folders that cannot be read"
"""Why something is left out."""

_SHOWN = 5
_FOLDER, _SAMPLE = "folder", "sample"


@dataclass
class LeftOut:
    """What was left out, without a list of it. counts: how many, by why. first: of each the first by code point.

    kinds: how many of each ending, of what is no sample by its name. things: what samples are called.
    """

    things: str = "images"
    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)

    def add(self, why: str, name: str) -> None:
        """One more."""
        self.counts[why] = self.counts.get(why, 0) + 1
        self.first[why] = min(self.first.get(why, name), name)
        if why == OTHER:
            kind = _suffix(name) or "no ending"
            self.kinds[kind] = self.kinds.get(kind, 0) + 1

    def notes(self, where: str) -> list[str]:
        """A sentence for each reason."""
        listed = ", ".join(f"{kind} {count}" for kind, count in Counter(self.kinds).most_common(_SHOWN))
        words = {OTHER: f"no {self.things} by their names: {listed}"}
        return [
            f"{where}: left out {self.counts[why]:,} ({words.get(why, why)}); the first: {plain(self.first[why])}"
            for why in (OTHER, SPECIAL, AGAIN, CLOSED)
            if why in self.counts
        ]


def plain(name: str) -> str:
    """A file's name as it can be printed, whatever bytes it is made of."""
    return name.encode("utf-8", "backslashreplace").decode().replace("\n", "\\n")


def walk(
    root: Path, known: Collection[str] = (), suffixes: Collection[str] = IMAGE_SUFFIXES, things: str = "images"
) -> tuple[list[str], LeftOut]:
    """Every sample below `root`, sorted by code point so that no locale changes the order, and what was left out.

    Paths are relative to `root`. Hidden files and folders, whose names open with a dot, are in neither, nor are files
    that are `known` to be none. suffixes: of samples; an image needs none. Raises OSError where `root` cannot be read.
    """
    files, left_out, seen = list[str](), LeftOut(things), set[tuple[int, int]]()
    own, linked = [""], list[str]()  # folders as "a/b/": real ones come first, links in the order of their paths
    while own or linked:
        folder = own.pop() if own else heapq.heappop(linked)
        try:
            state = (root / folder).stat()
            if (state.st_dev, state.st_ino) in seen:
                left_out.add(AGAIN, folder)
                continue
            seen.add((state.st_dev, state.st_ino))
            with os.scandir(root / folder) as entries:
                for entry in entries:
                    name = folder + entry.name
                    kind = _kind(entry, suffixes) if not entry.name.startswith(".") and name not in known else None
                    if kind == _FOLDER and entry.is_symlink():
                        heapq.heappush(linked, f"{name}/")
                    elif kind == _FOLDER:
                        own.append(f"{name}/")
                    elif kind == _SAMPLE:
                        files.append(name)
                    elif kind is not None:
                        left_out.add(kind, name)
        except OSError:
            if not folder:
                raise
            left_out.add(CLOSED, folder)
    return sorted(files), left_out


def _kind(entry: os.DirEntry[str], suffixes: Collection[str]) -> str:
    """A folder, a sample, or why it is left out."""
    try:
        if entry.is_dir():
            return _FOLDER
        if not entry.is_file():
            return SPECIAL
        bare = suffixes is IMAGE_SUFFIXES and "." not in entry.name
        return _SAMPLE if _suffix(entry.name) in suffixes or (bare and _looks_like_image(entry.path)) else OTHER
    except OSError:  # a link to itself
        return SPECIAL


def _suffix(name: str) -> str:
    _, dot, ending = name.rpartition("/")[2].rpartition(".")
    return dot + ending.lower() if dot else ""


def _looks_like_image(path: str) -> bool:
    try:
        with Path(path).open("rb") as file:
            return is_image(file.read(16))
    except OSError:
        return True  # as with an ending: the reader names what cannot be read
