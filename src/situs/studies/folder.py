"""The folder of a study: what is to be run in it, what is done, and where each job's model lies.

    study.toml              the study
    settings.json           its name, scale and number of seeds
    jobs/NAME-SEED/         what a job left: a run, a result, or what was taken in its place
    jobs/NAME-SEED.toml     a training's changes, laid over its preset
    jobs/NAME-SEED.json     how it stands, after how long, with what recipe
    jobs/NAME-SEED.log      what it said
    study.json, study.html  the table as it stands

No path in it names a machine: the folder can be moved, and the same command goes on there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from situs.config import differences, flat, from_dict, to_dict
from situs.errors import SitusError, unknown_name
from situs.files import read_json, write_text
from situs.limits import check_value
from situs.studies.datasets import fingerprint
from situs.studies.form import PAPER, VERBS, Job, Study, renewed
from situs.studies.load import load_study
from situs.studies.plan import Jobs, needs, planned, texts_of

STUDY, SETTINGS = "study.toml", "settings.json"
DONE, TAKEN, NOT_FINITE, FAILED, BEGUN = "done", "taken", "not finite", "failed", "begun"
STATES = (DONE, TAKEN, NOT_FINITE, FAILED, BEGUN)
"""How a job may stand; one that failed, or has begun and is not at work, is gone on with."""


@dataclass(frozen=True)
class Task:
    """A job with one seed. name: JOB-SEED. needs: the tasks that must be done first, by the jobs' names."""

    name: str
    of: str
    job: Job
    seed: int
    folder: Path
    needs: Mapping[str, str]

    @property
    def recipe(self) -> dict[str, Any]:
        """What makes it what it is."""
        return {**to_dict(self.job), "seed": self.seed}

    @property
    def begun(self) -> bool:
        """Whether it is a training with a checkpoint to go on from."""
        return VERBS[self.job.verb].trains and any((self.folder / "checkpoints").glob("step-*"))

    def file(self, kind: str) -> Path:
        """A file beside its folder: toml, json, log."""
        return self.folder.with_name(f"{self.name}.{kind}")


