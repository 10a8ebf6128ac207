"""Cases in separate processes: all compile at the same time, and one at a time is timed.

They share a folder: `job.json`, a file `N.warm` for each that is ready (or gone), the lock of the device, and the
answer of each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from situs.bench.cases import StepCase, Timing
from situs.bench.clock import measure_ceiling
from situs.bench.measure import StepRow, measure_case, precision_on
from situs.config import from_dict, to_dict
from situs.files import read_json, write_text
from situs.folder_lock import in_turn

Answer = tuple[int, StepRow | str]
"""The number of a case with its row, or with the reason of its failure."""


def measure_at_once(
    cases: Sequence[StepCase], timing: Timing, device: torch.device, ceilings: dict[str, float]
) -> Iterator[Answer]:
    """The answers of all cases, as they arrive; fills `ceilings` by precision. A failed process stops no other."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = {"cases": [to_dict(case) for case in cases], "timing": to_dict(timing)}
        job |= {"device": str(device), "parent": os.getpid()}
        write_text(folder / "job.json", json.dumps(job))
        running: dict[int, subprocess.Popen[bytes]] = {}
        try:
            running |= {number: _start(folder, number, len(cases)) for number in range(len(cases))}
            while running:
                time.sleep(0.05)
                for number in [number for number, process in running.items() if process.poll() is not None]:
                    (folder / f"{number}.warm").touch()  # it may have failed before
                    yield number, _answer(folder, number, running.pop(number).returncode, ceilings)
        finally:
            for process in running.values():
                process.kill()
                process.wait()


def _start(folder: Path, number: int, crowd: int) -> subprocess.Popen[bytes]:
    threads = max(2, (os.cpu_count() or 2) // crowd)
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": str(threads), **os.environ}
    command = [sys.executable, "-m", "situs.bench.crowd", str(folder), str(number)]
    with (folder / f"{number}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def _answer(folder: Path, number: int, status: int, ceilings: dict[str, float]) -> StepRow | str:
    """The row; or, after a failure, the last line of the process."""
    with suppress(OSError, ValueError):
        answer: dict[str, Any] = read_json(folder / f"{number}.json")
        ceilings |= answer["ceilings"]
        return StepRow.from_json(answer["row"])
    lines = (folder / f"{number}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else f"the process of this case ended with status {status}"


def take_part(folder: Path, number: int) -> None:
    """The work of one process."""
    job = read_json(folder / "job.json")
    case, timing = from_dict(StepCase, job["cases"][number]), from_dict(Timing, job["timing"])
    device, ceilings = torch.device(job["device"]), {}

    @contextmanager
    def turn() -> Iterator[None]:
        (folder / f"{number}.warm").touch()
        while len(list(folder.glob("*.warm"))) < len(job["cases"]):  # the parent marks processes that failed
            if os.getppid() != job["parent"]:  # the parent is gone
                raise SystemExit(1)
            time.sleep(0.05)
        with in_turn(folder / "lock"):
            precision = precision_on(case, device)
            kept = folder / f"ceiling-{precision}.json"
            if not kept.exists():  # the first process measures it for all
                write_text(kept, json.dumps({precision: measure_ceiling(device, precision)}))
            ceilings.update(read_json(kept))
            yield

    row = measure_case(case, timing, device, turn)
    write_text(folder / f"{number}.json", json.dumps({"row": row.to_json(), "ceilings": ceilings}))


if __name__ == "__main__":
    _, place, case_number = sys.argv
    take_part(Path(place), int(case_number))
