"""The table of a study: in every cell the paper's number, ours over the seeds, and the difference."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from situs.errors import counted, verb
from situs.progress import clock
from situs.results import Figure, Result, Summary, Tone
from situs.results import Table as Printed
from situs.studies.folder import DONE, FAILED, NOT_FINITE, TAKEN
from situs.studies.form import PAPER, PAPERS, Curves, Study, Table, Value

NOTHING = "–"
WIDE = 3
"""Up to this many columns of a paper's table, paper, ours and difference have separate columns."""


LISTED = 4
"""Number of cells without a number that a note lists."""


class Ended(NamedTuple):
    """The state of a task: done, taken, not finite, failed, begun, waits, open. why: the reason if it is not done.

    data: fingerprints of its data sets when it ran.
    """

    name: str
    job: str
    state: str
    seconds: float | None = None
    why: str = ""
    data: Mapping[str, str] = MappingProxyType({})


class Cell(NamedTuple):
    """A cell. paper: its number or text. values: ours by seed, in the paper's unit. why: why seeds are missing."""

    job: str
    paper: Value
    values: dict[int, float]
    digits: int
    reading: float = 0.0
    why: str = ""

    @property
    def mean(self) -> float | None:
        """The mean of ours over the seeds."""
        return statistics.fmean(self.values.values()) if self.values else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation over two seeds or more."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        return None if self.mean is None or isinstance(self.paper, str) else self.mean - self.paper

    def texts(self) -> tuple[str, str, str]:
        """Paper, ours and difference as texts."""
        paper = self.paper if isinstance(self.paper, str) else f"{self.paper:.{self.digits}f}"
        paper += f" (± {self.reading:g})" if self.reading and paper else ""
        ours = "" if self.mean is None else f"{self.mean:.{self.digits}f}"
        ours += "" if self.deviation is None else f" ± {self.deviation:.{max(self.digits, 1)}f}"
        ours = "; ".join(filter(None, (ours, self.why)))
        difference = "" if self.difference is None else f"{self.difference:+.{self.digits}f}"
        return paper or NOTHING, ours or NOTHING, difference or NOTHING

    def to_json(self) -> dict[str, Any]:
        """All numbers of the cell."""
        numbers = {"paper": self.paper if self.paper != "" else None, "ours": self.mean, "deviation": self.deviation}
        numbers |= {"difference": self.difference, "values": {str(seed): v for seed, v in self.values.items()}}
        return {
            **numbers,
            **({"reading": self.reading} if self.reading else {}),
            **({"why": self.why} if self.why else {}),
        }


class Drawn(NamedTuple):
    """A line of a figure. points: x and its cell."""

    name: str
    points: tuple[tuple[float, Cell], ...]


