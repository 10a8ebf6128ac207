"""Where the images of tar shards lie: compact arrays, kept in the user's cache and mapped into memory.

About 35 bytes a sample. The kept file is good as long as each shard has the size and the times of change that it had; a
shard that changed is read again, the others are not. It may be deleted at any time. Processes that map it share it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tarfile
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from situs.data.sources.images import IMAGE_SUFFIXES
from situs.data.sources.remote import is_kept, present
from situs.data.sources.tar_headers import BLOCK, SMALL, Member, plain_members
from situs.data.sources.walk import LeftOut, plain
from situs.errors import SitusError, counted
from situs.files import cache_folder, write_bytes

_END = 2 * BLOCK  # zeros, at the end of every archive
_WORTH_KEEPING = 16 << 20  # bytes of shards: less is read in a moment
_FORMAT = 2
_MOST = {"sizes": 2**32 - 1, "labels": 2**31 - 1}  # larger ones are refused wherever they are used
_DTYPES = {np.int64: "I64", np.uint32: "U32", np.int32: "I32", np.uint8: "U8"}
_KINDS = {"offsets": np.int64, "sizes": np.uint32, "labels": np.int32, "name_ends": np.int64, "names": np.uint8}


_keeps = ContextVar("situs.data.sources.tar_index", default=True)


@contextlib.contextmanager
def nothing_kept() -> Iterator[None]:
    """Within, indices are read and none is written: for a run that is only rehearsed."""
    before = _keeps.set(False)
    try:
        yield
    finally:
        _keeps.reset(before)


@dataclass
class TarIndex:
    """The images of some shards.

    arrays: "offsets", "sizes" and "labels" (-1 without one) of the images, their "names" in one piece and where each
    ends there. ends: how many images there are up to the end of each shard. left_out: of each shard. kept: the file
    that the arrays are mapped from, and its number; None where they lie in memory. states: of each shard its size and
    time of change, as it was when the index was opened.
    """

    ends: array[int]
    arrays: dict[str, np.ndarray]
    left_out: list[LeftOut]
    kept: tuple[Path, int] | None = None
    states: list[tuple[int, int]] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "arrays": self.arrays if self.kept is None else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.kept is not None:  # a worker that was started anew maps the file for itself
            with contextlib.suppress(OSError, ValueError, KeyError):
                header, self.arrays = _map(self.kept[0])
                if header["number"] == self.kept[1]:
                    return
            raise SitusError(f"{self.kept[0]}: was changed while it was in use; start again")

    def __len__(self) -> int:
        return len(self.arrays["offsets"])

    def name(self, index: int) -> str:
        """The member's name without needless slashes."""
        ends = self.arrays["name_ends"]
        text = self.arrays["names"][ends[index - 1] if index else 0 : ends[index]]
        return text.tobytes().decode("utf-8", "surrogateescape")


def open_index(shards: list[Path], labels: bool) -> TarIndex:
    """The images of the shards, from the cache where it has them. labels: read the numbers in the .cls members."""
    states = [file.stat() for file in shards]
    index = _known_or_read(shards, [*map(_mark, shards, states)], labels)
    index.states = [(each.st_size, each.st_mtime_ns) for each in states]
    return index


_Mark = tuple[str, int, int, int]


def _mark(file: Path, state: os.stat_result) -> _Mark:
    """What a shard is known by. The last is a time that no tool sets back; of a remote shard it says nothing."""
    return str(file.resolve()), state.st_size, state.st_mtime_ns, 0 if is_kept(file) else state.st_ctime_ns


def _known_or_read(shards: list[Path], found: list[_Mark], labels: bool) -> TarIndex:
    if sum(size for _, size, *_ in found) < _WORTH_KEEPING:
        return _join([_read_shard(file, labels) for file in shards])
    names = "\n".join([f"{_FORMAT} {labels}", *(name for name, *_ in found)])
    kept = cache_folder("tar") / f"{hashlib.blake2b(os.fsencode(names), digest_size=16).hexdigest()}.safetensors"
    known = _load(kept, found)
    if known is not None and all(known[1]):
        return known[0]
    if not _keeps.get():
        return _join([_read_shard(file, labels) for file in shards])
    with _alone(kept):  # of several ranks the first reads the shards, the others find its file
        known = _load(kept, found)
        if known is not None and all(known[1]):
            return known[0]
        parts = [
            _part(known[0], number) if known is not None and known[1][number] else _read_shard(file, labels)
            for number, file in enumerate(shards)
        ]
        with contextlib.suppress(OSError):  # a cache that cannot be written: read again at the next start
            for left in kept.parent.glob(f".{kept.name}.*.tmp"):  # by a process that was killed
                left.unlink()
            _save(kept, parts, found)
            known = _load(kept, found)
    return known[0] if known is not None and all(known[1]) else _join(parts)


# One shard


