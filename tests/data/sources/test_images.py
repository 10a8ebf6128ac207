"""Decoding against NumPy and Pillow's own conversions."""

from __future__ import annotations

import io
import math
import struct
import sys
import zlib
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from image_files import encoded
from PIL import Image, ImageFile, features

from situs.data.resize import centre_fit
from situs.data.sources import images
from situs.data.sources.images import (
    Header,
    decode,
    decode_numbers,
    from_array,
    from_pillow,
    is_image,
    read_header,
    to_channels,
)
from situs.errors import BrokenSampleError, SitusError

RNG = np.random.default_rng(0)
RGB = RNG.integers(0, 256, (9, 13, 3), dtype=np.uint8)


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def chw(array: np.ndarray) -> torch.Tensor:
    array = array[..., None] if array.ndim == 2 else array
    return torch.from_numpy(array.transpose(2, 0, 1).copy())


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000"])
def test_a_file_of_an_image_is_known_by_its_first_bytes(kind: str) -> None:
    Image.init()
    if kind in Image.SAVE:  # this Pillow may lack some
        assert is_image(encoded(Image.fromarray(RGB), kind)[:16])
    for brand in (b"avif", b"avis", b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1"):
        assert is_image(b"\0\0\0\x1cftyp" + brand + bytes(4))
    assert is_image(npy(RGB)[:16]) and is_image(b"MM\0*" + bytes(12))
    sound, film = b"RIFF\x24\0\0\0WAVEfmt ", b"\0\0\0\x1cftypmp42" + bytes(4)
    for other in (b"", b"text", sound, film, b"xxxx\0\0\0\0WEBPVP8 ", b"\0\0\0\x1cxxxxheic" + bytes(4)):
        assert not is_image(other)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("share", [0.3, 0.97])
def test_a_file_that_was_cut_short_says_so(kind: str, share: float) -> None:
    data = encoded(Image.fromarray(RNG.integers(0, 256, (40, 40, 3), dtype=np.uint8)), kind)
    with pytest.raises(BrokenSampleError, match=r"a: cannot be decoded as an image \(the file ends too early"):
        decode(data[: int(share * len(data))], "a")


def test_a_damaged_file_that_is_whole_is_not_called_cut() -> None:
    data = encoded(Image.fromarray(RGB), "WEBP", lossless=True)
    with pytest.raises(BrokenSampleError, match="cannot be decoded as an image") as broken:
        decode(data[:12] + bytes(len(data) - 12), "a")
    assert "cut short" not in str(broken.value)


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
    assert torch.equal(decode(encoded(Image.fromarray(alpha)), "x", channels=4), chw(alpha))
    opaque = np.dstack([RGB, np.full((9, 13), 255, np.uint8)])
    assert torch.equal(decode(encoded(Image.fromarray(opaque)), "x"), chw(RGB))
    bilevel = decode(encoded(Image.fromarray(RGB[..., 0]).convert("1")), "x")
    assert set(bilevel.unique().tolist()) <= {0, 255}
    assert decode(encoded(Image.fromarray(RGB).convert("CMYK"), "JPEG"), "x").shape == (3, 9, 13)


def test_what_is_transparent_is_laid_over_white():
    """c α + 255 (1 − α), whatever says α: a channel, a colour of the palette, or one grey level or colour."""
    share = RNG.integers(0, 256, (9, 13), dtype=np.uint8)
    share[0], share[1] = 0, 255
    weight = share[..., None] / 255
    wanted = chw((RGB * weight + 255 * (1 - weight)).round().astype(np.uint8)).int()
    for mode in ("RGBA", "LA"):
        image = Image.fromarray(np.dstack([RGB, share])).convert(mode)
        grey = np.asarray(Image.fromarray(RGB).convert("L"))[..., None]
        here = wanted if mode == "RGBA" else chw((grey * weight + 255 * (1 - weight)).round().astype(np.uint8)).int()
        found = decode(encoded(image), "x")
        assert found.shape == here.shape
        assert (found.int() - here).abs().max() <= 1
        assert set(found[:, 0].flatten().tolist()) == {255}
        assert torch.equal(found[:, 1].int(), here[:, 1])
        assert torch.equal(from_pillow(image, "x"), found)
    palette = Image.fromarray(RGB).quantize(16)
    chosen = np.asarray(palette)[4, 4]
    gone = torch.from_numpy(np.asarray(palette) == chosen)
    found = decode(encoded(palette, transparency=int(chosen)), "x", 3)
    assert bool((found[:, gone] == 255).all())
    assert torch.equal(found[:, ~gone], chw(np.asarray(palette.convert("RGB")))[:, ~gone])
    level = decode(encoded(Image.fromarray(share), transparency=int(share[5, 5])), "x")
    assert torch.equal(level, torch.from_numpy(np.where(share == share[5, 5], 255, share))[None])


def test_a_photograph_is_turned_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 270 degrees to see it upright
    got = decode(encoded(Image.fromarray(RGB), "PNG", exif=exif), "x")
    assert torch.equal(got, torch.rot90(chw(RGB), -1, (1, 2)))


def test_a_mask_is_turned_as_its_photograph_is():
    exif = Image.Exif()
    exif[0x0112] = 6
    numbers = RGB[..., 0] % 7
    for made in (Image.fromarray(numbers), Image.fromarray(numbers.astype(np.uint16))):
        got = decode_numbers(encoded(made, "PNG", exif=exif), "x")
        assert torch.equal(got.long(), torch.rot90(torch.from_numpy(numbers).long(), -1))


@pytest.mark.parametrize("kind", ["u1", "<u2", ">u2", "<i4"])
def test_a_mask_may_be_a_numpy_file(kind: str) -> None:
    numbers = RNG.integers(0, 200, (9, 13)).astype(kind)
    assert torch.equal(decode_numbers(npy(numbers), "x"), torch.from_numpy(numbers.astype(np.int64)))
    for wrong, said in (
        (np.zeros((3, 5, 7), np.uint8), r"an array of uint8 and shape \(3, 5, 7\) contains no class numbers"),
        (np.zeros((5, 7), np.float32), r"an array of float32 and shape \(1, 5, 7\) contains no class numbers"),
        (np.zeros((5, 7), bool), r"an array of bool and shape \(1, 5, 7\) contains no class numbers"),
    ):
        with pytest.raises(BrokenSampleError, match=said):
            decode_numbers(npy(wrong), "x")


def test_the_header_of_an_image_tells_its_upright_size() -> None:
    assert read_header(npy(RGB.astype(np.uint16)), "x") == Header("NPY", "uint16", 9, 13, turned=False)
    assert read_header(encoded(Image.fromarray(RGB)), "x") == Header("PNG", "RGB", 9, 13, turned=False)
    see_through = encoded(Image.fromarray(RGB).convert("RGBA"))
    assert read_header(see_through, "x") == Header("PNG", "RGBA", 9, 13, turned=False, transparent=True)
    for way in range(10):  # 1 is upright, 2 to 8 are turned or mirrored, the others mean nothing
        exif = Image.Exif()
        exif[0x0112] = way
        sides = (13, 9) if way in (5, 6, 7, 8) else (9, 13)
        wanted = Header("JPEG", "RGB", *sides, turned=2 <= way <= 8)
        data = encoded(Image.fromarray(RGB), "JPEG", exif=exif)
        assert read_header(data, "x") == wanted
        assert tuple(decode(data, "x").shape[1:]) == sides


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_two_versions_of_numpy_files_are_read(version: tuple[int, int]) -> None:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, RGB, version)
    if version < (3, 0):
        assert torch.equal(decode(buffer.getvalue(), "x"), chw(RGB))
    else:
        with pytest.raises(BrokenSampleError, match=r"\(NumPy format 3\.0: only versions 1\.0 and 2\.0 can be read\)"):
            decode(buffer.getvalue(), "x")


