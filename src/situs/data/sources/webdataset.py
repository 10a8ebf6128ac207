"""WebDataset shards: plain tar files in which `0001.jpg` and `0001.cls` are one sample.

Opening reads every header once, into an index of offsets, about 40 bytes per sample, that is cached for the next time;
afterwards any sample is one read, so shuffling can be exact and needs no buffer. Where blocks of samples are released
after use (`situs.data.sampler`), each block is one read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tarfile
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from situs.data.batch import VOID
from situs.data.sources.base import (
    ANY,
    SPLITS,
    Blocks,
    EncodedSource,
    Wanted,
    check_state,
    find_shards,
    split_name,
    split_of,
)
from situs.data.sources.folder import OTHER, SPECIAL, LeftOut, printable
from situs.data.sources.images import IMAGE_SUFFIXES, check_bytes
from situs.data.sources.labels import note_unseen, number_names
from situs.data.sources.manifest import CLASSES
from situs.data.sources.remote import DEFAULT_BYTES, ensure_local, is_remote_shard, open_shard
from situs.errors import BrokenSampleError, DataError, SitusError, counted, reason_of
from situs.files import cache_folder
from situs.folder_lock import in_turn

_END = 1024  # zeros, at the end of every archive
_LONGEST_NUMBER = 32  # bytes of a .cls
_MOST = 2**31 - 1  # a larger class number is refused wherever it is used
_WORTH_CACHING = 4 << 20  # bytes of a shard: the headers of smaller ones are read quickly
_FORMAT = 4
_BLOCK = 4 << 20  # bytes: long enough for the full rate of a disk

_writes_cache = ContextVar("situs.data.sources.webdataset", default=True)


@contextlib.contextmanager
def without_cache_writes() -> Iterator[None]:
    """Within, cached indices are read and none is written: for a dry run."""
    before = _writes_cache.set(False)
    try:
        yield
    finally:
        _writes_cache.reset(before)


class TarSource(EncodedSource):
    """The samples of one split's shards, in the order of shard names and of the samples within them.

    Class names come from a `classes.txt` beside the shards, one per line; without it they are the numbers.
    """

    def __init__(self, path: Path, wanted: Wanted = ANY) -> None:
        self._shards = find_shards(path, ".tar", wanted.split)
        self._index = open_index(self._shards, wanted.labels)
        self._ends: list[int] = self._index.arrays["ends"].tolist()  # of the shards
        self._remote = is_remote_shard(self._shards[0])
        self._blocks: dict[int, tuple[int, bytes]] | None = None  # of each block its offset and its bytes
        if not len(self._index):
            raise DataError(f"{path}: its tar files contain no images")
        labels = self._index.arrays["labels"]
        most = int(labels.max())
        if most >= 0 and (unlabelled := np.flatnonzero(labels < 0)).size:
            first = int(unlabelled[0])
            raise SitusError(
                f"{self._file(first)}: {self._index.name(first)} has no class (.cls file), but other images have one"
            )
        classes = None
        if most >= 0:
            folder = path if path.is_dir() else path.parent
            classes = _class_names(folder / CLASSES, most + 1)
        chosen = split_of(self._shards[0])
        super().__init__(split_name(path.stem, chosen), classes, wanted.channels, wanted.strict)
        self.notes = self._index.left_out.notes(self.name)
        if chosen in (None, *SPLITS["train"]):
            self.notes += note_unseen(self.name, classes, np.unique(labels))

    def __len__(self) -> int:
        return len(self._index)

    def _file(self, index: int) -> Path:
        return self._shards[bisect_right(self._ends, index)]

    def blocks(self) -> Blocks:
        """Consecutive samples of a shard; of a remote set the shards, which are fetched whole.

        `slow_random_access` does not depend on this machine's cache: a run is resumed with the same order anywhere.
        """
        ends, total = self._index.arrays["ends"], sum(size for size, _ in self._index.states)
        if self._remote:
            return Blocks(np.unique(ends[ends > 0]), total, total > DEFAULT_BYTES, "shards")
        return Blocks(self._block_ends, total, slow_random_access=False, name="pieces of shards")

    @cached_property
    def _block_ends(self) -> np.ndarray:
        """[m] int64, where each block ends: a sample belongs to the block that its first byte is in."""
        offsets, ends, start = self._index.arrays["offsets"], [], 0
        for stop, (size, _) in zip(self._ends, self._index.states, strict=True):
            ends.append(start + np.searchsorted(offsets[start:stop], np.arange(_BLOCK, size, _BLOCK)))
            ends.append(np.array([stop]))
            start = stop
        blocks = np.unique(np.concatenate(ends))
        return blocks[blocks > 0]

    def release(self, index: int | None = None) -> None:
        """Releases a block or all; from the first call on blocks are read whole, and stay in memory until then."""
        if self._remote:
            return  # its shards are on the disk, in a cache of limited size
        if index is None or self._blocks is None:
            self._blocks = {}
        if index is not None:
            self._blocks.pop(self._block(index), None)

    def _block(self, index: int) -> int:
        return int(np.searchsorted(self._block_ends, index, "right"))

    def payload(self, index: int) -> bytes:
        size, offset = (int(self._index.arrays[name][index]) for name in ("sizes", "offsets"))
        check_bytes(size, lambda: self.entry(index))
        if self._blocks is None:
            return self._read(index, offset, size)
        block = self._block(index)
        if block not in self._blocks:
            first = int(self._block_ends[block - 1]) if block else 0
            last = int(self._block_ends[block]) - 1
            begin, last_offset = (int(self._index.arrays["offsets"][sample]) for sample in (first, last))
            length = last_offset + int(self._index.arrays["sizes"][last]) - begin
            if length > 2 * _BLOCK + size:  # one of them is far too large for an image
                return self._read(index, offset, size)
            self._blocks[block] = begin, self._read(index, begin, length)
        begin, data = self._blocks[block]
        return data[offset - begin : offset - begin + size]

    def _read(self, index: int, offset: int, size: int) -> bytes:
        """Bytes of the shard of a sample, which must not have changed since it was indexed."""
        number = bisect_right(self._ends, index)
        file = self._shards[number]
        try:
            handle = open_shard(file) if self._remote else os.open(file, os.O_RDONLY)
        except OSError as error:  # concerns all its samples
            raise DataError(f"{file}: cannot be opened any more ({reason_of(error)})") from error
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
        return printable(f"{self._file(index)}, {self._index.name(index)}")

    def key(self, index: int) -> str:
        return f"{self._file(index).name}/{self._index.name(index)}"


def _class_names(file: Path, count: int) -> tuple[str, ...]:
    if not file.is_file():
        return number_names(count - 1, str(file.parent))
    try:
        names = tuple(line for line in file.read_text(encoding="utf-8").splitlines() if line)
    except UnicodeDecodeError as error:
        raise SitusError(f"{file}: must be UTF-8 text, one class per line ({error.reason})") from error
    if len(names) < count:
        raise SitusError(f"{file}: lists only {counted(len(names), 'classes')}, but the shards use {count} classes")
    return names


class TarIndex(NamedTuple):
    """The images of some shards.

    states: size and time of change of each shard when the index was opened. arrays: "offsets", "sizes" and "labels"
    (VOID without one) of the images, their "names" concatenated, where each ends ("name_ends"), and how many images
    there are up to the end of each shard ("ends").
    """

    states: list[tuple[int, int]]
    arrays: dict[str, np.ndarray]
    left_out: LeftOut

    def __len__(self) -> int:
        return len(self.arrays["offsets"])

    def name(self, index: int) -> str:
        """The name of a member, without superfluous slashes."""
        ends = self.arrays["name_ends"]
        text = self.arrays["names"][ends[index - 1] if index else 0 : ends[index]]
        return text.tobytes().decode("utf-8", "surrogateescape")


def open_index(shards: list[Path], labels: bool) -> TarIndex:
    """The images of the shards. labels: read the numbers in the .cls members."""
    states, parts, left_out = [], [], LeftOut()
    for file in shards:
        state = file.stat()
        states.append((state.st_size, state.st_mtime_ns))
        part, others = _open_shard_index(file, state, labels)
        parts.append(part)
        left_out.join(others)
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    before = np.cumsum([0, *(len(part["names"]) for part in parts[:-1])])
    arrays["name_ends"] += np.repeat(before, [len(part["offsets"]) for part in parts])
    return TarIndex(states, arrays | {"ends": np.cumsum([len(part["offsets"]) for part in parts])}, left_out)


_ShardIndex = tuple[dict[str, np.ndarray], LeftOut]


def _open_shard_index(file: Path, state: os.stat_result, labels: bool) -> _ShardIndex:
    """The index of a shard, from the user's cache where it is there and the shard is unchanged."""
    if state.st_size < _WORTH_CACHING:
        return _read_index(file, labels)
    # With the ctime, which no tool sets back; for a remote shard it means nothing.
    mark = np.array([_FORMAT, state.st_size, state.st_mtime_ns, 0 if is_remote_shard(file) else state.st_ctime_ns])
    name = hashlib.blake2b(os.fsencode(f"{labels} {file.resolve()}"), digest_size=16).hexdigest()
    cached = cache_folder("tar") / f"{name}.npz"
    index = _load(cached, mark)
    if index is None and _writes_cache.get():
        with in_turn(cached.parent / ".lock"):  # of several ranks the first reads the shard, the others its index
            index = _load(cached, mark)
            if index is None:
                index = _read_index(file, labels)
                _save(cached, mark, *index)
    return index or _read_index(file, labels)


