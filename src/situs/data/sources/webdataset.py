"""WebDataset shards: plain tar files in which `0001.jpg` and `0001.cls` are one sample.

Opening reads every header once, into an index of offsets that is kept for the next time; afterwards any sample is one
read at its place, so shuffling is exact and needs no buffer.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from pathlib import Path

import numpy as np

from situs.data.sources.base import ANY, EncodedSource, Wanted, find_shards, number_names, split_of
from situs.data.sources.images import BrokenImageError, check_bytes
from situs.data.sources.remote import open_shard
from situs.data.sources.tar_index import open_index
from situs.data.sources.walk import LeftOut, plain
from situs.errors import SitusError


class TarSource(EncodedSource):
    """The samples of one split's shards, in the order of shard names and of the samples within them.

    Class names come from a `classes.txt` beside the shards, one a line, else the numbers serve as names.
    """

    def __init__(self, path: Path, wanted: Wanted = ANY) -> None:
        self._shards = find_shards(path, ".tar", wanted.split)
        self._index = open_index(self._shards, wanted.labels)
        if not len(self._index):
            raise SitusError(f"{path}: its tar files hold no images", field="data")
        labels = self._index.arrays["labels"]
        most = int(labels.max())
        if most >= 0 and (lonely := np.flatnonzero(labels < 0)).size:
            first = int(lonely[0])
            raise SitusError(f"{self._file(first)}: {self._index.name(first)} has no .cls, others have one")
        classes = None
        if most >= 0:
            folder = path if path.is_dir() else path.parent
            classes = _class_names(folder / "classes.txt", most + 1)
        chosen = split_of(self._shards[0])
        super().__init__(path.stem + (f" ({chosen})" if chosen else ""), classes, wanted.channels, wanted.strict)
        self.notes = LeftOut.notes(self.name, self._index.left_out)

    def __len__(self) -> int:
        return len(self._index)

    def _file(self, index: int) -> Path:
        return self._shards[bisect_right(self._index.ends, index)]

    def payload(self, index: int) -> bytes:
        size, offset = (int(self._index.arrays[name][index]) for name in ("sizes", "offsets"))
        check_bytes(size, self.entry(index))
        try:
            handle = open_shard(self._file(index))
            try:
                return os.pread(handle, size, offset)
            finally:
                os.close(handle)
        except OSError as error:
            raise BrokenImageError(f"{self.entry(index)}: cannot be read ({error.strerror or error})") from error

    def label(self, index: int) -> int | None:
        return None if self.classes is None else int(self._index.arrays["labels"][index])

    def entry(self, index: int) -> str:
        return plain(f"{self._file(index)}, {self._index.name(index)}")

    def key(self, index: int) -> str:
        return f"{self._file(index).name}/{self._index.name(index)}"


def _class_names(file: Path, count: int) -> tuple[str, ...]:
    if not file.is_file():
        return number_names(count - 1, str(file.parent))
    try:
        names = tuple(line for line in file.read_text(encoding="utf-8").splitlines() if line)
    except UnicodeDecodeError as error:
        raise SitusError(f"{file}: must be UTF-8 text, one class a line ({error.reason})") from error
    if len(names) < count:
        raise SitusError(f"{file}: names {len(names)} classes, the shards use {count}")
    return names
