"""The fast reader of tar headers is held to Python's own: what it takes it takes alike, the rest it leaves."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from situs.data.sources.tar_headers import SMALL, Member, plain_members


def by_python(file: Path) -> list[Member]:
    """The same by Python's reader; an error where it does not come to the end of the archive."""
    found = []
    data = file.read_bytes()
    with tarfile.open(file, "r:") as tar:
        for info in tar:
            if not info.isdir():
                regular = info.isreg() and not info.issparse()
                content = data[info.offset_data : info.offset_data + info.size] if regular else b""
                size = info.size if regular else 0
                found.append(
                    Member(info.name, regular, info.offset_data, size, content if len(content) <= SMALL else b"")
                )
        rest = data[tar.offset :]
    if len(rest) < 1024 or any(rest):
        raise ValueError("does not end as a tar")
    return found


def packed(members: list[tuple[str, bytes, dict[str, Any]]], kind: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind) as file:
        for name, data, more in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for key, value in more.items():
                setattr(info, key, value)
            file.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


LONG = "a/" * 60 + "x" * 90 + ".jpg"  # needs a prefix, or a header of its own
PLAIN = [
    ("1.jpg", b"j" * 700, {}),
    ("1.cls", b"7", {}),
    ("folder", b"", {"type": tarfile.DIRTYPE}),
    ("folder/2.jpg", b"", {}),
    ("link", b"", {"type": tarfile.SYMTYPE, "linkname": "1.jpg"}),
    ("pipe", b"", {"type": tarfile.FIFOTYPE}),
    ("a" * 99 + "/" + "b" * 90 + ".jpg", b"k" * 512, {}),
    ("end.cls", b"12\n", {"mtime": 1.5, "uid": 3_000_000, "uname": "someone"}),
]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (tarfile.USTAR_FORMAT, []),
        (tarfile.GNU_FORMAT, [(LONG, b"x" * 33, {}), ("ü.jpg", b"x", {})]),
        (tarfile.PAX_FORMAT, [(LONG, b"x" * 33, {}), ("ü" * 80 + ".cls", b"1", {}), ("z.jpg", b"x", {"mtime": 0.25})]),
    ],
)
def test_every_way_to_write_a_name_is_read_as_python_reads_it(tmp_path, kind, more):
    members = [(name, data, {k: v for k, v in m.items() if k != "uid"}) for name, data, m in PLAIN]
    if kind == tarfile.USTAR_FORMAT:
        members = [(name, data, {**m, "mtime": 1}) for name, data, m in members]
    file = tmp_path / "x.tar"
    file.write_bytes(packed([*members, *more], kind))
    found = plain_members(file)
    assert found is not None
    assert list(found) == by_python(file)
    assert len(by_python(file)) == len(PLAIN) + len(more) - 1


def header(name: bytes = b"1.jpg", size: bytes = b"00000000012\0", kind: bytes = b"0", **more: bytes) -> bytes:
    """A header with any bytes in its fields and the right checksum."""
    block = bytearray(512)
    fields = {0: name, 100: b"0000644\0", 108: b"0000000\0", 116: b"0000000\0", 124: size, 136: b"00000000000\0"}
    fields |= {156: kind, 257: b"ustar\x0000", **{int(key[1:]): value for key, value in more.items()}}
    for place, value in fields.items():
        block[place : place + len(value)] = value
    if "_148" not in more:
        block[148:156] = b" " * 8
        block[148:156] = f"{sum(block):06o}\0 ".encode()
    return bytes(block)


DATA = b"0123456789" + bytes(502)
END = bytes(1024)
ODD = {
    "large number": (header(size=b"\x80" + (10).to_bytes(11, "big")), True),
    "twelve digits": (header(size=b"000000000012"), False),
    "spaces in front": (header(size=b"         12\0"), True),
    "spaces behind": (header(size=b"12         \0"), True),
    "negative": (header(size=b"\xff" * 11 + b"\xf6"), False),
    "minus": (header(size=b"-0000000012\0"), False),
    "underscore": (header(size=b"0000_000012\0"), False),
    "decimal": (header(size=b"00000000019\0"), False),
    "two numbers": (header(size=b"0000 000012\0"), False),
    "odd time": (header(_136=b"12 45678901\0"), False),
    "odd user": (header(_108=b"abcdefg\0"), False),
    "odd device": (header(_329=b"x\0"), False),
    "large user": (header(_108=b"\x80" + bytes(6) + b"\1"), True),
    "wrong checksum": (header(_148=b"000001\0 "), False),
    "no magic": (header(_257=bytes(8)), True),
    "prefix": (header(_345=b"folder/deep"), True),
    "behind the name": (header(name=b"1.jpg\0more"), False),
    "behind the prefix": (header(_345=b"folder\0more"), False),
    "old file": (header(kind=b"\0"), True),
    "old folder": (header(name=b"folder/", size=b"00000000000\0", kind=b"\0") + header(), False),
    "file with a slash": (header(name=b"folder/"), True),
    "contiguous": (header(kind=b"7"), False),
    "unknown kind": (header(kind=b"Q"), False),
    "sparse": (header(kind=b"S"), False),
    "hard link with a size": (header(kind=b"1", _157=b"other") + header(), True),
    "bytes in the name": (header(name=b"\xff\xfe.jpg"), True),
    "high bit": (header(_265=b"\xe4\xf6\xfc"), True),
}