def _save(file: Path, mark: np.ndarray, arrays: dict[str, np.ndarray], left_out: LeftOut) -> None:
    others = np.frombuffer(json.dumps(vars(left_out)).encode(), np.uint8)
    with contextlib.suppress(OSError):  # a cache that cannot be written: read again at the next start
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.stem}.tmp.npz")  # the lock is held, so only one is written
        contents: dict[str, Any] = {"mark": mark, "left_out": others, **arrays}
        np.savez(temporary, **contents)
        temporary.replace(file)


def _load(file: Path, mark: np.ndarray) -> _ShardIndex | None:
    """A cached index; None where there is none, or where it is damaged or of an older shard."""
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as cached:
            arrays = {name: cached[name] for name in cached.files}  # the zip file has a checksum of each
        if np.array_equal(arrays.pop("mark"), mark):
            return arrays, LeftOut(**json.loads(arrays.pop("left_out").tobytes()))
    except Exception:  # noqa: BLE001  (zip files, NumPy and json raise classes of their own where they are damaged)
        return None
    return None


def _read_index(file: Path, labels: bool) -> _ShardIndex:
    offsets, sizes, name_ends, names = array("q"), array("q"), array("q"), bytearray()
    keys, classes, left_out = list[str](), dict[str, int](), LeftOut()
    for key, name, offset, size in _images(file, labels, classes, left_out):
        keys.append(key)
        offsets.append(offset)
        sizes.append(size)
        names += name.encode("utf-8", "surrogateescape")
        name_ends.append(len(names))
    counts = Counter(keys)
    if twice := next((key for key, count in counts.items() if count > 1 and key in classes), None):
        raise DataError(f"{file}: {printable(twice)!r} has two images and one .cls; a sample must have one image")
    for key in classes.keys() - counts.keys():
        left_out.add(OTHER, f"{key}.cls")
    columns = {"offsets": offsets, "sizes": sizes, "name_ends": name_ends}
    arrays: dict[str, np.ndarray] = {name: np.array(values, np.int64) for name, values in columns.items()}
    arrays["labels"] = np.array([classes.get(key, VOID) for key in keys], np.int32)
    return arrays | {"names": np.frombuffer(bytes(names), np.uint8)}, left_out


