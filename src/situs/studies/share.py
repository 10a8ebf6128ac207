"""How far a job is, by what it says in its log."""

from __future__ import annotations

import re
from pathlib import Path

_TOLD = re.compile(rb"^step ([\d,]+)/([\d,]+) |^ *(\d+) %  ", re.MULTILINE)
_LAST = 4096  # bytes, which hold the newest line


def share_told(log: Path, start: int) -> float:
    """From 0 to 1, as the newest line with a share tells; 0 before there is one. start: where in the log it begins."""
    with log.open("rb") as file:
        end = file.seek(0, 2)
        file.seek(max(start, end - _LAST))
        found = [*_TOLD.finditer(file.read())]
    if not found:
        return 0.0
    done, of, percent = (int((part or b"0").replace(b",", b"")) for part in found[-1].groups())
    return min(1.0, done / of if of else percent / 100)
