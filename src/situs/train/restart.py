"""torchrun --max-restarts: a run whose ranks were killed is resumed in the folder where it began.

torchrun repeats the same command with the same new folder, which by then holds the run. So the first start leaves a
mark there, by which a restart recognises its own run; any other run there is refused as usual.
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
    """Identifies one torchrun through its restarts; None without torchrun."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"process {os.getppid()} on {socket.gethostname()}" if run_id == "none" else run_id


def mark(folder: Path) -> None:
    """Writes this torchrun's mark into the folder of a new run; nothing without torchrun."""
    if (job := _job()) is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / MARK, job)


def begun(folder: Path) -> bool:
    """Whether an earlier start of this torchrun began a run there; an incomplete folder of its own is cleaned up."""
    mark_file = folder / MARK
    if not restarts() or not mark_file.is_file() or mark_file.read_text(encoding="utf-8") != _job():
        return False
    if (folder / "config.json").exists():
        return True
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    (folder / CLASSES).unlink(missing_ok=True)
    return False
