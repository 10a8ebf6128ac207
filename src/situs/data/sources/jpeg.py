"""What a JPEG says of itself in its first bytes, in a tenth of the time that Pillow takes to open one."""

from __future__ import annotations

from typing import NamedTuple

START = b"\xff\xd8\xff"
_BARE = {0x01, *range(0xD0, 0xD8)}  # markers without a length
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_SCAN, _EXIF, _ADOBE = 0xDA, 0xE1, 0xEE
_SEQUENTIAL, _PROGRESSIVE = {0xC0, 0xC1}, 0xC2


class Frame(NamedTuple):
    """height, width: as they are stored. plain: grey or YCbCr of 8 bits, sequential or progressive, and nothing in the
    file that would turn it or change its colours."""

    height: int
    width: int
    plain: bool


def read_frame(data: bytes) -> Frame | None:
    """The frame of a JPEG; None for what is none, or whose markers are damaged before it."""
    if not data.startswith(START):
        return None
    at, odd = 2, False
    while at + 9 < len(data):
        if data[at] != 0xFF:
            return None
        mark = data[at + 1]
        if mark == 0xFF:  # filling
            at += 1
            continue
        if mark in _BARE:
            at += 2
            continue
        size = int.from_bytes(data[at + 2 : at + 4], "big")
        if mark in _FRAMES:
            bits, height, width = data[at + 4], data[at + 5 : at + 7], data[at + 7 : at + 9]
            usual = (mark in _SEQUENTIAL or mark == _PROGRESSIVE) and bits == 8 and data[at + 9] in {1, 3}
            sides = int.from_bytes(height, "big"), int.from_bytes(width, "big")
            return Frame(*sides, plain=usual and not odd) if min(sides) else None
        if mark == _SCAN or size < 2:
            return None
        odd = odd or mark == _ADOBE or (mark == _EXIF and data[at + 4 : at + 8] == b"Exif")
        at += 2 + size
    return None
