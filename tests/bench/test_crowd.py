"""Cases in processes of their own: one that falls stops no other, and one at a time has the device."""

from __future__ import annotations

import json
import os
import runpy
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from situs.bench import crowd
from situs.bench.cases import StepCase, Timing
from situs.bench.clock import Times
from situs.bench.measure import StepRow
from situs.config import to_dict

CPU = torch.device("cpu")
CASES = [StepCase(method="mp3"), StepCase(method="mae"), StepCase(method="mjp")]


def in_threads(monkeypatch: pytest.MonkeyPatch, tasks: Any) -> None:
    """Threads stand for the processes, which would each import torch."""

    class Answers(threading.Thread):
        def __init__(self, command: list[str], *, stdout: Any, **_: Any) -> None:
            super().__init__()
            self.place, self.number, self.returncode = Path(command[-2]), int(command[-1]), 0
            self.start()

        def run(self) -> None:
            try:
                tasks(self.place, self.number)
            except RuntimeError as error:
                (self.place / f"{self.number}.log").write_text(f"a trace\n{error}\n")
                self.returncode = 1

        def poll(self) -> int | None:
            return None if self.is_alive() else self.returncode

    end = time.monotonic() + 10  # those that still wait then have lost their parent
    monkeypatch.setattr("subprocess.Popen", Answers)
    monkeypatch.setattr(os, "getppid", lambda: os.getpid() if time.monotonic() < end else -1)


def test_one_at_a_time_is_timed_after_all_are_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    warm, inside, order = [], [], []

    def measure(case: StepCase, timing: Timing, device: torch.device, turn: Any) -> StepRow:
        if case.method == "mae":
            raise RuntimeError("out of memory")
        warm.append(case.method)
        with turn():
            inside.append(case.method)
            assert len(inside) == 1 and len(warm) == 2
            time.sleep(0.05)
            order.append(inside.pop())
        return StepRow(case, Times((1.0,), 2.0), 3)

    monkeypatch.setattr(crowd, "measure_case", measure)
    monkeypatch.setattr(crowd, "measure_ceiling", lambda device, precision: 4.0)
    in_threads(monkeypatch, crowd.take_part)
    ceilings: dict[str, float] = {}
    found = {CASES[at].method: answer for at, answer in crowd.measure_at_once(CASES, Timing(), CPU, ceilings)}
    assert found["mae"] == "out of memory"
    assert {name: answer.case.method for name, answer in found.items() if isinstance(answer, StepRow)} == {
        "mp3": "mp3", "mjp": "mjp",
    }  # fmt: skip
    assert sorted(order) == ["mjp", "mp3"] and ceilings == {"fp32": 4.0}


def test_a_process_that_leaves_nothing_is_told_by_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    in_threads(monkeypatch, lambda folder, number: None)
    assert [why for _, why in crowd.measure_at_once(CASES[:1], Timing(), CPU, {})] == [
        "the process of this case ended with status 0"
    ]


@pytest.mark.slow
def test_real_processes(tmp_path: Path) -> None:
    small = dict(model="vit_tiny_patch16_224", img_size=8, patch_size=4, batch=2, model_args={"depth": 1})
    cases = [StepCase(method="mp3", **small), StepCase(method="mp3", **{**small, "model": "nosuch"})]
    (_, row), (_, why) = sorted(crowd.measure_at_once(cases, Timing(warmup=1, steps=1, repeats=1), CPU, {}))
    assert isinstance(row, StepRow) and row.case.work == cases[0].work
    assert "'nosuch' is neither a timm model nor a folder" in str(why)


@pytest.mark.parametrize(("warm", "waits"), [((), True), ((2,), True), ((1, 2), False)])
def test_who_waits_for_another_and_has_lost_the_first_process_goes_too(
    warm: tuple[int, ...], waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"cases": [to_dict(case) for case in CASES], "timing": to_dict(Timing()), "device": "cpu", "parent": -1}
    (tmp_path / "job.json").write_text(json.dumps(job))
    for number in warm:
        (tmp_path / f"{number}.warm").touch()

    def measure(case: StepCase, timing: Timing, device: torch.device, turn: Any) -> StepRow:
        with turn():
            return StepRow(case, Times((1.0,), 2.0), 3)

    monkeypatch.setattr(crowd, "measure_case", measure)
    monkeypatch.setattr(crowd, "measure_ceiling", lambda device, precision: 4.0)
    with pytest.raises(SystemExit) if waits else nullcontext():
        crowd.take_part(tmp_path, 0)
    assert (tmp_path / "0.json").exists() != waits


def test_a_process_measures_the_case_that_it_was_started_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(command: list[str], **_: Any) -> Any:
        assert command[:3] == [sys.executable, "-m", crowd.__name__]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [str(crowd.__file__), *command[3:]])
            runpy.run_path(str(crowd.__file__), run_name="__main__")
        return SimpleNamespace(poll=lambda: 0, returncode=0)

    measure = lambda case, *_: StepRow(case, Times((1.0,), 2.0), 3)  # noqa: E731
    monkeypatch.setattr("situs.bench.measure.measure_case", measure)
    monkeypatch.setattr("subprocess.Popen", start)
    rows = dict(crowd.measure_at_once(CASES, Timing(), CPU, {}))
    assert [rows[number].case for number in range(3)] == CASES  # pyright: ignore[reportAttributeAccessIssue]


def test_processes_that_nobody_waits_for_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    class Process:
        returncode = 0

        def __init__(self, command: list[str], **_: Any) -> None:
            self.number = int(command[-1])

        def poll(self) -> int | None:
            return 0 if self.number == 0 else None

        def kill(self) -> None:
            ended.append(("kill", self.number))

        def wait(self) -> None:
            ended.append(("wait", self.number))

    monkeypatch.setattr("subprocess.Popen", Process)
    answers = crowd.measure_at_once(CASES, Timing(), CPU, {})
    assert next(answers)[0] == 0
    answers.close()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    assert ended == [("kill", 1), ("wait", 1), ("kill", 2), ("wait", 2)]


@pytest.mark.parametrize(
    ("cores", "cases", "own", "threads"),
    [(64, 4, None, "16"), (64, 21, None, "3"), (64, 40, None, "2"), (None, 1, None, "2"), (64, 4, "5", "5")],
)
def test_the_processes_share_the_cores_to_compile_and_have_two_each_at_least(
    cores: int | None, cases: int, own: str | None, threads: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name, given = "TORCHINDUCTOR_COMPILE_THREADS", dict[str, str]()
    monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv(name, own)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr("subprocess.Popen", lambda *_, env, **__: given.update(env))
    crowd._start(tmp_path, 0, cases)
    assert given[name] == threads
