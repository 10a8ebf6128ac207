from __future__ import annotations

import io
import json
import os
import sqlite3
import subprocess
import sys
import types
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from rich.console import Console

from situs.errors import SitusError
from situs.progress import in_words, listening, task
from situs.train.checkpoint import RunFolder
from situs.train.log import TRACKERS, Log, describe, machine, memory_gib

RECORD = {
    "step": 50, "epoch": 1.25, "loss": 2.34567, "position_accuracy": 0.41234, "gradient_norm": 3.0, "lr": 1.5e-4,
    "images_per_second": 3120.4, "data_wait": 0.034, "memory_gib": 17.31, "seconds": 12.0,
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", {"train": {"epochs": 3}})


def test_a_record_as_a_person_reads_it() -> None:
    shown = (
        "epoch 1.25 · loss 2.346 · position accuracy 0.4123 · lr 1.50e-04 · 3,120 samples/s · data-wait 3 % · 17.3 GiB"
    )
    assert describe(RECORD, skip=("step",)) == shown
    slow = [describe({"images_per_second": value}) for value in (0.0304, 0.96, 9.94, 11.2)]
    assert slow == ["0.03 samples/s", "0.96 samples/s", "9.9 samples/s", "11 samples/s"]


def test_plain_lines_where_there_is_no_terminal(run: RunFolder) -> None:
    out = io.StringIO()
    log = Log(run, 0, 100, console=Console(file=out, width=40, soft_wrap=True))
    progress: list[str] = []
    with listening(lambda tasks: progress.append(in_words(tasks))), task("training", 100):
        log.step(RECORD)
    assert {*progress} == {"training", ""}  # else the progress line repeats a record, and keeps it when it is old
    log.say("[not] markup")
    log.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step 50/100 · epoch 1.25 · loss 2.346 · ")
    assert "\x1b" not in out.getvalue()
    assert lines[1] == "[not] markup"


def test_on_a_terminal_the_progress_line_shows_the_newest_record(run: RunFolder) -> None:
    out, lines = io.StringIO(), []
    log = Log(run, 0, 100, console=Console(file=out, width=200, force_terminal=True))
    with listening(lambda tasks: lines.append(in_words(tasks))), task("training", 100):
        log.step(RECORD)
    log.close()
    assert not out.getvalue()
    for part in ("training: step 50/100", "epoch 1.25", "loss 2.346", "position accuracy 0.4123", "3,120 samples/s",
                 "data-wait 3 %", "17.3 GiB"):  # fmt: skip
        assert part in lines[1]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_that_is_gone_ends_no_run(run: RunFolder, terminal: bool) -> None:
    class Gone(io.StringIO):
        closed_by_user = False

        def write(self, text: str) -> int:
            if self.closed_by_user:
                raise OSError(5, "Input/output error")
            return super().write(text)

    out = Gone()
    log = Log(run, 0, 100, console=Console(file=out, force_terminal=terminal))
    log.step(RECORD)
    out.closed_by_user = True
    log.step(RECORD | {"step": 60})
    log.say("stopped")
    log.close()
    assert [record["step"] for record in run.records()] == [50, 60]


def test_every_record_is_a_line_of_strict_json(run: RunFolder) -> None:
    log = Log(run, 0, 100, console=Console(file=io.StringIO()))
    log.step(RECORD)
    log.keep({"step": 50, "probe": float("nan")})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    lines = [json.loads(line, parse_constant=refuse) for line in run.metrics.read_text().splitlines()]
    assert lines == [RECORD, {"step": 50, "probe": None}]


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_a_tracker_that_is_not_installed_names_its_extra(run: RunFolder, name: str, monkeypatch) -> None:
    for module in ("torch.utils.tensorboard", "wandb", "trackio", "mlflow"):
        monkeypatch.setitem(sys.modules, module, None)
    extra = name if name in ("trackio", "mlflow") else "track"  # apart: they want other versions than the pinned ones
    with pytest.raises(
        SitusError, match=rf"the tracker {name} needs the package '{name}': pip install 'situs\[{extra}\]'"
    ):
        Log(run, 0, 100, [name])


def test_an_unknown_tracker_lists_the_known(run: RunFolder) -> None:
    with pytest.raises(SitusError, match="unknown tracker 'paper'; choose one of: mlflow, tensorboard, trackio, wandb"):
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


def steps_of(run: RunFolder, name: str) -> None:
    """Two records through the real package."""
    log = Log(run, 0, 100, [name], console=Console(file=io.StringIO()))
    for step, loss in ((50, 2.5), (60, 1.25)):
        log.step({**RECORD, "step": step, "loss": loss})
    log.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the packages' own
def test_tensorboard_itself_reads_what_is_written(run: RunFolder) -> None:
    pytest.importorskip("tensorboard", reason="the extra track is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps_of(run, "tensorboard")
    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    assert [(each.step, each.value) for each in events.Scalars("loss")] == [(50, 2.5), (60, 1.25)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_itself_runs_offline(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra track is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    steps_of(run, "wandb")
    (kept,) = (run.path / "wandb").glob("offline-run-*/run-*.wandb")
    content = kept.read_bytes()
    assert b"loss" in content
    assert b"1.25" in content


def test_mlflow_that_cannot_start_is_one_sentence(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    module, entities = types.ModuleType("mlflow"), types.ModuleType("mlflow.entities")

    def refuse() -> None:
        raise OSError("no server at http://tracking:5000\nmore")

    module.MlflowClient = refuse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    with pytest.raises(SitusError, match=r"^the tracker mlflow cannot start: no server at http://tracking:5000$"):
        Log(run, 0, 100, ["mlflow"])


def test_a_lost_server_of_mlflow_does_not_end_the_run(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        calls: ClassVar[list[str]] = []

        def get_experiment_by_name(self, name: str) -> types.SimpleNamespace:
            return types.SimpleNamespace(experiment_id="1")

        def create_run(self, number: str, **_: object) -> types.SimpleNamespace:
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="a"))

        def log_batch(self, number: str, params: object = None, metrics: object = None) -> None:
            self.calls.append("params" if metrics is None else "metrics")
            if metrics is not None:
                raise ConnectionError("gone")

    module, entities = types.ModuleType("mlflow"), types.ModuleType("mlflow.entities")
    module.MlflowClient, entities.Metric = Client, lambda *values: values  # type: ignore[attr-defined]
    entities.Param = lambda *values: values  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    log = Log(run, 0, 100, ["mlflow"], console=Console(file=io.StringIO()))
    with pytest.warns(UserWarning, match=r"^the tracker mlflow failed, and the run continues without it: gone$"):
        log.step(RECORD)
    log.step({**RECORD, "step": 60})
    log.close()
    assert Client.calls == ["params", "metrics"]
    assert len(run.metrics.read_text().splitlines()) == 2


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize("resumed", [False, True], ids=["begun", "resumed"])
def test_a_run_is_found_again_in_mlflow_and_a_new_one_has_all_its_settings(
    resumed: bool, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """known: the server has the experiment, and a run of this folder in it."""
    calls: list[tuple[object, ...]] = []

    class Client:
        def get_experiment_by_name(self, name: str) -> types.SimpleNamespace | None:
            calls.append(("experiment", name))
            return types.SimpleNamespace(experiment_id="7") if known else None

        def create_experiment(self, name: str) -> str:
            calls.append(("made", name))
            return "8"

        def search_runs(self, numbers: list[str], which: str) -> list[types.SimpleNamespace]:
            calls.append(("sought", *numbers, which))
            return [types.SimpleNamespace(info=types.SimpleNamespace(run_id="old"))] if known else []

        def create_run(self, number: str, run_name: str, tags: dict[str, str]) -> types.SimpleNamespace:
            calls.append(("run", number, run_name, tags))
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="new"))

        def update_run(self, run: str, status: str) -> None:
            calls.append(("goes on", run, status))

        def log_batch(self, run: str, params: object = (), metrics: object = ()) -> None:
            calls.append(("batch", run, [*params], [*metrics]))

        def set_terminated(self, run: str) -> None:
            calls.append(("ended", run))

    module, entities = types.ModuleType("mlflow"), types.ModuleType("mlflow.entities")
    module.MlflowClient = Client  # type: ignore[attr-defined]
    entities.Metric = entities.Param = lambda *values: values  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    monkeypatch.setattr("situs.train.log.time", types.SimpleNamespace(time=lambda: 12.5))
    settings = {f"n{number:03}": "x" * 600 if number == 3 else number for number in range(201)}
    run = RunFolder.create(tmp_path / "run", {"train": settings})
    log = Log(RunFolder.open(run.path) if resumed else run, 0, 100, ["mlflow"], console=Console(quiet=True))
    log.keep({"step": 50, "loss": 1.5, "named": "x"})
    log.close()
    assert calls[:1] == [("experiment", "mine")] and (("made", "mine") in calls) is not known
    sought = [call for call in calls if call[0] == "sought"]
    assert len(sought) == resumed and all(call[1] == "78"[not known] for call in sought)
    name = "old" if known and resumed else "new"
    if name == "old":
        assert ("goes on", "old", "RUNNING") in calls and sum(call[0] == "batch" for call in calls) == 1
    else:
        (begun,) = (call for call in calls if call[0] == "run")
        assert begun[1:3] == ("78"[not known], "run")
        assert all(call[2] == f"tags.`situs.run` = '{begun[3]['situs.run']}'" for call in sought)
        sent = [call[2] for call in calls if call[0] == "batch" and call[2]]
        assert [len(part) for part in sent] == [100, 100, 1]  # the most that its server takes
        wanted = [(f"train.{key}", str(value)[:500]) for key, value in settings.items()]
        assert [pair for part in sent for pair in part] == wanted
    assert calls[-2:] == [("batch", name, [], [("loss", 1.5, 12500, 50)]), ("ended", name)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("store", ["file", "sqlite"])
def test_mlflow_itself_keeps_the_numbers_and_goes_on(
    run: RunFolder, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    if store == "sqlite":
        pytest.importorskip("sqlalchemy", reason="mlflow-skinny has no database")
    address = {"file": f"file://{tmp_path}/store", "sqlite": f"sqlite:///{tmp_path}/store.db"}[store]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    steps_of(run, "mlflow")
    log = Log(RunFolder.open(run.path), 60, 100, ["mlflow"], console=Console(file=io.StringIO()))
    log.step({**RECORD, "step": 70, "loss": float("nan")})
    log.close()
    client = mlflow.MlflowClient()
    (kept,) = client.search_runs([client.get_experiment_by_name("situs").experiment_id])  # one run, not two
    assert kept.info.run_name == "run" and kept.info.status == "FINISHED"
    assert kept.data.params == {"train.epochs": "3"}
    history = client.get_metric_history(kept.info.run_id, "loss")
    assert [(point.step, point.value) for point in history[:2]] == [(50, 2.5), (60, 1.25)]
    assert history[2].step == 70


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trackio_itself_keeps_the_numbers(run: RunFolder, tmp_path: Path) -> None:
    """In a process of its own: its folder is chosen when it is imported."""
    pytest.importorskip("trackio", reason="the extra trackio is not installed")
    script = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from test_log import steps_of, RunFolder\n"
        "steps_of(RunFolder.open(Path(sys.argv[1])), 'trackio')\n"
    )
    own = {**os.environ, "TRACKIO_DIR": str(tmp_path / "kept"), "HF_HUB_OFFLINE": "1"}
    given = [sys.executable, "-c", script, str(run.path), str(Path(__file__).parent)]
    done = subprocess.run(given, env=own, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = (tmp_path / "kept").glob("*.db")
    with sqlite3.connect(file) as base:
        rows = base.execute("select step, metrics from metrics order by step").fetchall()
    assert [(step, json.loads(metrics)["loss"]) for step, metrics in rows] == [(50, 2.5), (60, 1.25)]


def test_lines_for_people_go_to_stderr_plain_and_whole(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a terminal of 30 columns: no colours of numbers and no line breaks, which a search would not find."""
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "30"}.items():
        monkeypatch.setenv(name, value)
    text = "Loss 2.31 after 50 of 100 steps in '/a/long/path/of/a/run', True [bold]"
    Log(run, 0, 100).say(text)
    assert capsys.readouterr() == ("", f"{text}\n")


def test_a_run_says_on_which_machine_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert machine(torch.device("cpu"), "fp32") == {
        "device": "cpu (AVX2, 7 threads)", "precision": "fp32", "torch": torch.__version__,
    }  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a GPU at {device}")
    assert machine(torch.device("cuda:1"), "bf16")["device"] == "a GPU at cuda:1"


@pytest.mark.parametrize(("system", "unit"), [("linux", 2**10), ("darwin", 1)])
def test_memory_is_in_gib_wherever_it_is(system: str, unit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    used = types.SimpleNamespace(ru_maxrss=3 * 2**29 // unit)
    monkeypatch.setattr("situs.train.log.resource.getrusage", lambda who: used)
    assert memory_gib(torch.device("cpu")) == 1.5
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**31 + 2**30)
    assert memory_gib(torch.device("cuda")) == 3.0


def test_only_the_rank_that_writes_says_and_tracks(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "writer", False)
    out, before = io.StringIO(), sorted(run.path.iterdir())
    log = Log(run, 0, 100, ["nobody"], console=Console(file=out))
    log.say("text")
    log.step(RECORD)
    log.close()
    assert not log.trackers and not out.getvalue() and sorted(run.path.iterdir()) == before
