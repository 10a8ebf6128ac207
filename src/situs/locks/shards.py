"""Safetensors files as streams: the header first, then each tensor's bytes in turn, read and written once.

A permutation changes neither names, shapes nor sizes, so a locked file has the header of the clear one (without
withheld tensors) and its tensors in the same order; opening it gives back the same file, bit for bit. A few tensors are
in memory at a time, never a shard.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hmac import HMAC
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from situs.errors import SitusError, reason_of
from situs.progress import tracked
from situs.train.checkpoint.files import header, sync

WIDTHS = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""safetensors' dtypes -> bytes per element. Those with several elements in a byte are refused."""

BITS = {8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}
"""Elements are moved as integers of their width: no dtype is interpreted, so no bit can change."""

_NOTES = "__metadata__"
LARGEST_HEADER = 100_000_000
LARGEST_WHOLE = 1 << 28
"""Bytes of the largest tensor that is copied in one piece; a larger one is copied in chunks."""

CHUNK, SMALL_CHUNK = 1 << 23, 1 << 19
WORKERS = min(4, os.cpu_count() or 1)


class ByteSource(Protocol):
    """A stream of bytes. size: their number."""

    size: int

    def fill(self, into: memoryview) -> None:
        """Fills `into` with the next bytes; a file with too few is refused."""
        ...


class Sink(Protocol):
    """Where bytes are written in order."""

    def write(self, data: Any, /) -> object: ...


class PlainSource:
    """A file on disk."""

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
    """A file, read from its beginning."""
    with open_file(path) as file:
        yield PlainSource(file, path)


def open_file(path: Path) -> BinaryIO:
    """Opens a file for reading; a failure is a `SitusError`."""
    try:
        return path.open("rb", buffering=0)  # pyright: ignore[reportReturnType]
    except OSError as error:
        raise SitusError(f"{path}: cannot be read: {reason_of(error)}") from None


@contextmanager
def new_private_file(path: Path, what: str, field: str) -> Iterator[BinaryIO]:
    """A new file that others can never read, that replaces no file, and that is complete or absent.

    what: its content, in words. field: the argument that names it.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.writing")
    try:
        if os.path.lexists(path):
            raise FileExistsError
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.link(aside, path)  # unlike a rename, a link never replaces a file
        sync(path.parent)
    except OSError as error:
        if isinstance(error, FileExistsError) and os.path.lexists(path):  # and not a file where a folder should be
            raise SitusError(f"{path}: exists already; {what} is never overwritten", field=field) from None
        raise SitusError(f"{path}: {what} could not be written: {reason_of(error)}", field=field) from error
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


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
    """raw: the file's bytes before its first tensor. tensors: in the order of their data."""

    raw: bytes
    tensors: tuple[Spec, ...]

    @property
    def notes(self) -> dict[str, str]:
        """The file's metadata."""
        return json.loads(self.raw[8:]).get(_NOTES, {})

    def without(self, names: Collection[str]) -> Header:
        """The header of the same file without some of its tensors."""
        remaining = [spec for spec in self.tensors if spec.name not in names]
        return self if len(remaining) == len(self.tensors) else make_header(remaining, self.notes)

    def places(self) -> dict[str, int]:
        """Where in the file each tensor begins."""
        ends = accumulate((spec.size for spec in self.tensors), initial=len(self.raw))
        return {spec.name: end for spec, end in zip(self.tensors, ends, strict=False)}


def make_header(specs: Sequence[Spec], notes: Mapping[str, str]) -> Header:
    """The header of a file with these tensors in this order."""
    raw = header(((spec.name, spec.dtype, spec.shape, spec.size) for spec in specs), notes)
    return Header(raw, tuple(specs))


def read_header(source: ByteSource, where: str) -> Header:
    """The header of a safetensors file; refused unless every byte behind it belongs to one tensor."""
    length = bytearray(8)
    if source.size < 8:
        raise _broken(where, "it is too short for a header")
    source.fill(memoryview(length))
    size = int.from_bytes(length, "little")
    if size > min(LARGEST_HEADER, source.size - 8):
        raise _broken(where, "its header is longer than the file")
    text = bytearray(size)
    source.fill(memoryview(text))
    header = parse_header(bytes(length + text), where)
    if len(header.raw) + sum(spec.size for spec in header.tensors) != source.size:
        raise _broken(where, "it is longer or shorter than its header says")
    return header


