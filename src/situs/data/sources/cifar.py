"""CIFAR-10 and CIFAR-100 as published: the python batches (read without pickle) or the binary ones."""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from situs.data.sources.base import TensorSource, Wanted, choose_split, split_name
from situs.errors import DataError, SitusError, first_line

_PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class _Layout:
    """The files of one published form. label: its key, or in a binary row its byte."""

    name: str
    files: dict[str, tuple[str, ...]]
    classes: str
    label: str | int
    bytes_before: int = 0


_TEN = tuple(f"data_batch_{number}" for number in range(1, 6))
_LAYOUTS = (
    _Layout("cifar10", {"train": _TEN, "test": ("test_batch",)}, "batches.meta", "labels"),
    _Layout("cifar100", {"train": ("train",), "test": ("test",)}, "meta", "fine_labels"),
    _Layout(
        "cifar10", {"train": tuple(f"{n}.bin" for n in _TEN), "test": ("test_batch.bin",)}, "batches.meta.txt", 0, 1
    ),
    _Layout("cifar100", {"train": ("train.bin",), "test": ("test.bin",)}, "fine_label_names.txt", 1, 2),
)
# The folders in the author's archives, so that the folder above them may be named as well.
_ARCHIVES = ("cifar-10-batches-py", "cifar-100-python", "cifar-10-batches-bin", "cifar-100-binary")


def find_cifar(path: Path) -> tuple[Path, _Layout] | None:
    """The folder and form of CIFAR batches at `path` or one archive folder below it, or None."""
    for folder in (path, *(path / name for name in _ARCHIVES)):
        for layout in _LAYOUTS:
            named = [*layout.files["train"], *layout.files["test"], layout.classes]
            if sum((folder / file).is_file() for file in named) >= 2:
                return folder, layout
    return None


def open_cifar(path: Path, wanted: Wanted) -> TensorSource:
    """The images of one split, uint8 [n, 3, 32, 32], with fine labels for CIFAR-100."""
    located = find_cifar(path)
    assert located is not None, "the caller looks before it opens"
    folder, layout = located
    chosen = choose_split(layout.files, wanted.split, str(path)) or "train"
    batches: list[tuple[Tensor, Tensor]] = []
    for name in layout.files[chosen]:
        with _reading(folder / name):
            batches.append(_read_batch(folder / name, layout))
    with _reading(folder / layout.classes):
        classes = _read_classes(folder / layout.classes, layout)
    stacked, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    if int(targets.min()) < 0 or int(targets.max()) >= len(classes):
        raise SitusError(f"{folder}: a label lies outside the {len(classes)} classes of {layout.classes}")
    labels = targets if wanted.labels else None
    return TensorSource(stacked, labels, classes, split_name(layout.name, chosen), channels=wanted.channels)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Any error with a file as one sentence."""
    try:
        yield
    except SitusError:
        raise
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror or error})") from error
    except Exception as error:  # damaged bytes turn up as values of any type, and fail where they are used
        raise DataError(f"{file}: is not a CIFAR batch ({first_line(error)})") from error


def _read_batch(file: Path, layout: _Layout) -> tuple[Tensor, Tensor]:
    data = file.read_bytes()
    if isinstance(layout.label, int):
        row = layout.bytes_before + _PIXELS
        if not data or len(data) % row:
            raise DataError(f"{file}: {len(data)} bytes are not a whole number of {row}-byte rows")
        rows = np.frombuffer(data, np.uint8).reshape(-1, row)
        pixels, numbers = rows[:, layout.bytes_before :], rows[:, layout.label]
    else:
        batch: dict[str, Any] = read_pickled(data, str(file))
        pixels, numbers = _entry(batch, "data", file), _entry(batch, layout.label, file)
        fits = isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8 and pixels.shape[1:] == (_PIXELS,)
        if not fits or not len(pixels):
            raise DataError(f"{file}: 'data' is not uint8 [n, {_PIXELS}]")
        if len(numbers) != len(pixels):
            raise DataError(f"{file}: {len(pixels)} images and {len(numbers)} labels")
    images = torch.from_numpy(pixels.copy()).view(-1, 3, 32, 32)
    return images, torch.from_numpy(np.asarray(numbers, dtype=np.int64))


def _entry(batch: Any, key: str, file: Path) -> Any:
    if not isinstance(batch, dict) or key not in batch:
        raise DataError(f"{file}: contains no {key!r}, so it is not a CIFAR batch")
    return batch[key]


def _read_classes(file: Path, layout: _Layout) -> tuple[str, ...]:
    if isinstance(layout.label, int):
        return tuple(line for line in file.read_bytes().decode().splitlines() if line)
    key = "label_names" if layout.label == "labels" else "fine_label_names"
    names = _entry(read_pickled(file.read_bytes(), str(file)), key, file)
    return tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names)


@dataclass
class _Dtype:
    """NumPy's pickled dtype: made from its code, then given the byte order."""

    code: str
    order: str = "|"

    def __setstate__(self, state: Any) -> None:
        self.order = _text(state[1])

    def real(self) -> np.dtype[Any]:
        kind = np.dtype((self.order if self.order in "<>" else "") + self.code)
        if kind.kind not in "biuf":
            raise ValueError(f"arrays of {self.code!r} are not plain numbers")
        return kind


