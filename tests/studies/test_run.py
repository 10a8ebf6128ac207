"""The runner: skipped, resumed, side by side, cut, killed, not finite, taken. A small script stands for `situs`."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from warm import Warm

from situs.errors import SitusError
from situs.files import write_text
from situs.progress import listening, share
from situs.studies import run as running
from situs.studies.folder import BEGUN, DONE, FAILED, StudyFolder
from situs.studies.plan import load_study
from situs.studies.reading import read_study
from situs.studies.result import StudyResult
from situs.studies.run import StudyOptions, run_study
from situs.studies.words import flags, nameless

FAKE = Path(__file__).parent / "fake.py"
STUDY = """
title = "two jobs"
shows = "That it works."
seeds = 2
[data]
images = "any"
[jobs.pre]
verb = "pretrain"
change.train.max_steps = 6
[jobs.tuned]
verb = "finetune"
after = "pre"
change.train.max_steps = 5
[jobs.top1]
verb = "evaluate accuracy"
after = "tuned"
[[tables]]
columns = [{ name = "top-1", figure = "top1" }]
rows = [{ name = "tuned", paper = [5.0], job = "top1" }]
[[curves]]
x = "epoch"
y = "loss"
unit = ""
lines = [{ name = "tuned", job = "tuned", figure = "log.loss[*].value", over = "log.loss[*].epoch" }]
"""
DIVERGES = """
[jobs.hot]
verb = "pretrain"
change.train.max_steps = 6
change.optim.lr = 1e6
[jobs.hot-top1]
verb = "evaluate accuracy"
after = "hot"
[jobs.large]
verb = "pretrain"
change.train.max_steps = 2
change.data.batch = 13
[[tables]]
columns = [{ name = "top-1", figure = "top1" }, { name = "loss", figure = "loss" }]
rows = [{ name = "hot", paper = [5.0, ""], job = ["hot-top1", "large"] }]
"""


@pytest.fixture(autouse=True, scope="module")
def _faked() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "COMMAND", (sys.executable, str(FAKE)))
        patch.setattr(running, "PAUSE", 0.01)
        yield


@pytest.fixture
def study(tmp_path: Path) -> Path:
    file = tmp_path / "mine.toml"
    file.write_text(STUDY)
    return file


def same(found: StudyResult) -> dict[str, Any]:
    """Its numbers, without how long the jobs took."""
    numbers = found.to_json()
    for job in numbers["jobs"].values():
        job.pop("seconds")
    return numbers


def run(study: Path, out: Path, **changes: Any) -> StudyResult:
    return run_study(study, "samples", out=out, **changes)


@pytest.fixture(scope="module")
def kept() -> list[StudyResult]:
    """What `peace` gave to be kept, job by job."""
    return []


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `peace` is run."""
    return tmp_path_factory.mktemp("peace")


@pytest.fixture(scope="module")
def peace(place: Path, kept: list[StudyResult]) -> StudyResult:
    """What comes of the study where nothing disturbs it."""
    (place / "mine.toml").write_text(STUDY)
    return run(place / "mine.toml", place / "out", keep=kept.append)


@pytest.fixture
def finished(peace: StudyResult, place: Path, tmp_path: Path) -> Path:
    """A folder in which `study` has been run with two seeds."""
    assert peace.tasks
    return shutil.copytree(place / "out", tmp_path / "out")


def test_a_study_runs_in_order_and_its_cell_holds_the_mean_over_the_seeds(peace: StudyResult) -> None:
    (((cell,),),) = peace.rows
    values = {}
    for seed in (0, 1):
        value = 0.0
        for steps in (6, 5):
            for step in range(1, steps + 1):
                value = (value * 31 + step + seed) % 1009 / 7
        values[seed] = value / 10
    assert cell.values == pytest.approx(values)
    assert cell.mean == pytest.approx((values[0] + values[1]) / 2)
    assert cell.deviation == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    assert cell.difference == pytest.approx((values[0] + values[1]) / 2 - 5.0)
    assert [x for x, _ in peace.lines[0][0].points] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert all(task.state == "done" for task in peace.tasks) and len(peace.tasks) == 6


