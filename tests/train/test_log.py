from __future__ import annotations

import io
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from rich.console import Console

from situs.errors import SitusError
from situs.train.checkpoint import RunFolder
from situs.train.log import TRACKERS, Log, clock, describe, memory_gib

RECORD = {
    "step": 50, "epoch": 1.25, "loss": 2.34567, "position_accuracy": 0.41234, "gradient_norm": 3.0, "lr": 1.5e-4,
    "images_per_second": 3120.4, "data_wait": 0.034, "memory_gib": 17.31, "seconds": 12.0,
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", {"train": {"epochs": 3}})


def test_a_record_as_a_person_reads_it() -> None:
    shown = "epoch 1.25 · loss 2.346 · position accuracy 0.4123 · lr 1.50e-04 · 3,120 img/s · data-wait 3 % · 17.3 GiB"
    assert describe(RECORD, skip=("step",)) == shown
    assert [clock(s) for s in (0, 61.9, 3600, 90061)] == ["0:00", "1:01", "1:00:00", "25:01:01"]


def test_plain_lines_where_there_is_no_terminal(run: RunFolder) -> None:
    out = io.StringIO()
    log = Log(run, 0, 100, console=Console(file=out, width=40, soft_wrap=True))
    log.step(RECORD)
    log.say("[not] markup")
    log.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step 50/100 · epoch 1.25 · loss 2.346 · ")
    assert lines[0].endswith(" left")
    assert "\x1b" not in out.getvalue()
    assert lines[1] == "[not] markup"


def test_a_live_line_on_a_terminal(run: RunFolder) -> None:
    out = io.StringIO()
    log = Log(run, 0, 100, console=Console(file=out, width=200, force_terminal=True))
    log.step(RECORD)
    log.close()
    text = out.getvalue()
    assert "\x1b" in text
    for part in ("epoch 1.25 step 50/100", "loss 2.346", "position accuracy 0.4123", "3,120 img/s", "data-wait 3 %",
                 "17.3 GiB", "left"):  # fmt: skip
        assert part in text


def test_every_record_is_a_line_of_strict_json(run: RunFolder) -> None:
    log = Log(run, 0, 100, console=Console(file=io.StringIO()))
    log.step(RECORD)
    log.keep({"step": 50, "probe": float("nan")})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    lines = [json.loads(line, parse_constant=refuse) for line in run.metrics.read_text().splitlines()]
    assert lines == [RECORD, {"step": 50, "probe": None}]


def test_other_ranks_are_silent(tmp_path: Path, capsys) -> None:
    run = RunFolder.create(tmp_path / "run", {}, writer=False)
    log = Log(run, 0, 100)
    log.step(RECORD)
    log.say("hello")
    log.close()
    assert capsys.readouterr() == ("", "")
    assert not run.path.exists()


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_a_tracker_that_is_not_installed_names_its_extra(run: RunFolder, name: str, monkeypatch) -> None:
    for module in ("torch.utils.tensorboard", "wandb", "trackio"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        SitusError, match=rf"the tracker {name} needs the package '{name}': pip install 'situs\[track\]'"
    ):
        Log(run, 0, 100, [name])


def test_an_unknown_tracker_lists_the_known(run: RunFolder) -> None:
    with pytest.raises(SitusError, match="unknown tracker 'paper'; choose one of: tensorboard, trackio, wandb"):
        Log(run, 0, 100, ["paper"])


class Recorder:
    """Stands for wandb, trackio and SummaryWriter: it keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def init(self, **options):
        self.calls.append(("init", options))
        return self

    def log(self, metrics, step) -> None:
        self.calls.append(("log", step, metrics))

    def finish(self) -> None:
        self.calls.append(("finish",))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_the_numbers_reach_a_tracker(run: RunFolder, name: str, monkeypatch) -> None:
    peer = Recorder()
    module = types.ModuleType(name)
    module.init, module.finish = peer.init, peer.finish  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    log = Log(run, 0, 100, [name], console=Console(file=io.StringIO()))
    log.step(RECORD)
    log.close()
    assert [call[0] for call in peer.calls] == ["init", "log", "finish"]
    options = peer.calls[0][1]
    assert options["name"] == "run"
    assert options["config"] == {"train": {"epochs": 3}}
    assert options["resume"] == "allow"
    step, metrics = peer.calls[1][1:]
    assert step == 50
    assert metrics == {name: value for name, value in RECORD.items() if name != "step"}


def test_tensorboard_hides_what_is_written_again(run: RunFolder, monkeypatch) -> None:
    calls: list[tuple] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            calls.append((Path(folder).name, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            calls.append((name, value, step))

        def close(self) -> None:
            calls.append(("closed",))

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    log = Log(RunFolder.open(run.path), 40, 100, ["tensorboard"], console=Console(file=io.StringIO()))
    log.keep({"step": 50, "loss": 1.5})
    log.close()
    assert calls == [("tensorboard", 41), ("loss", 1.5, 50), ("closed",)]


def test_memory_is_that_of_this_process() -> None:
    assert 0.01 < memory_gib(torch.device("cpu")) < 1000
