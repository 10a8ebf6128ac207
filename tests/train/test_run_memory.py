"""SIGKILL on a run whose data is a Dataset in memory, and the same bits at the end."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from situs.train.checkpoint import RunFolder

SCRIPT = Path(__file__).parent / "kill_memory.py"


def started(run: Path, how: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, str(SCRIPT), str(run), how], start_new_session=True)


@pytest.mark.slow
def test_a_run_on_a_dataset_killed_twice_ends_with_the_same_bits(tmp_path: Path) -> None:
    assert started(tmp_path / "peace", "new").wait(timeout=120) == 0
    killed, steps = tmp_path / "killed", []
    for how, after in (("new", 10), ("resume", 30)):
        process = started(killed, how)
        end = time.monotonic() + 120
        while time.monotonic() < end and not (killed / "checkpoints" / f"step-{after:08}").exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=60) == -signal.SIGKILL
        last = RunFolder.open(killed, writer=False).latest()
        assert last is not None
        steps.append(last.step)
    assert 0 < steps[0] < steps[1] < 60
    assert started(killed, "resume").wait(timeout=120) == 0
    ends = [RunFolder.open(run, writer=False).latest() for run in (tmp_path / "peace", killed)]
    assert all(end is not None and end.step == 60 for end in ends)
    for file in ("model", "optimizer", "ema", "generators"):
        left, right = (end.tensors(file) for end in ends if end is not None)
        assert left
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left), file
