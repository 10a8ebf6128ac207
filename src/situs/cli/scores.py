"""How a verb writes its numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from situs.errors import SitusError
from situs.files import write_bytes


def write_scores(path: Path, scores: Mapping[str, Any]) -> None:
    """The numbers as JSON, written aside and renamed, by the first rank."""
    write_file(path, (json.dumps(scores, indent=2, ensure_ascii=False) + "\n").encode(), "--out")


def write_file(path: Path, content: bytes, flag: str) -> None:
    """A file that a flag names, written aside and renamed, by the first rank."""
    from situs.train import distributed

    if distributed.rank():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)
    except OSError as error:
        raise SitusError(f"{path}: could not be written: {(error.strerror or str(error)).lower()} ({flag})") from error