@dataclass
class _Array:
    """NumPy's pickled array: made empty, then given shape, dtype, order and bytes."""

    value: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        self.value = _from_bytes(data, dtype, shape, "F" if fortran else "C").value


def _text(value: Any) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else str(value)


def _from_bytes(data: Any, dtype: Any, shape: Any, order: Any = "C") -> _Array:
    if not isinstance(data, (bytes, bytearray)):  # bytes(10**9) would make as many zeros
        raise ValueError(f"{type(data).__name__} found where bytes are expected")
    kind = dtype.real()
    if math.prod(shape) * kind.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes do not fill an array of shape {tuple(shape)}")
    flat = np.frombuffer(data, kind)
    return _Array(flat.reshape(shape[::-1]).T if _text(order) == "F" else flat.reshape(shape))


def _encode(text: str, encoding: Any) -> bytes:
    if _text(encoding) != "latin1":
        raise ValueError(f"encoding {encoding!r} is not expected here")
    return text.encode("latin-1")


_CORES = ("numpy.core", "numpy._core")
# The only names that a batch may hold, and what is called in their place.
_CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    ("_codecs", "encode"): _encode,
    ("__builtin__", "bytes"): lambda: b"",  # as protocol 2 writes empty bytes
    ("builtins", "bytes"): lambda: b"",
    ("numpy", "dtype"): lambda code, *_: _Dtype(_text(code)),
    ("numpy", "ndarray"): lambda: None,  # named as an argument, never called
    **{(f"{core}.multiarray", "_reconstruct"): lambda *_: _Array() for core in _CORES},
    **{(f"{core}.numeric", "_frombuffer"): _from_bytes for core in _CORES},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        known = _CALLS.get((module_name, global_name))
        if known is None:
            raise SitusError(
                f"its pickle would call {module_name}.{global_name}, but no CIFAR batch needs this call; "
                "the call was prevented"
            )
        # A new function each time, for a pickle may set attributes of what it names.
        return lambda *arguments: known(*arguments)  # noqa: PLW0108


def read_pickled(data: bytes, name: str) -> dict[str, Any]:
    """The values of a pickled dict, by their keys as text; anything else is an error, not an action."""
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if "PUT" in opcode.name and int(argument or 0) > len(data):  # the memo is as long as the largest index
                raise ValueError("an index in its pickle memo is larger than the file")
        batch = _Unpickler(io.BytesIO(data), encoding="bytes").load()
        if not isinstance(batch, dict):
            raise SitusError(f"contains a {type(batch).__name__} instead of a dict, so it is not a CIFAR batch")
        return {_text(key): item.value if isinstance(item, _Array) else item for key, item in batch.items()}
    except SitusError as error:
        raise SitusError(f"{name}: {error}") from None
    except Exception as error:  # damaged bytes turn up as values of any type, and fail where they are used
        raise SitusError(f"{name}: is not a CIFAR batch ({first_line(error)})") from error
