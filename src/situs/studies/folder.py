"""The folder of a study: its jobs, their states and their models.

    study.toml              the study
    settings.json           its name, scale and number of seeds
    jobs/NAME-SEED/         the output of a job: a run, a result, or the model taken in its place
    jobs/NAME-SEED.toml     a training's changes to its preset
    jobs/NAME-SEED.json     its state, time and recipe
    jobs/NAME-SEED.log      its log
    study.json, study.html  the table so far

It contains no path of a machine: the folder can be moved, and the same command continues there.
"""

from __future__ import annotations

import hashlib
import json
import os
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
from situs.studies.form import PAPER, VERBS, Job, Study, renewed
from situs.studies.plan import Jobs, load_study, needs, planned, texts_of

STUDY, SETTINGS = "study.toml", "settings.json"
DONE, TAKEN, NOT_FINITE, FAILED, BEGUN = "done", "taken", "not finite", "failed", "begun"
STATES = (DONE, TAKEN, NOT_FINITE, FAILED, BEGUN)
"""The states of a job; one that failed, or was begun and is not running, is run again or resumed."""


@dataclass(frozen=True)
class Task:
    """A job with one seed. name: JOB-SEED. of: the job. needs: the tasks that must be done first, by job."""

    name: str
    of: str
    job: Job
    seed: int
    folder: Path
    needs: Mapping[str, str]

    @property
    def recipe(self) -> dict[str, Any]:
        """All settings of the job, and the seed."""
        return {**to_dict(self.job), "seed": self.seed}

    @property
    def begun(self) -> bool:
        """Whether it is a training with a checkpoint to resume from."""
        return VERBS[self.job.verb].trains and any((self.folder / "checkpoints").glob("step-*"))

    def file(self, kind: str) -> Path:
        """A file beside its folder: toml, json, log."""
        return self.folder.with_name(f"{self.name}.{kind}")


