"""Safetensors files as streams: the header first, then each tensor's bytes in turn, read and written once.

A permutation changes neither names, shapes nor sizes, so a locked file has the very header of the clear one (less the
tensors that are withheld) and its tensors in the same order; what comes back is the same file, bit for bit. Memory
holds a few tensors, never a shard.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from situs.errors import SitusError

WIDTHS = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""safetensors' dtypes -> bytes of one element. Those that pack several elements into a byte are refused."""

BITS = {8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}
"""Elements are moved as whole numbers of their width: no dtype is interpreted, so no bit can change."""

_NOTES = "__metadata__"
LARGEST_HEADER = 100_000_000
LARGEST_WHOLE = 1 << 28
"""Bytes of a tensor that passes through in one piece; a larger one goes by in chunks."""

CHUNK, SMALL_CHUNK = 1 << 23, 1 << 19
WORKERS = min(4, os.cpu_count() or 1)


class Source(Protocol):
    """Bytes in their order. size: how many there are in all."""

    size: int

    def fill(self, into: memoryview) -> None:
        """Fills `into` with the next bytes; there are enough, or the file is refused."""
        ...


class Sink(Protocol):
    """Where bytes go, in their order."""

    def write(self, data: Any, /) -> object: ...


class PlainSource:
    """A file as it lies on the disk."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.size = path.stat().st_size
        self._file, self._path = file, path

    def seek(self, place: int) -> None:
        self._file.seek(place)

    def fill(self, into: memoryview) -> None:
        done = 0
        while done < len(into):
            count = self._file.readinto(into[done:])  # pyright: ignore[reportAttributeAccessIssue]
            if not count:
                raise SitusError(f"{self._path.name}: the file ends too early: it is truncated")
            done += count


@contextmanager
def plain_source(path: Path) -> Iterator[PlainSource]:
    """A file, opened for reading from its beginning."""
    with open_file(path) as file:
        yield PlainSource(file, path)


def open_file(path: Path) -> BinaryIO:
    """Opens a file for reading; one that cannot be read is the user's to mend."""
    try:
        return path.open("rb", buffering=0)  # pyright: ignore[reportReturnType]
    except OSError as error:
        raise SitusError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from None


# --- the header ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """One tensor of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * WIDTHS[self.dtype]


@dataclass(frozen=True)
class Header:
    """raw: the file's bytes before its first tensor. tensors: in the order of their bytes."""

    raw: bytes
    tensors: tuple[Spec, ...]

    @property
    def notes(self) -> dict[str, str]:
        """The texts that the file holds beside its tensors."""
        return json.loads(self.raw[8:]).get(_NOTES, {})

    def without(self, names: Collection[str]) -> Header:
        """The header of the same file less some of its tensors."""
        left = [spec for spec in self.tensors if spec.name not in names]
        return self if len(left) == len(self.tensors) else make_header(left, self.notes)

    def places(self) -> dict[str, int]:
        """Where in the file each tensor begins."""
        ends = accumulate((spec.size for spec in self.tensors), initial=len(self.raw))
        return {spec.name: end for spec, end in zip(self.tensors, ends, strict=False)}


def make_header(specs: Sequence[Spec], notes: Mapping[str, str]) -> Header:
    """The header of a file that holds these tensors in this order."""
    tables: dict[str, Any] = {_NOTES: dict(notes)} if notes else {}
    at = 0
    for spec in specs:
        tables[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, at + spec.size]}
        at += spec.size
    text = json.dumps(tables, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return Header(len(text).to_bytes(8, "little") + text, tuple(specs))


def parse_header(raw: bytes, where: str) -> Header:
    """A header whose bytes were kept apart from its file."""
    if len(raw) < 8 or int.from_bytes(raw[:8], "little") != len(raw) - 8:
        raise _broken(where, "its header has not the length that it says")
    return Header(raw, tuple(_specs(raw[8:], where)))


def read_header(source: Source, where: str) -> Header:
    """The header of a safetensors file whose every byte belongs to one tensor; anything else is refused."""
    length = bytearray(8)
    if source.size < 8:
        raise _broken(where, "it is too short for a header")
    source.fill(memoryview(length))
    size = int.from_bytes(length, "little")
    if size > min(LARGEST_HEADER, source.size - 8):
        raise _broken(where, "its header is longer than the file")
    text = bytearray(size)
    source.fill(memoryview(text))
    specs = _specs(bytes(text), where)
    if 8 + size + sum(spec.size for spec in specs) != source.size:
        raise _broken(where, "it is longer or shorter than its header says")
    return Header(bytes(length + text), tuple(specs))


def _specs(text: bytes, where: str) -> list[Spec]:
    """The tensors in the order of their bytes, which lie without gaps."""
    tables = _parse(text, where)
    specs, at = [], 0
    for name, entry in sorted(tables.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        spec = Spec(name, entry["dtype"], tuple(entry["shape"]))
        if begin != at or end - begin != spec.size:
            raise _broken(where, f"the bytes of {name[:80]!r} are not where they must be")
        specs.append(spec)
        at = end
    return specs


def _parse(text: bytes, where: str) -> dict[str, dict[str, Any]]:
    """The tensors' tables, each with a known dtype, a shape and two offsets."""
    try:
        tables = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError):
        raise _broken(where, "its header is no valid JSON") from None
    if not isinstance(tables, dict):
        raise _broken(where, "its header is no table")
    notes = tables.pop(_NOTES, {})
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
        raise _broken(where, "its metadata are no texts")
    for name, entry in tables.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise _broken(where, f"{name[:80]!r} is not described as a tensor")
        if not isinstance(entry["dtype"], str) or entry["dtype"] not in WIDTHS:
            raise _broken(where, f"{name[:80]!r} is of a dtype that is not known here: {entry['dtype']!r:.40}")
        offsets = entry["data_offsets"]
        if not _counts(entry["shape"]) or not _counts(offsets) or len(offsets) != 2 or len(entry["shape"]) > 64:
            raise _broken(where, f"{name[:80]!r} has no valid shape or offsets")
    return tables


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**48 for value in values)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON table whose keys are all different (for json.loads): readers disagree on which of two counts."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key stands twice")
    return table


