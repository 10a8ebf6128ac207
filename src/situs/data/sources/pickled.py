"""Reads the pickled batches CIFAR is published in with an unpickler that admits NumPy's array constructors alone.

Unpickling calls whatever the file names. Here a name is only ever looked up in `_CALLS`, and what stands there builds
arrays of plain numbers from bytes: not even NumPy's own constructors, which could be asked for gigabytes, are reached.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from situs.errors import SitusError


@dataclass
class _Dtype:
    """NumPy's pickled dtype: made from its code, then told the byte order."""

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
    """NumPy's pickled array: made empty, then told shape, dtype, order and bytes."""

    value: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        self.value = _from_bytes(data, dtype, shape, "F" if fortran else "C").value


def _text(value: Any) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else str(value)


def _from_bytes(data: Any, dtype: Any, shape: Any, order: Any = "C") -> _Array:
    if not isinstance(data, (bytes, bytearray)):  # bytes(10**9) would make as many zeros
        raise ValueError(f"{type(data).__name__} stands where bytes are expected")
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
# The only names a batch may hold, and what they mean here.
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
            raise SitusError(f"asks to call {module_name}.{global_name}, which no CIFAR batch does; nothing was called")
        # A new function each time, for a pickle may set attributes of what it names.
        return lambda *arguments: known(*arguments)  # noqa: PLW0108


def read_pickled(data: bytes, name: str) -> dict[str, Any]:
    """The values of a pickled dict, by their keys as text; anything else is an error, not an action."""
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if "PUT" in opcode.name and int(argument or 0) > len(data):  # the memo is as long as the largest index
                raise ValueError("a memo longer than the file")
        held = _Unpickler(io.BytesIO(data), encoding="bytes").load()
        if not isinstance(held, dict):
            raise SitusError(f"holds no dict but a {type(held).__name__}, so it is no CIFAR batch")
        return {_text(key): item.value if isinstance(item, _Array) else item for key, item in held.items()}
    except SitusError as error:
        raise SitusError(f"{name}: {error}") from None
    except Exception as error:  # damaged bytes turn up as values of any type, and fail where they are used
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        raise SitusError(f"{name}: is not a CIFAR batch ({reason})") from error