def test_the_table_is_given_after_each_job(peace: StudyResult, kept: list[StudyResult]) -> None:
    assert [sum(task.state == "done" for task in result.tasks) for result in kept] == [1, 2, 3, 4, 5, 6]
    assert same(kept[-1]) == same(peace)


def test_what_is_done_is_skipped_and_more_seeds_can_be_asked_for(
    study: Path, peace: StudyResult, tmp_path: Path
) -> None:
    said: list[str] = []
    run(study, tmp_path / "out", seeds=1, say=said.append)
    assert sum(": situs " in line for line in said) == 3
    said.clear()
    again = run(study, tmp_path / "out", say=said.append, seeds=2, how=StudyOptions(at_once=3))
    assert [line.split(":")[0] for line in said if ": situs " in line] == ["pre-1", "tuned-1", "top1-1"]
    assert same(read_study(tmp_path / "out")) == same(again) == same(peace)


def test_fewer_seeds_than_a_folder_holds_run_those_alone(study: Path, tmp_path: Path) -> None:
    folder = StudyFolder.create(tmp_path / "out", load_study(study), study, "paper", 2)
    assert [*folder.chosen((), seeds=1)] == ["pre-0", "tuned-0", "top1-0"] and len(folder.chosen(())) == 6
    with pytest.raises(SitusError, match="unknown job 'top1-1'"):
        folder.chosen(("top1-1",), seeds=1)
    found = run(study, tmp_path / "out", seeds=1, how=StudyOptions(only=("pre",)))
    assert [task.name for task in found.tasks if task.state == "done"] == ["pre-0"] and found.seeds == 2


