"""What becomes of one image on its way to a shard.

An image that need not be shrunk keeps its bytes, whatever its format, so that a reader sees the same pixels; it is
decoded all the same, because what is broken is to be told now and not by a run. A larger one is decoded as every reader
here decodes it (upright, without palette or CMYK), resized (bicubic, antialiased) and written anew.
"""

from __future__ import annotations

import io
from typing import NamedTuple

import numpy as np
from torch import Tensor

from situs.data.pack.config import PackConfig
from situs.data.resize import covering_size, resized
from situs.data.sources.images import decode, read_header

_OWN = ("PNG", "WEBP", "AVIF", "GIF", "BMP", "DIB", "PPM", "NPY")
SUFFIXES = {"JPEG": ".jpg", "MPO": ".jpg", "HEIF": ".heic", "TIFF": ".tif", "JPEG2000": ".jp2"}
SUFFIXES |= {kind: f".{kind.lower()}" for kind in _OWN}
"""Pillow's name of a format -> the ending by which readers know it."""

# A JPEG many times too large is read at a part of its sides, but never below twice what is wanted: what is left to the
# resampling then hides nearly all of the difference.
_SPARE = 2
_LONGEST_JPEG = 65535


class Stored(NamedTuple):
    """An image as it stands in a shard. suffix: of its format."""

    data: bytes
    suffix: str


def store(data: bytes, name: str, how: PackConfig) -> Stored:
    """An encoded image; raises `BrokenSampleError` under `name` where it cannot be decoded."""
    header = read_header(data, name)
    short = min(header.height, header.width)
    if not how.short_side or short <= how.short_side:
        decode(data, name)
        return Stored(data, SUFFIXES[header.kind])
    reduce = 1
    if how.encoding == "jpeg":  # what is written without loss is also read without
        reduce = next((part for part in (8, 4, 2) if short // part >= _SPARE * how.short_side), 1)
    return _encode(_shrink(decode(data, name, how.channels, reduce=reduce), how.short_side), how)


def store_pixels(image: Tensor, how: PackConfig) -> Stored:
    """An image [C, H, W] of a set that holds no files: as it is without loss, or shrunk."""
    if how.short_side and min(image.shape[1:]) > how.short_side:
        return _encode(_shrink(image, how.short_side), how)
    return _encode(image, None)


def _shrink(image: Tensor, short_side: int) -> Tensor:
    return resized(image, covering_size((image.shape[1], image.shape[2]), short_side, short_side))


def _encode(image: Tensor, how: PackConfig | None) -> Stored:
    """how: None writes without loss."""
    from PIL import Image

    buffer, channels = io.BytesIO(), image.shape[0]
    deep = image.is_floating_point()
    if channels not in {1, 3, 4} or (deep and (channels != 1 or how is None)):
        np.save(buffer, image.contiguous().numpy())
        return Stored(buffer.getvalue(), ".npy")
    pixels = image.permute(1, 2, 0).contiguous().numpy()
    if deep:
        pixels = np.round(pixels * 65535.0).astype(np.uint16)
    picture = Image.fromarray(pixels[..., 0] if channels == 1 else pixels)
    if how is None or how.encoding == "png" or deep or channels == 4 or max(picture.size) > _LONGEST_JPEG:
        picture.save(buffer, "PNG", compress_level=6)
        return Stored(buffer.getvalue(), ".png")
    picture.save(buffer, "JPEG", quality=how.quality)
    return Stored(buffer.getvalue(), ".jpg")
