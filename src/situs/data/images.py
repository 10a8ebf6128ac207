"""One encoded image to one tensor: what Pillow reads (JPEG, PNG, WebP, TIFF…) and NumPy arrays.

A decoded image is [C, H, W]: uint8 in 0..255, or float32 in [0, 1] where the file is deeper than 8 bits.
Alpha is dropped unless four channels are asked for, a palette becomes RGB, and a photograph is turned as its
EXIF tag says.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from situs.errors import SitusError

if TYPE_CHECKING:
    from PIL import Image

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".npy"})
# Rec. 601 luma, the weights Pillow and torchvision turn RGB into grey with.
LUMA = (0.299, 0.587, 0.114)
_PILLOW_TYPES = {"I;16": torch.uint16, "I": torch.int32, "F": torch.float32}
_DEEPEST = {torch.uint16: 65535.0, torch.int32: 65535.0, torch.int16: 32767.0}


class BrokenImageError(SitusError):
    """An image that cannot be decoded; loaders skip and count it, or stop at it when they are strict."""


def decode(data: bytes, name: str, channels: int | None = None) -> Tensor:
    """The image in `data`, [C, H, W] uint8 or float32; `name` is what an error calls it."""
    try:
        image = _decode_native(data, keep_alpha=channels == 4)
    except Exception as error:  # each decoder raises classes of its own for each way a file can be damaged
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BrokenImageError(f"{name}: cannot be decoded as an image ({reason[:120]})") from error
    return to_channels(image, channels, name)


def to_channels(image: Tensor, channels: int | None, name: str) -> Tensor:
    """`image` [C, H, W] with `channels` channels: grey is repeated, RGB is weighed to grey, else refused."""
    have = image.shape[0]
    if channels is None or have == channels:
        return image
    if (have, channels) == (1, 3):
        return image.expand(3, -1, -1).contiguous()
    if (have, channels) == (3, 1):
        weights = torch.tensor(LUMA).view(3, 1, 1)
        grey = (image.to(torch.float32) * weights).sum(0, keepdim=True)
        return grey.round().to(torch.uint8) if image.dtype == torch.uint8 else grey
    raise SitusError(
        f"{name}: has {have} channels and {channels} were asked for; "
        "only grey to RGB and RGB to grey convert (--data.channels)"
    )


def centre_fit(image: Tensor, height: int, width: int) -> Tensor:
    """`image` [..., C, H, W] resized (bicubic, antialiased) to cover the size, then cut to its centre."""
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as tv

    have = image.shape[-2:]
    if tuple(have) == (height, width):
        return image
    # Whole numbers and cut, not rounded, as torchvision finds the longer side.
    tall = have[0] * width >= height * have[1]
    covering = [have[0] * width // have[1], width] if tall else [height, have[1] * height // have[0]]
    image = tv.resize(image, covering, InterpolationMode.BICUBIC, antialias=True)
    top, left = round((covering[0] - height) / 2), round((covering[1] - width) / 2)
    image = image[..., top : top + height, left : left + width]
    # Bicubic weights overshoot; uint8 is clamped by torchvision, floats are not.
    return image.clamp(0.0, 1.0) if image.is_floating_point() else image


def _decode_native(data: bytes, keep_alpha: bool) -> Tensor:
    return _decode_array(data) if data.startswith(b"\x93NUMPY") else _decode_pillow(data, keep_alpha)


def _shallow(image: Tensor) -> Tensor:
    """uint8 stays; deeper integers become float32 with the type's largest value at 1."""
    if image.dtype in {torch.uint8, torch.float32}:
        return image
    if image.dtype in _DEEPEST:
        return image.to(torch.float32) / _DEEPEST[image.dtype]
    if image.dtype in {torch.float64, torch.float16}:
        return image.to(torch.float32)
    raise ValueError(f"pixels of type {image.dtype} are not supported")


def _decode_array(data: bytes) -> Tensor:
    """A NumPy file of [H, W], [C, H, W] or [H, W, C] (the shorter end is the channels), floats in [0, 1]."""
    import numpy as np

    array = np.load(io.BytesIO(data), allow_pickle=False)
    if array.ndim not in {2, 3} or 0 in array.shape:
        raise ValueError(f"an array of shape {tuple(array.shape)} is no image")
    if array.ndim == 2:
        array = array[None]
    elif array.shape[2] < array.shape[0]:
        array = array.transpose(2, 0, 1)
    image = torch.from_numpy(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))))
    if image.is_floating_point() and not bool(torch.isfinite(image).all()):
        raise ValueError("the array holds NaN or infinity")
    return _shallow(image)


def _decode_pillow(data: bytes, keep_alpha: bool) -> Tensor:
    from PIL import Image, ImageOps, UnidentifiedImageError

    # Told the format, Pillow need not ask each of its forty plugins in turn: a third of the time of a small WebP.
    formats = ("WEBP",) if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None
    try:
        with Image.open(io.BytesIO(data), formats=formats) as opened:
            opened.load()
            ImageOps.exif_transpose(opened, in_place=True)
            image = _plain_mode(opened, keep_alpha)
            pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=_PILLOW_TYPES.get(image.mode, torch.uint8))
    except UnidentifiedImageError:
        raise ValueError("no known format") from None  # Pillow's own words name a place in memory
    return _shallow(pixels.view(image.height, image.width, -1).permute(2, 0, 1))


def _plain_mode(image: Image.Image, keep_alpha: bool) -> Image.Image:
    """Pillow's many modes brought to L, RGB, RGBA, 16/32-bit integers or floats."""
    if image.mode in {"L", "RGB", "F", "I"}:
        return image
    if image.mode.startswith("I;16"):
        return image if image.mode == "I;16" else image.convert("I")
    if image.mode in {"1", "LA", "La"}:
        return image.convert("L")
    if keep_alpha:
        return image.convert("RGBA")
    if "transparency" in image.info or image.mode in {"RGBa", "PA"}:
        # Straight to RGB, Pillow warns about or refuses these two.
        image = image.convert("RGBA")
    return image.convert("RGB")
