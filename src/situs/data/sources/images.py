"""One encoded image to one tensor: what Pillow reads (JPEG, PNG, WebP, TIFF…) and NumPy arrays.

A decoded image is [C, H, W]: uint8 in 0..255, or float32 in [0, 1] where the file has more than 8 bits a channel.
Transparent pixels are laid over white unless four channels are asked for, a palette becomes RGB, and a photograph is
turned as its EXIF tag says.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import math
import tokenize
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import torch
from torch import Tensor

from situs.errors import BrokenSampleError, SitusError, counted, first_line, verb

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

IMAGE_SUFFIXES = frozenset(
    {
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".avif", ".heic", ".heif", ".jp2", ".gif"),
        *(".bmp", ".dib", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".npy"),
    }
)
_NUMPY = b"\x93NUMPY"
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"\0\0\0\x0cjP  ", _NUMPY)
_HEIC = (b"heic", b"heix", b"heim", b"heis", b"hevc")
_HEIF = (*_HEIC, b"mif1", b"msf1")  # the last two may be AVIF as well
# Some of Pillow's other plugins start programs (EPS calls Ghostscript) or take anything for an image.
_FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000")
_ORIENTATION = 0x0112  # the EXIF tag
_MOST_BYTES = 1 << 30
# Rec. 601 luma, the weights Pillow and torchvision turn RGB into grey with.
LUMA = (0.299, 0.587, 0.114)
_PILLOW_TYPES = {"I;16": torch.uint16, "I": torch.int32, "F": torch.float32}
_DEEPEST = {torch.uint16: 65535.0, torch.int32: 65535.0, torch.int16: 32767.0}
_FLOATS = {torch.float16, torch.float32, torch.float64}
_NUMBERS = "uint8 (0 to 255), uint16 (0 to 65535) or floats from 0 to 1"
_ROUNDING = 1e-3  # of floats that are meant to be 0 or 1


class Header(NamedTuple):
    """The facts in a file's header, before a pixel is read.

    kind: Pillow's name of the format, or NPY. mode: Pillow's, or the array's type. height, width: of the upright image.
    turned: whether its EXIF tag turns or mirrors it. transparent: whether it has an alpha channel.
    """

    kind: str
    mode: str
    height: int
    width: int
    turned: bool
    transparent: bool = False


def decode(data: bytes, name: str, channels: int | None = None, *, reduce: int = 1) -> Tensor:
    """The image in `data`, [C, H, W] uint8 or float32; `name` is what an error calls it.

    reduce: 2, 4 or 8 reads a JPEG at 1/2, 1/4 or 1/8 of its sides (rounded up), which saves most of the work; its
    pixels are means in the cosine domain, close to a resized image but not equal to one. Other formats stay whole.
    """
    with _broken(name, data):
        if data.startswith(_NUMPY):
            image = _shallow(torch.from_numpy(_image_array(data)))
        else:
            plain = _decode_plain(data) if reduce == 1 else None
            image = plain if plain is not None else _decode_pillow(data, keep_alpha=channels == 4, reduce=reduce)
    return to_channels(image, channels, name)


def from_pillow(image: Image.Image, name: str, channels: int | None = None) -> Tensor:
    """An image of Pillow in memory as a tensor [C, H, W], as `decode` would give its file; the image is unchanged."""
    from PIL import ImageOps

    file = str(getattr(image, "filename", "") or "")
    # Where the pixels are not read yet, processes and threads would share the position in the open file.
    if getattr(image, "fp", None) is not None and Path(file).is_file() and getattr(image, "n_frames", 1) == 1:
        return decode(read_bytes(Path(file), lambda: name), name, channels)
    with _broken(name):
        pixels = _pixels_of(ImageOps.exif_transpose(image), keep_alpha=channels == 4)
    return to_channels(pixels, channels, name)


def from_array(array: np.ndarray | Tensor, name: str, channels: int | None = None, *, many: bool = False) -> Tensor:
    """An array or tensor [H, W], [C, H, W] or [H, W, C] (the shorter end is the channels) as `decode` gives an image.

    many: [n, …], all of one size; gives [n, C, H, W] and leaves the channels as they are.
    """
    import numpy as np

    if isinstance(array, np.ndarray):
        if array.dtype.kind not in "uif":
            raise BrokenSampleError(f"{name}: is an array of {array.dtype}; pixels must be {_NUMBERS}", field="data")
        array = array.astype(array.dtype.newbyteorder("="), copy=not array.flags.writeable)
        array = torch.from_numpy(np.ascontiguousarray(array))
    image = array.detach().cpu()
    if image.ndim - many not in {2, 3} or 0 in image.shape:
        reason = f"has the shape {list(image.shape)}; an image must be [H, W], [C, H, W] or [H, W, C]"
        raise BrokenSampleError(f"{name}: {reason}", field="data")
    if image.dtype not in {torch.uint8, torch.uint16, *_FLOATS}:
        kind = str(image.dtype).removeprefix("torch.")
        raise BrokenSampleError(f"{name}: has pixels of {kind}; pixels must be {_NUMBERS}", field="data")
    if image.ndim - many == 2:
        image = image.unsqueeze(-3)
    elif image.shape[-1] < image.shape[-3]:
        image = image.movedim(-1, -3).contiguous()
    try:
        image = _shallow(image)
    except ValueError as error:
        reason = f"{error}; pass {_NUMBERS}, without Normalize, because Situs normalises the images"
        raise BrokenSampleError(f"{name}: {reason}", field="data") from error
    return image if many else to_channels(image, channels, name)


def decode_numbers(data: bytes, name: str) -> Tensor:
    """The class numbers in an image file, [H, W] integers: grey levels or palette indices, unchanged."""
    from PIL import ImageOps

    with _broken(name, data):
        if data.startswith(_NUMPY):
            array = _image_array(data)
            if len(array) != 1 or array.dtype.kind not in "ui":
                raise ValueError(f"an array of {array.dtype} and shape {array.shape} contains no class numbers")
            return torch.from_numpy(array[0].astype("int64"))
        with _opened(data) as image:
            if image.mode not in {"L", "P", "1", "I"} and not image.mode.startswith("I;16"):
                raise ValueError(f"its pixels are {image.mode}; a mask must have one integer per pixel")
            binary = image.mode == "1"
            image = ImageOps.exif_transpose(image)  # as its photograph is
            if image.mode not in {"L", "P"}:
                image = image.convert("L" if binary else "I")
            kind = torch.int32 if image.mode == "I" else torch.uint8
            numbers = torch.frombuffer(bytearray(image.tobytes()), dtype=kind).view(image.height, image.width)
        return numbers.clamp(max=1) if binary else numbers


def size_text(image: Tensor, data: bytes, name: str) -> str:
    """The height and width of an image [C, H, W] that was decoded from `data`, for a sentence."""
    turned = " turned as its EXIF tag says" if read_header(data, name).turned else ""
    return f"{image.shape[1]} × {image.shape[2]}{turned}"


def read_header(data: bytes, name: str) -> Header:
    """The size and kind of the image in `data`, without decoding it."""
    with _broken(name, data):
        if data.startswith(_NUMPY):
            array = _image_array(data)
            return Header("NPY", str(array.dtype), array.shape[1], array.shape[2], turned=False)
        with _opened(data) as image:
            way = image.getexif().get(_ORIENTATION, 1)
            width, height = image.size[::-1] if way in {5, 6, 7, 8} else image.size
            return Header(image.format or "", image.mode, height, width, way in range(2, 9), is_transparent(image))


@contextmanager
def _broken(name: str, data: bytes = b"") -> Iterator[None]:
    """A decoder's error as BrokenSampleError. data: of the file, where there is one."""
    try:
        yield
    except Exception as error:  # each decoder raises classes of its own for each way a file can be damaged
        reason = first_line(error)
        short = data.startswith(b"RIFF") and len(data) < 8 + int.from_bytes(data[4:8], "little")  # WebP says nothing
        if short or "truncated" in reason.lower():
            reason = "the file ends too early: it was cut short, so copy it again"
        raise BrokenSampleError(f"{name}: cannot be decoded as an image ({reason})") from error


