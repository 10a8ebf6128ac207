"""Fills a study's table: from the folders of its jobs, or with what its file says was measured before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from situs.errors import SitusError
from situs.results import Provenance
from situs.studies.find import find, numbers_of
from situs.studies.folder import BEGUN, DONE, FAILED, NOT_FINITE, TAKEN, StudyFolder, Task
from situs.studies.form import PAPER, PAPERS, Curves, Line, Study, Table
from situs.studies.load import load_study, study_file
from situs.studies.plan import cell_of, point_of, times_of
from situs.studies.result import Cell, Drawn, Ended, StudyResult
from situs.studies.words import nameless

Lookup = Callable[[str, str, bool], tuple[dict[int, Any], str]]
"""Job, figure and whether it is a list of numbers -> what is found by seed, and why not for all."""


def _nothing(job: str, figure: str, listed: bool) -> tuple[dict[int, Any], str]:
    """Where there is no folder: the numbers are those that the file holds."""
    del job, figure, listed
    return {}, ""


def read_study(folder: str | Path) -> StudyResult:
    """A study's folder as it stands; or a study by its name or file, with what was measured before."""
    if Path(folder).is_dir():
        return read_folder(StudyFolder.open(Path(folder)))
    study = load_study(folder, configs=False)
    told = study.measured
    scale, seeds = (told.scale, told.seeds) if told else (PAPER, study.seeds)
    rows, lines = _filled(study, _nothing)
    return StudyResult(study_file(folder).stem, study, scale, seeds, (), rows, lines, provenance=_made(study))


def read_folder(folder: StudyFolder) -> StudyResult:
    """The study with what its jobs have left so far."""
    read = _Reader(folder)
    rows, lines = _filled(folder.study, read.values)
    ended = tuple(read.ended(task) for task in folder.tasks.values())
    about = (folder.name, folder.study, folder.scale, folder.seeds)
    made = _made(folder.study, [folder.state(task) for task in folder.tasks.values()])
    return StudyResult(*about, ended, rows, lines, tuple(read.pictures()), provenance=made)


def _filled(study: Study, lookup: Lookup) -> tuple[Any, Any]:
    """The cells of every table, the lines of every figure."""
    rows = tuple(
        tuple(tuple(_known(table, r, c, lookup) for c in range(len(table.columns))) for r in range(len(table.rows)))
        for table in study.tables
    )
    return rows, tuple(tuple(_drawn(curves, line, lookup) for line in curves.lines) for curves in study.curves)


def _made(study: Study, states: Sequence[Mapping[str, Any]] = ()) -> Provenance:
    """Of which paper, and on what days and machines its jobs were run."""
    facts = {"source": f"{PAPERS[study.paper]}, {study.place}"} if study.paper else {}
    if dates := sorted({str(state["date"]) for state in states if "date" in state}):
        facts["dates"] = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    machines = [state.get("machine") or {} for state in states]
    told = [", torch ".join((str(m.get("device")), str(m.get("torch")))) for m in machines if m]
    return Provenance({**facts, **({"machines": "; ".join(dict.fromkeys(told))} if told else {})})


def _known(table: Table, r: int, c: int, lookup: Lookup) -> Cell:
    row, column = table.rows[r], table.columns[c]
    job, figure = cell_of(table, row, c)
    times = times_of(
        column.unit if row.unit is None else row.unit, row.times if row.times is not None else column.times
    )
    found, why = lookup(job, figure, False) if job else ({}, "")
    values = {seed: times * value for seed, value in found.items()}
    if lookup is _nothing and row.ours and not isinstance(row.ours[c], str):
        values = {0: float(row.ours[c])}
    digits = column.digits if row.digits is None else row.digits
    reading = column.reading if row.reading is None else row.reading
    return Cell(job, row.paper[c] if row.paper else "", values, digits, reading, why)


