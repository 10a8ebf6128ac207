"""How a verb writes its numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from situs.config import write_text
from situs.errors import SitusError


def write_scores(path: Path, scores: Mapping[str, Any]) -> None:
    """The numbers as JSON, written aside and renamed, by the first rank."""
    from situs.train import distributed

    if distributed.rank():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(scores, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise SitusError(f"{path}: could not be written: {(error.strerror or str(error)).lower()} (--out)") from error