def test_colours_that_are_multiplied_by_their_alpha_are_divided_by_it() -> None:
    """Pillow's La and RGBa; what is opaque is the same in both."""
    alpha = np.full((9, 13), 255, np.uint8)
    alpha[:4] = 0
    for mode in ("LA", "RGBA"):
        image = Image.fromarray(np.dstack([RGB, alpha])).convert(mode)
        found = from_pillow(image.convert({"LA": "La", "RGBA": "RGBa"}[mode]), "x")
        assert torch.equal(found, from_pillow(image, "x"))
        assert bool((found[:, :4] == 255).all()) and found.shape[0] == (1 if mode == "LA" else 3)


HEIC = b"\0\0\0\x18ftypheic" + bytes(range(40))


class Heif(ImageFile.ImageFile):
    """The bytes from the thirteenth on as a grey picture."""

    format = "HEIF"
    format_description = "of this test"

    def _open(self) -> None:
        self._size, self._mode, self.tile = (4, 3), "L", [("raw", (0, 0, 4, 3), 12, ("L", 0, 1))]


def test_heic_is_read_where_its_package_is_there(monkeypatch) -> None:
    """A stand-in for pillow_heif, which registers a format with Pillow as that does."""
    package: Any = ModuleType("pillow_heif")
    package.__spec__ = ModuleSpec("pillow_heif", None)
    package.register_heif_opener = lambda: Image.register_open("HEIF", Heif, lambda start: start[4:12] == b"ftypheic")
    monkeypatch.setitem(sys.modules, "pillow_heif", package)
    monkeypatch.setattr(Image, "OPEN", dict(Image.OPEN))
    monkeypatch.setattr(Image, "ID", [*Image.ID])
    monkeypatch.setattr(images, "_reads_heic", cache(images._reads_heic.__wrapped__))
    assert decode(HEIC, "x").tolist() == [[[*HEIC[12:16]], [*HEIC[16:20]], [*HEIC[20:24]]]]


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow has no AVIF")
def test_an_avif_file_of_a_general_brand_is_read() -> None:
    data = encoded(Image.fromarray(RGB), "AVIF")
    general = data[:8] + b"mif1" + data[12:]
    assert torch.equal(decode(general, "x"), decode(data, "x"))