def _broken(where: str, why: str) -> SitusError:
    return SitusError(f"{where}: no readable safetensors file: {why}")


# --- tensors ------------------------------------------------------------------------------------------------

Change = Callable[[np.ndarray], np.ndarray]
Check = Callable[[Spec, str], None]


class Code(Protocol):
    """An authentication code in the making (HMAC)."""

    def update(self, data: Any, /) -> None: ...
    def hexdigest(self) -> str: ...


Start = Callable[[str], Code]
"""Name of a tensor -> the code that its bytes are to go through."""


def copy(source: Source, sink: Sink | None, code: Code) -> str:
    """Passes a whole file on; returns its code."""
    return _through(source, source.size, sink, code)


def codes_of(path: Path, header: Header, start: Start) -> dict[str, str]:
    """The code of each tensor's bytes. Nothing is kept, so that a small buffer stays in the processor's cache."""
    places = header.places()

    def code(spec: Spec) -> str:
        with plain_source(path) as source:
            source.seek(places[spec.name])
            return _through(source, spec.size, None, start(spec.name), SMALL_CHUNK)

    with ThreadPoolExecutor(WORKERS) as workers:
        found = workers.map(code, header.tensors)
        return dict(zip(places, found, strict=True))


def rewrite(
    source: Callable[[Spec], Source],
    sink: Callable[[Spec], Sink] | None,
    tensors: Sequence[Spec],
    changes: Mapping[str, Change],
    start: Start,
    check: Check | None = None,
) -> dict[str, str]:
    """Reads each tensor, has it checked by the code of its bytes, changes it, and writes it where it belongs.

    source, sink: which file a tensor is read from and written to, behind the header. changes: tensor name -> what is
    done to it; the others pass through. check: sees every tensor and its code before it is changed, and raises to
    refuse it. Returns the codes of what was written.

    Files are read and written in order; hashing and moving, which cost most and free the GIL, are done by workers.
    """
    found: dict[str, str] = {}
    waiting: deque[tuple[Spec, Future[tuple[memoryview, str]]]] = deque()

    def compare_with_truth(count: int) -> None:
        while len(waiting) > count:
            spec, work = waiting.popleft()
            data, found[spec.name] = work.result()
            if sink is not None:
                sink(spec).write(data)

    with ThreadPoolExecutor(WORKERS) as workers:
        for spec in tensors:
            if spec.name not in changes and spec.size > LARGEST_WHOLE:
                compare_with_truth(0)
                into = None if sink is None else sink(spec)
                found[spec.name] = _through(source(spec), spec.size, into, start(spec.name))
                if check is not None:
                    check(spec, found[spec.name])
                continue
            values = np.empty(spec.shape, dtype=BITS[WIDTHS[spec.dtype]])
            source(spec).fill(_bytes(values))
            waiting.append((spec, workers.submit(_work, spec, values, changes.get(spec.name), start, check)))
            compare_with_truth(WORKERS)
        compare_with_truth(0)
    return found


def _work(
    spec: Spec, values: np.ndarray, change: Change | None, start: Start, check: Check | None
) -> tuple[memoryview, str]:
    """What is to be written of one tensor, and its code."""
    code = ""
    if check is not None or change is None:
        code = _code_of(values, start(spec.name))
    if check is not None:
        check(spec, code)
    if change is None:
        return _bytes(values), code
    moved = np.ascontiguousarray(change(values))
    return _bytes(moved), _code_of(moved, start(spec.name))


def _code_of(values: np.ndarray, code: Code) -> str:
    code.update(_bytes(values))
    return code.hexdigest()


def _through(source: Source, size: int, sink: Sink | None, code: Code, chunk: int | None = None) -> str:
    """Takes `size` bytes into the code and passes them on."""
    buffer = memoryview(bytearray(min(size, chunk or CHUNK)))
    while size:
        part = buffer[: min(size, len(buffer))]
        source.fill(part)
        code.update(part)
        if sink is not None:
            sink.write(part)
        size -= len(part)
    return code.hexdigest()


def _bytes(values: np.ndarray) -> memoryview:
    return values.reshape(-1).view(np.uint8).data
