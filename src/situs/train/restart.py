"""torchrun --max-restarts: a run whose ranks were killed goes on by itself, in the folder that it had begun.

The same command is started again with the same new folder, which by then holds the run. So the first start leaves a
mark there, by which a restart knows the run for its own; any other run in its place is refused as ever.
"""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

from situs.files import write_text
from situs.train.checkpoint.folder import CLASSES, MARK
from situs.train.distributed import restarts


def _job() -> str | None:
    """What one torchrun keeps through its restarts and no other has; None without torchrun."""
    given = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"process {os.getppid()} on {socket.gethostname()}" if given == "none" else given


def mark(folder: Path) -> None:
    """Leaves word in the folder of a new run of whose it is; nothing without torchrun."""
    if (job := _job()) is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / MARK, job)


def begun(folder: Path) -> bool:
    """Whether an earlier start of this torchrun began a run there; what it left of a folder half made is taken away."""
    own = folder / MARK
    if not restarts() or not own.is_file() or own.read_text(encoding="utf-8") != _job():
        return False
    if (folder / "config.json").exists():
        return True
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    (folder / CLASSES).unlink(missing_ok=True)
    return False
