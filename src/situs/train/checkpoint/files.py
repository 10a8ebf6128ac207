"""A run's files on the disk, each with a checksum: tensors in safetensors files, tables in JSON, folders of both.

Tensors are hashed while they are written as a stream, and read whole or in part. A tensor that is sharded over ranks
has a part in a file of each rank; the file's metadata gives the part's offset in the format of
torch.distributed.checkpoint, whose safetensors reader opens such files too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from situs.errors import reason_of
from situs.files import write_text
from situs.train.distributed import Box

CHUNK = 1 << 26
"""Bytes that are copied from the device, hashed and written at a time."""

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SHARED, _SHAPES = "situs.shared", "situs.shapes"
_OFFSETS, _VERSION = "DCP_SHARDING_INFO", {"DCP_VERSION": "1.0"}


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    boxes: Mapping[str, Box] | None = None,
    check: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Writes one safetensors file and waits until it is on disk; gives its size and hash. Ties are written once.

    boxes: which part of the whole a tensor is, by name; a tensor without one is whole. check: called between two
    chunks, and may raise. Every failure to write is an `OSError`, as for an ordinary file.
    """
    unique, shared = _untied(tensors)
    notes = {_SHARED: json.dumps(shared)}
    if boxes is not None:
        places = {name: boxes[name] if name in boxes else whole(tensor.shape) for name, tensor in unique.items()}
        notes |= _VERSION | {_OFFSETS: json.dumps({n: {"saved_offsets": box.offset} for n, box in places.items()})}
        notes[_SHAPES] = json.dumps({name: box.shape for name, box in places.items()})
    ordered = sorted(unique.items(), key=lambda pair: (-pair[1].element_size(), pair[0]))
    head = header(((name, _NAMES[t.dtype], t.shape, t.numel() * t.element_size()) for name, t in ordered), notes)
    digest = hashlib.sha256(head)
    with path.open("wb") as file:
        file.write(head)
        for chunk in _chunks(tensor for _, tensor in ordered):
            check()
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def header(tensors: Iterable[tuple[str, str, Sequence[int], int]], notes: Mapping[str, str]) -> bytes:
    """The first bytes of a safetensors file. tensors: name, dtype, shape and bytes of each, in their order."""
    tables: dict[str, Any] = {"__metadata__": dict(notes)} if notes else {}
    at = 0
    for name, dtype, shape, size in tensors:
        tables[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(tables, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return len(text).to_bytes(8, "little") + text


def _chunks(tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """The tensors' bytes; from a GPU through a page-locked buffer, on this thread's own stream."""
    assert sys.byteorder == "little"  # as safetensors' files are
    staging: Tensor | None = None
    for tensor in tensors:
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for part in data.split(CHUNK):
            if part.device.type == "cuda":
                if staging is None:
                    staging = torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True)
                staged = staging[: part.numel()].copy_(part, non_blocking=True)
                torch.cuda.current_stream(part.device).synchronize()
            else:
                staged = part.cpu()
            yield staged.numpy().data


def _untied(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(every tensor once; alias -> the name it is stored under)."""
    unique: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        key = identity(tensor)
        if tensor.numel() and key in seen:
            shared[name] = seen[key]
        else:
            unique[name], seen[key] = tensor, name
    return unique, shared


def identity(tensor: Tensor) -> tuple[object, ...]:
    """The same for two names of one tensor."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _ends(box: Box) -> list[int]:
    return [offset + size for offset, size in zip(box.offset, box.size, strict=True)]


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor of this shape."""
    return Box(tuple(shape), (0,) * len(shape), tuple(shape))


class Part(NamedTuple):
    """The part of a tensor that is in one file."""

    file: Any
    box: Box


class Parts:
    """The tensors of one file, or of one file per rank, by name; read on demand."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._parts: dict[str, list[Part]] = {}
        self._shared: dict[str, str] = {}
        for path in paths:
            file: Any = safe_open(path, framework="pt")
            notes = file.metadata() or {}
            self._shared |= json.loads(notes.get(_SHARED, "{}"))
            offsets, shapes = (json.loads(notes.get(name, "{}")) for name in (_OFFSETS, _SHAPES))
            for name in file.keys():  # noqa: SIM118  (no mapping)
                size = tuple(file.get_slice(name).get_shape())
                offset = tuple(offsets[name]["saved_offsets"]) if name in offsets else (0,) * len(size)
                part = Part(file, Box(tuple(shapes.get(name, size)), offset, size))
                self._parts.setdefault(name, []).append(part)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The whole shape of every tensor."""
        shapes = {name: parts[0].box.shape for name, parts in self._parts.items()}
        return shapes | {alias: shapes[name] for alias, name in self._shared.items()}

    def all(self) -> dict[str, Tensor]:
        """Every tensor, whole; a tie is one tensor under all its names."""
        tensors = {name: self.read(name) for name in self._parts}
        return tensors | {alias: tensors[name] for alias, name in self._shared.items()}

    def read(self, name: str, wanted: Box | None = None) -> Tensor:
        """A tensor, or a part of it, put together from the files that have some of it."""
        name = self._shared.get(name, name)
        parts = self._parts[name]
        file, (shape, _, size) = parts[0]
        if not shape or (wanted is None and size == shape):
            return file.get_tensor(name).clone()
        wanted = whole(shape) if wanted is None else wanted
        out = torch.empty(wanted.size, dtype=DTYPES[file.get_slice(name).get_dtype()])
        missing = out.numel()
        for file, box in parts:
            begins = [max(a, b) for a, b in zip(wanted.offset, box.offset, strict=True)]
            ends = [min(a, b) for a, b in zip(_ends(wanted), _ends(box), strict=True)]
            if any(end <= begin for begin, end in zip(begins, ends, strict=True)):
                continue
            in_file = tuple(slice(b - o, e - o) for b, e, o in zip(begins, ends, box.offset, strict=True))
            in_out = tuple(slice(b - o, e - o) for b, e, o in zip(begins, ends, wanted.offset, strict=True))
            out[in_out] = file.get_slice(name)[in_file]
            missing -= math.prod(e - b for b, e in zip(begins, ends, strict=True))
        if missing:
            raise OSError(f"{name} lacks {missing:,} of {out.numel():,} numbers")
        return out


# --- tables and folders ---------------------------------------------------------------------------------------

FORMAT, SHARDED = 2, 3
"""Formats of a folder: with whole tensors, and with each rank's part of them."""

FORMATS = (FORMAT, SHARDED)
CHECKSUM = "sha256"
"""The last entry of a table: the SHA-256 of all its others and of the file's name."""


def digest(path: Path) -> str:
    """The file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def with_checksum(table: Mapping[str, Any], name: str) -> str:
    """The JSON of a table for a file of this name; under another name it does not verify."""
    whole_table = {**table, CHECKSUM: fingerprint(table, name)}
    return json.dumps(whole_table, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_table(path: Path) -> dict[str, Any] | str:
    """The table in a file, without its checksum; or what is wrong with the file."""
    if not path.is_file():  # a pipe would be waited for
        return f"{path.name} is missing"
    try:
        table = json.loads(path.read_bytes().decode())
    except OSError as error:
        return f"{path.name} cannot be read: {reason_of(error)}"
    except (ValueError, RecursionError):
        return f"{path.name} is cut short or damaged"
    if not isinstance(table, dict) or CHECKSUM not in table:
        return f"{path.name} has no checksum: it is damaged, or of an older version"
    checksum = table.pop(CHECKSUM)
    return table if fingerprint(table, path.name) == checksum else f"{path.name} has changed since it was written"


def fingerprint(table: Mapping[str, Any], name: str = "") -> str:
    """The SHA-256 of a name and a table's content, whatever the order of its keys and the space between them."""
    text = f"{name}\n{json.dumps(table, sort_keys=True, separators=(',', ':'))}"
    return hashlib.sha256(text.encode()).hexdigest()


def write_state(folder: Path, state: Mapping[str, Any], files: Mapping[str, Any], version: int = FORMAT) -> None:
    """Writes the state.json of a folder, with the size and checksum of each of its files; waits for the disk."""
    write_text(folder / "state.json", with_checksum({"format": version, **state, "files": dict(files)}, "state.json"))
    sync(folder)


def read_folder(folder: Path) -> dict[str, Any] | str:
    """The state.json of a folder whose files are whole, or what is wrong with it."""
    state = read_table(folder / "state.json")
    if isinstance(state, str):
        return state
    if state.get("format") not in FORMATS:
        return f"state.json has format {state.get('format')}, but this version reads formats {FORMAT} and {SHARDED}"
    for name, fact in state["files"].items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else 0
        if size != fact["bytes"]:
            return f"{name} has {size:,} of {fact['bytes']:,} bytes"
        try:
            if digest(path) != fact["sha256"]:
                return f"{name} has changed since it was written"
        except OSError as error:
            return f"{name} cannot be read: {reason_of(error)}"
    return state


def remove(folder: Path) -> None:
    """Deletes a checkpoint; renames it first, so that a crash leaves no half of it under its name."""
    renamed = folder.with_name(f".removing-{folder.name}")
    delete(renamed)
    folder.rename(renamed)
    delete(renamed)


def delete(path: Path) -> None:
    """Deletes a folder or file, as far as it can be deleted."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
