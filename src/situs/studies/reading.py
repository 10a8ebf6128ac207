"""Fills a study's table: from the folders of its jobs, or with the earlier numbers of its file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from situs.errors import SitusError
from situs.results import Provenance
from situs.results import Table as Printed
from situs.studies.find import find, numbers_of
from situs.studies.folder import BEGUN, DONE, FAILED, NOT_FINITE, TAKEN, StudyFolder, Task
from situs.studies.form import PAPER, PAPERS, Curves, Line, Ours, Study, Table, Value
from situs.studies.plan import cell_of, load_study, point_of, study_file, study_names, times_of
from situs.studies.result import Cell, Drawn, Ended, StudyResult
from situs.studies.words import nameless

ENDS = {NOT_FINITE: "was not finite", FAILED: "failed"}
"""States of a job on which no other can build -> how it ended."""

Lookup = Callable[[str, str, bool], tuple[dict[int, Any], str]]
"""Job, figure and whether it is a list of numbers -> values by seed, and why some are missing."""


def read_study(folder: str | Path) -> StudyResult:
    """A study's folder with its present numbers; or a study by its name or file, with earlier numbers."""
    if Path(folder).is_dir():
        return read_folder(StudyFolder.open(Path(folder)))
    study = load_study(folder, configs=False)
    measured = study.measured
    scale, seeds = (measured.scale, measured.seeds) if measured else (PAPER, study.seeds)
    rows, lines = _filled(study, None)
    return StudyResult(study_file(folder).stem, study, scale, seeds, (), rows, lines, provenance=_provenance(study))


def read_folder(folder: StudyFolder) -> StudyResult:
    """The study with the numbers of its jobs so far."""
    read = _Reader(folder)
    rows, lines = _filled(folder.study, read.values)
    ended = tuple(read.ended(task) for task in folder.tasks.values())
    about = (folder.name, folder.study, folder.scale, folder.seeds)
    provenance = _provenance(folder.study, [folder.state(task) for task in folder.tasks.values()])
    return StudyResult(*about, ended, rows, lines, tuple(read.pictures()), provenance=provenance)


def _filled(study: Study, lookup: Lookup | None) -> tuple[Any, Any]:
    """The cells of every table, the lines of every figure. lookup: None for the earlier numbers of the file."""
    rows = tuple(
        tuple(tuple(_known(table, r, c, lookup) for c in range(len(table.columns))) for r in range(len(table.rows)))
        for table in study.tables
    )
    return rows, tuple(tuple(_drawn(curves, line, lookup) for line in curves.lines) for curves in study.curves)


def _provenance(study: Study, states: Sequence[Mapping[str, Any]] = ()) -> Provenance:
    """The paper, and the days and machines of the jobs."""
    facts = {"source": f"{PAPERS[study.paper]}, {study.place}"} if study.paper else {}
    if dates := sorted({str(state["date"]) for state in states if "date" in state}):
        facts["dates"] = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    machines = [state.get("machine") or {} for state in states]
    machine_names = [", torch ".join((str(m.get("device")), str(m.get("torch")))) for m in machines if m]
    return Provenance({**facts, **({"machines": "; ".join(dict.fromkeys(machine_names))} if machine_names else {})})


def _known(table: Table, r: int, c: int, lookup: Lookup | None) -> Cell:
    row, column = table.rows[r], table.columns[c]
    unit, times, digits, reading = (
        getattr(column if getattr(row, name) is None else row, name) for name in ("unit", "times", "digits", "reading")
    )
    paper, ours = row.paper[c] if row.paper else "", row.ours[c] if row.ours else ""
    return _cell(lookup, *cell_of(table, row, c), times_of(unit, times), paper, ours, digits, reading)


def _cell(
    lookup: Lookup | None, job: str, figure: str, times: float, paper: Value, ours: Ours, digits: int, reading: float
) -> Cell:
    """A cell with the numbers of its job, or with those measured earlier."""
    if lookup is None:
        numbers = () if isinstance(ours, str) else ours if isinstance(ours, tuple) else (ours,)
        return Cell(job, paper, dict(enumerate(map(float, numbers))), digits, reading)
    by_seed, why = lookup(job, figure, False) if job else ({}, "")
    return Cell(job, paper, {seed: times * value for seed, value in by_seed.items()}, digits, reading, why)


