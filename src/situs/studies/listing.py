"""The list of all studies: what they show, what they need, the paper's numbers and ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from situs.results import Table
from situs.studies.form import PAPER, Study
from situs.studies.load import study_names
from situs.studies.reading import read_study
from situs.studies.result import Cell, StudyResult


@dataclass(frozen=True)
class StudyList:
    """Studies by name, with the numbers of their files."""

    studies: dict[str, StudyResult]

    def table(self) -> Table:
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
        return Table("Studies", header, [[name, *_row(result)] for name, result in self.studies.items()])

    def sentence(self) -> str:
        """How many there are, and how many can be run."""
        run = sum(result.study.runs for result in self.studies.values())
        machine = " or ".join(dict.fromkeys(result.study.cost.machine for result in self.studies.values()))
        return (
            f"{len(self.studies)} tables and figures; {run} of them can be run. Hours are for {machine} and one "
            "seed (~: estimated). Numbers: their count, and the range of the first column."
        )

    def tables(self) -> Iterator[Table]:
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
