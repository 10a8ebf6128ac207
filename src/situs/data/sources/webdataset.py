"""WebDataset shards: plain tar files in which `0001.jpg` and `0001.cls` are one sample.

Opening reads every header once, into an index of offsets that is kept for the next time; afterwards any sample is one
read at its place, so shuffling can be exact and needs no buffer. Where blocks of samples are released when they are
used up (`situs.data.blocks`), each is read in one go.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from functools import cached_property
from pathlib import Path

import numpy as np

from situs.data.sources.base import (
    ANY,
    SPLITS,
    Blocks,
    EncodedSource,
    Wanted,
    check_state,
    find_shards,
    number_names,
    split_of,
    unseen,
)
from situs.data.sources.folder import plain
from situs.data.sources.images import check_bytes
from situs.data.sources.remote import USUAL_BYTES, is_kept, open_shard
from situs.data.sources.tar_index import open_index
from situs.errors import BrokenSampleError, DataError, SitusError, counted

_BLOCK = 4 << 20  # bytes: long enough for a disk to read them about as fast as it can


class TarSource(EncodedSource):
    """The samples of one split's shards, in the order of shard names and of the samples within them.

    Class names come from a `classes.txt` beside the shards, one a line, else the numbers serve as names.
    """

    def __init__(self, path: Path, wanted: Wanted = ANY) -> None:
        self._shards = find_shards(path, ".tar", wanted.split)
        self._index = open_index(self._shards, wanted.labels)
        self._ends: list[int] = self._index.arrays["ends"].tolist()  # of the shards
        self._remote = is_kept(self._shards[0])
        self._held: dict[int, tuple[int, bytes]] | None = None  # of each block its first byte's place, and its bytes
        if not len(self._index):
            raise DataError(f"{path}: its tar files hold no images")
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
        self.notes = self._index.left_out.notes(self.name)
        if chosen in (None, *SPLITS["train"]):
            self.notes += unseen(self.name, classes, np.unique(labels))

    def __len__(self) -> int:
        return len(self._index)

    def _file(self, index: int) -> Path:
        return self._shards[bisect_right(self._ends, index)]

    def blocks(self) -> Blocks:
        """Runs of samples that lie behind each other in a shard; of a remote set whole shards, which come whole.

        What is dear does not depend on what this machine's cache may hold: a run goes on with the same order anywhere.
        """
        ends, total = self._index.arrays["ends"], sum(size for size, _ in self._index.states)
        if self._remote:
            return Blocks(np.unique(ends[ends > 0]), total, total > USUAL_BYTES, "shards")
        return Blocks(self._block_ends, total, dear=False, name="pieces of shards")

    @cached_property
    def _block_ends(self) -> np.ndarray:
        """[m] int64, where each block ends: by the place of its first byte in its shard."""
        offsets, ends, start = self._index.arrays["offsets"], [], 0
        for stop, (size, _) in zip(self._ends, self._index.states, strict=True):
            ends.append(start + np.searchsorted(offsets[start:stop], np.arange(_BLOCK, size, _BLOCK)))
            ends.append(np.array([stop]))
            start = stop
        found = np.unique(np.concatenate(ends))
        return found[found > 0]

    def release(self, index: int | None = None) -> None:
        """A block that is not needed for now; from the first call on blocks are read whole, and held till then."""
        if self._remote:
            return  # its shards lie on the disk, and give way there
        if index is None or self._held is None:
            self._held = {}
        if index is not None:
            self._held.pop(self._block(index), None)

    def _block(self, index: int) -> int:
        return int(np.searchsorted(self._block_ends, index, "right"))

    def payload(self, index: int) -> bytes:
        size, offset = (int(self._index.arrays[name][index]) for name in ("sizes", "offsets"))
        check_bytes(size, lambda: self.entry(index))
        if self._held is None:
            return self._read(index, offset, size)
        block = self._block(index)
        if block not in self._held:
            first = int(self._block_ends[block - 1]) if block else 0
            last = int(self._block_ends[block]) - 1
            begin, past = (int(self._index.arrays["offsets"][at]) for at in (first, last))
            length = past + int(self._index.arrays["sizes"][last]) - begin
            if length > 2 * _BLOCK + size:  # one of them is far too large for an image
                return self._read(index, offset, size)
            self._held[block] = begin, self._read(index, begin, length)
        begin, data = self._held[block]
        return data[offset - begin : offset - begin + size]

    def _read(self, index: int, offset: int, size: int) -> bytes:
        """Bytes of the shard of an image, which must be what the index was made of."""
        number = bisect_right(self._ends, index)
        file = self._shards[number]
        try:
            handle = open_shard(file) if self._remote else os.open(file, os.O_RDONLY)
        except OSError as error:  # of all its images, and of none
            said = (error.strerror or str(error)).lower()
            raise DataError(f"{file}: cannot be opened any more ({said})") from error
        try:
            check_state(file, os.fstat(handle), self._index.states[number])
            return os.pread(handle, size, offset)
        except OSError as error:
            raise BrokenSampleError(f"{self.entry(index)}: cannot be read ({error.strerror or error})") from error
        finally:
            os.close(handle)

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
        raise SitusError(f"{file}: names {counted(len(names), 'classes')}, the shards use {count}")
    return names
