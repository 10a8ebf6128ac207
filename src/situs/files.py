"""Small files: TOML and JSON with errors of one sentence, atomic writes; and a user's own code by its name."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from situs.errors import SitusError, reason_of


def absolute(text: str) -> str:
    """An existing path as absolute; other text unchanged."""
    path = Path(text).expanduser()
    return os.path.abspath(path) if path.exists() else text  # noqa: PTH100  (links stay links)


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The tables of a TOML file."""
    return _parse(tomllib.loads, tomllib.TOMLDecodeError, "TOML", Path(path))


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The tables of a JSON file."""
    return _parse(json.loads, json.JSONDecodeError, "JSON", Path(path))


def _parse(loads: Callable[[str], Any], failure: type[ValueError], format_name: str, path: Path) -> Any:
    text = _read(path)
    try:
        tables = loads(text)
    except (failure, RecursionError) as error:
        raise SitusError(f"{path}: is not valid {format_name}: {error}") from None
    if not isinstance(tables, dict):
        raise SitusError(f"{path}: must contain a table at its top level, not a {type(tables).__name__}")
    return tables


def _read(path: Path, field: str = "") -> str:
    """A file's text. field: the field that names the file."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # a null character in the path is a ValueError
        reason = str(getattr(error, "strerror", None) or error).lower()
        reason = "it is not text in UTF-8" if isinstance(error, UnicodeDecodeError) else reason
        named = f"{field}={path}" if field else path
        raise SitusError(f"{named}: cannot be read: {reason}", field=field or ()) from None


TABLES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
"""Endings of tables, whose lines are not plain text."""


def missing_reason(folder: Path, name: str) -> str:
    """Why a folder has no such file, for a sentence: it is missing, or sealed."""
    if (folder / f"{name}.sealed").is_file():
        return f"its {name} is sealed (situs unlock opens the folder)"
    return f"has no {name}"


def read_lines(path: Path, field: str) -> list[str]:
    """The lines of a text file without blank ones; field: the field that names the file."""
    if path.suffix in TABLES:
        raise SitusError(
            f"{field}={path}: is a table file; give a plain text file with one sample per line", field=field
        )
    lines = [line.strip() for line in _read(path, field).splitlines() if line.strip()]
    if not lines:
        raise SitusError(f"{field}={path}: has no text", field=field)
    return lines


def cache_folder(name: str) -> Path:
    """A folder of the user's cache, which survives a reboot; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "situs" / name


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """`write_bytes` for text, in UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(
    path: str | os.PathLike[str], content: bytes | Iterable[bytes | memoryview], *, private: bool = False
) -> None:
    """Writes a file under a temporary name and renames it: readers see the old file or the whole new one.

    content: whole, or in pieces. private: only for the owner (mode 0600), from its first byte on.
    """
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("wb") as file:
            if private:
                draft.chmod(0o600)
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_result(path: Path, content: bytes, *, private: bool = False, field: str = "out") -> Path:
    """`write_bytes` for a file that the user named by `field`: makes its folder; a failure is one sentence."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content, private=private)
    except OSError as error:
        raise SitusError(f"{path}: could not be written: {reason_of(error)}", field=field) from error
    return path


def make_folder(path: Path, field: str = "out") -> None:
    """Makes a folder that the user named by `field`, if it is not there; a failure is one sentence."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SitusError(f"{path}: cannot be created: {reason_of(error)}", field=field) from None


# --- a user's own code ----------------------------------------------------------------------------------------


def names_code(source: str) -> bool:
    """Whether `source` is package.module:name or file.py:name, and not a folder or a name of a library ("hf:…")."""
    place, colon, name = source.rpartition(":")
    if not colon or not name.isidentifier() or place == "hf":
        return False
    return place.endswith(".py") or all(part.isidentifier() for part in place.split("."))


def load_code(source: str, what: str = "") -> Any:
    """The object that package.module:name or file.py:name names. what: the start of an error's sentence."""
    place, _, name = source.rpartition(":")
    try:
        return getattr(_import(place), name)
    except (Exception, SystemExit) as error:  # whatever the user's own code raises while it is imported
        reason = error if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):  # of a script that reads its own flags
            reason = "importing this file ends the program; move its last statements under if __name__ == '__main__'"
        raise SitusError(
            f"{what}{source}: cannot be imported as package.module:name or file.py:name: {reason}"
        ) from error


def _import(place: str) -> Any:
    if not place.endswith(".py"):
        return _import_from(Path.cwd(), place)  # as python -m does
    file = Path(place).expanduser().resolve()
    if not file.is_file():
        raise ImportError(f"there is no file {place}")
    return _import_from(file.parent, file.stem)


def _import_from(folder: Path, name: str) -> Any:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return import_module(name)
