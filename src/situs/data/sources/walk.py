"""The image files below a folder, and what else lies there.

Links are followed, but each folder is read once: under its own path where that lies below, else under the first link
that leads to it. So a link in a circle adds nothing. Only regular files are taken: opening a pipe would wait for ever.
"""

from __future__ import annotations

import heapq
import os
from collections import Counter
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
        kinds = Counter(_suffix(name) or "no ending" for name in self.others).most_common(_SHOWN)
        told = {
            f"no images by their names: {', '.join(f'{kind} {count}' for kind, count in kinds)}": self.others,
            "pipes, devices or links to nothing": self.special,
            "links to a folder that is read already": self.again,
            "folders that cannot be read": self.closed,
        }
        return [
            f"{where}: left out {len(names):,} ({what}); the first: {plain(min(names))}"
            for what, names in told.items()
            if names
        ]


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