@dataclass
class _Shard:
    """As `TarIndex`, of one shard, while it is read."""

    offsets: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[int] = field(default_factory=lambda: array("q"))
    name_ends: array[int] = field(default_factory=lambda: array("q"))
    names: bytearray = field(default_factory=bytearray)
    keys: list[str] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    left_out: LeftOut = field(default_factory=LeftOut)

    def add(self, member: Member, labels: bool) -> None:
        if not member.regular:
            self.left_out.add_special(member.name)
            return
        folder, base = os.path.split(member.name) if "/" in member.name else ("", member.name)
        stem, dot, suffix = base.partition(".")
        key = f"{folder}/{stem}" if folder else stem
        kind = f".{suffix.lower()}"
        if kind in IMAGE_SUFFIXES:
            self.keys.append(key)
            self.offsets.append(member.offset)
            self.sizes.append(min(member.size, _MOST["sizes"]))
            self.names += f"{key}{dot}{suffix}".encode("utf-8", "surrogateescape")
            self.name_ends.append(len(self.names))
        elif kind != ".cls":
            self.left_out.add_other(member.name)
        elif labels:
            if member.size > SMALL:
                raise ValueError(f"{member.name!r} is no class number, it has {member.size:,} bytes")
            number = min(int(member.content), _MOST["labels"])
            if self.numbers.setdefault(key, number) != number:
                raise ValueError(f"{member.name!r} stands there twice, as {self.numbers[key]} and as {number}")

    def check_pairs(self, file: Path) -> None:
        """Refuses two images with one class number; a class number without an image is left out."""
        if not self.numbers:
            return
        seen = Counter(self.keys)
        if twice := next((key for key, count in seen.items() if count > 1 and key in self.numbers), None):
            raise SitusError(f"{file}: {plain(twice)!r} has two images and one .cls, a sample has one", field="data")
        for key in self.numbers.keys() - seen.keys():
            self.left_out.add_other(f"{key}.cls")

    def index(self) -> TarIndex:
        labels = array("q", [self.numbers.get(key, -1) for key in self.keys])
        given = {"offsets": self.offsets, "sizes": self.sizes, "labels": labels, "name_ends": self.name_ends}
        arrays = {name: np.array(values, _KINDS[name]) for name, values in given.items()}
        arrays["names"] = np.frombuffer(bytes(self.names), np.uint8)
        return TarIndex(array("q", [len(self.keys)]), arrays, [self.left_out])


def _read_shard(file: Path, labels: bool) -> TarIndex:
    present(file)
    shard = _Shard()
    try:
        members = plain_members(file)
        if members is not None:
            for member in members:
                shard.add(member, labels)
        else:
            with file.open("rb") as raw, tarfile.open(fileobj=raw, mode="r:") as tar:
                for member in _python_members(raw, tar):
                    shard.add(member, labels)
                _check_end(raw, tar.offset, file, len(shard.keys))
    except SitusError:
        raise
    except Exception as error:  # each field of a header fails in its own way where it is damaged
        reason = plain(str(error))[:120]
        raise SitusError(
            f"{file}: is not a plain tar of images and class numbers, or is damaged after "
            f"{counted(len(shard.keys), 'images')} ({reason})",
            field="data",
        ) from error
    if any(number < 0 for number in shard.numbers.values()):
        raise SitusError(f"{file}: a .cls holds a negative class number", field="data")
    shard.check_pairs(file)
    return shard.index()


def _python_members(raw: BinaryIO, tar: tarfile.TarFile) -> Iterator[Member]:
    """By Python's own reader, which takes every kind of tar, slowly."""
    last = -1
    for info in tar:
        if info.offset <= last or info.size < 0:  # a damaged size would lead back, and round for ever
            raise tarfile.ReadError(f"{info.name!r} claims {info.size:,} bytes")
        last = info.offset
        if not info.isreg() or info.issparse():
            if not info.isdir():
                yield Member(info.name, False, info.offset_data, 0, b"")
            continue
        content = os.pread(raw.fileno(), info.size, info.offset_data) if info.size <= SMALL else b""
        yield Member(info.name, True, info.offset_data, info.size, content)


def _check_end(raw: BinaryIO, end: int, file: Path, images: int) -> None:
    """Refuses a tar that does not end as one: Python's reader takes whatever it cannot read for the end."""
    raw.seek(end)
    mark = raw.read(_END)
    if len(mark) < _END or any(mark):
        cut = raw.seek(0, os.SEEK_END) <= end + len(mark) and not any(mark)
        what = "was cut short" if cut else "is damaged"
        raise SitusError(
            f"{file}: {what} after {counted(images, 'images')}, at byte {end:,}, where neither another member nor the "
            "end of the archive follows; get it again",
            field="data",
        )
    while part := raw.read(1 << 20):
        if any(part):
            raise SitusError(
                f"{file}: goes on after its end, after {counted(images, 'images')}: several tar files in one? Join "
                "them with tar --concatenate, or keep them apart",
                field="data",
            )