@dataclass(frozen=True)
class StudyResult(Result):
    """A study with its numbers so far. rows: cells by table and row. lines: by figure. drawn: pictures."""

    file: ClassVar[str] = "study"

    name: str
    study: Study
    scale: str
    seeds: int
    tasks: tuple[Ended, ...]
    rows: tuple[tuple[tuple[Cell, ...], ...], ...]
    lines: tuple[tuple[Drawn, ...], ...]
    drawn: tuple[tuple[str, Path], ...] = ()

    @property
    def private(self) -> bool:
        """Whether its page shows pictures that only their owner may read."""
        return any(not file.stat().st_mode & 0o077 for _, file in self.drawn)

    def cells(self) -> Iterator[tuple[str, Cell]]:
        """The name of each cell, and the cell."""
        for table, rows in zip(self.study.tables, self.rows, strict=True):
            for row, cells in zip(table.rows, rows, strict=True):
                for column, cell in zip(table.columns, cells, strict=True):
                    yield f"{row.name}, {column.name}", cell
        for curves, lines in zip(self.study.curves, self.lines, strict=True):
            for line in lines:
                for x, cell in line.points:
                    yield f"{line.name} at {curves.x} {x:g}", cell

    @property
    def title(self) -> str:
        """Of the page."""
        return self.study.title

    @property
    def meaning(self) -> str:
        """What the table shows, and what our numbers are."""
        where = f"{PAPERS[self.study.paper]}, {self.study.place}. " if self.study.paper else ""
        ours = "Our number is the mean over the seeds ± the standard deviation."
        return f"{where}{self.study.shows}\n\n{ours} The difference is our number minus the paper's number."

    @property
    def done(self) -> int:
        """How many jobs have a result."""
        return sum(task.state in (DONE, TAKEN) for task in self.tasks)

    @property
    def tone(self) -> Tone | None:
        """Unsure while jobs are left."""
        return "unsure" if self.done < len(self.tasks) else None

    @property
    def mark(self) -> str:
        """The tone in words."""
        return "Not all jobs are done"

    def figures(self) -> list[Figure]:
        """The lines of each figure, and pictures that jobs drew."""
        pairs = enumerate(zip(self.study.curves, self.lines, strict=True))
        drawn = [Figure("", title, "figures.picture", (file,), section="Pictures") for title, file in self.drawn]
        jobs = Figure("", "", "bars", ({"jobs done": self.done, "jobs in all": len(self.tasks)}, "jobs"))
        curves = [figure for number, pair in pairs if (figure := _lines(*pair, number)) is not None]
        return [*(curves or [jobs]), *drawn]

    def details(self) -> list[Printed]:
        """The state of each job."""
        rows = [
            [task.name, task.state, None if task.seconds is None else clock(task.seconds), task.why or None]
            for task in self.tasks
        ]
        return [Printed("Jobs", ["job", "state", "time", "why"], rows)] if rows else []

    def summary(self) -> Summary:
        """Progress and agreement with the paper; a table for each of the paper's; notes."""
        tables = [_printed(table, rows) for table, rows in zip(self.study.tables, self.rows, strict=True)]
        for curves, lines in zip(self.study.curves, self.lines, strict=True):
            tables += _points(curves, lines)
        jobs = ((f"{self.done} of {len(self.tasks)}", "jobs done"),)
        return Summary(f"{self._progress()}{self._nearness()}", tuple(tables), tuple(self._notes()), jobs)

    @property
    def unread(self) -> list[str]:
        """The cells without a number although all runs of their job are done."""
        open_ = {task.job for task in self.tasks if task.state != DONE}
        jobs = {task.job for task in self.tasks} - open_
        return [where for where, cell in self.cells() if cell.job in jobs and cell.why]

    def _progress(self) -> str:
        measured = self.study.measured
        seeded = counted(self.seeds, "seeds")
        if not self.tasks and measured is None:
            return "Our numbers have not been measured."
        if not self.tasks and measured is not None:
            machine, scale = measured.machine, measured.scale
            return f"Our numbers were measured at scale {scale} with {seeded} ({measured.date}, {machine})."
        counts = {state: sum(task.state == state for task in self.tasks) for state in (DONE, TAKEN, NOT_FINITE, FAILED)}
        other = ", ".join(f"{count} {state}" for state, count in counts.items() if count and state != DONE)
        seconds = sum(task.seconds or 0 for task in self.tasks)
        done = f"{counts[DONE]} of {counted(len(self.tasks), 'jobs')} {verb(counts[DONE], 'are')} done"
        text = f"{done}{other and f' ({other})'}, in {clock(seconds)}"
        return f"{text}, at scale {self.scale} with {seeded}."

    def _nearness(self) -> str:
        """Agreement with the paper, over the cells with all their seeds; only at the paper's scale."""
        compared = [(abs(cell.difference), where, cell) for where, cell in self.cells() if cell.difference is not None]
        compared = [entry for entry in compared if not entry[2].why]
        if not compared or self.scale != PAPER:
            return ""
        within = sum(gap <= max(cell.reading, 0.5 * 10**-cell.digits) for gap, _, cell in compared)
        gap, where, cell = max(compared, key=lambda entry: entry[0])
        agree = (
            f"{within} {verb(within, 'agree')} with the paper (up to half of the paper's last digit, or up to the "
            "error of reading the paper's plots)"
        )
        text = f" Of {counted(len(compared), 'numbers')} {agree}"
        return f"{text}; the largest difference ({where}) is {gap:.{cell.digits}f}."

    def _notes(self) -> Iterator[str]:
        if self.study.note:
            yield self.study.note
        if self.scale != PAPER and any(cell.difference is not None for _, cell in self.cells()):
            yield (
                f"At scale {self.scale} the jobs are smaller than the jobs of the paper, so the differences from the "
                "paper's numbers mean little."
            )
        if not self.tasks and self.study.measured and self.study.measured.note:
            yield f"On our numbers: {self.study.measured.note}."
        for task in self.tasks:
            if task.state in (NOT_FINITE, FAILED):
                yield f"{task.name} {'was not finite' if task.state == NOT_FINITE else 'failed'}: {task.why}."
        for name in self.study.data:
            of = {
                task.data[name]: task.name for task in reversed(self.tasks) if task.state == DONE and name in task.data
            }
            if len(of) > 1:
                yield f"Not all of these jobs used the same data for {name}: {', '.join(reversed(of.values()))}."
        if unread := self.unread:
            lost = f"{counted(len(unread), 'numbers')} of finished jobs {verb(len(unread), 'were')} not found"
            yield f"{lost}: {'; '.join(unread[:LISTED])}."
        for entry in self.study.missing:
            names = ", ".join((*entry.rows, *entry.columns)) or "the whole study"
            yield f"Missing: {names} needs {entry.package}: {entry.why}."

    def ours(self) -> Iterator[str]:
        """The rows and lines with our numbers, in the form of the study's file: `ours = [81.2, [7.1, 7.3], ""]`."""

        def text_of(cell: Cell) -> str:
            numbers = [f"{value:.{max(cell.digits, 1)}f}" for _, value in sorted(cell.values.items())]
            return f"[{', '.join(numbers)}]" if len(numbers) > 1 else "".join(numbers) or '""'

        def lines_of(name: str, cells: Sequence[Cell]) -> Iterator[str]:
            if any(cell.mean is not None for cell in cells):
                yield f"{name}: ours = [{', '.join(map(text_of, cells))}]"

        for table, rows in zip(self.study.tables, self.rows, strict=True):
            for row, cells in zip(table.rows, rows, strict=True):
                yield from lines_of(row.name, cells)
        for curves, lines in zip(self.study.curves, self.lines, strict=True):
            for line, form in zip(lines, curves.lines, strict=True):
                yield from lines_of(line.name, [cell for _, cell in line.points] if form.at else [])

    def numbers(self) -> dict[str, Any]:
        """Every cell and point with all seeds, and the state of each job."""
        return {
            "study": self.name,
            "title": self.study.title,
            "paper": self.study.paper,
            "place": self.study.place,
            "scale": self.scale,
            "seeds": self.seeds,
            "tables": [
                {
                    row.name: {c.name: cell.to_json() for c, cell in zip(table.columns, cells, strict=True)}
                    for row, cells in zip(table.rows, rows, strict=True)
                }
                for table, rows in zip(self.study.tables, self.rows, strict=True)
            ],
            "curves": [
                {line.name: [{"x": x, **cell.to_json()} for x, cell in line.points] for line in lines}
                for lines in self.lines
            ],
            "jobs": {
                task.name: {**{k: v for k, v in task._asdict().items() if k != "name"}, "data": dict(task.data)}
                for task in self.tasks
            },
        }


