"""Runs a study: finished jobs are skipped, interrupted ones are resumed, one after the other or several at once.

Each job is a `situs` command in its own process. A failed job does not stop the others. On Ctrl-C and at the end of
the time limit the jobs save a checkpoint; the same call resumes them.
"""

from __future__ import annotations

import contextlib
import os
import re
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
from situs.errors import SitusError, counted, reason_of, verb
from situs.files import make_folder, read_json, write_text
from situs.folder_lock import lock_folder
from situs.limits import Count, Positive
from situs.progress import clock
from situs.studies.find import figure_files
from situs.studies.folder import BEGUN, DONE, FAILED, NOT_FINITE, StudyFolder, Task, fingerprint, toml_of
from situs.studies.form import PAPER, VERBS
from situs.studies.plan import data_of, load_study, put, study_file
from situs.studies.reading import read_folder
from situs.studies.result import StudyResult
from situs.studies.words import elsewhere, nameless, paths_of, words_of
from situs.train.interrupt import Interrupt

Say = Callable[[str], None]
COMMAND = (sys.executable, "-m", "situs.studies.child")
"""The command of a job; the runner's process id and the words of `situs` follow."""

PAUSE = 0.1
"""Seconds between two checks of the jobs."""

PATIENCE = 120.0
"""Seconds in which a job must save a checkpoint and end."""


@dataclass(frozen=True)
class StudyOptions(Checked):
    """Options of how the jobs of a study run. They do not change its numbers."""

    at_once: Count = 1
    """Number of jobs that run at the same time. If there are several GPUs, each job has its own."""

    only: tuple[str, ...] = ()
    """Names or patterns of the jobs to run. The jobs on which these depend also run. Default: all jobs."""

    minutes: Positive | None = None
    """Time limit in minutes. At the limit, running jobs save a checkpoint and stop."""

    device: Literal["cpu"] | None = None
    """With cpu, no GPU is used. By default, GPUs are used if there are any."""


def run_study(
    study: str | Path,
    data: str | Mapping[str, str] | None = None,
    *,
    out: str | Path,
    seeds: int | None = None,
    scale: str = PAPER,
    take: Mapping[str, str | Path] | None = None,
    how: StudyOptions | None = None,
    say: Say = lambda _: None,
    keep: Callable[[StudyResult], None] = lambda _: None,
) -> StudyResult:
    """Runs the unfinished jobs of a study in the folder `out`, and gives its table.

    study: a name (`study_names`) or a TOML file. data: the path of its data set, or of each by name; jobs without data
    are left out. seeds: how many, default: the study's; more can be added later. scale: one of the study's. take: JOB
    or JOB-SEED -> a run or an export in its place. say: gets a line when a job starts or ends. keep: gets the table
    when a job ends.
    """
    how = how or StudyOptions()
    loaded, path = load_study(study), Path(out)
    paths = paths_of(loaded, study_file(study).stem, data)
    marks = {name: path if path == SAMPLES else _mark(path) for name, path in paths.items()}
    created = not path.exists()
    make_folder(path)
    try:
        with lock_folder(path):
            folder = StudyFolder.begun(path, loaded, study_file(study), scale, seeds)
            tasks = folder.chosen(how.only, seeds=seeds)
            models = [(folder.taker(name, Path(source)), Path(source)) for name, source in (take or {}).items()]
            folder.write_settings(study_file(study))  # nothing is written before all arguments are checked
            for task, source in models:
                folder.take(task, source)
            folder.check_recipes()
            _Runner(folder, paths, marks, say, keep, _slots(how)).run(tasks, how.minutes)
            return read_folder(folder)
    except OSError as error:
        reason = f"{reason_of(error)}; correct this, then run the same command again"
        raise SitusError(f"{path}: cannot be written: {reason}", field="out") from None
    finally:
        if created and path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def _mark(path: str) -> str:
    try:
        return fingerprint(path)
    except OSError as error:
        raise SitusError(f"{path}: cannot be read: {reason_of(error)}", field="data") from None


