"""The progress of a job, from its log."""

from __future__ import annotations

import re
from pathlib import Path

_TOLD = re.compile(rb"^step ([\d,]+)/([\d,]+) |^ *(\d+) %  ", re.MULTILINE)
_LAST = 4096  # bytes, which hold the newest line


def progress_in(log: Path, start: int) -> float:
    """The progress from 0 to 1 in the newest line that shows it; 0 before. start: where this run's log begins."""
    with log.open("rb") as file:
        end = file.seek(0, 2)
        file.seek(max(start, end - _LAST))
        lines = [*_TOLD.finditer(file.read())]
    if not lines:
        return 0.0
    done, of, percent = (int((part or b"0").replace(b",", b"")) for part in lines[-1].groups())
    return min(1.0, done / of if of else percent / 100)