def _printed(table: Table, rows: Sequence[Sequence[Cell]]) -> Printed:
    """A table with three columns for each of the paper's, or three numbers in one cell where they are many; without
    a paper, ours alone."""
    alone = not any(row.paper for row in table.rows)
    wide = len(table.columns) <= WIDE and not alone
    by_row = any(row.unit is not None for row in table.rows)
    header = [table.corner]
    for column in table.columns:
        name = _named(column.name, "" if by_row else column.unit)
        header += (f"{name}: paper", "ours", "difference") if wide else (name,)
    body: list[list[str | None]] = []
    for row, cells in zip(table.rows, rows, strict=True):
        three = [cell.texts() for cell in cells]
        texts = [t for triple in three for t in triple] if wide else [e[1] if alone else " | ".join(e) for e in three]
        unit = table.columns[0].unit if row.unit is None else row.unit
        body.append([_named(row.name, unit if by_row else ""), *(None if text == NOTHING else text for text in texts)])
    title = table.title or ("Ours" if alone else "Paper, ours, difference")
    if not wide and not alone:
        title = f"{table.title} (paper | ours | difference)" if table.title else "Paper | ours | difference"
    return Printed(title, header, body)


def _named(name: str, unit: str) -> str:
    return f"{name}, {unit}" if unit else name


def _points(curves: Curves, lines: Sequence[Drawn]) -> Iterator[Printed]:
    """A figure's points as a table, without the lines that are lists of a job's output."""
    body = [
        [line.name, f"{x:g}", *cell.texts()]
        for line, form in zip(lines, curves.lines, strict=True)
        if form.at
        for x, cell in line.points
    ]
    name = _named(curves.y, curves.unit)
    header = ["line", curves.x, f"{name}: paper", "ours", "difference"]
    if body and not any(line.paper for line in curves.lines):
        header, body = [*header[:2], name], [[*row[:2], row[3]] for row in body]
    if body:
        yield Printed(curves.title or curves.y, header, body)


def _lines(curves: Curves, lines: Sequence[Drawn], number: int) -> Figure | None:
    """The paper's lines and ours; None if there are no numbers."""
    series: dict[str, tuple[list[float], list[float]]] = {}
    alone = not any(line.paper for line in curves.lines)
    for line in lines:
        paper = [(x, float(cell.paper)) for x, cell in line.points if not isinstance(cell.paper, str)]
        ours = [(x, cell.mean) for x, cell in line.points if cell.mean is not None]
        for name, points in ((f"{line.name}, paper", paper), (line.name if alone else f"{line.name}, ours", ours)):
            if points:
                series[name] = ([x for x, _ in points], [y for _, y in points])
    if not series:
        return None
    read = f" The paper's numbers were read from the paper's figure (± {curves.reading:g})." if curves.reading else ""
    caption = f"{curves.y[:1].upper()}{curves.y[1:]} over {curves.x}.{read}"
    values, options = (
        (series, curves.x, _named(curves.y, curves.unit)),
        {"title": curves.title, "x_scale": curves.scale},
    )
    return Figure(f"curves{number or ''}", caption, "figures.curves", values, options, "Curves")
