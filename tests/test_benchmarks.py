"""A benchmark says what failed by its status, and measures the rest."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

METHODS = Path(__file__).resolve().parent.parent / "benchmarks" / "methods.py"
SMALL = ["--model", "vit_tiny_patch16_224", "--img-size", "16", "--patch-size", "8", "--depth", "1", "--batch", "2",
         "--device", "cpu", "--precision", "fp32", "--no-compile", "--warmup", "1", "--steps", "1",
         "--repeats", "1"]  # fmt: skip


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", [str(METHODS), *SMALL, *words])
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)  # it would stay for the tests after
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(METHODS), run_name="__main__")
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("cases", "status", "rows"),
    [
        (["supervised"], 0, ["supervised"]),
        (["mp3:2.0", "supervised"], 1, ["supervised"]),
        (["mp3:2.0", "nosuchmethod"], 1, []),
    ],
)
def test_the_status_says_whether_every_case_was_measured(
    cases: list[str], status: int, rows: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--cases", *cases) == status
    printed = capsys.readouterr()
    table = printed.out.partition("warm-up s\n")[2].splitlines()
    assert [line.split()[0] for line in table if not line.startswith("failed")] == rows
    failed = [case for case in cases if case not in rows]
    assert printed.out.endswith(f"failed, see above: {', '.join(failed)}\n") == bool(failed)
    assert ("mask_ratio=2.0: must be in [0, 1)" in printed.err) == ("mp3:2.0" in cases)


@pytest.mark.parametrize(("broken", "status"), [((), 0), (("mp3",), 1), (("mp3", "mae"), 1)])
def test_cases_at_once_fail_one_by_one(
    broken: tuple[str, ...], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Processes that only answer stand for the real ones, which each import torch."""

    class Answers:
        def __init__(self, command: list[str], **_: Any) -> None:
            self.returncode = 1 if command[-1] in broken else 0

        def communicate(self) -> tuple[str, None]:
            row = dict.fromkeys(("img/s", "spread", "ms/step", "GiB", "warm s"), 1.0)
            return ("" if self.returncode else f"some words\n{json.dumps(row)}\n"), None

    monkeypatch.setattr("subprocess.Popen", Answers)
    assert run(monkeypatch, "--at-once", "--cases", "mp3", "mae") == status
    table = capsys.readouterr().out
    assert [name for name in ("mp3", "mae") if f"\n{name} " in table] == [n for n in ("mp3", "mae") if n not in broken]
