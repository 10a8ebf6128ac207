"""WebDataset shards: plain tar files in which `0001.jpg` and `0001.cls` are one sample.

Opening reads every header once, into an index of offsets, about 40 bytes a sample, that is kept for the next time;
afterwards any sample is one read at its place, so shuffling can be exact and needs no buffer. Where blocks of samples
are released when they are used up (`situs.data.blocks`), each is read in one go.
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
from situs.data.sources.base import ANY, SPLITS, Blocks, EncodedSource, Wanted, check_state, find_shards, split_of
from situs.data.sources.folder import OTHER, SPECIAL, LeftOut, plain
from situs.data.sources.images import IMAGE_SUFFIXES, check_bytes
from situs.data.sources.labels import note_unseen, number_names
from situs.data.sources.remote import USUAL_BYTES, is_kept, open_shard, present
from situs.errors import BrokenSampleError, DataError, SitusError, counted
from situs.files import cache_folder
from situs.folder_lock import in_turn

_END = 1024  # zeros, at the end of every archive
_LONGEST_NUMBER = 32  # bytes of a .cls
_MOST = 2**31 - 1  # a larger class number is refused wherever it is used
_WORTH_KEEPING = 4 << 20  # bytes of a shard: the headers of less are read in a moment
_FORMAT = 4
_BLOCK = 4 << 20  # bytes: long enough for a disk to read them about as fast as it can

_keeps = ContextVar("situs.data.sources.webdataset", default=True)


@contextlib.contextmanager
def nothing_kept() -> Iterator[None]:
    """Within, indices are read and none is written: for a run that is only rehearsed."""
    before = _keeps.set(False)
    try:
        yield
    finally:
        _keeps.reset(before)


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
            self.notes += note_unseen(self.name, classes, np.unique(labels))

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


class TarIndex(NamedTuple):
    """The images of some shards.

    states: of each shard its size and time of change, as it was when the index was opened. arrays: "offsets", "sizes"
    and "labels" (VOID without one) of the images, their "names" in one piece, where each ends there ("name_ends"), and
    how many images there are up to the end of each shard ("ends").
    """

    states: list[tuple[int, int]]
    arrays: dict[str, np.ndarray]
    left_out: LeftOut

    def __len__(self) -> int:
        return len(self.arrays["offsets"])

    def name(self, index: int) -> str:
        """The member's name without needless slashes."""
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


_Found = tuple[dict[str, np.ndarray], LeftOut]


def _open_shard_index(file: Path, state: os.stat_result, labels: bool) -> _Found:
    """That of a shard, from the user's cache where it is kept there and the shard is as it was."""
    if state.st_size < _WORTH_KEEPING:
        return _read_index(file, labels)
    # Beside the time of change one that no tool sets back; of a remote shard it says nothing.
    mark = np.array([_FORMAT, state.st_size, state.st_mtime_ns, 0 if is_kept(file) else state.st_ctime_ns])
    name = hashlib.blake2b(os.fsencode(f"{labels} {file.resolve()}"), digest_size=16).hexdigest()
    kept = cache_folder("tar") / f"{name}.npz"
    known = _load(kept, mark)
    if known is None and _keeps.get():
        with in_turn(kept.parent / ".lock"):  # of several ranks the first reads the shard, the others its file
            known = _load(kept, mark)
            if known is None:
                known = _read_index(file, labels)
                _save(kept, mark, *known)
    return known or _read_index(file, labels)


def _save(file: Path, mark: np.ndarray, arrays: dict[str, np.ndarray], left_out: LeftOut) -> None:
    others = np.frombuffer(json.dumps(vars(left_out)).encode(), np.uint8)
    with contextlib.suppress(OSError):  # a cache that cannot be written: read again at the next start
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_name(f".{file.stem}.tmp.npz")  # one at a time is written
        kept: dict[str, Any] = {"mark": mark, "left_out": others, **arrays}
        np.savez(aside, **kept)
        aside.replace(file)


def _load(file: Path, mark: np.ndarray) -> _Found | None:
    """What the file holds; None where there is none, or one that is damaged or of an older shard."""
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as kept:
            arrays = {name: kept[name] for name in kept.files}  # each held to the checksum of its zip file
        if np.array_equal(arrays.pop("mark"), mark):
            return arrays, LeftOut(**json.loads(arrays.pop("left_out").tobytes()))
    except Exception:  # noqa: BLE001  (zip files, NumPy and json raise classes of their own where they are damaged)
        return None
    return None


def _read_index(file: Path, labels: bool) -> _Found:
    offsets, sizes, name_ends, names = array("q"), array("q"), array("q"), bytearray()
    keys, classes, left_out = list[str](), dict[str, int](), LeftOut()
    for key, name, offset, size in _images(file, labels, classes, left_out):
        keys.append(key)
        offsets.append(offset)
        sizes.append(size)
        names += name.encode("utf-8", "surrogateescape")
        name_ends.append(len(names))
    seen = Counter(keys)
    if twice := next((key for key, count in seen.items() if count > 1 and key in classes), None):
        raise DataError(f"{file}: {plain(twice)!r} has two images and one .cls, a sample has one")
    for key in classes.keys() - seen.keys():
        left_out.add(OTHER, f"{key}.cls")
    whole = {"offsets": offsets, "sizes": sizes, "name_ends": name_ends}
    arrays: dict[str, np.ndarray] = {name: np.array(values, np.int64) for name, values in whole.items()}
    arrays["labels"] = np.array([classes.get(key, VOID) for key in keys], np.int32)
    return arrays | {"names": np.frombuffer(bytes(names), np.uint8)}, left_out


def _images(
    file: Path, labels: bool, classes: dict[str, int], left_out: LeftOut
) -> Iterator[tuple[str, str, int, int]]:
    """Key, name, offset and size of each image of a shard; the class of each key goes to `classes`."""
    present(file)
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
            f"({plain(str(error))[:120]})"
        ) from error


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """All but folders."""
    last = -1
    while (info := tar.next()) is not None:
        tar.members.clear()  # pyright: ignore[reportAttributeAccessIssue]  (a gigabyte of a large archive)
        if info.offset <= last or info.size < 0:  # a damaged size would lead back, and round for ever
            raise tarfile.ReadError(f"{info.name!r} claims {info.size:,} bytes")
        last = info.offset
        if not info.isdir():
            yield info


def _class_number(raw: BinaryIO, info: tarfile.TarInfo) -> int:
    if info.size > _LONGEST_NUMBER:
        raise ValueError(f"{info.name!r} is no class number, it has {info.size:,} bytes")
    number = int(os.pread(raw.fileno(), info.size, info.offset_data))
    if number < 0:
        raise ValueError(f"{info.name!r} holds a negative class number")
    return min(number, _MOST)


def _check_end(raw: BinaryIO, end: int, file: Path, images: int) -> None:
    """Refuses a tar that does not end as one: Python's reader takes whatever it cannot read for the end."""
    raw.seek(end)
    mark = raw.read(_END)
    if len(mark) < _END or any(mark):
        cut = raw.seek(0, os.SEEK_END) <= end + len(mark) and not any(mark)
        what = "was cut short" if cut else "is damaged"
        raise DataError(
            f"{file}: {what} after {counted(images, 'images')}, at byte {end:,}, where neither another member nor the "
            "end of the archive follows; get it again"
        )
    while part := raw.read(1 << 20):
        if any(part):
            raise DataError(
                f"{file}: has data after its end, after {counted(images, 'images')}: several tar files in one? Join "
                "them with tar --concatenate, or keep them apart"
            )