def check_bytes(size: int, name: Callable[[], str], sample: str = "an image") -> None:
    """Refuses a file that is too large for a sample before it is read into memory."""
    if size > _MOST_BYTES:
        raise BrokenSampleError(f"{name()}: has {size:,} bytes; {sample} may have at most {_MOST_BYTES:,}")


def read_bytes(file: Path, name: Callable[[], str]) -> bytes:
    """The bytes of a sample's file. name: what an error calls it."""
    try:
        check_bytes(file.stat().st_size, name)
        return file.read_bytes()
    except OSError as error:
        raise BrokenSampleError(f"{name()}: cannot be read ({error.strerror or error})") from error


def is_image(start: bytes) -> bool:
    """Whether a file that begins with these 16 bytes is an image, for files without a suffix."""
    brand = start[8:12] if start[4:8] == b"ftyp" else b""
    webp = start[:4] == b"RIFF" and start[8:12] == b"WEBP"
    return start.startswith(_MAGIC) or webp or brand in (b"avif", b"avis", *_HEIF)


def to_channels(image: Tensor, channels: int | None, name: str) -> Tensor:
    """`image` [C, H, W] with `channels` channels: grey is repeated, RGB becomes luma, others are refused."""
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
        f"{name}: has {counted(have, 'channels')}, but {channels} {verb(channels, 'are')} expected; "
        "Situs converts only "
        "grey to RGB, and RGB to grey",
        field="channels",
    )


