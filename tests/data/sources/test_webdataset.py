"""Tar shards that are cut short, damaged or joined: named, never half read."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from situs.data.sources import open_source
from situs.data.sources.images import BrokenImageError
from situs.errors import SitusError


def png(value: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (6, 5), (value, value, value)).save(buffer, "PNG")
    return buffer.getvalue()


def packed(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


WHOLE = packed({f"{number}.png": png(number) for number in range(8)})
EACH = 1024  # header and data of one member


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_the_whole_is_read(tmp_path):
    source = open_source(write(tmp_path / "x.tar", WHOLE))
    assert len(source) == 8
    assert source.notes == []
    # A writer may leave the padding to whole records out.
    assert len(open_source(write(tmp_path / "y.tar", WHOLE[: 8 * EACH + 1024]))) == 8


@pytest.mark.parametrize("length", [4 * EACH, 4 * EACH + 100, 4 * EACH + 512, 4 * EACH + 600, 8 * EACH, 8 * EACH + 512])
def test_a_tar_that_was_cut_anywhere_is_refused(tmp_path, length):
    with pytest.raises(SitusError, match=r"x\.tar: .*(cut short|damaged) after [458] images"):
        open_source(write(tmp_path / "x.tar", WHOLE[:length]))


def test_a_damaged_header_is_no_end(tmp_path):
    damaged = bytearray(WHOLE)
    damaged[3 * EACH + 150] ^= 0xFF  # in the checksum
    with pytest.raises(SitusError, match=r"is damaged after 3 images, at byte 3,072"):
        open_source(write(tmp_path / "x.tar", bytes(damaged)))


def test_two_archives_in_one_file_are_told(tmp_path):
    with pytest.raises(SitusError, match=r"goes on after its end, after 8 images: several tar files in one\?"):
        open_source(write(tmp_path / "x.tar", WHOLE + WHOLE))


@pytest.mark.parametrize("size", [-512, -1024])
def test_a_negative_size_leads_to_no_circle(tmp_path, size):
    info = tarfile.TarInfo("1.png")
    info.size = 10
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\xff" + (2**88 + size).to_bytes(11, "big")  # as GNU writes numbers of any size
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    with pytest.raises(SitusError, match=r"x\.tar"):
        open_source(write(tmp_path / "x.tar", WHOLE[:EACH] + bytes(header) + WHOLE[EACH:]))


def test_a_member_too_large_for_an_image_is_named_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("situs.data.sources.images._MOST_BYTES", 50)
    source = open_source(write(tmp_path / "x.tar", WHOLE))
    with pytest.raises(BrokenImageError, match=r"x\.tar, 0\.png: has [\d,]+ bytes, and an image at most 50"):
        source.read(0)


def test_class_numbers_have_an_end(tmp_path):
    write(tmp_path / "x.tar", packed({"a.png": png(0), "a.cls": b"100000000"}))
    with pytest.raises(SitusError, match=r"class number 100,000,000: must be below 1,000,000"):
        open_source(tmp_path)
    write(tmp_path / "x.tar", packed({"a.png": png(0), "a.cls": b"1" * 5000}))
    with pytest.raises(SitusError, match=r"'a\.cls' is no class number, it has 5,000 bytes"):
        open_source(tmp_path)


def test_members_that_are_no_images_are_counted(tmp_path):
    write(tmp_path / "x.tar", packed({"a.png": png(0), "a.json": b"{}", "b.seg.png": png(0), "b.cls": b"0"}))
    source = open_source(tmp_path, labels=False)
    assert len(source) == 1
    assert source.notes == [
        f"{tmp_path.name}: left out 2 (no images by their names: .json 1, .png 1); the first: a.json"
    ]


def test_class_names_must_be_text(tmp_path):
    write(tmp_path / "x.tar", packed({"a.png": png(0), "a.cls": b"0"}))
    write(tmp_path / "classes.txt", b"\xff\xfe")
    with pytest.raises(SitusError, match=r"classes\.txt: must be UTF-8 text"):
        open_source(tmp_path)
