"""The kill test: SIGKILL at random moments, mostly while a checkpoint is written, and the same bits at the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from kill import TIMES
from warm import warm

from situs.train.checkpoint import RunFolder

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(
    ("kills", "epochs", "device"),
    [
        (4, 6, "cpu"),
        pytest.param(20, 16, "cpu", marks=pytest.mark.slow),
        pytest.param(20, 30, "cuda", marks=[pytest.mark.slow, pytest.mark.gpu, GPU]),
    ],
)
def test_a_run_killed_often_ends_with_the_same_bits(kills: int, epochs: int, device: str, tmp_path: Path) -> None:
    status, printed, complaints = warm(Path(__file__).parent / "kill.py", tmp_path, kills, epochs, device)
    assert status == 0, complaints
    said = json.loads(printed)
    assert said["status"] == [0, 0], [path.read_text() for path in tmp_path.glob("*.err")]
    assert len(said["killed"]) == kills
    assert all(0 < step < said["total"] for step in said["killed"])
    assert said["while writing"] >= kills / 2

    peace, killed = RunFolder.open(tmp_path / "peace"), RunFolder.open(tmp_path / "killed")
    a, b = peace.latest(), killed.latest()
    assert a is not None
    assert b is not None
    assert a.step == b.step == said["total"] == 6 * epochs
    for file in ("model", "optimizer", "ema", "generators"):
        left, right = a.tensors(file), b.tensors(file)
        assert left.keys() == right.keys()
        assert left, f"{file} is empty: nothing was compared"
        different = [name for name in left if not torch.equal(left[name], right[name])]
        assert different == []

    def lines(run: RunFolder) -> list[dict]:
        return [{k: v for k, v in record.items() if k not in TIMES} for record in run.records()]

    assert lines(peace) == lines(killed)
    assert said["same"]
    assert [r["step"] for r in lines(peace) if "loss" in r] == [*range(5, 6 * epochs, 5), 6 * epochs]
    assert [r["step"] for r in lines(peace) if "probe" in r] == [*range(6, 6 * epochs + 1, 6)]
    assert lines(peace)[-2]["loss"] < lines(peace)[0]["loss"]