def test_a_jpeg_with_filling_and_bare_markers_is_plain() -> None:
    assert torch.equal(images._decode_plain(JPEG), decode(JPEG, "x"))
    for inserted in (b"\xff", b"\xff" * 5, b"\xff\xd0", b"\xff\xd7\xff"):
        filled = JPEG[:2] + inserted + JPEG[2:]
        found = images._decode_plain(filled)
        assert found is not None and torch.equal(found, decode(JPEG, "x"))


def test_sixteen_bits_of_colour_are_scaled_and_not_cut():
    """Pillow reads them as 8 bits: a level of 256 is lost at most, and 40,000 stays below 65,535."""
    colours = np.array([[[0, 1000, 32768], [65535, 256, 40000]]], dtype=np.uint16)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in colours)
    head = struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    parts = [struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d)) for t, d in chunks]
    got = decode(b"\x89PNG\r\n\x1a\n" + b"".join(parts), "x")
    assert (got.float() / 255 - chw(colours.astype(np.float32)) / 65535).abs().max() < 1 / 255


def test_arrays_of_any_number_of_channels():
    five = RNG.random((5, 8, 9)).astype(np.float32)
    assert torch.equal(decode(npy(five), "x"), torch.from_numpy(five))
    assert torch.equal(decode(npy(five.transpose(1, 2, 0)), "x"), torch.from_numpy(five))
    assert torch.equal(decode(npy(RGB[..., 0]), "x"), chw(RGB[..., 0]))
    deep = RNG.integers(0, 65536, (6, 7), dtype=np.uint16)
    assert torch.allclose(decode(npy(deep), "x"), chw(deep.astype(np.float32)) / 65535)


def test_channels_that_do_not_convert_are_refused_in_one_sentence():
    with pytest.raises(SitusError, match=r"^scan.npy: has 5 channels, but 3 are expected; "):
        decode(npy(np.zeros((5, 8, 9), np.uint8)), "scan.npy", channels=3)
    with pytest.raises(SitusError, match="has 3 channels, but 2"):
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
    with pytest.raises(BrokenSampleError, match=r"^folder/one\.jpg: cannot be decoded") as caught:
        decode(data, "folder/one.jpg")
    assert "\n" not in str(caught.value)
    assert " at 0x" not in str(caught.value)


@pytest.mark.parametrize(
    ("pixels", "span"),
    [
        ([0.5, np.nan], "nan to nan"),
        ([0.5, np.inf], "0.5 to inf"),
        ([0.0, 254.5], "0 to 254.5"),
        ([-1.0, 1.0], "-1 to 1"),
        (np.array([0, 1 << 20], np.int32), "0 to 16.0002"),
    ],
)
@pytest.mark.parametrize("form", ["tif", "npy"])
def test_floats_that_are_no_pixels_are_broken(pixels, span, form):
    """A NaN would end a run at its loss; what lies beyond 0 and 1 would be clamped, or wrap where it is packed."""
    array = np.tile(np.array(pixels) if isinstance(pixels, np.ndarray) else np.array(pixels, np.float32), (4, 2))
    data = npy(array) if form == "npy" else encoded(Image.fromarray(array), "TIFF")
    with pytest.raises(BrokenSampleError, match=rf"x: .* \(its pixels must be between 0 and 1, not from {span}\)"):
        decode(data, "x")
    fine = np.array([[0.0, 1.0004], [-0.0004, 0.3]], np.float32)  # rounding
    assert torch.equal(decode(encoded(Image.fromarray(fine), "TIFF"), "x"), chw(fine))