def _slots(how: StudyOptions) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each of the jobs side by side; None leaves it unchanged."""
    if how.device == "cpu":
        return [""] * how.at_once
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        import torch

        visible = ",".join(map(str, range(torch.cuda.device_count())))
    devices = [device for device in visible.split(",") if device]
    return [devices[index % len(devices)] if len(devices) > 1 else None for index in range(how.at_once)]


# --- running --------------------------------------------------------------------------------------------------


@dataclass
class _Running:
    """A running job. slot: its number among those side by side. before: seconds of earlier runs. log_start: where its
    part of the log begins."""

    task: Task
    process: subprocess.Popen[bytes]
    began: float
    slot: int
    command: str
    before: float
    log_start: int


@dataclass
class _Runner:
    """data: paths by name. marks: fingerprints of the data sets."""

    folder: StudyFolder
    data: Mapping[str, str]
    marks: Mapping[str, str]
    say: Say
    keep: Callable[[StudyResult], None]
    slots: Sequence[str | None]
    running: dict[str, _Running] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)

    def run(self, tasks: Mapping[str, Task], minutes: float | None) -> None:
        """Runs until no task can be started, the time limit is reached, or it is interrupted."""
        began = time.monotonic()
        self._check_data(tasks)
        done = [task.name for task in tasks.values() if self.folder.ended(task) not in ("", FAILED, BEGUN)]
        with Interrupt() as interrupt, progress.task("jobs", len(tasks), len(done)) as bar:
            try:
                while True:
                    self._reap(stopping=False)
                    at_work = {
                        name: progress_in(running.task.file("log"), running.log_start)
                        for name, running in self.running.items()
                    }
                    ended = len(done) + len(self.tried) - len(at_work)
                    listed = ", ".join(f"{name} {100 * share:.0f} %" for name, share in at_work.items())
                    bar.tell(ended + sum(at_work.values()), listed)
                    if interrupt.requested or (minutes is not None and time.monotonic() - began > 60 * minutes):
                        why = "interrupted" if interrupt.requested else f"the time limit of {minutes:g} min is reached"
                        saving = f"{counted(len(self.running), 'running jobs')} {verb(len(self.running), 'save')}"
                        self.say(f"{why}; {saving} a checkpoint; repeat the command later to continue")
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
        """Refuses to resume a job on other data; says which jobs were done on other data."""
        reported: set[str] = set()
        for task in self.folder.tasks.values():
            for name, was in self.folder.state(task).get("data", {}).items():
                if self.marks.get(name, was) == was:
                    continue
                if self.folder.ended(task) == BEGUN and task.begun and task.name in tasks:
                    raise SitusError(
                        f"{self.data[name]}: job {task.name} started with other data for {name}; give the original "
                        f"path, or delete jobs/{task.name} to start the job again",
                        field="data",
                    )
                if self.folder.ended(task) == DONE and name not in reported:
                    reported.add(name)
                    self.say(f"{name}: job {task.name} was run on other data than the data now in {self.data[name]}")

    def _marks(self, task: Task) -> dict[str, str]:
        return {name: self.marks[name] for name in data_of(self.folder.study, task.job)}

    def _ready(self, tasks: Mapping[str, Task]) -> list[Task]:
        """Tasks that may start now: not ended, not running, with their data, and with all they need done."""
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
        slot = next(i for i in range(len(self.slots)) if i not in {running.slot for running in self.running.values()})
        visible = self.slots[slot]
        env = {**os.environ, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})}
        if len(self.slots) > 1:  # jobs that each use every core would slow each other down
            env.setdefault("OMP_NUM_THREADS", str(max(1, cores() // len(self.slots))))
        command = " ".join(["situs", *words])
        self.say(f"{task.name}: {command}")
        command = self._nameless(command)
        self.folder.write_state(task, BEGUN, seconds=before, data=self._marks(task))  # valid if we are killed
        with task.file("log").open("ab") as log:
            log_start = log.tell()
            process = subprocess.Popen(
                [*COMMAND, str(os.getpid()), *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,  # we pass Ctrl-C on
            )
        self.running[task.name] = _Running(task, process, time.monotonic(), slot, command, before, log_start)
        self.tried.add(task.name)

    def _nameless(self, text: str) -> str:
        """The text without paths of this machine: the folder may be moved."""
        places = {"STUDY": str(self.folder.path), **self.data}
        text = nameless(text, {"STUDY": os.path.abspath(self.folder.path)})  # noqa: PTH100  (links stay)
        return nameless(text, {shown: path for shown, path in places.items() if not elsewhere(path)})

    def _reap(self, *, stopping: bool) -> None:
        """Writes the state of the jobs that have ended. stopping: they were asked to stop, which is no failure."""
        for name in [name for name, running in self.running.items() if running.process.poll() is not None]:
            running = self.running.pop(name)
            state, message = self._judged(running, stopping)
            seconds = time.monotonic() - running.began
            outcome = {BEGUN: "saved, to be resumed,"}.get(state, state)
            if state == BEGUN and running.process.returncode == -signal.SIGKILL:
                outcome = "killed before it saved a checkpoint"
            self.say(f"{name}: {outcome} after {clock(seconds)}{message and ': '}{message}")
            facts: dict[str, Any] = {"seconds": round(running.before + seconds, 1), "command": running.command}
            facts["data"] = self._marks(running.task)
            facts |= {"date": datetime.now(UTC).date().isoformat(), **({"message": message} if message else {})}
            if states := sorted(running.task.folder.glob("checkpoints/step-*/state.json")):
                facts["machine"] = read_json(states[-1]).get("machine", {})
            self.folder.write_state(running.task, state, **facts)
            if state != BEGUN:
                self.keep(read_folder(self.folder))

    def _judged(self, running: _Running, stopping: bool) -> tuple[str, str]:
        """The state of an ended process, and its last message where it did not end well."""
        task, status, how = running.task, running.process.returncode, VERBS[running.task.job.verb]
        if status == 0 or (how.partly and status == 1 and figure_files(task.folder)):
            return DONE, ""
        message = self._nameless(_last_line(task.file("log"), running.log_start)) or f"ended with status {status}"
        if status < 0:
            perhaps = ", perhaps out of memory" if status == -signal.SIGKILL else ""
            name = {number.value: number.name for number in signal.Signals}.get(-status, f"signal {-status}")
            message = f"was ended by {name}{perhaps}"
        if how.trains and (task.folder / "nan").is_dir():
            return NOT_FINITE, message
        return (BEGUN, "") if stopping or status == 130 else (FAILED, message)

    def _end(self) -> None:
        """Asks the running jobs to save a checkpoint, waits, and kills those that do not end."""
        for running in self.running.values():
            running.process.send_signal(signal.SIGINT)
        until = time.monotonic() + PATIENCE
        try:
            while self.running and time.monotonic() < until:
                self._reap(stopping=True)
                time.sleep(0.05)
        finally:
            for running in self.running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(running.process.pid, signal.SIGKILL)  # with the processes it has started
                running.process.wait()
            self._reap(stopping=True)


def _wait_until_free(folder: Path) -> None:
    """Waits while a job of a killed runner still saves its checkpoint there."""
    until = time.monotonic() + PATIENCE
    while folder.is_dir() and time.monotonic() < until:
        try:
            with lock_folder(folder):
                return
        except SitusError:
            time.sleep(0.2)


def _last_line(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        text = file.read().decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    messages = [
        line.removeprefix("situs: ") for line in lines if line.startswith("situs: ")
    ]  # what follows is a library's
    return (messages or lines or [""])[-1]


_PROGRESS = re.compile(rb"^step ([\d,]+)/([\d,]+) |^ *(\d+) %  ", re.MULTILINE)
_TAIL = 4096  # bytes, which hold the newest line


def progress_in(log: Path, start: int) -> float:
    """The progress from 0 to 1 in the newest line that shows it; 0 before. start: where this run's log begins."""
    with log.open("rb") as file:
        end = file.seek(0, 2)
        file.seek(max(start, end - _TAIL))
        lines = [*_PROGRESS.finditer(file.read())]
    if not lines:
        return 0.0
    done, of, percent = (int((part or b"0").replace(b",", b"")) for part in lines[-1].groups())
    return min(1.0, done / of if of else percent / 100)