class StudyFolder:
    """A study at a scale with a number of seeds, in its folder."""

    def __init__(self, path: Path, study: Study, name: str, scale: str, seeds: int) -> None:
        self.path, self.study, self.name, self.scale, self.seeds = path, study, name, scale, seeds
        self.jobs: Jobs = planned(study, scale)
        self._states: dict[str, dict[str, Any]] = {}
        self._marks: dict[str, str] = {}
        self.tasks = {task.name: task for name in self.jobs for task in self._tasks(name)}

    @classmethod
    def create(cls, path: Path, study: Study, file: Path, scale: str, seeds: int | None) -> StudyFolder:
        """The folder of a new or continued study; refused if it holds another study or another scale."""
        folder = cls.begun(path, study, file, scale, seeds)
        folder.write_settings(file)
        return folder

    def write_settings(self, file: Path) -> None:
        """Writes the study and its settings into the folder."""
        self.path.mkdir(parents=True, exist_ok=True)
        settings = {"study": self.name, "scale": self.scale, "seeds": self.seeds}
        write_text(self.path / SETTINGS, _json(settings))
        (self.path / "jobs").mkdir(exist_ok=True)
        write_text(self.path / STUDY, file.read_text(encoding="utf-8"))

    @classmethod
    def begun(cls, path: Path, study: Study, file: Path, scale: str, seeds: int | None) -> StudyFolder:
        """The same as `create`, without writing anything."""
        if seeds is not None:
            check_value("seeds", seeds, ">= 1")
        name = file.stem
        if not study.runs:
            reasons = "; ".join(
                f"it needs {missing.package}: {missing.why}" for missing in study.missing if missing.whole
            )
            raise SitusError(f"{name}: cannot be run yet; {reasons}", field="study")
        if (path / SETTINGS).is_file():
            old = read_json(path / SETTINGS)
            if file.exists() and (path / STUDY).exists() and file.samefile(path / STUDY):
                name = str(old.get("study"))  # the folder's copy of a file on another machine
            for key, value in (("study", name), ("scale", scale)):
                if old.get(key) != value:
                    raise SitusError(
                        f"{path}: was started with {key} {old.get(key)!r}, not {value!r}; give the same {key}, or "
                        "choose another folder",
                        field=("out", key),
                    )
            seeds = max(_seeds_of(path, old), seeds or 0)
        elif path.exists() and (not path.is_dir() or any(entry.name != ".lock" for entry in path.iterdir())):
            raise SitusError(f"{path}: must be empty or the folder of a study", field="out")
        folder = cls(path, study, name, scale, seeds or study.seeds)
        folder.check_recipes()
        return folder

    @classmethod
    def open(cls, path: Path) -> StudyFolder:
        """An existing folder."""
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
        """The tasks of the jobs whose names match a pattern, and the tasks they need; without patterns, all.

        needed: False leaves out what they need. seeds: only the first seeds; the folder may hold more.
        """
        tasks = {name: task for name, task in self.tasks.items() if seeds is None or task.seed < seeds}
        if not only:
            return tasks
        for pattern in only:
            if not any(fnmatchcase(task.of, pattern) or task.name == pattern for task in tasks.values()):
                raise unknown_name("job", pattern, self.jobs, field="only")
        names = [t.name for t in tasks.values() if any(fnmatchcase(t.of, p) or t.name == p for p in only)]
        for name in names if needed else ():  # grows during the loop
            names += [needed_name for needed_name in self.tasks[name].needs.values() if needed_name not in names]
        return {name: task for name, task in self.tasks.items() if name in names}

    # --- how each ended -------------------------------------------------------------------------------------

    def state(self, task: Task) -> dict[str, Any]:
        """The state of a task; {} before its start. Read once: nobody else writes while a study runs."""
        if task.name not in self._states:
            state = read_json(task.file("json")) if task.file("json").is_file() else {}
            if state and (state.get("state") not in STATES or not isinstance(state.get("recipe"), Mapping)):
                raise SitusError(
                    f"{task.file('json')}: does not contain the state of a job; delete this file to run the job again"
                )
            self._states[task.name] = state
        return self._states[task.name]

    def ended(self, task: Task) -> str:
        """One of DONE, TAKEN, NOT_FINITE, FAILED, BEGUN; "" before its start."""
        return str(self.state(task).get("state", ""))

    def done(self, task: Task) -> bool:
        """Whether it ended well."""
        return self.ended(task) in (DONE, TAKEN)

    def model_here(self, task: Task) -> bool:
        """Whether it is done and its output is here for other jobs; a packed study may lack it."""
        return (
            self.done(task) and (task.folder / "config.json" if VERBS[task.job.verb].trains else task.folder).exists()
        )

    def write_state(self, task: Task, state: str, **facts: Any) -> None:
        """Writes the state of a task, its recipe, and the recipes of the tasks that it depends on."""
        rests = {needed.name: self._model_recipe(needed) for needed in self._above(task)}
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
        """The fingerprint of the weights at the path that a job names as its model; "" where it names none."""
        text = task.job.model
        if not Path(text).exists():  # NAME=FILE, as `open_model` reads it; a path may hold a = too
            text = text.partition("=")[2]
            if text == "pretrained" or "{" in text:  # a library's; those of jobs and data have their own fingerprints
                return ""
        return self._lies_at(text)

    def _files(self, task: Task) -> dict[str, str]:
        """The fingerprint of each path in its options; a word without a / or an ending is no path."""
        texts = [text for text in texts_of(task.job.options) if "/" in text or Path(text).suffix]
        return {text: mark for text in texts if (mark := self._lies_at(text))}

    def _lies_at(self, text: str) -> str:
        if text not in self._marks:
            try:
                self._marks[text] = fingerprint(text, WEIGHTS) if text and "://" not in text else ""
            except OSError:  # not on this machine
                self._marks[text] = ""
        return self._marks[text]

    def _above(self, task: Task) -> list[Task]:
        """All tasks that it depends on, the nearest first; a taken model depends on none."""
        names = [*task.needs.values()]
        for above in (self.tasks[name] for name in names):  # grows during the loop
            if self.ended(above) != TAKEN:
                names += [name_above for name_above in above.needs.values() if name_above not in names]
        return [self.tasks[name] for name in names]

    def _model_recipe(self, task: Task) -> dict[str, Any]:
        """The recipe of a task's model."""
        state = self.state(task) if self.ended(task) == TAKEN else {}
        return {**task.recipe, **({"taken": state.get("source"), "weights": state.get("weights")} if state else {})}

    def check_recipes(self) -> None:
        """Refuses a study whose jobs, or the jobs they depend on, were run with other settings than now."""
        checked = [t for t in self.tasks.values() if self.state(t) and (self.ended(t) in (DONE, NOT_FINITE) or t.begun)]
        conflicts: dict[str, str] = {}
        for task in checked:
            for key, was, now in self._changed(self.state(task)["recipe"], task.recipe, task):
                conflicts.setdefault(task.name, f"job {task.name} was run with {key} {was!r}, but {key} is now {now!r}")
            noted = self.state(task).get("weights") if self.ended(task) != TAKEN else None
            if noted and self._mark(task) not in ("", noted):
                reason = f"the model in {task.job.model} has changed since job {task.name} was run"
                conflicts.setdefault(task.name, reason)
            now = self._files(task)
            for path, mark in (self.state(task).get("files") or {}).items():
                if now.get(path, mark) != mark:
                    conflicts.setdefault(task.name, f"job {task.name} was run with another version of the file {path}")
        for task in (task for task in checked if self.ended(task) != TAKEN):
            for above in self._above(task):
                rested = (self.state(task).get("above") or {}).get(above.name)
                for key, was, now in self._changed(rested, self._model_recipe(above), task):
                    reason = f"job {task.name} depends on {above.name}, whose {key} was {was!r} but is now {now!r}"
                    conflicts.setdefault(task.name, reason)
                if above.name in conflicts:
                    conflicts.setdefault(task.name, "")
        if conflicts:
            which = ", ".join(conflicts)
            named = which if len(conflicts) == 1 else "NAME"
            which = f"jobs/{named} and jobs/{named}.json{'' if len(conflicts) == 1 else f' for every NAME of {which}'}"
            reason = next(filter(None, conflicts.values()))
            raise SitusError(f"{self.path}: {reason}; choose another folder, or delete {which}", field="out")

    def _changed(self, before: Any, now: Mapping[str, Any], task: Task) -> Iterator[tuple[str, Any, Any]]:
        """Key, old and new value of the differences of two recipes; nothing without an old one."""
        if not before:
            return
        try:
            recipes = [{k: v for k, v in renewed(recipe).items() if k not in _BESIDE} for recipe in (before, now)]
            jobs = [from_dict(Job, recipe) for recipe in recipes]
        except (SitusError, AttributeError) as error:
            raise SitusError(f"{task.file('json')}: does not describe a job ({error})", field="out") from None
        for key, (old, new) in differences(*jobs).items():
            yield key, old, new
        if before.get("taken") != now.get("taken"):
            yield "model", before.get("taken") or "trained", now.get("taken") or "trained"
        elif None not in (weights := [recipe.get("weights") for recipe in (before, now)]) and weights[0] != weights[1]:
            yield "model", before["taken"], f"another {now['taken']}"

    def taker(self, name: str, source: Path) -> Task:
        """The task that a model's folder may replace, by its name or its job's."""
        task = self.tasks.get(name) or self.tasks.get(f"{name}-0")
        if task is None:
            raise unknown_name("job", name, self.jobs, field="take")
        if not VERBS[task.job.verb].trains:
            raise SitusError(
                f"take: a finished model can replace only a job that trains, but the job {name} only measures",
                field="take",
            )
        if not (source / "config.json").is_file():
            raise SitusError(f"take: {source} must be a run or an export, but has no config.json", field="take")
        state = self.state(task)
        other = state.get("weights") not in (None, fingerprint(source, WEIGHTS))
        if self.model_here(task) and (other or state.get("source") != source.name):
            how = "another " * (state.get("source") == source.name) + str(state.get("source"))
            how = f"was taken from {how}" if self.ended(task) == TAKEN else "was trained here"
            hint = (
                f"the model of {task.name} {how}; delete jobs/{task.name} and jobs/{task.name}.json to use "
                f"{source.name} instead"
            )
            raise SitusError(f"take: {hint}", field="take")
        return task

    def take(self, task: Task, source: Path) -> None:
        """Copies a model's folder (a run, an export) in place of a training's output: it counts as done."""
        if self.model_here(task):
            return
        aside = task.folder.with_name(f".taking-{task.name}")
        for old in (aside, task.folder):
            shutil.rmtree(old, ignore_errors=True)
        shutil.copytree(source, aside)
        aside.rename(task.folder)
        self.write_state(task, TAKEN, source=source.name, weights=fingerprint(source, WEIGHTS))


WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
"""Endings of weight files."""

_BESIDE = ("seed", "taken", "weights")
"""Keys of a recipe that are not keys of a job."""


def _seeds_of(path: Path, settings: Mapping[str, Any]) -> int:
    seeds = settings.get("seeds")
    if type(seeds) is not int or seeds < 1:
        raise SitusError(
            f"{path / SETTINGS}: the number of seeds must be an integer >= 1, not {seeds!r}", field="folder"
        )
    return seeds


def _json(table: Mapping[str, Any]) -> str:
    return json.dumps(table, indent=1, ensure_ascii=False) + "\n"


def toml_of(tables: Mapping[str, Any]) -> str:
    """Tables of plain values as TOML, one line per value."""
    lines = []
    for key, value in flat(tables).items():
        if isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
            raise SitusError(f"change.{key}: must not be a list of TOML tables", field=f"change.{key}")
        lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}\n")
    return "".join(lines)


# --- fingerprints of data sets and weights ----------------------------------------------------------------------------


PIECE = 64 * 1024
"""Bytes that are read at the beginning and at the end of a file."""

READ = 32
"""Files of which pieces are read, spread evenly over all of them."""


def fingerprint(path: str | Path, ending: str | tuple[str, ...] = "") -> str:
    """A hash of a file or folder: names, sizes and pieces of some files, not dates; of an address, its text alone.

    Hidden files (caches, locks) do not count. ending: in a folder only files whose names end so count.
    """
    root, hashed = Path(path), hashlib.blake2b(digest_size=8)
    if "://" in str(path):
        hashed.update(str(path).encode())
        return hashed.hexdigest()
    files = (
        sorted(file for file in _files(root) if file[0].endswith(ending))
        if root.is_dir()
        else [("", root.stat().st_size)]
    )
    for name, size in files:
        hashed.update(f"{name}\0{size}\n".encode("utf-8", "surrogateescape"))
    for name, size in files[:: max(1, -(-len(files) // READ))]:
        with (root / name if name else root).open("rb") as file:
            hashed.update(file.read(PIECE))
            file.seek(max(PIECE, size - PIECE))
            hashed.update(file.read(PIECE))
    return hashed.hexdigest()


def _files(root: Path) -> Iterator[tuple[str, int]]:
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            file = Path(folder) / name
            if not name.startswith(".") and file.is_file():
                yield file.relative_to(root).as_posix(), file.stat().st_size
