"""Runs a study: what is done is skipped, what was cut goes on, one job after the other or several at once.

Each job is a `situs` command in a process of its own. One that is not finite or fails leaves the others alone. Ctrl-C
and the end of the time allowed ask the jobs to save themselves; the same call goes on with them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from situs import progress
from situs.config import Checked
from situs.data.open import SAMPLES
from situs.data.work import cores
from situs.errors import SitusError
from situs.files import read_json, write_text
from situs.folder_lock import lock_folder
from situs.limits import Count, Positive
from situs.progress import clock
from situs.studies.datasets import fingerprint
from situs.studies.find import figure_files
from situs.studies.folder import BEGUN, DONE, FAILED, NOT_FINITE, StudyFolder, Task, toml_of
from situs.studies.form import PAPER, VERBS
from situs.studies.load import load_study, study_file
from situs.studies.plan import data_of, put
from situs.studies.reading import read_folder
from situs.studies.result import StudyResult
from situs.studies.share import share_told
from situs.studies.words import elsewhere, nameless, paths_of, words_of
from situs.train.interrupt import Interrupt

Say = Callable[[str], None]
COMMAND = (sys.executable, "-m", "situs.studies.child")
"""What runs a job; the runner's process id and the words of `situs` follow."""

PAUSE = 0.1
"""Seconds between two looks at the jobs."""

PATIENCE = 120.0
"""Seconds a job has to save itself and end when it is asked to."""


@dataclass(frozen=True)
class How(Checked):
    """How the jobs of a study are run, which changes none of its numbers."""

    at_once: Count = 1
    """Number of jobs at the same time, each on its own GPU if there are several."""

    only: tuple[str, ...] = ()
    """Names or patterns of jobs to run, with the jobs they need. Default: all."""

    minutes: Positive | None = None
    """Time limit; running jobs then save themselves and stop."""

    device: Literal["cpu"] | None = None
    """cpu: do not use GPUs."""


def run_study(
    study: str | Path,
    data: str | Mapping[str, str] | None = None,
    *,
    out: str | Path,
    seeds: int | None = None,
    scale: str = PAPER,
    take: Mapping[str, str | Path] | None = None,
    how: How | None = None,
    say: Say = lambda _: None,
    keep: Callable[[StudyResult], None] = lambda _: None,
) -> StudyResult:
    """Runs what is not done yet of a study in the folder `out`, and gives its table as it stands then.

    study: a name (`study_names`) or a TOML file. data: the path of its data set, or of each by name; jobs whose data is
    not given are left out. seeds: how often, by default as the study says; more can be asked for later. scale: one of
    the study's. take: JOB or JOB-SEED -> a run or an export in its place. say: is told what begins and ends. keep: is
    given the table whenever a job has ended.
    """
    how = how or How()
    loaded, path = load_study(study), Path(out)
    given = paths_of(loaded, study_file(study).stem, data)
    marks = {name: path if path == SAMPLES else _mark(path) for name, path in given.items()}
    created = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SitusError(f"{path}: cannot be made: {(error.strerror or str(error)).lower()}", field="out") from None
    try:
        with lock_folder(path):
            folder = StudyFolder.begun(path, loaded, study_file(study), scale, seeds)
            tasks = folder.chosen(how.only, seeds=seeds)
            models = [(folder.taker(name, Path(source)), Path(source)) for name, source in (take or {}).items()]
            folder.settle(study_file(study))  # nothing is written before all that was asked is known to be right
            for task, source in models:
                folder.take(task, source)
            folder.check_recipes()
            _Runner(folder, given, marks, say, keep, _slots(how)).run(tasks, how.minutes)
            return read_folder(folder)
    except OSError as error:
        told = (error.strerror or str(error)).lower()
        raise SitusError(
            f"{path}: cannot be written: {told}; once it can be, the same command goes on", field="out"
        ) from None
    finally:
        if created and path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def _mark(path: str) -> str:
    try:
        return fingerprint(path)
    except OSError as error:
        raise SitusError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}", field="data") from None


def _slots(how: How) -> list[str | None]:
    """What CUDA_VISIBLE_DEVICES is for each of the jobs that run side by side; None leaves it as it is."""
    if how.device == "cpu":
        return [""] * how.at_once
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        import torch

        given = ",".join(map(str, range(torch.cuda.device_count())))
    devices = [each for each in given.split(",") if each]
    return [devices[index % len(devices)] if len(devices) > 1 else None for index in range(how.at_once)]


