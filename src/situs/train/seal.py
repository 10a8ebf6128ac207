"""JSON that vouches for itself: a table whose last entry is the SHA-256 of all its others and of the file's name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SEAL = "sha256"


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
        return f"{path.name} cannot be read: {(error.strerror or str(error)).lower()}"
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
