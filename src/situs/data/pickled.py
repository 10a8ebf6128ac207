"""Reads the pickled batches CIFAR is published in without unpickling them.

Unpickling calls whatever the file names. Here `pickletools` splits the file into its instructions and a small
machine follows those that build plain values; a name in the file is only ever looked up in `_CALLS` below,
never imported. Everything else in the file is refused before it has any effect.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from situs.errors import SitusError

_MARK = object()
_VALUES = frozenset(
    {
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING"),
        *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    }
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_IGNORED = frozenset({"PROTO", "FRAME"})
_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True)
class _Name:
    """A global that the file mentions; nothing is imported for it."""

    module: str
    name: str


@dataclass
class _Dtype:
    """NumPy's pickled dtype: made from its code, then told the byte order."""

    code: str
    order: str = "|"

    def build(self, state: Any) -> None:
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

    def build(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        self.value = _from_bytes(data, dtype, shape, "F" if fortran else "C").value


def _text(value: Any) -> str:
    return value.decode("ascii") if isinstance(value, (bytes, bytearray)) else str(value)


def _bytes(value: Any) -> bytes:
    # Python 2 wrote bytes as strings, and pickletools gives those back as latin-1 text.
    if isinstance(value, str):
        return value.encode("latin-1")
    if not isinstance(value, (bytes, bytearray)):  # bytes(10**9) would make as many zeros
        raise ValueError(f"{type(value).__name__} stands where bytes are expected")
    return bytes(value)


def _from_bytes(data: Any, dtype: Any, shape: Any, order: Any = "C") -> _Array:
    raw, kind = _bytes(data), dtype.real()
    if math.prod(shape) * kind.itemsize != len(raw):
        raise ValueError(f"{len(raw)} bytes do not fill an array of shape {tuple(shape)}")
    flat = np.frombuffer(raw, kind)
    return _Array(flat.reshape(shape[::-1]).T if _text(order) == "F" else flat.reshape(shape))


def _encode(text: str, encoding: Any) -> bytes:
    if _text(encoding) != "latin1":
        raise ValueError(f"encoding {encoding!r} is not expected here")
    return text.encode("latin-1")


_NUMPY_CORES = ("numpy.core", "numpy._core")
# The only names a batch may call, and what they mean here.
_CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    ("_codecs", "encode"): _encode,
    ("numpy", "dtype"): lambda code, *_: _Dtype(_text(code)),
    ("__builtin__", "bytes"): lambda *_: b"",
    ("builtins", "bytes"): lambda *_: b"",
    **{(f"{core}.multiarray", "_reconstruct"): lambda *_: _Array() for core in _NUMPY_CORES},
    **{(f"{core}.numeric", "_frombuffer"): _from_bytes for core in _NUMPY_CORES},
}


def read_pickled(data: bytes, name: str) -> Any:
    """The dicts, lists, strings, numbers and arrays in a pickle; anything else is an error, not an action."""
    try:
        return _plain(_run(data))
    except SitusError as error:
        raise SitusError(f"{name}: {error}") from None
    except Exception as error:  # damaged bytes turn up as values of any type, and fail where they are used
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        raise SitusError(f"{name}: is not a CIFAR batch ({reason})") from error


def _run(data: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(data):
        code = opcode.name
        if code == "STOP":
            return stack.pop()
        if code in _VALUES:
            stack.append(argument)
        elif code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code in _PUTS or code == "MEMOIZE":
            memo[int(argument) if code in _PUTS else len(memo)] = stack[-1]  # pyright: ignore[reportArgumentType]
        elif code in _GETS:
            stack.append(memo[int(argument)])  # pyright: ignore[reportArgumentType]
        elif code in {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"}:
            _objects(code, argument, stack)
        elif code not in _IGNORED:
            _containers(code, stack)
    raise ValueError("the file ends too early")


def _objects(code: str, argument: Any, stack: list[Any]) -> None:
    """The four instructions that name, call and fill objects."""
    if code == "GLOBAL":
        stack.append(_Name(*argument.split(" ", 1)))
    elif code == "STACK_GLOBAL":
        name, module = stack.pop(), stack.pop()
        stack.append(_Name(str(module), str(name)))
    elif code == "REDUCE":
        arguments, called = stack.pop(), stack.pop()
        known = _CALLS.get((called.module, called.name)) if isinstance(called, _Name) else None
        if known is None:
            what = f"{called.module}.{called.name}" if isinstance(called, _Name) else repr(called)
            raise SitusError(f"asks to call {what}, which no CIFAR batch does; nothing was called")
        stack.append(known(*arguments))
    else:
        state = stack.pop()
        stack[-1].build(state)


def _containers(code: str, stack: list[Any]) -> None:
    """The instructions that make and fill lists, tuples and dicts."""
    if code == "MARK":
        stack.append(_MARK)
    elif code in {"EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE"}:
        stack.append({"EMPTY_LIST": [], "EMPTY_DICT": {}, "EMPTY_TUPLE": ()}[code])
    elif code in _TUPLES:
        count = _TUPLES[code]
        stack[-count:] = [tuple(stack[-count:])]
    elif code == "APPEND":
        value = stack.pop()
        stack[-1].append(value)
    elif code == "SETITEM":
        value, key = stack.pop(), stack.pop()
        stack[-1][key] = value
    elif code in {"APPENDS", "SETITEMS", "LIST", "DICT", "TUPLE"}:
        start = len(stack) - 1 - stack[::-1].index(_MARK)
        items = stack[start + 1 :]
        del stack[start:]
        if code == "APPENDS":
            stack[-1].extend(items)
        elif code == "SETITEMS":
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif code == "DICT":
            stack.append(dict(zip(items[::2], items[1::2], strict=True)))
        else:
            stack.append(items if code == "LIST" else tuple(items))
    else:
        raise SitusError(f"holds the pickle instruction {code}, which no CIFAR batch does")


def _plain(value: Any) -> Any:
    """Arrays taken out of their wrappers, and the keys of dicts as text."""
    if isinstance(value, _Array):
        return value.value
    if isinstance(value, dict):
        return {_text(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, (_Name, _Dtype)):
        raise ValueError("a name stands where data is expected")
    return value
