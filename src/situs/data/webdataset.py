"""WebDataset shards: plain tar files in which `0001.jpg` and `0001.cls` are one sample.

Opening reads every header once, into an index of offsets; afterwards any sample is one seek and one read, so
shuffling is exact and needs no buffer.
"""

from __future__ import annotations

import os
import tarfile
from dataclasses import dataclass
from pathlib import Path

from situs.data.base import EncodedSource, find_shards, split_of
from situs.data.images import IMAGE_SUFFIXES, BrokenImageError
from situs.errors import SitusError


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

    def __init__(
        self,
        path: Path,
        split: str | None = None,
        *,
        labels: bool = True,
        channels: int | None = None,
        strict: bool = False,
    ) -> None:
        self._shards = find_shards(path, ".tar", split)
        self._members: list[_Member] = []
        numbers: list[int | None] = []
        for shard, file in enumerate(self._shards):
            members, found = _index(file, shard, labels)
            self._members += members
            numbers += found
        if not self._members:
            raise SitusError(f"{path}: its tar files hold no images (--data)")
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
        super().__init__(path.stem + (f" ({chosen})" if chosen else ""), classes, channels, strict)

    def __len__(self) -> int:
        return len(self._members)

    def payload(self, index: int) -> bytes:
        """The image's bytes, read at its offset."""
        member = self._members[index]
        try:
            with self._shards[member.shard].open("rb", buffering=0) as file:
                file.seek(member.offset)
                return file.read(member.size)
        except OSError as error:
            raise BrokenImageError(f"{self.entry(index)}: cannot be read ({error.strerror or error})") from error

    def label(self, index: int) -> int | None:
        """The number in the sample's .cls file."""
        return None if self._labels is None else self._labels[index]

    def entry(self, index: int) -> str:
        """Shard and member."""
        member = self._members[index]
        return f"{self._shards[member.shard]}, {member.key}{member.suffix}"


def _index(file: Path, shard: int, labels: bool) -> tuple[list[_Member], list[int | None]]:
    """Image members of one shard, and the number in each one's .cls (None without one)."""
    members: list[_Member] = []
    numbers: dict[str, int] = {}
    try:
        with tarfile.open(file, mode="r:") as tar:
            for info in tar:
                if not info.isreg():
                    continue
                folder, base = os.path.split(info.name)
                stem, dot, suffix = base.partition(".")
                key = f"{folder}/{stem}" if folder else stem
                kind = f".{suffix.lower()}"
                if kind in IMAGE_SUFFIXES:
                    members.append(_Member(shard, key, dot + suffix, info.offset_data, info.size))
                elif kind == ".cls" and labels:
                    stream = tar.extractfile(info)
                    numbers[key] = int(stream.read()) if stream else -1
    except (tarfile.TarError, OSError, ValueError) as error:
        reason = str(error)[:120]
        raise SitusError(f"{file}: is not a plain tar of images and class numbers ({reason}) (--data)") from error
    if any(number < 0 for number in numbers.values()):
        raise SitusError(f"{file}: a .cls holds a negative class number (--data)")
    return members, [numbers.get(member.key) for member in members]


def _class_names(file: Path, count: int) -> tuple[str, ...]:
    if not file.is_file():
        return tuple(str(number) for number in range(count))
    names = tuple(line for line in file.read_text(encoding="utf-8").splitlines() if line)
    if len(names) < count:
        raise SitusError(f"{file}: names {len(names)} classes, the shards use {count}")
    return names