def _images(
    file: Path, labels: bool, classes: dict[str, int], left_out: LeftOut
) -> Iterator[tuple[str, str, int, int]]:
    """Key, name, offset and size of each image of a shard; the class of each key goes to `classes`."""
    ensure_local(file)
    images = 0
    try:
        with file.open("rb") as raw, tarfile.open(fileobj=raw, mode="r:") as tar:
            for info in _members(tar):
                if not info.isreg() or info.issparse():
                    left_out.add(SPECIAL, info.name)
                    continue
                folder, base = os.path.split(info.name)
                stem, dot, suffix = base.partition(".")
                key, kind = f"{folder}/{stem}" if folder else stem, f".{suffix.lower()}"
                if kind in IMAGE_SUFFIXES:
                    images += 1
                    yield key, f"{key}{dot}{suffix}", info.offset_data, info.size
                elif kind != ".cls":
                    left_out.add(OTHER, info.name)
                elif labels:
                    number = _class_number(raw, info)
                    if classes.setdefault(key, number) != number:
                        raise ValueError(f"{info.name!r} occurs twice, as {classes[key]} and as {number}")
            _check_end(raw, tar.offset, file, images)
    except SitusError:
        raise
    except Exception as error:  # each field of a header fails in its own way where it is damaged
        raise DataError(
            f"{file}: is not a plain tar of images and class numbers, or is damaged after {counted(images, 'images')} "
            f"({printable(str(error))[:120]})"
        ) from error


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """All but folders."""
    last = -1
    while (info := tar.next()) is not None:
        tar.members.clear()  # pyright: ignore[reportAttributeAccessIssue]  (a gigabyte of a large archive)
        if info.offset <= last or info.size < 0:  # a damaged size would lead back, in an endless loop
            raise tarfile.ReadError(f"{info.name!r} claims {info.size:,} bytes")
        last = info.offset
        if not info.isdir():
            yield info


def _class_number(raw: BinaryIO, info: tarfile.TarInfo) -> int:
    if info.size > _LONGEST_NUMBER:
        raise ValueError(f"{info.name!r} is not a class number: it has {info.size:,} bytes")
    number = int(os.pread(raw.fileno(), info.size, info.offset_data))
    if number < 0:
        raise ValueError(f"{info.name!r} contains a negative class number")
    return min(number, _MOST)


def _check_end(raw: BinaryIO, end: int, file: Path, images: int) -> None:
    """Refuses a tar that does not end as one: Python's reader treats whatever it cannot read as the end."""
    raw.seek(end)
    mark = raw.read(_END)
    if len(mark) < _END or any(mark):
        cut = raw.seek(0, os.SEEK_END) <= end + len(mark) and not any(mark)
        damage = "was cut short" if cut else "is damaged"
        raise DataError(
            f"{file}: {damage} after {counted(images, 'images')} (neither a member nor the end of the archive begins "
            f"at byte {end:,}); copy the file again"
        )
    while part := raw.read(1 << 20):
        if any(part):
            raise DataError(
                f"{file}: the archive ends after {counted(images, 'images')}, but the file continues. Join several "
                "tar files with tar --concatenate, or keep them separate"
            )