def _drawn(curves: Curves, line: Line, lookup: Lookup) -> Drawn:
    times = times_of(curves.unit, curves.times)
    points: list[tuple[float, Cell]] = []
    if line.over:
        job, figure = point_of(line, 0)
        (xs, _), (ys, why) = lookup(job, line.over, True), lookup(job, figure, True)
        of = {seed: dict(zip(xs[seed], y, strict=True)) for seed, y in ys.items() if len(xs.get(seed, ())) == len(y)}
        for x in sorted({x for axis in xs.values() for x in axis}):  # a seed may have fewer of them
            values = {seed: times * held[x] for seed, held in of.items() if x in held}
            points.append((x, Cell(job, "", values, curves.digits, 0.0, why)))
        return Drawn(line.name, tuple(points))
    for index, x in enumerate(line.at):
        job, figure = point_of(line, index)
        found, why = lookup(job, figure, False) if job else ({}, "")
        values = {seed: times * value for seed, value in found.items()}
        if lookup is _nothing and line.ours and not isinstance(line.ours[index], str):
            values = {0: float(line.ours[index])}
        paper = line.paper[index] if line.paper else ""
        points.append((x, Cell(job, paper, values, curves.digits, curves.reading, why)))
    return Drawn(line.name, tuple(points))


class _Reader:
    """Looks into the jobs' folders, each once."""

    def __init__(self, folder: StudyFolder) -> None:
        self.folder = folder
        self._numbers: dict[str, Mapping[str, Any]] = {}

    def values(self, job: str, figure: str, listed: bool) -> tuple[dict[int, Any], str]:
        """By seed; and why there is none of some."""
        if job not in self.folder.jobs:
            return {}, "left out"
        found: dict[int, Any] = {}
        reasons: dict[str, list[int]] = {}
        for task in (task for task in self.folder.tasks.values() if task.of == job):
            ended = self.ended(task)
            try:
                if ended.state == DONE:
                    found[task.seed] = self._figure(task, figure, listed)
                else:
                    reasons.setdefault(ended.why if ended.state == "waits" else ended.state, []).append(task.seed)
            except SitusError as error:
                reasons.setdefault(nameless(str(error), {"STUDY": str(self.folder.path)}), []).append(task.seed)
        if not found and {*reasons} <= {"open", BEGUN}:
            return {}, ""
        several = self.folder.seeds > 1
        told = (f"{why} (seed {', '.join(map(str, seeds))})" if several else why for why, seeds in reasons.items())
        return found, "; ".join(told)

    def _figure(self, task: Task, figure: str, listed: bool) -> Any:
        if task.name not in self._numbers:
            self._numbers[task.name] = numbers_of(task.job, task.folder)
        value = find(self._numbers[task.name], figure)
        numbers: list[Any] = value if isinstance(value, list) else [value]
        if listed != isinstance(value, list) or not all(type(each) in (int, float) for each in numbers):
            told = f"a list of {len(numbers)}" if isinstance(value, list) else repr(value)
            raise SitusError(f"{figure} is {told}, no {'list of numbers' if listed else 'number'}")
        made = [float(each) for each in numbers]
        if not all(map(isfinite, made)):
            raise SitusError(f"{figure} is not finite")
        return made if listed else made[0]

    def ended(self, task: Task) -> Ended:
        """How it stands, with the reason where it waits for what will not come."""
        state = self.folder.state(task)
        if state and state["state"] != BEGUN:
            why = str(state.get("message", "")) or (f"from {state['source']}" if state["state"] == TAKEN else "")
            return Ended(task.name, task.of, str(state["state"]), state.get("seconds"), why, state.get("data") or {})
        for needed in task.needs.values():
            above = self.ended(self.folder.tasks[needed])
            if above.state in (NOT_FINITE, FAILED):
                return Ended(task.name, task.of, "waits", None, f"{needed} {_was(above.state)}")
            if above.state == "waits":
                return Ended(task.name, task.of, "waits", None, above.why)
            if above.state == DONE and not self.folder.model_here(self.folder.tasks[needed]):
                return Ended(task.name, task.of, "waits", None, f"the model of {needed} is on another machine")
        return Ended(task.name, task.of, str(state.get("state", "open")), state.get("seconds"))

    def pictures(self) -> Iterator[tuple[str, Path]]:
        """What jobs have drawn, of the first seed."""
        for picture in self.folder.study.pictures:
            task = self.folder.tasks.get(f"{picture.job}-0")
            if task is not None and self.folder.ended(task) == DONE:
                for file in sorted(task.folder.glob(f"{picture.file}.png")):
                    yield picture.title or file.stem, file


def _was(state: str) -> str:
    return "was not finite" if state == NOT_FINITE else "failed"
