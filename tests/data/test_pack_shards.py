"""One image on its way to a shard: its own bytes where nothing has to change, else what a reader would see."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from image_files import encoded
from PIL import Image

from situs.data.pack import PackConfig, store, store_pixels
from situs.data.sources.images import decode, read_header
from situs.errors import BrokenSampleError

RNG = np.random.default_rng(0)
SMOOTH = np.add.outer(np.arange(60), np.arange(90))[..., None] * np.array([1, 1, 1]) + np.array([0, 30, 60])
RGB = SMOOTH.astype(np.uint8)
EXACT = PackConfig(short_side=20, encoding="png")


def turned(kind: str) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(Image.fromarray(RGB), kind, exif=exif)


FILES = {
    "jpeg": encoded(Image.fromarray(RGB), "JPEG"),
    "turned": turned("JPEG"),
    "cmyk": encoded(Image.fromarray(RGB).convert("CMYK"), "JPEG"),
    "grey": encoded(Image.fromarray(RGB[..., 0])),
    "palette": encoded(Image.fromarray(RGB).quantize(16)),
    "alpha": encoded(Image.fromarray(np.dstack([RGB, RGB[..., :1]]))),
    "webp": encoded(Image.fromarray(RGB), "WEBP", lossless=True),
    "tiff": encoded(Image.fromarray(RGB), "TIFF"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("short_side", [0, 60, 400])
def test_what_need_not_shrink_keeps_its_bytes(name, short_side):
    stored = store(FILES[name], "x", PackConfig(short_side=short_side))
    assert stored.data == FILES[name]
    expected = {"jpeg": ".jpg", "turned": ".jpg", "cmyk": ".jpg", "webp": ".webp", "tiff": ".tif"}
    assert stored.suffix == expected.get(name, ".png")


@pytest.mark.parametrize("name", FILES)
def test_a_shrunk_image_is_what_pillow_makes_of_the_decoded_one(name):
    """Pillow's own resampling as the oracle, which agrees with torchvision's to a level of rounding."""
    whole = decode(FILES[name], "x")
    got = decode(store(FILES[name], "x", EXACT).data, "x")
    height, width = (20, 30) if name != "turned" else (30, 20)
    assert got.shape == (whole.shape[0], height, width)
    for mine, own in zip(got, whole, strict=True):
        wanted = Image.fromarray(own.numpy()).resize((width, height), Image.Resampling.BICUBIC)
        assert np.abs(mine.numpy().astype(int) - np.asarray(wanted).astype(int)).max() <= 1
    assert read_header(store(FILES[name], "x", EXACT).data, "x").turned is False


def test_jpeg_and_its_quality():
    fine, coarse = (store(FILES["webp"], "x", PackConfig(short_side=20, quality=q)) for q in (95, 20))
    assert fine.suffix == coarse.suffix == ".jpg"
    assert len(fine.data) > len(coarse.data)
    exact = decode(store(FILES["webp"], "x", EXACT).data, "x").int()
    assert (decode(fine.data, "x").int() - exact).abs().float().mean() < 3


def test_alpha_is_kept_where_four_channels_are_asked_for():
    four = store(FILES["alpha"], "x", PackConfig(short_side=20, channels=4))
    assert four.suffix == ".png"
    assert decode(four.data, "x", 4).shape == (4, 20, 30)


def test_sixteen_bits_stay():
    deep = RNG.integers(0, 65536, (40, 50), dtype=np.uint16)
    stored = store(encoded(Image.fromarray(deep)), "x", PackConfig(short_side=20))
    got = decode(stored.data, "x")
    assert got.dtype == torch.float32
    whole = torch.from_numpy(deep.astype(np.float32) / 65535)[None, None]
    wanted = torch.nn.functional.interpolate(whole, (20, 25), mode="bicubic", antialias=True).clamp(0, 1)[0]
    assert torch.allclose(got, wanted, atol=1.1 / 65535)


def test_a_photograph_many_times_too_large_is_read_at_a_part_of_its_sides(monkeypatch):
    large = encoded(Image.fromarray(RGB).resize((900, 600), Image.Resampling.BICUBIC), "JPEG", quality=95)
    asked = []
    monkeypatch.setattr(
        "situs.data.pack.decode",
        lambda *a, reduce=1, **k: asked.append(reduce) or decode(*a, reduce=reduce, **k),
    )
    scaled = decode(store(large, "x", PackConfig(short_side=60, quality=100)).data, "x").int()
    exact = decode(store(large, "x", PackConfig(short_side=60, encoding="png")).data, "x").int()
    assert asked == [4, 1]  # 600 / 4 = 150 is at least twice 60; what is written without loss is read without
    assert scaled.shape == exact.shape == (3, 60, 90)
    assert (scaled - exact).abs().float().mean() < 1.5


@pytest.mark.parametrize(("side", "part"), [(79, 1), (80, 2), (159, 2), (160, 4), (319, 4), (320, 8)])
def test_a_photograph_is_never_read_below_twice_its_new_side(side, part, monkeypatch):
    asked = []
    monkeypatch.setattr("situs.data.pack.decode", lambda *_, reduce: asked.append(reduce) or torch.zeros(3, 20, 20))
    store(encoded(Image.new("L", (side, 400)), "JPEG"), "x", PackConfig(short_side=20))
    assert asked == [part]


def test_pixels_without_a_file_are_stored_without_loss():
    image = torch.from_numpy(RNG.integers(0, 256, (3, 8, 9), dtype=np.uint8))
    for given in (
        image,
        image[:1],
        image[:1].expand(4, -1, -1),
        image[:2],
        image.float() / 255,
        image[:1] / 999.0,
    ):
        assert torch.equal(decode(store_pixels(given, PackConfig()).data, "x", len(given)), given)
    assert decode(store_pixels(image, PackConfig(short_side=4)).data, "x").shape == (3, 4, 4)


@pytest.mark.parametrize("short_side", [0, 20, 400])
def test_what_cannot_be_decoded_is_broken(short_side):
    for data in (b"no image", FILES["jpeg"][:300], b""):
        with pytest.raises(BrokenSampleError, match="its name: cannot be decoded"):
            store(data, "its name", PackConfig(short_side=short_side))