def test_what_jobs_at_work_have_done_counts(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_STEP", "0.05")
    heard: list[tuple[float, str]] = []
    with listening(lambda tasks: heard.extend((share(tasks) or 0.0, each.now) for each in tasks)):
        run(study, tmp_path / "out", seeds=1)
    shares = [each for each, _ in heard]
    assert shares == sorted(shares) and shares[-1] == 1.0
    for before, (name, steps) in enumerate({"pre-0": 6, "tuned-0": 5}.items()):  # of three jobs
        known = {f"{name} {100 * step / steps:.0f} %": (before + step / steps) / 3 for step in range(steps + 1)}
        told = {now: each for each, now in heard if now.startswith(name)}
        assert told == pytest.approx({now: known[now] for now in told})
        assert len(told) > 2, "not only its beginning and its end"


def test_interrupted_twice_by_the_clock_it_ends_the_same(
    study: Path, peace: StudyResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_STEP", "0.15")
    said: list[str] = []
    kept: list[StudyResult] = []
    for at_once in (1, 2, 2):
        how = StudyOptions(minutes=0.6 / 60, at_once=at_once)
        cut = run(study, tmp_path / "out", how=how, say=said.append, keep=kept.append)
        assert any(task.state == "begun" for task in cut.tasks)
    assert any(" min is reached; 2 running jobs save a checkpoint" in line for line in said)
    assert any(" min is reached; 1 running job saves a checkpoint" in line for line in said)
    monkeypatch.setenv("FAKE_STEP", "0.0")
    assert same(run(study, tmp_path / "out", say=said.append, keep=kept.append)) == same(peace)
    assert sum("--resume" in line for line in said) >= 2
    assert len(kept) == len(peace.tasks), "once for each job that has ended"
    told = [line.split(": ")[1].rpartition(" after ")[0] for line in said if " after 0:0" in line]
    assert sorted({*told}) == ["done", "saved, to be resumed,"] and told.count("done") == len(peace.tasks)


def test_the_seconds_of_a_resumed_job_are_those_of_all_its_runs(study: Path, tmp_path: Path) -> None:
    settings = (tmp_path / "out", load_study(study), study, "paper", 1)
    folder = StudyFolder.create(*settings)
    pre, tuned = folder.tasks["pre-0"], folder.tasks["tuned-0"]
    (pre.folder / "checkpoints" / "step-00000000").mkdir(parents=True)
    (pre.folder / "metrics.jsonl").touch()
    (pre.folder / "config.json").write_text('{"seed": 0, "start": 0.0, "data": null, "train": {"max_steps": 6}}')
    for task in (pre, tuned):
        folder.write_state(task, "begun", seconds=1000.0, data={})
    said: list[str] = []
    run(study, tmp_path / "out", seeds=1, how=StudyOptions(only=("tuned",)), say=said.append)
    seconds = [json.loads(task.file("json").read_text())["seconds"] for task in (pre, tuned)]
    assert 1000 < seconds[0] < 1060
    assert 0 < seconds[1] < 60, "a run that left nothing is begun anew"
    assert [line.split(" after ")[0] for line in said if " after 0:" in line] == ["pre-0: done", "tuned-0: done"]


@pytest.mark.slow
def test_killed_in_the_middle_it_ends_the_same(study: Path, peace: StudyResult, tmp_path: Path) -> None:
    """SIGKILL for the runner: its jobs save themselves, and the next start goes on, in another place too."""
    code = f"""
import sys
from situs.files import write_text
from situs.progress import listening, share
from situs.studies import run as running
running.COMMAND = (sys.executable, {str(FAKE)!r})
running.run_study({str(study)!r}, "samples", out={str(tmp_path / "out")!r}, how=running.StudyOptions(at_once=2))
"""
    with Warm("-c", code, env={**os.environ, "FAKE_STEP": "0.2"}) as process:
        until = time.monotonic() + 120
        while not list((tmp_path / "out").glob("jobs/pre-*/checkpoints/step-00000002")):
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.05)
        process.kill()
    assert json.loads((tmp_path / "out" / "jobs" / "pre-0.json").read_text())["state"] == "begun"
    study.write_text(STUDY.replace("max_steps = 6", "max_steps = 7"))
    with pytest.raises(SitusError, match="was run with"):  # what was begun with other settings is not gone on with
        run(study, tmp_path / "out")
    study.write_text(STUDY)
    moved = tmp_path / "moved"
    _until(lambda: not list(tmp_path.glob("out/jobs/*/.lock")))  # its jobs are told by the system, and save themselves
    shutil.copytree(tmp_path / "out", moved, ignore=shutil.ignore_patterns(".lock"))
    assert same(run(study, moved)) == same(peace)


def test_what_does_not_end_is_ended_with_all_that_it_has_started(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "PATIENCE", 0.3)
    monkeypatch.setenv("FAKE_STEP", "600")
    monkeypatch.setenv("FAKE_CHILD", "1")
    said: list[str] = []
    child = tmp_path / "out" / "jobs" / "pre-0" / "child"
    stop = threading.Thread(target=lambda: (_until(child.is_file), os.kill(os.getpid(), signal.SIGINT)))
    stop.start()
    with pytest.raises(KeyboardInterrupt):
        run(study, tmp_path / "out", say=said.append)
    stop.join()
    assert any("killed before it saved a checkpoint" in line for line in said)
    status = Path(f"/proc/{child.read_text()}/stat")
    _until(lambda: not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z")


def _until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_other_data_at_the_same_path_is_noticed(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, out, said = tmp_path / "images", tmp_path / "out", []
    images.mkdir()
    (images / "a.png").write_bytes(b"one")
    run_study(study, str(images), out=out, seeds=1)
    (images / "a.png").write_bytes(b"two")
    monkeypatch.setenv("FAKE_STEP", "0.15")
    found = run_study(study, str(images), out=out, seeds=2, say=said.append, how=StudyOptions(minutes=0.6 / 60))
    assert any("pre-0 was run on other data" in line and str(images) in line for line in said)
    assert found.tasks[1].state == "begun"
    (images / "a.png").write_bytes(b"six")
    with pytest.raises(
        SitusError, match=r"job pre-1 started with other data for images; .* delete jobs/pre-1 "
    ) as told:
        run_study(study, str(images), out=out)
    assert told.value.fields == ("data",)
    (images / "a.png").write_bytes(b"two")
    monkeypatch.setenv("FAKE_STEP", "0.0")
    found = run_study(study, str(images), out=out)
    notes = [note for note in found.summary().notes if "the same data for images" in note]
    assert len(notes) == 1 and "pre-0, pre-1" in notes[0]
    assert str(tmp_path) not in json.dumps(found.to_json())


def test_a_line_has_the_points_of_every_seed(finished: Path) -> None:
    log = finished / "jobs" / "tuned-0" / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:3]))
    points = read_study(finished).lines[0][0].points
    assert [(x, sorted(cell.values)) for x, cell in points] == [
        (1, [0, 1]),
        (2, [0, 1]),
        (3, [0, 1]),
        (4, [1]),
        (5, [1]),
    ]


