"""One folder of tensors and facts: written to the last byte, and known again for whole or damaged."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from situs.files import write_text
from situs.train.seal import read_sealed, sealed
from situs.train.tensors import digest, sync, write_tensors

FORMAT = 2


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
