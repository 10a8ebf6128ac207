"""WebDataset shards: plain tar files in which `0001.jpg` and `0001.cls` are one sample.

Opening reads every header once, into an index of offsets; afterwards any sample is one seek and one read, so
shuffling is exact and needs no buffer.
"""

from __future__ import annotations

import os
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from situs.data.sources.base import ANY, EncodedSource, Wanted, find_shards, number_names, split_of
from situs.data.sources.images import IMAGE_SUFFIXES, BrokenImageError, check_bytes
from situs.data.sources.walk import FilesFound, plain
from situs.errors import SitusError

_BLOCK = 512
_END = 2 * _BLOCK  # zeros, at the end of every archive
_LONGEST_NUMBER = 32


@dataclass(frozen=True, slots=True)
class _Member:
    shard: int
    key: str
    suffix: str
    offset: int
    size: int


class TarSource(EncodedSource):
    """The samples of one split's shards, in the order of shard names and of the samples within them.

    Class names come from a `classes.txt` beside the shards, one a line, else the numbers serve as names.
    """

    def __init__(self, path: Path, wanted: Wanted = ANY) -> None:
        self._shards = find_shards(path, ".tar", wanted.split)
        self._members: list[_Member] = []
        numbers: list[int | None] = []
        left_out = FilesFound()
        for shard, file in enumerate(self._shards):
            members, found = _index(file, shard, wanted.labels, left_out)
            self._members += members
            numbers += found
        if not self._members:
            raise SitusError(f"{path}: its tar files hold no images", field="data")
        labelled = [number for number in numbers if number is not None]
        if labelled and len(labelled) < len(numbers):
            lonely = self._members[numbers.index(None)]
            raise SitusError(f"{self._shards[lonely.shard]}: {lonely.key}{lonely.suffix} has no .cls, others have one")
        self._labels = labelled or None
        classes = None
        if labelled:
            folder = path if path.is_dir() else path.parent
            classes = _class_names(folder / "classes.txt", max(labelled) + 1)
        chosen = split_of(self._shards[0])
        super().__init__(path.stem + (f" ({chosen})" if chosen else ""), classes, wanted.channels, wanted.strict)
        self.notes = left_out.notes(self.name)

    def __len__(self) -> int:
        return len(self._members)

    def payload(self, index: int) -> bytes:
        member = self._members[index]
        check_bytes(member.size, self.entry(index))
        try:
            with self._shards[member.shard].open("rb", buffering=0) as file:
                file.seek(member.offset)
                return file.read(member.size)
        except OSError as error:
            raise BrokenImageError(f"{self.entry(index)}: cannot be read ({error.strerror or error})") from error

    def label(self, index: int) -> int | None:
        return None if self._labels is None else self._labels[index]

    def entry(self, index: int) -> str:
        member = self._members[index]
        return plain(f"{self._shards[member.shard]}, {member.key}{member.suffix}")

    def key(self, index: int) -> str:
        member = self._members[index]
        return f"{self._shards[member.shard].name}/{member.key}{member.suffix}"


def _index(file: Path, shard: int, labels: bool, left_out: FilesFound) -> tuple[list[_Member], list[int | None]]:
    """Image members of one shard, and the number in each one's .cls (None without one)."""
    members: list[_Member] = []
    numbers: dict[str, int] = {}
    try:
        with file.open("rb") as raw, tarfile.open(fileobj=raw, mode="r:") as tar:
            last = -1
            for info in tar:
                if info.offset <= last or info.size < 0:  # a damaged size would lead back, and round for ever
                    raise tarfile.ReadError(f"{info.name!r} claims {info.size:,} bytes")
                last = info.offset
                if not info.isreg() or info.issparse():
                    left_out.special += [] if info.isdir() else [info.name]
                    continue
                folder, base = os.path.split(info.name)
                stem, dot, suffix = base.partition(".")
                key = f"{folder}/{stem}" if folder else stem
                kind = f".{suffix.lower()}"
                if kind in IMAGE_SUFFIXES:
                    members.append(_Member(shard, key, dot + suffix, info.offset_data, info.size))
                elif kind != ".cls":
                    left_out.others.append(info.name)
                elif labels:
                    numbers[key] = _read_number(tar, info)
            _check_end(raw, tar.offset, file, len(members))
    except SitusError:
        raise
    except Exception as error:  # each field of a header fails in its own way where it is damaged
        reason = plain(str(error))[:120]
        raise SitusError(
            f"{file}: is not a plain tar of images and class numbers, or is damaged after {len(members):,} images "
            f"({reason})",
            field="data",
        ) from error
    if any(number < 0 for number in numbers.values()):
        raise SitusError(f"{file}: a .cls holds a negative class number", field="data")
    return members, [numbers.get(member.key) for member in members]


def _read_number(tar: tarfile.TarFile, info: tarfile.TarInfo) -> int:
    if info.size > _LONGEST_NUMBER:
        raise ValueError(f"{info.name!r} is no class number, it has {info.size:,} bytes")
    stream = tar.extractfile(info)
    return int(stream.read()) if stream else -1


def _check_end(raw: BinaryIO, end: int, file: Path, images: int) -> None:
    """Refuses a tar that does not end as one: Python's reader takes whatever it cannot read for the end."""
    raw.seek(end)
    mark = raw.read(_END)
    if len(mark) < _END or any(mark):
        cut = raw.seek(0, os.SEEK_END) <= end + len(mark) and not any(mark)
        what = "was cut short" if cut else "is damaged"
        raise SitusError(
            f"{file}: {what} after {images:,} images, at byte {end:,}, where neither another member nor the end of "
            "the archive follows; get it again",
            field="data",
        )
    while part := raw.read(1 << 20):
        if any(part):
            raise SitusError(
                f"{file}: goes on after its end, after {images:,} images: several tar files in one? Join them with "
                "tar --concatenate, or keep them apart",
                field="data",
            )


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