def _shallow(image: Tensor) -> Tensor:
    """uint8 stays; larger integers become float32 with the type's largest value at 1. Floats must be in [0, 1]."""
    if image.dtype == torch.uint8:
        return image
    if image.dtype in _DEEPEST:
        image = image.to(torch.float32) / _DEEPEST[image.dtype]
    elif image.dtype not in _FLOATS:
        raise ValueError(f"pixels of type {image.dtype} are not supported")
    least, most = (float(end) for end in image.aminmax())  # NaN where a pixel is
    if not (least >= -_ROUNDING and most <= 1 + _ROUNDING):
        raise ValueError(f"its pixels must be between 0 and 1, not from {least:g} to {most:g}")
    return image.to(torch.float32)


def _image_array(data: bytes) -> np.ndarray:
    """A NumPy file of [H, W], [C, H, W] or [H, W, C] (the shorter end is the channels): [C, H, W]."""
    import numpy as np

    array = read_npy(data)
    if array.ndim not in {2, 3} or 0 in array.shape:
        raise ValueError(f"an array of shape {tuple(array.shape)} is not an image")
    if array.ndim == 2:
        array = array[None]
    elif array.shape[2] < array.shape[0]:
        array = array.transpose(2, 0, 1)
    return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("=")))


def read_npy(data: bytes) -> np.ndarray:
    """A NumPy file, as a view of its bytes: `np.load` would first allocate whatever the header claims."""
    import numpy as np

    stream = io.BytesIO(data)
    shape, fortran, dtype = read_npy_header(stream, len(data))
    return np.frombuffer(data, dtype, offset=stream.tell()).reshape(shape, order="F" if fortran else "C")


def read_npy_header(stream: BinaryIO, size: int) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, Fortran order and type of a NumPy file, whose `size` in bytes must fit them."""
    import numpy as np

    version = np.lib.format.read_magic(stream)
    if version not in {(1, 0), (2, 0)}:
        raise ValueError(f"NumPy format {'.'.join(map(str, version))}: only versions 1.0 and 2.0 can be read")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        shape, fortran, dtype = read(stream)
    except (SyntaxError, tokenize.TokenError) as error:  # NumPy parses a damaged header as Python
        raise ValueError("its header is damaged") from error
    needed, present = math.prod(shape) * dtype.itemsize, size - stream.tell()
    if dtype.hasobject or min(shape, default=1) < 0 or needed != present:
        raise ValueError(f"{present} bytes do not fill an array of {dtype} and shape {shape}")
    return shape, fortran, dtype


@cache
def _silence_pillow() -> None:
    """Ignores Pillow's warnings, which name no file; what makes an image unreadable is an error."""
    warnings.filterwarnings("ignore", module=r"PIL\.")


@cache
def _known_formats() -> tuple[str, ...]:
    """Those of `_FORMATS` that this Pillow was built with."""
    from PIL import Image

    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


@cache
def _reads_heic() -> bool:
    """Whether Pillow can read HEIC, which phones write; it needs a package of its own."""
    if importlib.util.find_spec("pillow_heif") is None:
        return False
    importlib.import_module("pillow_heif").register_heif_opener()
    return True


def _formats(data: bytes) -> tuple[str, ...]:
    """The formats to try. With one alone Pillow asks no other plugin, a third of the time of a small WebP."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return ("WEBP",)
    if data[4:8] != b"ftyp" or data[8:12] not in _HEIF:
        return _known_formats()
    if _reads_heic():
        return ("HEIF", "AVIF")
    if data[8:12] in _HEIC:
        raise ValueError("HEIC needs another package: pip install pillow-heif")
    return ("AVIF",)


@contextmanager
def _opened(data: bytes) -> Iterator[Image.Image]:
    """The image with its header read and its pixels not yet decoded."""
    from PIL import Image, UnidentifiedImageError

    _silence_pillow()
    try:
        with Image.open(io.BytesIO(data), formats=_formats(data)) as opened:
            pixels, most = opened.width * opened.height, Image.MAX_IMAGE_PIXELS
            if most is not None and pixels > most:
                raise ValueError(f"{opened.width} × {opened.height} pixels are more than the limit of {most:,}")
            yield opened
    except UnidentifiedImageError:
        raise ValueError("no known format") from None  # Pillow's message names an address in memory


def _decode_plain(data: bytes) -> Tensor | None:
    """A JPEG of the usual kind in two thirds of Pillow's time, bit for bit the same; None leaves it to Pillow.

    Both use libjpeg-turbo. What torchvision refuses, Pillow refuses too, with a reason.
    """
    decoder = _jpeg_decoder()
    if decoder is None or not _is_plain_jpeg(data):
        return None
    try:
        return decoder(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0, False)  # as stored, not turned
    except RuntimeError:
        return None


@cache
def _jpeg_decoder() -> Callable[..., Tensor] | None:
    """torchvision's operator, because its wrapper warns at every call that it is deprecated; None without it."""
    try:
        import torchvision.io  # noqa: F401  (loads the operator)

        return torch.ops.image.decode_jpeg.default
    except (ImportError, AttributeError):
        return None