class StudyFolder:
    """A study at a scale, with so many seeds, in its folder."""

    def __init__(self, path: Path, study: Study, name: str, scale: str, seeds: int) -> None:
        self.path, self.study, self.name, self.scale, self.seeds = path, study, name, scale, seeds
        self.jobs: Jobs = planned(study, scale)
        self._states: dict[str, dict[str, Any]] = {}
        self._marks: dict[str, str] = {}
        self.tasks = {task.name: task for name in self.jobs for task in self._tasks(name)}

    @classmethod
    def create(cls, path: Path, study: Study, file: Path, scale: str, seeds: int | None) -> StudyFolder:
        """The folder of a study that begins or goes on; refused where another study, or another scale, is in it."""
        folder = cls.begun(path, study, file, scale, seeds)
        folder.settle(file)
        return folder

    def settle(self, file: Path) -> None:
        """Writes down what the folder is for."""
        self.path.mkdir(parents=True, exist_ok=True)
        settings = {"study": self.name, "scale": self.scale, "seeds": self.seeds}
        write_text(self.path / SETTINGS, _json(settings))  # it is ours now
        (self.path / "jobs").mkdir(exist_ok=True)
        write_text(self.path / STUDY, file.read_text(encoding="utf-8"))

    @classmethod
    def begun(cls, path: Path, study: Study, file: Path, scale: str, seeds: int | None) -> StudyFolder:
        """What `create` gives, of which nothing is written."""
        if seeds is not None:
            check_value("seeds", seeds, ">= 1")
        known = file.stem
        if not study.runs:
            said = "; ".join(f"it needs {each.package}: {each.why}" for each in study.missing if each.whole)
            raise SitusError(f"{known}: cannot be run yet; {said}", field="study")
        if (path / SETTINGS).is_file():
            old = read_json(path / SETTINGS)
            if file.exists() and (path / STUDY).exists() and file.samefile(path / STUDY):
                known = str(old.get("study"))  # its own copy, where the file itself is on another machine
            for key, value in (("study", known), ("scale", scale)):
                if old.get(key) != value:
                    raise SitusError(f"{path}: holds {key} {old.get(key)!r}, and not {value!r}", field=("out", key))
            seeds = max(_seeds_of(path, old), seeds or 0)
        elif path.exists() and (not path.is_dir() or any(each.name != ".lock" for each in path.iterdir())):
            raise SitusError(f"{path}: is no folder of a study, and not empty", field="out")
        folder = cls(path, study, known, scale, seeds or study.seeds)
        folder.check_recipes()
        return folder

    @classmethod
    def open(cls, path: Path) -> StudyFolder:
        """The folder as it lies there."""
        if not (path / SETTINGS).is_file() or not (path / STUDY).is_file():
            raise SitusError(f"{path}: holds no study", field="folder")
        settings = read_json(path / SETTINGS)
        if absent := {"study", "seeds"} - settings.keys():
            raise SitusError(f"{path / SETTINGS}: lacks {', '.join(sorted(absent))}", field="folder")
        study, seeds = load_study(path / STUDY, configs=False), _seeds_of(path, settings)
        return cls(path, study, str(settings["study"]), str(settings.get("scale", PAPER)), seeds)

    def _tasks(self, name: str) -> list[Task]:
        job = self.jobs[name]

        def of(needed: str, seed: int) -> str:
            return f"{needed}-{0 if self.jobs[needed].once else seed}"

        return [
            Task(
                f"{name}-{seed}",
                name,
                job,
                seed,
                self.path / "jobs" / f"{name}-{seed}",
                {needed: of(needed, seed) for needed in needs(job)},
            )
            for seed in range(1 if job.once else self.seeds)
        ]

    def chosen(self, only: Sequence[str], *, needed: bool = True, seeds: int | None = None) -> dict[str, Task]:
        """The tasks of the jobs whose names fit one of the patterns, and what they need; all for none.

        needed: False leaves out what they need. seeds: those of the first seeds alone; the folder may hold more.
        """
        tasks = {name: task for name, task in self.tasks.items() if seeds is None or task.seed < seeds}
        if not only:
            return tasks
        for pattern in only:
            if not any(fnmatchcase(task.of, pattern) or task.name == pattern for task in tasks.values()):
                raise unknown_name("job", pattern, self.jobs, field="only")
        names = [t.name for t in tasks.values() if any(fnmatchcase(t.of, p) or t.name == p for p in only)]
        for name in names if needed else ():  # it grows while it is walked
            names += [each for each in self.tasks[name].needs.values() if each not in names]
        return {name: task for name, task in self.tasks.items() if name in names}

    # --- how each ended -------------------------------------------------------------------------------------

    def state(self, task: Task) -> dict[str, Any]:
        """How it stands; {} where it has not begun. Read once: nobody else writes while a study is run."""
        if task.name not in self._states:
            state = read_json(task.file("json")) if task.file("json").is_file() else {}
            if state and (state.get("state") not in STATES or not isinstance(state.get("recipe"), Mapping)):
                raise SitusError(f"{task.file('json')}: does not say how the job ended; delete it to run the job again")
            self._states[task.name] = state
        return self._states[task.name]

    def ended(self, task: Task) -> str:
        """One of DONE, TAKEN, NOT_FINITE, FAILED, BEGUN; "" where it has not begun."""
        return str(self.state(task).get("state", ""))

    def done(self, task: Task) -> bool:
        """Whether it ended well."""
        return self.ended(task) in (DONE, TAKEN)

    def model_here(self, task: Task) -> bool:
        """Whether it is done and what it made is here, for another to start from; a packed study leaves some behind."""
        return (
            self.done(task) and (task.folder / "config.json" if VERBS[task.job.verb].trains else task.folder).exists()
        )

    def write_state(self, task: Task, state: str, **facts: Any) -> None:
        """Says how a task ended, with what recipe, and with what recipes those that it rests on."""
        rests = {needed.name: self._made(needed) for needed in self._above(task)}
        self._states[task.name] = {
            "state": state,
            **facts,
            "recipe": task.recipe,
            **({"above": rests} if rests else {}),
            **({"weights": mark} if "weights" not in facts and (mark := self._mark(task)) else {}),
            **({"files": files} if (files := self._files(task)) else {}),
        }
        write_text(task.file("json"), _json(self._states[task.name]))

    def _mark(self, task: Task) -> str:
        """What tells the weights at a path that a job names as its model from others there; "" where it names none."""
        text = task.job.model
        if not Path(text).exists():  # NAME=FILE, as `open_model` reads it; a path may hold a = too
            text = text.partition("=")[2]
            if text == "pretrained" or "{" in text:  # a library's; those of jobs and of data are noted as such
                return ""
        return self._lies_at(text)

    def _files(self, task: Task) -> dict[str, str]:
        """The same of each path that its options name; a word without a / or an ending is none, whatever lies there."""
        texts = [text for text in texts_of(task.job.options) if "/" in text or Path(text).suffix]
        return {text: mark for text in texts if (mark := self._lies_at(text))}

    def _lies_at(self, text: str) -> str:
        if text not in self._marks:
            try:
                self._marks[text] = fingerprint(text, WEIGHTS) if text and "://" not in text else ""
            except OSError:  # it is not here: a library's, or another machine's
                self._marks[text] = ""
        return self._marks[text]

    def _above(self, task: Task) -> list[Task]:
        """All that it rests on, the nearest first; a model that was taken rests on nothing here."""
        found = [*task.needs.values()]
        for above in (self.tasks[name] for name in found):  # it grows while it is walked
            if self.ended(above) != TAKEN:
                found += [each for each in above.needs.values() if each not in found]
        return [self.tasks[name] for name in found]

    def _made(self, task: Task) -> dict[str, Any]:
        """What a task's model was made with."""
        state = self.state(task) if self.ended(task) == TAKEN else {}
        return {**task.recipe, **({"taken": state.get("source"), "weights": state.get("weights")} if state else {})}

    def check_recipes(self) -> None:
        """Refuses a study whose jobs, or those they rest on, were run or begun with other settings than it has now."""
        kept = [t for t in self.tasks.values() if self.state(t) and (self.ended(t) in (DONE, NOT_FINITE) or t.begun)]
        told: dict[str, str] = {}
        for task in kept:
            for key, was, now in self._changed(self.state(task)["recipe"], task.recipe, task):
                told.setdefault(task.name, f"job {task.name} was run with {key} {was!r}, which is now {now!r}")
            noted = self.state(task).get("weights") if self.ended(task) != TAKEN else None
            if noted and self._mark(task) not in ("", noted):
                said = f"job {task.name} was run with another model than lies at {task.job.model} now"
                told.setdefault(task.name, said)
            now = self._files(task)
            for path, mark in (self.state(task).get("files") or {}).items():
                if now.get(path, mark) != mark:
                    told.setdefault(task.name, f"job {task.name} was run with another file than lies at {path} now")
        for task in (task for task in kept if self.ended(task) != TAKEN):
            for above in self._above(task):
                rested = (self.state(task).get("above") or {}).get(above.name)
                for key, was, now in self._changed(rested, self._made(above), task):
                    said = f"job {task.name} rests on {above.name}, whose {key} was {was!r} then and is {now!r} now"
                    told.setdefault(task.name, said)
                if above.name in told:
                    told.setdefault(task.name, "")
        if told:
            which = ", ".join(told)
            named = which if len(told) == 1 else "NAME"
            which = f"jobs/{named} and jobs/{named}.json{'' if len(told) == 1 else f' for every NAME of {which}'}"
            said = next(filter(None, told.values()))
            raise SitusError(f"{self.path}: {said}; take another folder, or delete {which}", field="out")

    def _changed(self, before: Any, now: Mapping[str, Any], task: Task) -> Iterator[tuple[str, Any, Any]]:
        """Key, old and new value of what two recipes differ in; nothing where no old one was noted."""
        if not before:
            return
        try:
            recipes = [{k: v for k, v in renewed(each).items() if k not in _BESIDE} for each in (before, now)]
            jobs = [from_dict(Job, each) for each in recipes]
        except (SitusError, AttributeError) as error:
            raise SitusError(f"{task.file('json')}: holds no recipe of a job ({error})", field="out") from None
        for key, (old, new) in differences(*jobs).items():
            yield key, old, new
        if before.get("taken") != now.get("taken"):
            yield "model", before.get("taken") or "trained", now.get("taken") or "trained"
        elif None not in (weights := [each.get("weights") for each in (before, now)]) and weights[0] != weights[1]:
            yield "model", before["taken"], f"another {now['taken']}"

    def taker(self, name: str, source: Path) -> Task:
        """The task whose place a model's folder may take, by its name or its job's."""
        task = self.tasks.get(name) or self.tasks.get(f"{name}-0")
        if task is None:
            raise unknown_name("job", name, self.jobs, field="take")
        if not VERBS[task.job.verb].trains:
            raise SitusError(f"take: {name} is a measurement; only a training can be replaced by a model", field="take")
        if not (source / "config.json").is_file():
            raise SitusError(f"take: {source} holds no run and no export, there is no config.json in it", field="take")
        state = self.state(task)
        other = state.get("weights") not in (None, fingerprint(source, WEIGHTS))
        if self.model_here(task) and (other or state.get("source") != source.name):
            how = "another " * (state.get("source") == source.name) + str(state.get("source"))
            how = f"was taken from {how}" if self.ended(task) == TAKEN else "was trained here"
            said = f"{task.name} {how}; delete jobs/{task.name} and jobs/{task.name}.json to take {source.name}"
            raise SitusError(f"take: {said}", field="take")
        return task

    def take(self, task: Task, source: Path) -> None:
        """Puts a model's folder (a run, an export) in the place of a job that makes one: it counts as done."""
        if self.model_here(task):
            return
        aside = task.folder.with_name(f".taking-{task.name}")
        for old in (aside, task.folder):
            shutil.rmtree(old, ignore_errors=True)
        shutil.copytree(source, aside)
        aside.rename(task.folder)
        self.write_state(task, TAKEN, source=source.name, weights=fingerprint(source, WEIGHTS))


WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
"""The files of a model that tell it from another of its name."""

_BESIDE = ("seed", "taken", "weights")
"""Keys of a recipe beside those of a job."""


def _seeds_of(path: Path, settings: Mapping[str, Any]) -> int:
    seeds = settings.get("seeds")
    if type(seeds) is not int or seeds < 1:
        raise SitusError(f"{path / SETTINGS}: tells no seeds that are >= 1 ({seeds!r})", field="folder")
    return seeds


def _json(table: Mapping[str, Any]) -> str:
    return json.dumps(table, indent=1, ensure_ascii=False) + "\n"


def toml_of(tables: Mapping[str, Any]) -> str:
    """Tables of plain values as TOML, one line a value."""
    lines = []
    for key, value in flat(tables).items():
        if isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
            raise SitusError(f"change.{key}: a list of tables is no field of a config", field=f"change.{key}")
        lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}\n")
    return "".join(lines)