# --- running --------------------------------------------------------------------------------------------------


@dataclass
class _Running:
    """A job at work. slot: which of those side by side. before: seconds it took until it was cut. said: where in its
    log what it says begins."""

    task: Task
    process: subprocess.Popen[bytes]
    began: float
    slot: int
    command: str
    before: float
    said: int


@dataclass
class _Runner:
    """data: paths by name. marks: what tells each data set from another at its path."""

    folder: StudyFolder
    data: Mapping[str, str]
    marks: Mapping[str, str]
    say: Say
    keep: Callable[[StudyResult], None]
    slots: Sequence[str | None]
    running: dict[str, _Running] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)

    def run(self, tasks: Mapping[str, Task], minutes: float | None) -> None:
        """Until nothing is left that can be run, the time is over, or it is interrupted."""
        began = time.monotonic()
        self._check_data(tasks)
        done = [task.name for task in tasks.values() if self.folder.ended(task) not in ("", FAILED, BEGUN)]
        with Interrupt() as interrupt, progress.task("jobs", len(tasks), len(done)) as told:
            try:
                while True:
                    self._reap(asked=False)
                    at_work = {
                        name: share_told(each.task.file("log"), each.said) for name, each in self.running.items()
                    }
                    ended = len(done) + len(self.tried) - len(at_work)
                    said = ", ".join(f"{name} {100 * share:.0f} %" for name, share in at_work.items())
                    told.tell(ended + sum(at_work.values()), said)
                    if interrupt.requested or (minutes is not None and time.monotonic() - began > 60 * minutes):
                        why = "interrupted" if interrupt.requested else f"the time of {minutes:g} min is over"
                        self.say(f"{why}: jobs at work save themselves ({len(self.running)}); the same command goes on")
                        break
                    for task in self._ready(tasks)[: len(self.slots) - len(self.running)]:
                        self._start(task)
                    if not self.running:
                        break
                    time.sleep(PAUSE)
            finally:
                self._end()
        if interrupt.requested:
            self.keep(read_folder(self.folder))
            raise KeyboardInterrupt

    def _check_data(self, tasks: Mapping[str, Task]) -> None:
        """Refuses to go on with a job that was cut on other data; says where others were done on other data."""
        told: set[str] = set()
        for task in self.folder.tasks.values():
            for name, was in self.folder.state(task).get("data", {}).items():
                if self.marks.get(name, was) == was:
                    continue
                if self.folder.ended(task) == BEGUN and task.begun and task.name in tasks:
                    raise SitusError(
                        f"{self.data[name]}: is not the {name} that job {task.name} began with; give that, or delete "
                        f"jobs/{task.name} to begin it again",
                        field="data",
                    )
                if self.folder.ended(task) == DONE and name not in told:
                    told.add(name)
                    self.say(f"{name}: {task.name} was done on other data than lies at {self.data[name]} now")

    def _marks(self, task: Task) -> dict[str, str]:
        return {name: self.marks[name] for name in data_of(self.folder.study, task.job)}

    def _ready(self, tasks: Mapping[str, Task]) -> list[Task]:
        """What may begin now: not ended, not at work, its data given, and all that it needs done."""
        return [
            task
            for task in tasks.values()
            if task.name not in self.running
            and task.name not in self.tried
            and self.folder.ended(task) in ("", FAILED, BEGUN)
            and all(name in self.data for name in data_of(self.folder.study, task.job))
            and all(self.folder.model_here(self.folder.tasks[needed]) for needed in task.needs.values())
        ]

    def _start(self, task: Task) -> None:
        _wait_until_free(task.folder)
        if not task.begun:
            shutil.rmtree(task.folder, ignore_errors=True)
            task.folder.unlink(missing_ok=True)  # a key is a file
        known = {**{f"data.{name}": path for name, path in self.data.items()}, "seed": task.seed}
        if task.job.change:
            write_text(task.file("toml"), toml_of(put(task.job.change, known)))
        words = words_of(self.folder, task, self.data)
        before = float(self.folder.state(task).get("seconds", 0.0)) if task.begun else 0.0
        slot = next(i for i in range(len(self.slots)) if i not in {each.slot for each in self.running.values()})
        visible = self.slots[slot]
        env = {**os.environ, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})}
        if len(self.slots) > 1:  # jobs that each take every core spend their time waiting for one another
            env.setdefault("OMP_NUM_THREADS", str(max(1, cores() // len(self.slots))))
        command = " ".join(["situs", *words])
        self.say(f"{task.name}: {command}")
        command = self._nameless(command)
        self.folder.write_state(task, BEGUN, seconds=before, data=self._marks(task))  # a kill finds it so
        with task.file("log").open("ab") as log:
            said = log.tell()
            process = subprocess.Popen(
                [*COMMAND, str(os.getpid()), *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,  # Ctrl-C is ours to hand on
            )
        self.running[task.name] = _Running(task, process, time.monotonic(), slot, command, before, said)
        self.tried.add(task.name)

    def _nameless(self, text: str) -> str:
        """Without the paths of this machine: the folder may be moved."""
        places = {"STUDY": str(self.folder.path), **self.data}
        text = nameless(text, {"STUDY": os.path.abspath(self.folder.path)})  # noqa: PTH100  (links stay)
        return nameless(text, {shown: path for shown, path in places.items() if not elsewhere(path)})

    def _reap(self, *, asked: bool) -> None:
        """Writes down how those ended that have. asked: they were told to stop, so that being cut is no failure."""
        for name in [name for name, each in self.running.items() if each.process.poll() is not None]:
            each = self.running.pop(name)
            state, message = self._judged(each, asked)
            seconds = time.monotonic() - each.began
            told = {BEGUN: "saved, to be gone on with,"}.get(state, state)
            if state == BEGUN and each.process.returncode == -signal.SIGKILL:
                told = "ended by force before it had saved itself"
            self.say(f"{name}: {told} after {clock(seconds)}{message and ': '}{message}")
            facts: dict[str, Any] = {"seconds": round(each.before + seconds, 1), "command": each.command}
            facts["data"] = self._marks(each.task)
            facts |= {"date": datetime.now(UTC).date().isoformat(), **({"message": message} if message else {})}
            self.folder.write_state(each.task, state, **facts, **_machine(each.task))
            if state != BEGUN:
                self.keep(read_folder(self.folder))

    def _judged(self, each: _Running, asked: bool) -> tuple[str, str]:
        """How a process ended, and its last words where that was not well."""
        task, status, how = each.task, each.process.returncode, VERBS[each.task.job.verb]
        if status == 0 or (how.partly and status == 1 and figure_files(task.folder)):
            return DONE, ""
        message = self._nameless(_last_line(task.file("log"), each.said)) or f"ended with status {status}"
        if status < 0:
            perhaps = ", perhaps for want of memory" if status == -signal.SIGKILL else ""
            name = {each.value: each.name for each in signal.Signals}.get(-status, f"signal {-status}")
            message = f"was ended by {name}{perhaps}"
        if how.trains and (task.folder / "nan").is_dir():
            return NOT_FINITE, message
        return (BEGUN, "") if asked or status == 130 else (FAILED, message)

    def _end(self) -> None:
        """Asks those at work to save themselves, waits, and ends by force what does not come to an end."""
        for each in self.running.values():
            each.process.send_signal(signal.SIGINT)
        until = time.monotonic() + PATIENCE
        try:
            while self.running and time.monotonic() < until:
                self._reap(asked=True)
                time.sleep(0.05)
        finally:
            for each in self.running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(each.process.pid, signal.SIGKILL)  # its own session: with the processes it has started
                each.process.wait()
            self._reap(asked=True)


def _wait_until_free(folder: Path) -> None:
    """Where the job of a runner that was killed still saves itself there."""
    until = time.monotonic() + PATIENCE
    while folder.is_dir() and time.monotonic() < until:
        try:
            with lock_folder(folder):
                return
        except SitusError:
            time.sleep(0.2)


def _machine(task: Task) -> dict[str, Any]:
    """On what a training ran, as its newest checkpoint tells."""
    told = sorted(task.folder.glob("checkpoints/step-*/state.json"))
    return {"machine": read_json(told[-1]).get("machine", {})} if told else {}


def _last_line(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        text = file.read().decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    own = [line.removeprefix("situs: ") for line in lines if line.startswith("situs: ")]  # what follows is a library's
    return (own or lines or [""])[-1]
