"""A run's files on disk: tensors with ties kept, JSON that vouches for itself, folders known for whole or damaged."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from situs.files import write_text

FORMAT = 2
SEAL = "sha256"
"""The last entry of a sealed table: the SHA-256 of all its others and of the file's name."""

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


def sealed(table: Mapping[str, Any], name: str) -> str:
    """The text of a sealed table that is to lie in a file of this name, and in no other."""
    whole = {**table, SEAL: fingerprint(table, name)}
    return json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_sealed(path: Path) -> dict[str, Any] | str:
    """The table in a sealed file, without its seal; or else what is wrong with the file."""
    if not path.is_file():  # nor a pipe, which would be waited for
        return f"{path.name} is missing"
    try:
        table = json.loads(path.read_bytes().decode())
    except OSError as error:
        return f"{path.name} cannot be read: {reason(error)}"
    except (ValueError, RecursionError):
        return f"{path.name} is cut short or damaged"
    if not isinstance(table, dict) or SEAL not in table:
        return f"{path.name} has no hash of itself: it is damaged, or of a version before hashes"
    seal = table.pop(SEAL)
    return table if fingerprint(table, path.name) == seal else f"{path.name} is not as it was written"


def fingerprint(table: Mapping[str, Any], name: str = "") -> str:
    """The SHA-256 of a name and a table's content, whatever the order of its keys and the space between them."""
    text = f"{name}\n{json.dumps(table, sort_keys=True, separators=(',', ':'))}"
    return hashlib.sha256(text.encode()).hexdigest()


def write_folder(folder: Path, files: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
    """Writes safetensors files and, last, a state.json that vouches for all in the folder; waits for the disk."""
    for name, tensors in files.items():
        write_tensors(folder / f"{name}.safetensors", tensors)
    held = {path.name: {"bytes": path.stat().st_size, "sha256": digest(path)} for path in sorted(folder.iterdir())}
    write_text(folder / "state.json", sealed({"format": FORMAT, **state, "files": held}, "state.json"))
    sync(folder)


def read_folder(folder: Path) -> dict[str, Any] | str:
    """The state.json of a folder whose files are whole, or else what is wrong with it."""
    state = read_sealed(folder / "state.json")
    if isinstance(state, str):
        return state
    if state.get("format") != FORMAT:
        return f"state.json is of format {state.get('format')}, and this version reads format {FORMAT}"
    for name, fact in state["files"].items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else 0
        if size != fact["bytes"]:
            return f"{name} has {size:,} of {fact['bytes']:,} bytes"
        try:
            if digest(path) != fact["sha256"]:
                return f"{name} has other bytes than were written"
        except OSError as error:
            return f"{name} cannot be read: {reason(error)}"
    return state


def remove(folder: Path) -> None:
    """Takes a checkpoint away: first its name, so that a crash leaves no half of it under that name."""
    away = folder.with_name(f".removing-{folder.name}")
    delete(away)
    folder.rename(away)
    delete(away)


def delete(path: Path) -> None:
    """A folder, or whatever lies in its place, as far as it can be deleted."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def reason(error: OSError) -> str:
    """What the system says, as the end of a sentence."""
    return (error.strerror or str(error)).lower()