def damaged(chance: np.random.Generator) -> tuple[bytes, bool]:
    """A JPEG of some kind, often with a wrong byte, a piece of zeros, or its end too early; and whether it is whole."""
    image = Image.fromarray(chance.integers(0, 256, (21, 34, 3), dtype=np.uint8).repeat(2, 0))
    image = image.convert("L") if chance.random() < 0.2 else image
    options = {"subsampling": int(chance.integers(3))} if image.mode == "RGB" else {}
    data = bytearray(encoded(image, "JPEG", progressive=bool(chance.random() < 0.3), **options))
    place, damage = int(chance.integers(len(data))), int(chance.integers(4))
    match damage:
        case 0:
            data[place] = int(chance.integers(256))
        case 1:
            data[place : place + 20] = bytes(20)
        case 2:
            data = data[:place] + b"\xff\xd9"
    return bytes(data), damage == 3


def test_a_plain_jpeg_is_what_pillow_makes_of_it_whole_or_damaged(monkeypatch, capfd):
    """An older libjpeg, as the oldest Pillow has, fills the missing part of a damaged image with other pixels."""
    alike = tuple(map(int, features.version("libjpeg_turbo").split("."))) >= (3, 1)
    chance, fast = np.random.default_rng(5), 0
    for _ in range(200):
        (data, whole), made = damaged(chance), []
        for decoder in (None, images._jpeg_decoder()):
            with monkeypatch.context() as patched:
                patched.setattr(images, "_jpeg_decoder", lambda decoder=decoder: decoder)
                try:
                    made.append(decode(data, "x"))
                except BrokenSampleError as error:
                    made.append(str(error))
        if isinstance(made[0], torch.Tensor):
            assert torch.equal(*made) if whole or alike else made[0].shape == made[1].shape
        else:
            assert made[0] == made[1]
        fast += images._decode_plain(data) is not None
    assert fast > 80
    capfd.readouterr()  # libjpeg tells of damage on the screen


def test_an_array_with_a_pickle_inside_is_not_loaded():
    with pytest.raises(BrokenSampleError):
        decode(npy(np.array([[{"a": 1}]], dtype=object)), "x")


def claimed(header: dict[str, object], body: bytes = b"x" * 16) -> bytes:
    """A NumPy file whose header says what we like."""
    text = repr(header).encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body


@pytest.mark.parametrize("shape", [(10**6, 10**6), (-4, -4), (4, 5), (10**18, 10**18), (0,)])
def test_an_array_is_never_made_larger_than_its_file(shape, monkeypatch):
    monkeypatch.setattr(np, "load", lambda *_, **__: pytest.fail("allocates whatever the header claims"))
    with pytest.raises(BrokenSampleError):
        decode(claimed({"descr": "|u1", "fortran_order": False, "shape": shape}), "x")
    assert decode(claimed({"descr": "|u1", "fortran_order": True, "shape": (4, 4)}), "x").shape == (1, 4, 4)


def test_arrays_in_fortrans_order_are_the_same_picture():
    assert torch.equal(decode(npy(np.asfortranarray(RGB)), "x"), chw(RGB))


@pytest.mark.filterwarnings("ignore:Image size")
def test_an_image_of_too_many_pixels_is_named_before_it_is_unpacked(monkeypatch):
    big = encoded(Image.new("L", (20000, 5000)))
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("unpacked"))
    with pytest.raises(BrokenSampleError, match=r"20000 × 5000 pixels are more than the limit of 89,478,485"):
        decode(big, "x")


def test_no_format_that_starts_a_program_is_read():
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 5\n%%EndComments\nshowpage\n"
    with pytest.raises(BrokenSampleError, match="no known format"):
        decode(postscript, "x.png")


