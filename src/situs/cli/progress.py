"""A verb's words on stderr while it works; how far it is shows `situs.progress.showing`."""

from __future__ import annotations

import sys

from situs.progress import latest


def remark(line: str) -> None:
    """A word on what is being done: on a terminal in the line that moves, elsewhere a line of its own."""
    if sys.stderr.isatty():
        latest(line)
    else:
        print(line, file=sys.stderr, flush=True)