def _decode_pillow(data: bytes, keep_alpha: bool, reduce: int = 1) -> Tensor:
    from PIL import ImageOps

    with _opened(data) as opened:
        if reduce > 1 and opened.format == "JPEG":
            opened.draft(None, (opened.width // reduce, opened.height // reduce))
        opened.load()
        ImageOps.exif_transpose(opened, in_place=True)
        return _pixels_of(opened, keep_alpha)


def _pixels_of(image: Image.Image, keep_alpha: bool) -> Tensor:
    """An upright image of Pillow as a tensor [C, H, W]."""
    image = _plain_mode(image, keep_alpha)
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=_PILLOW_TYPES.get(image.mode, torch.uint8))
    return _shallow(pixels.view(image.height, image.width, -1).permute(2, 0, 1))


def _plain_mode(image: Image.Image, keep_alpha: bool) -> Image.Image:
    """An image with one of Pillow's many modes as L, RGB, RGBA, 16/32-bit integers or floats."""
    transparent = is_transparent(image)
    if image.mode in {"F", "I"} or (image.mode in {"L", "RGB"} and not transparent):
        return image
    if image.mode.startswith("I;16"):
        return image if image.mode == "I;16" else image.convert("I")
    if keep_alpha and image.mode not in {"1", "L", "LA", "La"}:
        return image.convert("RGBA")
    grey = "L" if image.mode in {"1", "L", "LA", "La"} else "RGB"
    return _over_white(image).convert(grey) if transparent else image.convert(grey)


def is_transparent(image: Image.Image) -> bool:
    """Whether an image of Pillow has an alpha channel, or a transparent colour."""
    return image.mode in {"LA", "La", "PA", "RGBA", "RGBa"} or "transparency" in image.info


_flags = {"transparent": False}


def pop_transparency_flag() -> bool:
    """Whether this process has laid an image over white since the last call."""
    transparent, _flags["transparent"] = _flags["transparent"], False
    return transparent


def _over_white(image: Image.Image) -> Image.Image:
    """An image with its transparent pixels laid over white, opaque."""
    from PIL import Image as Pillow

    if image.mode == "La":
        image = image.convert("LA")
    image = image.convert("RGBA")
    if image.getchannel("A").getextrema() == (255, 255):
        return image.convert("RGB")
    _flags["transparent"] = True
    return Pillow.alpha_composite(Pillow.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")


START, END = b"\xff\xd8\xff", b"\xff\xd9"
_BARE = {0x01, *range(0xD0, 0xD8)}  # markers without a length
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_SCAN, _EXIF, _ADOBE = 0xDA, 0xE1, 0xEE
_USUAL = {0xC0, 0xC1, 0xC2}  # sequential and progressive
_MOST_PIXELS = 1 << 26  # larger ones are left to Pillow, which refuses some


def _is_plain_jpeg(data: bytes) -> bool:
    """Whether every decoder gives the same of a JPEG: grey or YCbCr of 8 bits, sequential or progressive, without tags
    that turn it or change its colours, not huge, and with its end marker."""
    at, framed = 2, False
    while data.startswith(START) and at + 9 < len(data) and data[at] == 0xFF:
        mark, size = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if mark == 0xFF:  # filling
            at += 1
        elif mark in _BARE:
            at += 2
        elif mark == _SCAN:  # pixels never contain the two bytes of the end marker
            return framed and data.find(END, at) > 0
        else:
            tagged = mark == _ADOBE or (mark == _EXIF and data[at + 4 : at + 8] == b"Exif")
            unusual = mark in _FRAMES and (framed or not _is_usual(data[at + 4 : at + 2 + size], mark))
            if size < 2 or tagged or unusual:
                return False
            framed = framed or mark in _FRAMES
            at += 2 + size
    return False


def _is_usual(frame: bytes, mark: int) -> bool:
    """Whether a JPEG's frame is of 8 bits, grey or of three components that are not named R, G and B."""
    height, width = int.from_bytes(frame[1:3], "big"), int.from_bytes(frame[3:5], "big")
    usual = len(frame) >= 6 and mark in _USUAL and frame[0] == 8 and frame[5] in {1, 3} and frame[6::3] != b"RGB"
    return usual and 0 < height * width <= _MOST_PIXELS