def pax(records: bytes, **more: Any) -> bytes:
    size = f"{len(records):011o}\0".encode()
    return header(name=b"pax", size=size, kind=b"x", **more) + records + bytes(-len(records) % 512)


def record(keyword: str, value: bytes) -> bytes:
    body = b" " + keyword.encode() + b"=" + value + b"\n"
    length = len(body) + 1
    while len(str(length)) + len(body) != length:
        length += 1
    return str(length).encode() + body


EXTENDED = {
    "a path": (pax(record("path", b"deep/2.png")), True),
    "a path in UTF-8": (pax(record("path", "ü.png".encode())), True),
    "a path with a slash": (pax(record("path", b"deep/")), True),
    "a path that is no text": (pax(record("path", b"\xff.png")), False),
    "nothing of use": (pax(record("mtime", b"1.5") + record("comment", b"a=b\nc")), True),
    "a size": (pax(record("size", b"3")), False),
    "another alphabet": (pax(record("hdrcharset", b"BINARY")), False),
    "a sparse file": (pax(record("GNU.sparse.size", b"3")), False),
    "no record": (pax(b"no record"), False),
    "a length of nothing": (pax(b"0 a=b\n"), False),
    "a length too great": (pax(b"99 path=b\n"), False),
    "a record behind its size": (pax(record("path", b"a.png"))[:-100] + bytes(100), True),
    "two in a row": (pax(record("path", b"a.png")) * 2, False),
    "for all": (header(name=b"g", size=b"00000000000\0", kind=b"g"), False),
    "a long name": (header(name=b"././@LongLink", size=b"00000000006\0", kind=b"L") + b"2.png\0" + bytes(506), True),
    "a long name in full blocks": (header(size=b"00000001000\0", kind=b"L") + b"n" * 508 + b".png", True),
    "a long link": (header(size=b"00000000006\0", kind=b"K") + b"2.png\0" + bytes(506), False),
}


@pytest.mark.parametrize("case", [*ODD, *EXTENDED])
def test_an_odd_header_is_read_as_python_reads_it_or_left_to_it(tmp_path, case):
    file = tmp_path / "x.tar"
    blocks, plain = {**ODD, **EXTENDED}[case]
    rest = header() + DATA if case in EXTENDED else DATA
    file.write_bytes(header(name=b"0.jpg") + DATA + blocks + rest + END)
    found = plain_members(file)
    assert (found is not None) is plain
    if found is not None:
        assert list(found) == by_python(file)


def test_a_record_in_the_padding_is_left_to_python(tmp_path):
    extra = pax(record("path", b"a.png"))
    file = tmp_path / "x.tar"
    file.write_bytes(extra[:-50] + record("path", b"b.png") + bytes(50 - 15) + header() + DATA + END)
    assert plain_members(file) is None


@pytest.mark.parametrize("seed", range(4))
def test_damage_is_never_taken_for_something_else(tmp_path, seed):
    """Random bytes of headers changed, cut and moved: what is still taken is what Python takes."""
    whole = packed([(f"{n}.jpg" if n % 2 else f"{n}.cls", b"5" * (n * 40 % 600), {"mtime": 1.5}) for n in range(12)])
    whole = whole[: len(whole) - len(whole) % 512]
    chance = np.random.default_rng(seed)
    file, taken = tmp_path / "x.tar", 0
    for _ in range(60):
        data = bytearray(whole)
        for place in chance.integers(0, 12 * 1024, chance.integers(1, 4)).tolist():
            data[place] = int(chance.choice([0, 32, 48, 49, 55, 57, 95, 128, 255, int(chance.integers(256))]))
        if chance.random() < 0.2:
            del data[int(chance.integers(len(data))) :]
        file.write_bytes(bytes(data))
        found = plain_members(file)
        if found is not None:
            taken += 1
            assert list(found) == by_python(file)
    assert 0 < taken < 60