def _drawn(curves: Curves, line: Line, lookup: Lookup | None) -> Drawn:
    times, how = times_of(curves.unit, curves.times), (curves.digits, curves.reading)
    points: list[tuple[float, Cell]] = []
    if line.over and lookup is not None:
        job, figure = point_of(line, 0)
        (xs, _), (ys, why) = lookup(job, line.over, True), lookup(job, figure, True)
        of = {seed: dict(zip(xs[seed], y, strict=True)) for seed, y in ys.items() if len(xs.get(seed, ())) == len(y)}
        for x in sorted({x for axis in xs.values() for x in axis}):  # a seed may have fewer of them
            values = {seed: times * line_of[x] for seed, line_of in of.items() if x in line_of}
            points.append((x, Cell(job, "", values, curves.digits, 0.0, why)))
    for index, x in enumerate(line.at):
        paper, ours = line.paper[index] if line.paper else "", line.ours[index] if line.ours else ""
        points.append((x, _cell(lookup, *point_of(line, index), times, paper, ours, *how)))
    return Drawn(line.name, tuple(points))


class _Reader:
    """Reads the jobs' folders, each once."""

    def __init__(self, folder: StudyFolder) -> None:
        self.folder = folder
        self._numbers: dict[str, Mapping[str, Any]] = {}

    def values(self, job: str, figure: str, listed: bool) -> tuple[dict[int, Any], str]:
        """Values by seed, and why some are missing."""
        if job not in self.folder.jobs:
            return {}, "left out"
        by_seed: dict[int, Any] = {}
        reasons: dict[str, list[int]] = {}
        for task in (task for task in self.folder.tasks.values() if task.of == job):
            ended = self.ended(task)
            try:
                if ended.state == DONE:
                    by_seed[task.seed] = self._figure(task, figure, listed)
                else:
                    reasons.setdefault(ended.why if ended.state == "waits" else ended.state, []).append(task.seed)
            except SitusError as error:
                reasons.setdefault(nameless(str(error), {"STUDY": str(self.folder.path)}), []).append(task.seed)
        if not by_seed and {*reasons} <= {"open", BEGUN}:
            return {}, ""
        several = self.folder.seeds > 1
        parts = (f"{why} (seed {', '.join(map(str, seeds))})" if several else why for why, seeds in reasons.items())
        return by_seed, "; ".join(parts)

    def _figure(self, task: Task, figure: str, listed: bool) -> Any:
        if task.name not in self._numbers:
            self._numbers[task.name] = numbers_of(task.job, task.folder)
        value = find(self._numbers[task.name], figure)
        numbers: list[Any] = value if isinstance(value, list) else [value]
        if listed != isinstance(value, list) or not all(type(number) in (int, float) for number in numbers):
            kind = f"a list of {len(numbers)}" if isinstance(value, list) else repr(value)
            raise SitusError(f"{figure} is {kind}, not a {'list of numbers' if listed else 'number'}")
        floats = [float(number) for number in numbers]
        if not all(map(isfinite, floats)):
            raise SitusError(f"{figure} is not finite")
        return floats if listed else floats[0]

    def ended(self, task: Task) -> Ended:
        """The state of a task, with the reason where it waits for a job that will not end well."""
        state = self.folder.state(task)
        if state and state["state"] != BEGUN:
            why = str(state.get("message", "")) or (f"from {state['source']}" if state["state"] == TAKEN else "")
            return Ended(task.name, task.of, str(state["state"]), state.get("seconds"), why, state.get("data") or {})
        for needed in task.needs.values():
            above = self.ended(self.folder.tasks[needed])
            if above.state in ENDS:
                return Ended(task.name, task.of, "waits", None, f"{needed} {ENDS[above.state]}")
            if above.state == "waits":
                return Ended(task.name, task.of, "waits", None, above.why)
            if above.state == DONE and not self.folder.model_here(self.folder.tasks[needed]):
                return Ended(task.name, task.of, "waits", None, f"the model of {needed} is on another machine")
        return Ended(task.name, task.of, str(state.get("state", "open")), state.get("seconds"))

    def pictures(self) -> Iterator[tuple[str, Path]]:
        """The pictures that jobs drew, of the first seed."""
        for picture in self.folder.study.pictures:
            task = self.folder.tasks.get(f"{picture.job}-0")
            if task is not None and self.folder.ended(task) == DONE:
                for file in sorted(task.folder.glob(f"{picture.file}.png")):
                    yield picture.title or file.stem, file


