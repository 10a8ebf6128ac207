"""The kill test: SIGKILL at ten random moments, and the same bits at the end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from situs.train.checkpoint import RunFolder

TIMES = {"seconds", "images_per_second", "data_wait", "memory_gib"}


def test_a_run_killed_ten_times_ends_with_the_same_bits(tmp_path: Path) -> None:
    script = Path(__file__).parent / "kill.py"
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["status"] == [0, 0]
    assert len(said["killed"]) == 10
    assert all(0 < step < said["total"] for step in said["killed"])

    peace, killed = RunFolder.open(tmp_path / "peace"), RunFolder.open(tmp_path / "killed")
    a, b = peace.latest(), killed.latest()
    assert a is not None
    assert b is not None
    assert a.step == b.step == said["total"] == 84
    for file in ("model", "optimizer", "ema", "generators"):
        left, right = a.tensors(file), b.tensors(file)
        assert left.keys() == right.keys()
        assert left, f"{file} is empty: nothing was compared"
        different = [name for name in left if not torch.equal(left[name], right[name])]
        assert different == []

    def lines(run: RunFolder) -> list[dict]:
        return [{k: v for k, v in record.items() if k not in TIMES} for record in run.records()]

    assert lines(peace) == lines(killed)
    assert [r["step"] for r in lines(peace) if "loss" in r] == [*range(5, 84, 5), 84]
    assert [r["step"] for r in lines(peace) if "probe" in r] == [*range(6, 85, 6)]
    assert lines(peace)[-2]["loss"] < lines(peace)[0]["loss"]
