"""Lines on stderr while a verb works; `situs.progress.showing` shows the progress bar."""

from __future__ import annotations

import sys

from situs.progress import latest


def remark(line: str) -> None:
    """Says what is being done: on a terminal in the progress line, elsewhere as a line."""
    if getattr(sys.stderr, "rich_proxied_file", sys.stderr).isatty():  # what rich before 15 puts there is none
        latest(line)
    else:
        print(line, file=sys.stderr, flush=True)
