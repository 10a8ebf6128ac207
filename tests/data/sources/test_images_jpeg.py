"""A JPEG's frame against Pillow's reading of it, and the image at a part of its sides against means of the whole."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from situs.data.sources.images import START, decode, read_frame, read_header
from situs.errors import BrokenSampleError

RGB = np.random.default_rng(0).integers(0, 256, (37, 53, 3), dtype=np.uint8)


def jpeg(mode: str = "RGB", **options) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(RGB).convert(mode).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def exif() -> Image.Exif:
    made = Image.Exif()
    made[0x0112] = 6
    return made


PLAIN = {
    "colour": jpeg(),
    "grey": jpeg("L"),
    "progressive": jpeg(progressive=True),
    "444": jpeg(subsampling=0, quality=99),
    "422": jpeg(subsampling=1),
    "comment": jpeg(comment=b"\xff\xc0\x00\x11" * 9),  # which looks like a frame and is none
    "restarts": jpeg(restart_marker_rows=1),
}


def moved_behind_the_frame(data: bytes, mark: bytes) -> bytes:
    """A segment of the head put between frame and pixels, where decoders heed it as well."""
    at, scan = data.index(mark), data.index(b"\xff\xda")
    end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return data[:at] + data[end:scan] + data[at:end] + data[scan:]


def without(data: bytes, mark: bytes) -> bytes:
    at = data.index(mark)
    return data[:at] + data[at + 2 + int.from_bytes(data[at + 2 : at + 4], "big") :]


ODD = {
    "cmyk": jpeg("CMYK"),
    "turned": jpeg(exif=exif()),
    "turned late": moved_behind_the_frame(jpeg(exif=exif()), b"\xff\xe1"),
    "adobe rgb": jpeg(keep_rgb=True),
    "adobe rgb, told late": moved_behind_the_frame(jpeg(keep_rgb=True), b"\xff\xee"),
    "rgb by its components' names": without(jpeg(keep_rgb=True), b"\xff\xee"),
    "cut short": jpeg()[:-400],
    "without its end": jpeg()[:-2],
    "filled up with zeros": jpeg()[:-400] + bytes(400),
}


@pytest.mark.parametrize("name", [*PLAIN, *ODD])
def test_the_frame_is_what_pillow_reads(name):
    data = (PLAIN | ODD)[name]
    frame, image = read_frame(data), Image.open(io.BytesIO(data))
    assert (frame.width, frame.height) == image.size
    assert frame.plain == (name in PLAIN)
    assert read_header(data, "x")[2:5] == ((53, 37, True) if name.startswith("turned") else (37, 53, False))


def test_more_pixels_than_are_read_are_left_to_pillow():
    data = PLAIN["colour"]
    place = data.index(b"\xff\xc0") + 5
    huge = data[:place] + b"\xff\xff\xff\xff" + data[place + 4 :]
    assert read_frame(huge) == (65535, 65535, False)
    with pytest.raises(BrokenSampleError, match="x: cannot be decoded"):
        decode(huge, "x")


def test_what_is_no_jpeg_has_no_frame():
    data = PLAIN["colour"]
    place = data.index(b"\xff\xc0")
    short = data[:place] + data[place : place + 2] + b"\0\x11\x08\0\0\0\0" + data[place + 9 :]
    for bad in (
        b"",
        b"\x89PNG",
        START,
        data[:20],
        data[:place],
        data[: place + 5],
        data[:4] + b"\0\0" + data[6:],
        short,
    ):
        assert read_frame(bad) is None


@pytest.mark.parametrize("reduce", [2, 4, 8])
def test_a_part_of_the_sides(reduce):
    smooth = np.add.outer(np.arange(75), np.arange(101)).astype(np.uint8)
    plain, turned, png = io.BytesIO(), io.BytesIO(), io.BytesIO()
    Image.fromarray(smooth).save(plain, "JPEG", quality=100)
    Image.fromarray(smooth).save(turned, "JPEG", quality=100, exif=exif())
    got, whole = decode(plain.getvalue(), "x", reduce=reduce), decode(plain.getvalue(), "x").float()
    assert got.shape == (1, -(-75 // reduce), -(-101 // reduce))
    means = torch.nn.functional.avg_pool2d(whole, reduce)
    assert (got[:, : means.shape[1], : means.shape[2]] - means).abs().median() <= 1
    assert decode(turned.getvalue(), "x", reduce=reduce).shape == (1, *got.shape[:0:-1])
    Image.fromarray(smooth).save(png, "PNG")
    assert decode(png.getvalue(), "x", reduce=reduce).shape == (1, 75, 101)  # no JPEG