def _join(parts: list[TarIndex]) -> TarIndex:
    arrays = {name: np.concatenate([*_pieces(parts, name)]) for name in _KINDS}
    return TarIndex(_ends(parts), arrays, [each for part in parts for each in part.left_out])


def _ends(parts: list[TarIndex]) -> array[int]:
    return array("q", np.cumsum([len(part) for part in parts], dtype=np.int64).tobytes())


def _pieces(parts: list[TarIndex], name: str) -> Iterator[np.ndarray]:
    """What each part adds to one array of the whole."""
    text = 0
    for part in parts:
        yield part.arrays[name] + text if name == "name_ends" else part.arrays[name]
        text += len(part.arrays["names"])


def _part(index: TarIndex, shard: int) -> TarIndex:
    start, stop = index.ends[shard - 1] if shard else 0, index.ends[shard]
    ends = index.arrays["name_ends"]
    first, last = (int(ends[at - 1]) if at else 0 for at in (start, stop))
    arrays = {name: np.array(values[start:stop]) for name, values in index.arrays.items()}
    arrays["name_ends"] -= first
    arrays["names"] = np.array(index.arrays["names"][first:last])
    return TarIndex(array("q", [stop - start]), arrays, [index.left_out[shard]])


# The kept file


def _save(file: Path, parts: list[TarIndex], shards: Iterable[_Mark]) -> None:
    """Writes part by part, as safetensors: the whole need not be put together in memory."""
    left_out = [each for part in parts for each in part.left_out]
    header: dict[str, Any] = {
        "shards": list(shards),
        "ends": list(_ends(parts)),
        "left_out": [[each.kinds, each.first_other, each.special, each.first_special] for each in left_out],
        "sums": dict.fromkeys(_KINDS, 0),
    }
    layout, at = dict[str, Any](), 0
    for name, kind in _KINDS.items():
        count = 0
        for piece in _pieces(parts, name):
            header["sums"][name] = zlib.crc32(np.ascontiguousarray(piece).data, header["sums"][name])
            count += len(piece)
        size = count * np.dtype(kind).itemsize
        layout[name] = {"dtype": _DTYPES[kind], "shape": [count], "data_offsets": [at, at + size]}
        at += size
    header["number"] = zlib.crc32(json.dumps(header).encode())
    text = json.dumps({"__metadata__": {"situs": json.dumps(header)}, **layout}).encode()
    text += b" " * (-len(text) % 8)  # so that the arrays are aligned
    file.parent.mkdir(parents=True, exist_ok=True)
    arrays = (np.ascontiguousarray(piece).data for name in _KINDS for piece in _pieces(parts, name))
    write_bytes(file, chain([len(text).to_bytes(8, "little"), text], arrays))


def _load(file: Path, shards: list[_Mark]) -> tuple[TarIndex, list[bool]] | None:
    """What the file holds, and which shards are as they were; None where there is none or it is damaged."""
    try:
        header, arrays = _map(file)
        number = header.pop("number")
        if number != zlib.crc32(json.dumps(header).encode()) or any(
            zlib.crc32(arrays[name].data) != header["sums"][name] for name in _KINDS
        ):
            return None
        left_out = [
            LeftOut(Counter(kinds), first, special, other) for kinds, first, special, other in header["left_out"]
        ]
        known = [tuple(shard) for shard in header["shards"]]
        index = TarIndex(array("q", header["ends"]), arrays, left_out, (file, number))
        whole = len(known) == len(shards) == len(index.ends) == len(left_out) and index.ends[-1] == len(index)
        return (index, [old == new for old, new in zip(known, shards, strict=True)]) if whole else None
    except (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError):
        return None


def _map(file: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The header and the arrays of a safetensors file, mapped and not read."""
    size = file.stat().st_size
    with file.open("rb") as raw:
        length = int.from_bytes(raw.read(8), "little")
        if not 0 < length < size:
            raise ValueError("no header")
        layout = json.loads(raw.read(length))
    arrays = {}
    for name, kind in _KINDS.items():
        start, stop = layout[name]["data_offsets"]
        if not 0 <= start <= stop <= size - 8 - length or (stop - start) % np.dtype(kind).itemsize:
            raise ValueError(f"no {name}")
        count = (stop - start) // np.dtype(kind).itemsize
        place = 8 + length + start
        # As plain arrays, whose single numbers are had twice as fast.
        arrays[name] = np.asarray(np.memmap(file, kind, "r", place, (count,))) if count else np.empty(0, kind)
    return json.loads(layout["__metadata__"]["situs"]), arrays


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Waits for another process that is making this file. Where nothing can be locked both make it, and one wins."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, ImportError):
            import fcntl

            file.parent.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(file.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
