"""A benchmark says what failed by its status, measures the rest, and gives peers the same work."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from situs.bench.cases import StepCase, Timing
from situs.bench.measure import measure_case

METHODS = Path(__file__).resolve().parent.parent / "benchmarks" / "methods.py"
SMALL = ["--model", "vit_tiny_patch16_224", "--img-size", "16", "--patch-size", "8", "--depth", "1", "--batch", "2",
         "--device", "cpu", "--warmup", "1", "--steps", "1", "--repeats", "1"]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "status", "rows"),
    [
        (["--cases", "supervised", "--peers", "timm"], 0, ["supervised", "timm"]),
        (["--cases", "mp3:2.0", "supervised", "--peers"], 1, ["supervised"]),
        (["--cases", "mp3:2.0", "nosuchmethod", "--peers"], 1, []),
    ],
)
def test_the_status_says_whether_every_case_was_measured(
    words: list[str], status: int, rows: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(METHODS), *SMALL, *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(METHODS), run_name="__main__")
    assert int(ended.value.code or 0) == status
    printed = capsys.readouterr()
    lines = [line.split()[0] for line in printed.out.splitlines() if line.startswith("  ")]
    assert lines == (["case", *rows] if rows else [])
    failed = [case for case in ("mp3:2.0", "nosuchmethod") if case in words]
    assert printed.out.endswith(f"failed, see above: {', '.join(failed)}\n") == bool(failed)
    assert ("mask_ratio=2.0: must be in [0, 1)" in printed.err) == ("mp3:2.0" in words)


def test_a_peer_is_given_as_many_operations() -> None:
    peers = runpy.run_path(str(METHODS))["PEERS"]
    case = StepCase(model="vit_tiny_patch16_224", img_size=16, patch_size=8, model_args={"depth": 1}, batch=4)
    timing, cpu = Timing(warmup=1, steps=1, repeats=1), torch.device("cpu")
    assert peers["timm"](case, timing, cpu).flops == measure_case(case, timing, cpu).flops
