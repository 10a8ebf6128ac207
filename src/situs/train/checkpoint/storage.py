"""A run's files on disk: JSON that vouches for itself, folders known for whole or damaged."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from situs.files import write_text
from situs.train.checkpoint.tensors import write_tensors

FORMAT, SHARDED = 2, 3
"""Of a folder whose tensors are whole, and of one that holds each rank's part of them."""

FORMATS = (FORMAT, SHARDED)
SEAL = "sha256"
"""The last entry of a sealed table: the SHA-256 of all its others and of the file's name."""


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
    vouch(folder, state, held)


def vouch(folder: Path, state: Mapping[str, Any], files: Mapping[str, Any], version: int = FORMAT) -> None:
    """Writes the state.json of a folder, which holds the size and hash of each of its files; waits for the disk."""
    write_text(folder / "state.json", sealed({"format": version, **state, "files": dict(files)}, "state.json"))
    sync(folder)


def read_folder(folder: Path) -> dict[str, Any] | str:
    """The state.json of a folder whose files are whole, or else what is wrong with it."""
    state = read_sealed(folder / "state.json")
    if isinstance(state, str):
        return state
    if state.get("format") not in FORMATS:
        return f"state.json is of format {state.get('format')}, and this version reads formats {FORMAT} and {SHARDED}"
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