def test_ctrl_c_leaves_all_resumable(
    study: Path, peace: StudyResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_STEP", "0.2")
    timer = threading.Timer(0.8, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    kept: list[StudyResult] = []
    with pytest.raises(KeyboardInterrupt):
        run(study, tmp_path / "out", keep=kept.append)
    assert kept and any(task.state == "begun" for task in kept[-1].tasks)
    assert read_study(tmp_path / "out").rows[0][0][0].texts() == ("5.0", "–", "–")
    monkeypatch.setenv("FAKE_STEP", "0.0")
    assert same(run(study, tmp_path / "out")) == same(peace)


def test_a_job_that_diverges_or_fails_ends_alone_and_its_cell_says_so(study: Path, tmp_path: Path) -> None:
    study.write_text(STUDY + DIVERGES)
    found = run(study, tmp_path / "out")
    states = {task.name: (task.state, task.why) for task in found.tasks if task.name.endswith("-0")}
    assert states["top1-0"][0] == "done"
    assert states["hot-0"] == ("not finite", "step 3 was not finite (loss nan)")
    assert states["hot-top1-0"] == ("waits", "hot-0 was not finite")
    assert states["large-0"] == ("failed", "no memory for a batch of 13")
    (left, right), said = found.rows[1][0], found.summary()
    assert left.texts()[1] == "hot-0 was not finite (seed 0); hot-1 was not finite (seed 1)"
    assert right.texts()[1] == "failed (seed 0, 1)"
    assert "hot-0 was not finite: step 3 was not finite (loss nan)." in said.notes
    assert "2 not finite, 2 failed" in said.sentence
    lines: list[str] = []
    run(study, tmp_path / "out", say=lines.append)
    begun = [line.split(":")[0] for line in lines if ": situs " in line]
    assert begun == ["large-0", "large-1"], "what failed is tried again, what was not finite would be so again"


def test_an_export_stands_for_a_pretraining_that_all_seeds_share(study: Path, tmp_path: Path) -> None:
    study.write_text(STUDY.replace("[jobs.pre]", "[jobs.pre]\nonce = true"))
    whole = run(study, tmp_path / "whole")
    assert len(whole.tasks) == 5
    export = tmp_path / "encoder"
    export.mkdir()
    (export / "config.json").write_text("{}")
    lines = (tmp_path / "whole" / "jobs" / "pre-0" / "metrics.jsonl").read_text().splitlines()
    (export / "export.json").write_text(str(json.loads(lines[-1])["loss"]))
    said: list[str] = []
    found = run(study, tmp_path / "out", take={"pre": export}, say=said.append)
    assert not any("pretrain" in line for line in said)
    assert found.tasks[0].state == "taken" and found.tasks[0].why == "from encoder"
    assert found.rows == whole.rows
    with pytest.raises(SitusError, match=r"take: .*the job top1 only measures"):
        run(study, tmp_path / "out", take={"top1": export})
    with pytest.raises(SitusError, match="unknown job 'nosuch'"):
        run(study, tmp_path / "out", take={"nosuch": export})
    with pytest.raises(SitusError, match=r"take: .* has no config\.json"):
        run(study, tmp_path / "new", take={"pre": tmp_path})


def test_only_some_jobs_and_those_they_need(study: Path, tmp_path: Path) -> None:
    found = run(study, tmp_path / "out", how=StudyOptions(only=("tun*",)))
    assert {task.name for task in found.tasks if task.state == "done"} == {"pre-0", "pre-1", "tuned-0", "tuned-1"}
    with pytest.raises(SitusError, match="unknown job 'nosuch'; choose one of: pre, top1, tuned"):
        run(study, tmp_path / "out", how=StudyOptions(only=("nosuch",)))


def test_jobs_side_by_side_have_a_gpu_each_and_share_the_cores(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen(out: str, seed: int) -> tuple[str, str | None]:
        config = json.loads((tmp_path / f"{out}/jobs/pre-{seed}/config.json").read_text())
        return config["gpu"], config["threads"]

    monkeypatch.setattr(running, "cores", lambda: 7)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    run(study, tmp_path / "out", how=StudyOptions(at_once=2))
    assert [seen("out", seed) for seed in (0, 1)] == [("4", "3"), ("7", "3")]
    run(study, tmp_path / "cpu", seeds=1, how=StudyOptions(device="cpu"))
    assert seen("cpu", 0) == ("", None), "alone it takes every core"


def test_why_a_job_failed_is_told_in_its_own_words_and_without_paths(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a folder by a short name, which is a word of the sentence too
    words = f"no memory for a batch in {tmp_path}/a/jobs/large-0\nresource_tracker: 1 leaked object to clean up"
    monkeypatch.setenv("FAKE_WORDS", words)
    study.write_text(STUDY + DIVERGES)
    found = run(study, Path("a"), seeds=1, how=StudyOptions(only=("large",)))
    assert (
        next(task.why for task in found.tasks if task.job == "large") == "no memory for a batch in STUDY/jobs/large-0"
    )


def test_a_folder_keeps_to_its_study(study: Path, finished: Path, tmp_path: Path) -> None:
    out = finished
    told = "".join(path.read_text() for path in out.glob("jobs/*.json"))
    assert str(tmp_path) not in told and "--from STUDY/jobs/pre-0" in told, "no path of a machine"
    study.write_text(STUDY.replace("max_steps = 6", "max_steps = 7"))
    with pytest.raises(SitusError, match=r"job pre-0 was run with change.train.max_steps 6.* is now 7; choose another"):
        run(study, out)
    other = tmp_path / "other.toml"
    other.write_text(STUDY)
    with pytest.raises(SitusError, match="was started with study 'mine', not 'other'"):
        run(other, out)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    with pytest.raises(SitusError, match="must be empty or the folder of a study"):
        run(other, tmp_path / "full")


def test_what_rests_on_a_job_that_was_made_anew_is_not_kept(study: Path, tmp_path: Path) -> None:
    """Its numbers would be those of the model before: the table must not show them as those of the new one."""
    out = tmp_path / "out"
    first = same(run(study, out, seeds=1))
    study.write_text(STUDY.replace("max_steps = 6", "max_steps = 7"))
    with pytest.raises(
        SitusError, match=r"delete jobs/NAME and jobs/NAME.json for every NAME of pre-0, tuned-0, top1-0"
    ):
        run(study, out)
    for name in ("pre-0", "tuned-0"):  # as it was told, but for the last
        shutil.rmtree(out / "jobs" / name)
        (out / "jobs" / f"{name}.json").unlink()
    told = r"job top1-0 depends on pre-0, whose change.train.max_steps was 6 .* 7; .* delete jobs/top1-0 and"
    with pytest.raises(SitusError, match=told):
        run(study, out)
    study.write_text(STUDY)
    assert same(run(study, out)) == first, "made again with the same settings they are the same"
    study.write_text(STUDY.replace("max_steps = 6", "max_steps = 7"))
    fresh = same(run(study, tmp_path / "fresh", seeds=1))
    for name in ("pre-0", "tuned-0", "top1-0"):
        shutil.rmtree(out / "jobs" / name)
        (out / "jobs" / f"{name}.json").unlink()
    assert same(run(study, out)) == fresh != first


def test_a_model_that_was_taken_anew_does_not_leave_the_old_numbers(study: Path, tmp_path: Path) -> None:
    out, models = tmp_path / "out", [tmp_path / "one", tmp_path / "two"]
    for value, model in enumerate(models):
        model.mkdir()
        (model / "config.json").write_text("{}")
        (model / "export.json").write_text(str(100.0 * value))
    first = same(run(study, out, seeds=1, take={"pre": models[0]}))
    assert same(run(study, out, take={"pre": models[0]})) == first, "the same command goes on"
    with pytest.raises(SitusError, match=r"take: the model of pre-0 was taken from one; delete jobs/pre-0"):
        run(study, out, take={"pre": models[1]})
    with pytest.raises(SitusError, match="take: the model of tuned-0 was trained here; delete"):
        run(study, out, take={"tuned": models[1]})
    shutil.rmtree(out / "jobs" / "pre-0")
    with pytest.raises(SitusError, match=r"job tuned-0 depends on pre-0, whose model was 'one' .* 'two'"):
        run(study, out, take={"pre": models[1]})


def test_another_model_of_the_same_name_is_another(study: Path, tmp_path: Path) -> None:
    out, models = tmp_path / "out", [tmp_path / each / "export" for each in ("a", "b")]
    for value, model in enumerate(models):
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        (model / "export.json").write_text("0.5")
        (model / "model.safetensors").write_text(str(value))
    run(study, out, seeds=1, take={"pre": models[0]})
    (models[0] / "accuracy.json").write_text("{}")  # what was measured since makes it no other model
    run(study, out, take={"pre": models[0]})
    with pytest.raises(SitusError, match=r"take: the model of pre-0 was taken from another export; delete"):
        run(study, out, take={"pre": models[1]})
    shutil.rmtree(out / "jobs" / "pre-0")
    with pytest.raises(SitusError, match=r"depends on pre-0, whose model was 'export' .* 'another export'"):
        run(study, out, take={"pre": models[1]})


def test_a_model_of_ones_own_is_told_from_another_at_its_path(study: Path, tmp_path: Path) -> None:
    out, model = tmp_path / "out", tmp_path / "model"
    study.write_text(STUDY.replace('after = "pre"', f'model = "{model}"'))
    model.mkdir()
    (model / "export.json").write_text("1.0")
    for name in ("model.safetensors", "pytorch_model.bin"):
        (model / name).write_text("one")
        first = same(run(study, out, seeds=1))
        (model / "accuracy.json").write_text("{}")  # what was measured since makes it no other model
        assert same(run(study, out)) == first
        (model / name).write_text("two")
        told = rf"{model} has changed since job tuned-0 .* for every NAME of tuned-0, top1-0"
        with pytest.raises(SitusError, match=told):
            run(study, out)
        (model / name).unlink()
        shutil.rmtree(out)
    (model / "model.safetensors").write_text("one")
    first = same(run(study, out, seeds=1))
    model.rename(tmp_path / "elsewhere")  # as on another machine, where what is done stays done
    assert same(run(study, out)) == first


def test_a_file_that_options_name_and_that_has_changed_is_refused(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("learned").mkdir()  # a word that is no path
    for name in ("learned/a.pt", "list.txt", "other.txt"):
        Path(name).write_text("one")
    options = 'options = { positions = "learned", lists = ["list.txt"], beside = { file = "other.txt" }, time = 60 }'
    study.write_text(STUDY.replace('after = "tuned"', f'after = "tuned"\n{options}'))
    settings = (tmp_path / "out", load_study(study), study, "paper", 1)
    folder = StudyFolder.create(*settings)
    folder.write_state(folder.tasks["top1-0"], "done")
    assert [*folder.state(folder.tasks["top1-0"])["files"]] == ["list.txt", "other.txt"]
    Path("learned/a.pt").write_text("two")
    Path("other.txt").unlink()  # as on another machine
    StudyFolder.create(*settings)
    Path("list.txt").write_text("two")
    with pytest.raises(SitusError, match=r"job top1-0 was run .*list.txt.*; choose"):
        StudyFolder.create(*settings)


def test_weights_that_a_library_publishes_are_no_folder_of_that_name(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pretrained").mkdir()
    Path("pretrained/model.safetensors").write_text("not these")
    Path("lr=1").mkdir()
    Path("lr=1/model.safetensors").write_text("a path with a sign of its own")
    for number, (model, noted) in enumerate(
        [
            ("vit=pretrained", False),
            ("vit", False),
            ("pretrained", True),
            ("vit=pretrained/model.safetensors", True),
            ("lr=1", True),
            ("vit=lr=1/model.safetensors", True),
        ]
    ):
        study.write_text(STUDY.replace('after = "pre"', f'model = "{model}"'))
        folder = StudyFolder.create(tmp_path / str(number), load_study(study), study, "paper", 1)
        folder.write_state(folder.tasks["tuned-0"], "done")
        assert ("weights" in folder.state(folder.tasks["tuned-0"])) == noted, model


def test_the_copy_in_its_folder_is_the_study(study: Path, tmp_path: Path) -> None:
    """What was unpacked on another machine goes on without the file it came from."""
    run(study, tmp_path / "out", seeds=1)
    study.unlink()
    found = run(tmp_path / "out" / "study.toml", tmp_path / "out", seeds=2)
    assert found.name == "mine" and [task.state for task in found.tasks] == ["done"] * 6


def test_a_job_that_was_killed_says_so_and_not_its_last_words(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_WORDS", "no memory for a batch of 13")
    study.write_text(STUDY + DIVERGES)
    only = StudyOptions(only=("large",))
    assert run(study, tmp_path / "out", seeds=1, how=only).summary().notes[0].endswith("no memory for a batch of 13.")
    monkeypatch.setattr(running, "COMMAND", (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"))
    said: list[str] = []
    (note,) = run(study, tmp_path / "out", seeds=1, how=only, say=said.append).summary().notes
    assert note == "large-0 failed: was ended by SIGKILL, perhaps out of memory."
    assert [re.sub(r"\d:\d\d", "0:00", line) for line in said[1:]] == [
        "large-0: failed after 0:00: was ended by SIGKILL, perhaps out of memory"
    ]
    if sys.platform == "linux":  # one of real time, which has no name
        monkeypatch.setattr(running, "COMMAND", (sys.executable, "-c", "import os; os.kill(os.getpid(), 40)"))
        (note,) = run(study, tmp_path / "out", seeds=1, how=only).summary().notes
        assert note == "large-0 failed: was ended by signal 40."
    monkeypatch.setattr(running, "COMMAND", (sys.executable, "-c", "raise SystemExit(7)"))
    (note,) = run(study, tmp_path / "out", seeds=1, how=only).summary().notes
    assert note == "large-0 failed: ended with status 7.", "not with what an earlier try had said"


@pytest.mark.parametrize(
    "mistake",
    [
        {"how": StudyOptions(only=("nosuch*",))},
        {"take": {"nosuch": "x"}},
        {"take": {"pre": "x"}},
        {"seeds": 0},
        {"seeds": -1},
    ],
)
def test_a_mistake_in_what_is_asked_leaves_nothing_behind(study: Path, tmp_path: Path, mistake: dict[str, Any]) -> None:
    with pytest.raises(SitusError, match=r"unknown job 'nosuch|has no config|seeds=.*: must be >= 1"):
        run(study, tmp_path / "out", **mistake)
    assert not (tmp_path / "out").exists()


def test_a_number_that_is_not_finite_is_none(
    peace: StudyResult, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = finished
    (((before,),),) = peace.rows
    (out / "jobs" / "top1-0" / "accuracy.json").write_text('{"top1": NaN}')
    (((cell,),),) = read_study(out).rows
    assert cell.values == {1: before.values[1]} and cell.why == "top1 is not finite (seed 0)"
    monkeypatch.chdir(tmp_path)
    out.rename("a")
    Path("a/jobs/top1-0/accuracy.json").write_text("{")
    assert read_study("a").rows[0][0][0].why.startswith("STUDY/jobs/top1-0/accuracy.json: is not valid JSON: Expecting")


def test_damaged_notes_are_sentences(study: Path, finished: Path) -> None:
    out = finished
    state, settings = out / "jobs" / "pre-0.json", out / "settings.json"
    for content in ('{"state": "done"}', '{"state": "splendid", "recipe": {}}'):
        kept = state.read_text()
        state.write_text(content)
        for look in (lambda: run(study, out), lambda: read_study(out)):
            with pytest.raises(SitusError, match=r"pre-0.json: does not contain the state of a job; delete"):
                look()
        state.write_text(kept)
    for seeds in ('"x"', "0"):
        settings.write_text(f'{{"study": "mine", "scale": "paper", "seeds": {seeds}}}')
        for look in (lambda: run(study, out), lambda: read_study(out)):
            with pytest.raises(SitusError, match=r"settings.json: the number of seeds must be an integer >= 1"):
                look()


def test_data_must_be_named_and_be_there(study: Path, tmp_path: Path) -> None:
    with pytest.raises(SitusError, match="mine needs data: images: any"):
        run_study(study, out=tmp_path / "out")
    with pytest.raises(SitusError, match="nosuch: does not exist; images must be"):
        run_study(study, "nosuch", out=tmp_path / "out")
    with pytest.raises(SitusError, match="unknown data set 'pictures'; choose one of: images"):
        run_study(study, {"pictures": "samples"}, out=tmp_path / "out")
    study.write_text(STUDY.replace('[data]\nimages = "any"', '[data]\nimages = "any"\nmore = "many"').replace(
        '[jobs.pre]', '[jobs.pre]\ndata = "more"'
    ))  # fmt: skip
    with pytest.raises(SitusError, match=r"NAME=PATH; .*: images \(any\), more"):
        run_study(study, "samples", out=tmp_path / "out")
    found = run_study(study, {"images": "samples"}, out=tmp_path / "part", seeds=1)
    assert {task.state for task in found.tasks} == {"open"}, "its data is not given"


def test_options_as_words() -> None:
    given = {"ratios": [0, 0.15], "no_told": True, "cover": False, "a": {"b_c": 1, "d": False}, "split": "val"}
    words = ["--ratios", "0,0.15", "--no-told", "--no-cover", "--a.b-c", "1", "--a.no-d", "--split", "val"]
    assert flags(given) == words


@pytest.mark.parametrize("full", ["settings.json", "study.toml", "top1-0.json"])
def test_a_full_disk_is_one_sentence_and_the_same_command_goes_on(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    def write(path: Path, text: str) -> None:
        if path.name == full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_text(path, text)

    with monkeypatch.context() as patch:
        patch.setattr("situs.studies.folder.write_text", write)
        with pytest.raises(SitusError, match="out: cannot be written: no space left on device") as caught:
            run(study, tmp_path / "out", seeds=1)
    assert caught.value.field == "out"
    assert full != "settings.json" or not (tmp_path / "out").exists(), "nothing half-written"
    assert all(task.state == "done" for task in run(study, tmp_path / "out", seeds=1).tasks)


def test_settings_that_tell_nothing_are_a_sentence(study: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "settings.json").write_text("{}")
    (tmp_path / "out" / "study.toml").write_text(STUDY)
    with pytest.raises(SitusError, match=r"settings.json: lacks seeds, study"):
        read_study(tmp_path / "out")


def test_a_path_is_named_only_where_it_stands_as_one() -> None:
    places = {"STUDY": "st", "images": "/data/set"}
    text = "step 2: st/jobs/a, 'st' and /data/set, not /data/settings, best/x, st.old or ./st; the word st"
    wanted = "step 2: STUDY/jobs/a, 'st' and images, not /data/settings, best/x, st.old or ./st; the word st"
    assert nameless(text, places) == wanted


@pytest.mark.parametrize(
    ("verb", "status", "numbers", "stopping", "state"),
    [
        ("evaluate accuracy", 0, False, False, DONE),
        ("evaluate accuracy", 1, True, False, FAILED),
        ("bench", 1, True, False, DONE),  # a case failed, and those of the others are kept
        ("bench", 1, False, False, FAILED),
        ("bench", 2, True, False, FAILED),
        ("bench", -9, True, False, FAILED),
        ("bench", 1, True, True, DONE),
        ("pretrain", 1, True, True, BEGUN),
        ("pretrain", 130, True, False, BEGUN),
    ],
)
def test_a_job_is_done_where_its_numbers_are_whole(
    verb: str, status: int, numbers: bool, stopping: bool, state: str, tmp_path: Path
) -> None:
    folder = StudyFolder(tmp_path, load_study("lock"), "mine", "quick", 1)
    task: Any = SimpleNamespace(job=SimpleNamespace(verb=verb), folder=tmp_path, file=lambda _: tmp_path / "log")
    (tmp_path / "log").write_text("begins\nsitus: the last words\n")
    if numbers:
        (tmp_path / "step.json").touch()
    runner: Any = SimpleNamespace(_nameless=lambda text: text, folder=folder)
    job: Any = SimpleNamespace(task=task, process=SimpleNamespace(returncode=status), log_start=7)
    ended, message = running._Runner._judged(runner, job, stopping)
    assert ended == state
    killed = "was ended by SIGKILL, perhaps out of memory"
    assert message == ("" if state != FAILED else killed if status < 0 else "the last words")
