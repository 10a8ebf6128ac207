"""metrics.jsonl: one line a log step, of which every checkpoint holds the length and the hash up to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from situs.errors import SitusError
from situs.files import write_bytes
from situs.train.checkpoint.storage import sync


def vouched(path: Path, size: int) -> dict[str, Any]:
    """Size and hash of the log's first `size` bytes, which are on the disk then. Later lines may come meanwhile."""
    if path.exists():
        sync(path)
    data = read_log(path)[:size]
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def read_log(path: Path) -> bytes:
    """The bytes of metrics.jsonl, none where there is no such file."""
    if not path.exists():
        return b""
    if not path.is_file():
        raise SitusError(f"{path}: is no file; move it away", field="resume")
    return path.read_bytes()


def check_log(path: Path, step: int, fact: Mapping[str, Any], way_out: str = "") -> None:
    """Refuses a log that is not as it was when the checkpoint of `step` was written."""
    if hashlib.sha256(read_log(path)[: fact["bytes"]]).hexdigest() != fact["sha256"]:
        raise SitusError(f"{path}: is not as it was written up to step {step}{way_out}", field="resume")


def cut_log(path: Path, size: int) -> None:
    """Leaves the log's first `size` bytes: the run will write the rest again."""
    data = read_log(path)
    if len(data) > size:
        write_bytes(path, data[:size])


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics.jsonl; a last line that a crash cut short is left out."""
    if not path.is_file():
        return []
    found = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines):
                break
            raise SitusError(f"{path}: line {number} is no JSON") from None
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise SitusError(f"{path}: line {number} is no record of a step")
        found.append(record)
    return found
