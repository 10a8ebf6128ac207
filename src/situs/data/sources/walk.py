"""The image files below a folder, and what else lies there.

Links are followed, but each folder is read once: under its own path where that lies below, else under the first link
that leads to it. So a link in a circle adds nothing. Only regular files are taken: opening a pipe would wait for ever.
"""

from __future__ import annotations

import heapq
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from situs.data.sources.images import IMAGE_SUFFIXES, is_image

_SHOWN = 5


@dataclass
class FilesFound:
    """Paths relative to the folder. files: images, sorted by code point so that no locale changes the order.

    others: regular files that are no images by their names, or without an ending and by their first bytes. special:
    pipes, devices, links to nothing. again: links to folders that are read already. closed: folders that cannot be
    read. Hidden files and folders, whose names open with a dot, are in none of them.
    """

    files: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    special: list[str] = field(default_factory=list)
    again: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)

    def notes(self, where: str) -> list[str]:
        """What was left out, a sentence each."""
        left_out = LeftOut()
        for name in self.others:
            left_out.add_other(name)
        for name in self.special:
            left_out.add_special(name)
        told = {"links to a folder that is read already": self.again, "folders that cannot be read": self.closed}
        more = [_sentence(where, len(names), what, min(names)) for what, names in told.items() if names]
        return [*LeftOut.notes(where, [left_out]), *more]


@dataclass
class LeftOut:
    """How much was left out, without a list of it. kinds: how many of each ending, of what is no image by its name.

    special: how many pipes, devices and links. The first of each is the first by code point.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    first_other: str | None = None
    special: int = 0
    first_special: str | None = None

    def add_other(self, name: str) -> None:
        """A file that is no image by its name."""
        self.kinds[_suffix(name) or "no ending"] += 1
        self.first_other = name if self.first_other is None else min(self.first_other, name)

    def add_special(self, name: str) -> None:
        """A pipe, a device or a link."""
        self.special += 1
        self.first_special = name if self.first_special is None else min(self.first_special, name)

    @staticmethod
    def notes(where: str, parts: Iterable[LeftOut]) -> list[str]:
        """What was left out of all parts, a sentence each."""
        parts = list(parts)
        kinds: Counter[str] = Counter()
        for part in parts:
            kinds.update(part.kinds)
        listed = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common(_SHOWN))
        others = [part.first_other for part in parts if part.first_other is not None]
        special = [part.first_special for part in parts if part.first_special is not None]
        found = []
        if others:
            found.append(_sentence(where, kinds.total(), f"no images by their names: {listed}", min(others)))
        if special:
            count = sum(part.special for part in parts)
            found.append(_sentence(where, count, "pipes, devices or links to nothing", min(special)))
        return found


def _sentence(where: str, count: int, what: str, first: str) -> str:
    return f"{where}: left out {count:,} ({what}); the first: {plain(first)}"


def plain(name: str) -> str:
    """A file's name as it can be printed, whatever bytes it is made of."""
    return name.encode("utf-8", "backslashreplace").decode().replace("\n", "\\n")


def walk(root: Path) -> FilesFound:
    """Every image below `root`. Raises OSError where `root` itself cannot be read."""
    found, seen = FilesFound(), set()
    own, linked = [""], []  # folders as "a/b/": real ones come first, links in the order of their paths
    while own or linked:
        folder = own.pop() if own else heapq.heappop(linked)
        try:
            state = (root / folder).stat()
            if (state.st_dev, state.st_ino) in seen:
                found.again.append(folder)
                continue
            seen.add((state.st_dev, state.st_ino))
            with os.scandir(root / folder) as entries:
                for entry in entries:
                    if not entry.name.startswith("."):
                        _sort_in(entry, folder, found, own, linked)
        except OSError:
            if not folder:
                raise
            found.closed.append(folder)
    found.files.sort()
    return found


def _sort_in(entry: os.DirEntry[str], folder: str, found: FilesFound, own: list[str], linked: list[str]) -> None:
    name = folder + entry.name
    try:
        if entry.is_dir():
            if entry.is_symlink():
                heapq.heappush(linked, f"{name}/")
            else:
                own.append(f"{name}/")
        elif not entry.is_file():
            found.special.append(name)
        elif _suffix(entry.name) in IMAGE_SUFFIXES or ("." not in entry.name and _looks_like_image(entry.path)):
            found.files.append(name)
        else:
            found.others.append(name)
    except OSError:  # a link to itself
        found.special.append(name)


def _suffix(name: str) -> str:
    _, dot, ending = name.rpartition("/")[2].rpartition(".")
    return dot + ending.lower() if dot else ""


def _looks_like_image(path: str) -> bool:
    try:
        with Path(path).open("rb") as file:
            return is_image(file.read(16))
    except OSError:
        return True  # as with an ending: the reader names what cannot be read
