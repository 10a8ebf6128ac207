"""The manifest of a packed set: which shards it has, and what each must be."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path, PurePosixPath
from typing import Any

from situs.errors import SitusError, reason_of

MANIFEST = "manifest.json"
CLASSES = "classes.txt"
KIND = "situs data pack"


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a packed folder; None where there is none, or another program's."""
    try:
        return parse_manifest((folder / MANIFEST).read_bytes(), str(folder / MANIFEST))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SitusError(f"{folder / MANIFEST}: cannot be read: {reason_of(error)}") from None


def parse_manifest(data: bytes, name: str) -> dict[str, Any] | None:
    """The manifest in a file called `name`; None where it is another program's."""
    try:
        manifest = json.loads(data)
        if not isinstance(manifest, dict) or manifest.get("kind") != KIND:
            return None
        if manifest["version"] != 1:
            raise SitusError(
                f"{name}: the manifest has version {manifest['version']}, but this version of situs reads only "
                "version 1"
            )
        for shard in manifest["shards"]:
            file = shard["file"]
            if PurePosixPath(file).name != file or file in {"", ".", ".."}:
                raise SitusError(f"{name}: is damaged: {file!r} is not a file name of a shard")
            if not isinstance(shard["bytes"], int) or not isinstance(shard["sha256"], str):
                raise SitusError(f"{name}: is damaged: the size or the SHA-256 of {file!r} is missing")
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, SitusError):
            raise
        raise SitusError(f"{name}: is damaged ({type(error).__name__}: {str(error)[:80]})") from None
    return manifest


def check_size(folder: Path, shard: dict[str, Any]) -> str:
    """What is wrong with a shard of a manifest before its bytes are read; empty where nothing is."""
    try:
        size = (folder / shard["file"]).stat().st_size
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return "" if size == shard["bytes"] else f"has {size:,} bytes instead of {shard['bytes']:,}"


def check_shard(folder: Path, shard: dict[str, Any]) -> str:
    """What is wrong with a shard of a manifest; empty where nothing is."""
    if wrong := check_size(folder, shard):
        return wrong
    try:
        with (folder / shard["file"]).open("rb") as file:
            hashed = hashlib.file_digest(file, "sha256")
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return "" if hashed.hexdigest() == shard["sha256"] else "differs from what was packed (SHA-256)"