@pytest.mark.parametrize(("shape", "size"), [((1, 3_000_000), (32, 32)), ((3_000_000, 1), (32, 48)), ((2, 90), (4, 4))])
def test_a_thread_of_an_image_takes_no_more_memory_than_a_picture(shape, size, monkeypatch):
    """Its middle is what is asked for; to resize all of it first would take gigabytes."""
    from torchvision.transforms.v2 import functional as tv

    resize, largest = tv.resize, []
    monkeypatch.setattr(tv, "resize", lambda image, to, *a, **k: largest.append(to) or resize(image, to, *a, **k))
    image = torch.zeros(3, *shape)
    middle = [slice(max(0, side // 2 - 24), side // 2 + 24) for side in shape]
    image[:, middle[0], middle[1]] = 1.0
    torch.testing.assert_close(centre_fit(image, *size), torch.ones(3, *size))
    assert math.prod(largest[0]) <= 9 * math.prod(size)


def test_only_a_very_long_image_is_cut_before_it_is_resized():
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as tv

    image = torch.rand(3, 10, 79, generator=torch.Generator().manual_seed(0))
    wanted = tv.center_crop(tv.resize(image, [5, 39], InterpolationMode.BICUBIC, antialias=True), [5, 5]).clamp(0, 1)
    assert torch.equal(centre_fit(image, 5, 5), wanted)


def test_centre_fit_covers_and_cuts_the_middle():
    tall = torch.arange(6.0).view(1, 6, 1).expand(1, 6, 2) / 6
    assert torch.equal(centre_fit(tall, 2, 2), tall[:, 2:4])
    assert centre_fit(torch.zeros(3, 50, 31, dtype=torch.uint8), 20, 24).shape == (3, 20, 24)
    same = torch.rand(3, 4, 4)
    assert centre_fit(same, 4, 4) is same


@pytest.mark.parametrize("reduce", [1, 2, 4, 8])
def test_a_jpeg_alone_is_read_at_a_part_of_its_sides(reduce: int) -> None:
    """Each pixel is about the mean of those that it stands for; sides are rounded up."""
    ramp = np.add.outer(np.arange(61), np.arange(91))[..., None] + np.array([0, 30, 60])
    plain = ramp.astype(np.uint8)
    found = decode(encoded(plain, "JPEG", quality=95), "x", reduce=reduce)
    height, width = -(-61 // reduce), -(-91 // reduce)
    assert found.shape == (3, height, width)
    whole = chw(plain).float()[:, : 61 // reduce * reduce, : 91 // reduce * reduce]
    wanted = torch.nn.functional.avg_pool2d(whole, reduce)
    assert (found[:, : 61 // reduce, : 91 // reduce] - wanted).abs().max() < 5
    assert torch.equal(decode(encoded(plain), "x", reduce=reduce), chw(plain))


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("channels", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("last", [False, True])
def test_an_array_is_an_image_whichever_of_its_ends_is_the_channels(many: bool, channels: int, last: bool) -> None:
    """channels: 0 for none. The image itself is told apart by its values, one image after the other."""
    wanted = torch.arange(3 * max(channels, 1) * 5 * 7).view(3, max(channels, 1), 5, 7).to(torch.uint8)
    given = wanted[:, 0] if not channels else wanted.movedim(1, 3) if last else wanted
    for array in (given, given.numpy(), given.numpy().astype(">u2"), (given / 255).double()):
        scale = 255 if "float" in str(array.dtype) else 1
        scale, exact = (65535, False) if str(array.dtype) == ">u2" else (scale, scale == 1)
        found = from_array(array, "x", many=True) if many else from_array(array[1], "x")
        expected = wanted if many else wanted[1]
        assert found.shape == expected.shape and found.dtype == (torch.uint8 if exact else torch.float32)
        torch.testing.assert_close(found.double() * (1 if exact else scale), expected.double(), rtol=0, atol=2e-3)


def test_an_array_that_is_only_read_stays_as_it_is_and_an_odd_one_is_a_sentence() -> None:
    fixed = np.arange(35, dtype=np.uint8).reshape(5, 7)
    fixed.flags.writeable = False
    assert torch.equal(from_array(fixed[::-1, ::2], "x")[0], torch.from_numpy(fixed[::-1, ::2].copy()))
    assert from_array(fixed, "x", 3).shape == (3, 5, 7)  # as a model takes it
    for array, said in (
        (np.zeros((5, 7), dtype=bool), "x: is an array of bool; pixels must be"),
        (torch.zeros(5, 7, dtype=torch.int64), "x: has pixels of int64; pixels must be"),
        (np.zeros((2, 3, 5, 7), np.uint8), r"x: has the shape \[2, 3, 5, 7\]; an image must be"),
        (np.zeros((0, 7), np.uint8), r"x: has the shape \[0, 7\]; an image must be"),
        (np.full((5, 7), 1.5), "x: its pixels must be between 0 and 1, not from 1.5 to 1.5; pass "),
    ):
        with pytest.raises(BrokenSampleError, match=said) as caught:
            from_array(array, "x")
        assert caught.value.field == "data"
