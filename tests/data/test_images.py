"""Decoding against NumPy and Pillow's own conversions."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from situs.data.images import BrokenImageError, centre_fit, decode, to_channels
from situs.errors import SitusError

RNG = np.random.default_rng(0)
RGB = RNG.integers(0, 256, (9, 13, 3), dtype=np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def chw(array: np.ndarray) -> torch.Tensor:
    array = array[..., None] if array.ndim == 2 else array
    return torch.from_numpy(array.transpose(2, 0, 1).copy())


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("WEBP", {"lossless": True}), ("BMP", {}), ("TIFF", {})])
def test_rgb_is_exact(kind, options):
    got = decode(encoded(Image.fromarray(RGB), kind, **options), "x")
    assert got.dtype == torch.uint8
    assert torch.equal(got, chw(RGB))


def test_grey_repeats_to_rgb_and_rgb_weighs_to_grey_as_in_pillow():
    grey = Image.fromarray(RGB[..., 0])
    assert torch.equal(decode(encoded(grey), "x"), chw(RGB[..., :1]))
    assert torch.equal(decode(encoded(grey), "x", channels=3), chw(RGB[..., :1]).expand(3, -1, -1))
    weighed = decode(encoded(Image.fromarray(RGB)), "x", channels=1)
    wanted = chw(np.asarray(Image.fromarray(RGB).convert("L")))
    assert (weighed.int() - wanted.int()).abs().max() <= 1  # Pillow rounds in fixed point


def test_sixteen_bits_keep_their_depth():
    deep = RNG.integers(0, 65536, (5, 7), dtype=np.uint16)
    for kind in ("PNG", "TIFF"):
        got = decode(encoded(Image.fromarray(deep), kind), "x")
        assert got.dtype == torch.float32
        assert torch.allclose(got, chw(deep.astype(np.float32) / 65535), atol=1e-7)
    three = decode(encoded(Image.fromarray(deep)), "x", channels=3)
    assert three.shape == (3, 5, 7)


def test_palette_alpha_bilevel_and_cmyk():
    palette = Image.fromarray(RGB).quantize(16)
    assert torch.equal(decode(encoded(palette), "x"), chw(np.asarray(palette.convert("RGB"))))
    alpha = np.dstack([RGB, RNG.integers(0, 256, (9, 13), dtype=np.uint8)])
    assert torch.equal(decode(encoded(Image.fromarray(alpha)), "x", 3), chw(RGB))
    assert torch.equal(decode(encoded(Image.fromarray(alpha)), "x"), chw(RGB))
    assert torch.equal(decode(encoded(Image.fromarray(alpha)), "x", channels=4), chw(alpha))
    palette.info["transparency"] = 0
    assert decode(encoded(palette, transparency=0), "x", 3).shape == (3, 9, 13)
    bilevel = decode(encoded(Image.fromarray(RGB[..., 0]).convert("1")), "x")
    assert set(bilevel.unique().tolist()) <= {0, 255}
    assert decode(encoded(Image.fromarray(RGB).convert("CMYK"), "JPEG"), "x").shape == (3, 9, 13)


def test_a_photograph_is_turned_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 270 degrees to see it upright
    got = decode(encoded(Image.fromarray(RGB), "PNG", exif=exif), "x")
    assert torch.equal(got, torch.rot90(chw(RGB), -1, (1, 2)))


def test_arrays_of_any_number_of_channels():
    five = RNG.random((5, 8, 9)).astype(np.float32)
    assert torch.equal(decode(npy(five), "x"), torch.from_numpy(five))
    assert torch.equal(decode(npy(five.transpose(1, 2, 0)), "x"), torch.from_numpy(five))
    assert torch.equal(decode(npy(RGB[..., 0]), "x"), chw(RGB[..., 0]))
    deep = RNG.integers(0, 65536, (6, 7), dtype=np.uint16)
    assert torch.allclose(decode(npy(deep), "x"), chw(deep.astype(np.float32)) / 65535)


def test_channels_that_do_not_convert_are_refused_in_one_sentence():
    with pytest.raises(SitusError, match=r"^scan.npy: has 5 channels and 3 were asked for; .*\(--data.channels\)$"):
        decode(npy(np.zeros((5, 8, 9), np.uint8)), "scan.npy", channels=3)
    with pytest.raises(SitusError, match="has 3 channels and 2"):
        to_channels(torch.zeros(3, 2, 2), 2, "x")


JPEG = encoded(Image.fromarray(np.kron(RGB, np.ones((8, 8, 1), np.uint8))), "JPEG")


@pytest.mark.parametrize(
    "data",
    [
        JPEG[: len(JPEG) // 2],
        b"",
        b"not an image",
        encoded(Image.fromarray(RGB))[:60],
        npy(np.zeros((2, 2, 2, 2))),
        npy(np.full((4, 4), np.nan)),
        npy(RGB)[:-10],
        npy(np.zeros((4, 4), np.complex64)),
        npy(RGB).replace(b"}", b" "),
    ],
    ids=["torn jpeg", "empty", "text", "torn png", "4-d array", "nan", "torn array", "complex", "torn header"],
)
def test_broken_images_name_the_file(data):
    with pytest.raises(BrokenImageError, match=r"^folder/one\.jpg: cannot be decoded") as caught:
        decode(data, "folder/one.jpg")
    assert "\n" not in str(caught.value)
    assert " at 0x" not in str(caught.value)


def test_an_array_with_a_pickle_inside_is_not_loaded():
    with pytest.raises(BrokenImageError):
        decode(npy(np.array([[{"a": 1}]], dtype=object)), "x")


def test_centre_fit_covers_and_cuts_the_middle():
    tall = torch.arange(6.0).view(1, 6, 1).expand(1, 6, 2) / 6
    assert torch.equal(centre_fit(tall, 2, 2), tall[:, 2:4])
    assert centre_fit(torch.zeros(3, 50, 31, dtype=torch.uint8), 20, 24).shape == (3, 20, 24)
    same = torch.rand(3, 4, 4)
    assert centre_fit(same, 4, 4) is same
