"""The members of a plain tar file, read fast: the headers one after another, and their fields checked all at once.

What is not plain (damage, sparse files, a size given elsewhere than in its field) is left to Python's own reader, which
knows every kind of tar and says what is wrong with it; so nothing is taken here that it would take otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

BLOCK = 512
SMALL = 32
_AHEAD = 8192  # read at once: often a small member and the next header lie in it
_ZEROS = bytes(BLOCK)
_LONGEST_EXTRA = 1 << 20
# Kinds of members: files, folders, links and devices; headers that give the next member a longer name.
_REGULAR, _FOLDER, _SPECIAL = b"0\0", b"5", b"12346"
_PAX, _LONG_NAME = b"xX", b"L"
_SIZE, _CHECKSUM = 124, 148
_NUMBERS = ((100, 108), (108, 116), (116, 124), (_SIZE, 136), (136, 148), (_CHECKSUM, 156), (329, 337), (337, 345))


class Member(NamedTuple):
    """One member that is no folder.

    regular: a file with data, and not a link, a device or a sparse file. offset, size: of its data. content: the data
    where it is no longer than `SMALL`.
    """

    name: str
    regular: bool
    offset: int
    size: int
    content: bytes


class _OddError(Exception):
    """Not plain."""


def plain_members(file: Path) -> Iterator[Member] | None:
    """The members of a tar file in their order, all checked before the first is given; None where it is not plain."""
    handle = os.open(file, os.O_RDONLY)
    try:
        return _Reader(handle).members()
    except (_OddError, ValueError, UnicodeDecodeError):
        return None
    finally:
        os.close(handle)


class _Found(NamedTuple):
    """What goes from header to header: the headers, where their data lies, and what else is known of some of them."""

    headers: list[bytes]
    offsets: list[int]
    sizes: list[int]
    renamed: dict[int, bytes]
    contents: dict[int, bytes]


class _Reader:
    def __init__(self, handle: int) -> None:
        self.handle, self.start, self.buffer = handle, 0, b""

    def read(self, at: int, size: int) -> bytes:
        """Bytes at a place; fewer at the end of the file."""
        here = at - self.start
        if here + size > len(self.buffer):
            self.buffer, self.start, here = os.pread(self.handle, max(_AHEAD, size), at), at, 0
        return self.buffer[here : here + size]

    def members(self) -> Iterator[Member]:
        found = self.follow()
        if not found.headers:
            raise _OddError
        table = np.frombuffer(b"".join(found.headers), np.uint8).reshape(-1, BLOCK)
        _check_fields(table)
        if not np.isin(table[:, 156], list(_REGULAR + _FOLDER + _SPECIAL + _PAX + _LONG_NAME)).all():
            raise _OddError
        return _members(found, table[:, 156].tolist(), _names(table))

    def follow(self) -> _Found:
        """Every header to the end of the archive. As few steps for each as can be: there may be millions."""
        found = _Found([], [], [], {}, {})
        at, renamed = 0, None
        while True:
            here = at - self.start
            if here + BLOCK > len(self.buffer):
                self.buffer, self.start, here = os.pread(self.handle, _AHEAD, at), at, 0
            header = self.buffer[here : here + BLOCK]
            if len(header) < BLOCK or header == _ZEROS:
                break
            kind, data = header[156], at + BLOCK
            size = int(header[124:135], 8) if header[124] < 0x80 else int.from_bytes(header[125:136], "big")
            if size < 0 or header[124] > 0x80:
                raise _OddError
            after = data + (size + BLOCK - 1 & -BLOCK)
            if kind in _PAX or kind in _LONG_NAME:
                if renamed is not None:
                    raise _OddError
                renamed, at = self.new_name(kind, data, size, after), after
            else:
                if renamed is not None:
                    found.renamed[len(found.headers)], renamed = renamed, None
                if kind not in _REGULAR:
                    at = data
                else:
                    at = after
                    if size <= SMALL:
                        found.contents[len(found.headers)] = self.read(data, size)
            found.headers.append(header)
            found.offsets.append(data)
            found.sizes.append(size)
        if renamed is not None:
            raise _OddError
        self.check_end(at)
        return found

    def new_name(self, kind: int, data: int, size: int, after: int) -> bytes:
        """The name that an extended header gives to the next member; nothing where it gives none."""
        if size > _LONGEST_EXTRA:
            raise _OddError
        extra = self.read(data, after - data)
        if len(extra) < after - data or any(extra[size:]):
            raise _OddError
        return _pax_name(extra[:size]) if kind in _PAX else extra.partition(b"\0")[0]

    def check_end(self, at: int) -> None:
        """Zeros to the end, and two blocks of them at least."""
        first = at
        while part := os.pread(self.handle, 1 << 20, at):
            if part.count(0) != len(part):
                raise _OddError
            at += len(part)
        if at - first < 2 * BLOCK:
            raise _OddError


def _members(found: _Found, kinds: list[int], names: list[bytes]) -> Iterator[Member]:
    for number, (kind, own) in enumerate(zip(kinds, names, strict=True)):
        if kind in _REGULAR or kind in _SPECIAL:
            name = (found.renamed.get(number) or own).decode("utf-8", "surrogateescape")
            size = found.sizes[number] if kind in _REGULAR else 0
            yield Member(name, kind in _REGULAR, found.offsets[number], size, found.contents.get(number, b""))


def _names(table: np.ndarray) -> list[bytes]:
    """The name in each header itself: up to the first zero, behind its prefix where it has one."""
    names, prefixes = (np.ascontiguousarray(table[:, start:end]) for start, end in ((0, 100), (345, 500)))
    for text in (names, prefixes):
        if ((text[:, 1:] != 0) & (text[:, :-1] == 0)).any():
            raise _OddError  # something behind a name's end
    found = names.view("S100")[:, 0].tolist()
    if any(name.endswith(b"/") for name, kind in zip(found, table[:, 156].tolist(), strict=True) if kind == 0):
        raise _OddError  # an old way to write a folder
    for number in np.flatnonzero(prefixes[:, 0]).tolist():
        found[number] = prefixes[number].tobytes().rstrip(b"\0") + b"/" + found[number]
    return found


def _pax_name(records: bytes) -> bytes:
    """The path that an extended header gives to the next member; nothing where it gives none."""
    if b"GNU.sparse" in records or b"hdrcharset" in records:
        raise _OddError
    at, path = 0, b""
    while at < len(records):
        space = records.index(b" ", at, at + 12)
        length = records[at:space]
        end = at + int(length)
        keyword, equals, value = records[space + 1 : end - 1].partition(b"=")
        if not length.isdigit() or end > len(records) or records[end - 1 : end] != b"\n" or not equals or not keyword:
            raise _OddError
        if keyword == b"path":
            value.decode("utf-8")
            path = value.rstrip(b"/")
            if not path or 0 in path:
                raise _OddError
        elif keyword == b"size":
            raise _OddError
        at = end
    return path


def _check_fields(table: np.ndarray) -> None:
    """That every checksum is right and every number plain: octal digits in one piece and an end, or a large number."""
    for start, end in _NUMBERS:
        field = table[:, start:end]
        digit = (field >= ord("0")) & (field <= ord("7"))
        pieces = (digit[:, 1:] & ~digit[:, :-1]).sum(1) + digit[:, 0]
        plain = (digit | (field == 0) | (field == ord(" "))).all(1) & (pieces <= 1)
        if start == _SIZE:  # the last byte ends the number
            plain &= ~digit[:, -1]
        if start != _CHECKSUM:
            plain |= field[:, 0] == 0x80
        if not plain.all():
            raise _OddError
    field = table[:, _CHECKSUM : _CHECKSUM + 8]
    digit = (field >= ord("0")) & (field <= ord("7"))
    if not digit[:, :6].all() or digit[:, 6:].any():
        raise _OddError
    written = (field[:, :6] - ord("0")).astype(np.int64) @ (8 ** np.arange(6)[::-1])
    if (table.sum(1, dtype=np.int64) - field.sum(1, dtype=np.int64) + 8 * ord(" ") != written).any():
        raise _OddError