# --- the list of all studies ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StudyList:
    """Studies by name, with the numbers of their files."""

    studies: dict[str, StudyResult]

    def table(self) -> Printed:
        """A row for each study."""
        header = [
            "study",
            "what it shows",
            "data",
            "GPU hours: quick",
            "GPU hours: paper",
            "the paper's numbers",
            "ours",
            "missing",
        ]
        return Printed("Studies", header, [[name, *_row(result)] for name, result in self.studies.items()])

    def sentence(self) -> str:
        """How many there are, and how many can be run."""
        run = sum(result.study.runs for result in self.studies.values())
        machine = " or ".join(dict.fromkeys(result.study.cost.machine for result in self.studies.values()))
        return (
            f"{len(self.studies)} tables and figures; the experiments of {run} of them can be run. GPU hours "
            f"are given for {machine} and "
            'one seed (~ marks an estimate). The columns "the paper\'s numbers" and "ours" show how many such numbers '
            "each table or figure has, and the range of the numbers in its first column or first plot."
        )

    def tables(self) -> Iterator[Printed]:
        """The paper's tables with its numbers and ours."""
        for name, result in self.studies.items():
            for table in result.summary().tables:
                yield table._replace(title=f"{name}: {result.study.title}. {table.title}")


def list_studies(paper: str | None = None) -> StudyList:
    """The studies that come with situs, of one paper or of all."""
    names = [name for name in study_names() if paper is None or name.startswith(f"{paper}-")]
    return StudyList({name: read_study(name) for name in names})


def _row(result: StudyResult) -> list[str | None]:
    study = result.study
    missing = "; ".join(dict.fromkeys(f"{entry.package}: {entry.why}" for entry in study.missing))
    where = f"{study.place}: {study.title}" if study.paper else study.title
    ours = _range(result, lambda cell: cell.mean)
    if ours and study.measured and study.measured.scale != PAPER:
        ours += f" (scale {study.measured.scale})"
    paper = _range(result, lambda cell: None if isinstance(cell.paper, str) else cell.paper)
    return [where, ", ".join(study.data) or "none", *_hours(study), paper, ours, missing or None]


def _range(result: StudyResult, number: Callable[[Cell], float | None]) -> str | None:
    """How many numbers, and the range of the first column or figure: "18; CIFAR-100 64.6 to 84.5 %"."""
    count = sum(number(cell) is not None for _, cell in result.cells())
    if not count:
        return None
    study = result.study
    if study.tables:
        first = study.tables[0].columns[0]
        rows = zip(study.tables[0].rows, result.rows[0], strict=True)
        name, cells = first.name, [cells[0] for row, cells in rows if row.unit in (None, first.unit)]
    else:
        first = study.curves[0]
        name, cells = first.y, [cell for line in result.lines[0] for _, cell in line.points]
    shown = [value for cell in cells if (value := number(cell)) is not None]
    if not shown:
        return f"{count}"
    ends = " to ".join(dict.fromkeys(f"{value:.{first.digits}f}" for value in (min(shown), max(shown))))
    return f"{count}; {name} {ends} {first.unit}".rstrip()


def _hours(study: Study) -> tuple[str | None, str | None]:
    def hours_text(scale: str) -> str | None:
        if scale not in study.cost.minutes:
            return None
        hours = study.cost.minutes[scale] / 60
        return f"{'' if scale in study.cost.measured else '~'}{f'{hours:,.0f}' if hours >= 10 else f'{hours:.2g}'}"

    return hours_text("quick"), hours_text(PAPER)
