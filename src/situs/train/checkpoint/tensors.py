"""Tensors in safetensors files: written as a stream, hashed on the way; read whole or in the part that is asked for.

A tensor that ranks share in parts lies in a file of each. Where a part belongs stands in the file's metadata, in the
words of torch.distributed.checkpoint, whose reader of safetensors opens such files too.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from situs.train.distributed import Box

CHUNK = 1 << 26
"""Bytes that are brought from the device, hashed and written in one go."""

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
    """Writes one safetensors file and waits until it is on the disk; gives its size and hash. Ties are written once.

    boxes: of which wholes the tensors are parts, by name; those that have none are whole themselves. check: called
    between two chunks, and may raise. Every failure to write is an `OSError`, as it is for an ordinary file.
    """
    kept, shared = _untied(tensors)
    notes = {_SHARED: json.dumps(shared)}
    if boxes is not None:
        places = {name: boxes[name] if name in boxes else whole(tensor.shape) for name, tensor in kept.items()}
        notes |= _VERSION | {_OFFSETS: json.dumps({n: {"saved_offsets": box.offset} for n, box in places.items()})}
        notes[_SHAPES] = json.dumps({name: box.shape for name, box in places.items()})
    ordered = sorted(kept.items(), key=lambda pair: (-pair[1].element_size(), pair[0]))
    head = header(((name, _NAMES[t.dtype], t.shape, t.numel() * t.element_size()) for name, t in ordered), notes)
    seen = hashlib.sha256(head)
    with path.open("wb") as file:
        file.write(head)
        for chunk in _chunks(tensor for _, tensor in ordered):
            check()
            seen.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": seen.hexdigest()}


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
    """The tensors' bytes; of those on a GPU through a little page-locked memory, on this thread's own stream."""
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


def save(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """safetensors' own writer, with the rights and the errors of an ordinary file (it leaves 0600 and wraps them)."""
    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
    except SafetensorError as error:
        raise OSError(str(error).removeprefix("Error while serializing: I/O error: ")) from error
    path.chmod(0o644)


def _untied(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(each tensor once; alias -> the name it is kept under)."""
    kept: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        key = identity(tensor)
        if tensor.numel() and key in seen:
            shared[name] = seen[key]
        else:
            kept[name], seen[key] = tensor, name
    return kept, shared


def identity(tensor: Tensor) -> tuple[object, ...]:
    """The same for two names of one tensor."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _ends(box: Box) -> list[int]:
    return [offset + size for offset, size in zip(box.offset, box.size, strict=True)]


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor of this shape."""
    return Box(tuple(shape), (0,) * len(shape), tuple(shape))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """What `write_tensors` wrote into a file, on the CPU, ties given back under all their names."""
    return Parts([path]).all()


class Part(NamedTuple):
    """What of a tensor lies in one file."""

    file: Any
    box: Box


class Entry(NamedTuple):
    """One tensor: the shape of the whole, and its parts."""

    shape: tuple[int, ...]
    parts: list[Part]


class Parts:
    """The tensors in one file, or in one of each rank, by name; read as they are asked for."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.entries: dict[str, Entry] = {}
        shared: dict[str, str] = {}
        for path in paths:
            file: Any = safe_open(path, framework="pt")
            notes = file.metadata() or {}
            shared |= json.loads(notes.get(_SHARED, "{}"))
            offsets, shapes = (json.loads(notes.get(name, "{}")) for name in (_OFFSETS, _SHAPES))
            for name in file.keys():  # noqa: SIM118  (no mapping)
                size = tuple(file.get_slice(name).get_shape())
                shape = tuple(shapes.get(name, size))
                offset = tuple(offsets[name]["saved_offsets"]) if name in offsets else (0,) * len(size)
                self.entries.setdefault(name, Entry(shape, [])).parts.append(Part(file, Box(shape, offset, size)))
        self.entries |= {alias: self.entries[name] for alias, name in shared.items()}
        self._kept = shared

    def all(self) -> dict[str, Tensor]:
        """Every tensor, whole; a tie is one tensor under all its names."""
        held = {name: self.read(name) for name in self.entries if name not in self._kept}
        return held | {alias: held[name] for alias, name in self._kept.items()}

    def read(self, name: str, wanted: Box | None = None) -> Tensor:
        """A tensor, or the part of it that is wanted, put together from the files that have some of it."""
        entry, name = self.entries[name], self._kept.get(name, name)
        first = entry.parts[0].file.get_slice(name)
        if not entry.shape or (wanted is None and entry.parts[0].box.size == entry.shape):
            return entry.parts[0].file.get_tensor(name).clone()
        wanted = whole(entry.shape) if wanted is None else wanted
        out = torch.empty(wanted.size, dtype=DTYPES[first.get_dtype()])
        missing = out.numel()
        for file, box in entry.parts:
            begins = [max(a, b) for a, b in zip(wanted.offset, box.offset, strict=True)]
            ends = [min(a, b) for a, b in zip(_ends(wanted), _ends(box), strict=True)]
            if any(end <= begin for begin, end in zip(begins, ends, strict=True)):
                continue
            there = tuple(slice(b - o, e - o) for b, e, o in zip(begins, ends, box.offset, strict=True))
            here = tuple(slice(b - o, e - o) for b, e, o in zip(begins, ends, wanted.offset, strict=True))
            out[here] = file.get_slice(name)[there]
            missing -= math.prod(e - b for b, e in zip(begins, ends, strict=True))
        if missing:
            raise OSError(f"{name} lacks {missing:,} of {out.numel():,} numbers")
        return out
