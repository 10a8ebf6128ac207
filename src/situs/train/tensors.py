"""Tensors on disk: safetensors files that are whole or absent, with ties kept and a digest for each."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

_SHARED = "situs.shared"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes one safetensors file and waits until it is on the disk; tied tensors are written once.

    Every failure to write is an `OSError`, as it is for an ordinary file.
    """
    kept, shared = _untied(tensors)
    save(path, kept, {_SHARED: json.dumps(shared)})
    sync(path)


def save(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """safetensors' own writer, with the rights and the errors of an ordinary file (it leaves 0600 and wraps them)."""
    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
    except SafetensorError as error:
        raise OSError(str(error).removeprefix("Error while serializing: I/O error: ")) from error
    path.chmod(0o644)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """What `write_tensors` wrote, on the CPU, ties given back under all their names."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
        shared = json.loads((file.metadata() or {}).get(_SHARED, "{}"))
    return tensors | {alias: tensors[name] for alias, name in shared.items()}


def _untied(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(each tensor once, contiguous and on the CPU; alias -> the name it is kept under)."""
    kept: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and key in seen:
            shared[name] = seen[key]
            continue
        seen[key] = name
        storage = tensor.untyped_storage().data_ptr()
        # safetensors refuses two tensors of one storage, even where they do not overlap.
        copied = tensor.cpu().contiguous()
        kept[name] = copied.clone() if storage in storages and tensor.device.type == "cpu" else copied
        storages.add(storage)
    return kept, shared


def digest(path: Path) -> str:
    """The file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
