"""Fingerprints of data sets: the same for a copy at another path, another for other data at the same path."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

PIECE = 64 * 1024
"""Bytes that are read at the beginning and at the end of a file."""

READ = 32
"""Files of which pieces are read, spread evenly over all of them."""


def fingerprint(path: str | Path, ending: str | tuple[str, ...] = "") -> str:
    """A hash of a file or folder: names, sizes and pieces of some files, not dates; of an address, its text alone.

    Hidden files (caches, locks) do not count. ending: in a folder only files whose names end so count.
    """
    root, hashed = Path(path), hashlib.blake2b(digest_size=8)
    if "://" in str(path):
        hashed.update(str(path).encode())
        return hashed.hexdigest()
    files = (
        sorted(file for file in _files(root) if file[0].endswith(ending))
        if root.is_dir()
        else [("", root.stat().st_size)]
    )
    for name, size in files:
        hashed.update(f"{name}\0{size}\n".encode("utf-8", "surrogateescape"))
    for name, size in files[:: max(1, -(-len(files) // READ))]:
        with (root / name if name else root).open("rb") as file:
            hashed.update(file.read(PIECE))
            file.seek(max(PIECE, size - PIECE))
            hashed.update(file.read(PIECE))
    return hashed.hexdigest()


def _files(root: Path) -> Iterator[tuple[str, int]]:
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            file = Path(folder) / name
            if not name.startswith(".") and file.is_file():
                yield file.relative_to(root).as_posix(), file.stat().st_size
