"""A job's process: `python -m situs.studies.child PARENT WORDS` runs `situs WORDS` and ends with its parent."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys


def end_with(parent: int) -> None:
    """From now on this process gets SIGTERM when its parent dies, and a training saves a checkpoint; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it was killed before we came here
            raise SystemExit(130)


if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    runpy.run_module("situs", run_name="__main__", alter_sys=True)