def parse_header(raw: bytes, where: str) -> Header:
    """A header from its bytes; refused unless dtypes are known and tensors leave no gaps."""
    if len(raw) < 8 or int.from_bytes(raw[:8], "little") != len(raw) - 8:
        raise _broken(where, "its header does not have the length that it states")
    try:
        tables = json.loads(raw[8:], object_pairs_hook=unique)
    except (ValueError, RecursionError):
        raise _broken(where, "its header is not valid JSON") from None
    if not isinstance(tables, dict):
        raise _broken(where, "its header is not a JSON object")
    notes = tables.pop(_NOTES, {})
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
        raise _broken(where, "the values of its metadata are not strings")
    for name, entry in tables.items():
        _check_entry(name, entry, where)
    specs, at = [], 0
    for name, entry in sorted(tables.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        spec = Spec(name, entry["dtype"], tuple(entry["shape"]))
        if begin != at or end - begin != spec.size:
            raise _broken(where, f"the bytes of {name[:80]!r} are not where they must be")
        specs.append(spec)
        at = end
    return Header(raw, tuple(specs))


def _check_entry(name: str, entry: Any, where: str) -> None:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _broken(where, f"{name[:80]!r} is not described as a tensor")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in WIDTHS:
        raise _broken(where, f"{name[:80]!r} has an unknown dtype: {entry['dtype']!r:.40}")
    offsets = entry["data_offsets"]
    if not _counts(entry["shape"]) or not _counts(offsets) or len(offsets) != 2 or len(entry["shape"]) > 64:
        raise _broken(where, f"{name[:80]!r} has no valid shape or offsets")


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**48 for value in values)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON table without duplicate keys (for json.loads): readers disagree on which of two counts."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key occurs twice")
    return table


def _broken(where: str, why: str) -> SitusError:
    return SitusError(f"{where}: is not a readable safetensors file: {why}")


Change = Callable[[np.ndarray], np.ndarray]
Check = Callable[[Spec, str], None]


Start = Callable[[str], HMAC]
"""Name of a tensor -> a new code for its bytes."""


def copy(source: ByteSource, sink: Sink | None, code: HMAC, size: int | None = None, chunk: int = CHUNK) -> str:
    """Copies `size` bytes, or a whole file; returns their code."""
    size = source.size if size is None else size
    buffer = memoryview(bytearray(min(size, chunk)))
    while size:
        part = buffer[: min(size, len(buffer))]
        source.fill(part)
        code.update(part)
        if sink is not None:
            sink.write(part)
        size -= len(part)
    return code.hexdigest()


def codes_of(path: Path, header: Header, start: Start) -> dict[str, str]:
    """The code of each tensor's bytes, through a small buffer that fits the processor's cache."""
    places = header.places()

    def code(spec: Spec) -> str:
        with plain_source(path) as source:
            source.seek(places[spec.name])
            return copy(source, None, start(spec.name), spec.size, SMALL_CHUNK)

    with ThreadPoolExecutor(WORKERS) as workers:
        return dict(zip(places, workers.map(code, header.tensors), strict=True))


def rewrite(
    source: Callable[[Spec], ByteSource],
    sink: Callable[[Spec], Sink] | None,
    tensors: Sequence[Spec],
    changes: Mapping[str, Change],
    start: Start,
    check: Check | None = None,
) -> dict[str, str]:
    """Reads each tensor, checks its code, changes it, and writes it; returns the codes of what was written.

    source, sink: the file that a tensor is read from and written to, behind the header. changes: tensor name -> how it
    is changed; others are copied. check: gets every tensor and its code before the change, and raises to refuse it.

    Files are read and written in order; hashing and moving, which cost most and free the GIL, are done by workers.
    """
    codes: dict[str, str] = {}
    waiting: deque[tuple[Spec, Future[tuple[memoryview, str]]]] = deque()

    def write_all_but(count: int) -> None:
        while len(waiting) > count:
            spec, work = waiting.popleft()
            data, codes[spec.name] = work.result()
            if sink is not None:
                sink(spec).write(data)

    with ThreadPoolExecutor(WORKERS) as workers:
        for spec in tracked(tensors, "weights"):
            if spec.name not in changes and spec.size > LARGEST_WHOLE:
                write_all_but(0)
                into = None if sink is None else sink(spec)
                codes[spec.name] = copy(source(spec), into, start(spec.name), spec.size, CHUNK)
                if check is not None:
                    check(spec, codes[spec.name])
                continue
            values = np.empty(spec.shape, dtype=BITS[WIDTHS[spec.dtype]])
            source(spec).fill(_bytes(values))
            waiting.append((spec, workers.submit(_work, spec, values, changes.get(spec.name), start, check)))
            write_all_but(WORKERS)
        write_all_but(0)
    return codes


def _work(
    spec: Spec, values: np.ndarray, change: Change | None, start: Start, check: Check | None
) -> tuple[memoryview, str]:
    """The bytes to write for one tensor, and their code."""
    code = ""
    if check is not None or change is None:
        code = _code_of(values, start(spec.name))
    if check is not None:
        check(spec, code)
    if change is None:
        return _bytes(values), code
    moved = np.ascontiguousarray(change(values))
    return _bytes(moved), _code_of(moved, start(spec.name))


def _code_of(values: np.ndarray, code: HMAC) -> str:
    code.update(_bytes(values))
    return code.hexdigest()


def _bytes(values: np.ndarray) -> memoryview:
    return values.reshape(-1).view(np.uint8).data
