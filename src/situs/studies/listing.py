"""The list of all studies: what each shows, what it needs, the paper's numbers, ours where measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from situs.results import Table
from situs.studies.form import PAPER, Study
from situs.studies.load import study_names
from situs.studies.reading import read_study
from situs.studies.result import StudyResult


@dataclass(frozen=True)
class StudyList:
    """Studies by name, each with the numbers its file holds."""

    studies: dict[str, StudyResult]

    def table(self) -> Table:
        """A row each."""
        header = [
            "study",
            "what it shows",
            "data",
            "GPU hours: quick",
            "paper",
            "the paper's numbers",
            "ours",
            "missing",
        ]
        return Table("Studies", header, [[name, *_row(found)] for name, found in self.studies.items()])

    def sentence(self) -> str:
        """How many there are, and how many can be run."""
        run = sum(found.study.runs for found in self.studies.values())
        machine = ", ".join(dict.fromkeys(found.study.cost.machine for found in self.studies.values()))
        return (
            f"{len(self.studies)} tables and figures, of which {run} can be run. Hours are of {machine} for one seed; "
            "~: estimated, not measured. Of the numbers: how many, and the range of the first column."
        )

    def tables(self) -> Iterator[Table]:
        """The paper's tables with its numbers and ours."""
        for name, found in self.studies.items():
            for table in found.summary().tables:
                yield table._replace(title=f"{name}: {found.study.title}. {table.title}")


def list_studies(paper: str | None = None) -> StudyList:
    """The studies that come with situs, of one paper or of all."""
    names = [name for name in study_names() if paper is None or name.startswith(f"{paper}-")]
    return StudyList({name: read_study(name) for name in names})


def _row(found: StudyResult) -> list[str | None]:
    study = found.study
    missing = "; ".join(dict.fromkeys(f"{each.package}: {each.why}" for each in study.missing))
    where = f"{study.place}: {study.title}" if study.paper else study.title
    ours = _told([(where, cell.mean) for where, cell in found.cells()], found)
    if ours and study.measured and study.measured.scale != PAPER:
        ours += f" (scale {study.measured.scale})"
    paper = _told(
        [(where, None if isinstance(cell.paper, str) else cell.paper) for where, cell in found.cells()], found
    )
    return [where, ", ".join(study.data) or "none", *_hours(study), paper, ours, missing or None]


def _told(values: list[tuple[str, float | None]], found: StudyResult) -> str | None:
    """How many numbers, and of the first column or figure their range: "18; CIFAR-100 64.6 to 84.5 %"."""
    known = [(where, value) for where, value in values if value is not None]
    if not known:
        return None
    study = found.study
    if study.tables:
        column = study.tables[0].columns[0]
        name, unit, digits, end = column.name, column.unit, column.digits, f", {column.name}"
        other = tuple(f"{row.name}, " for row in study.tables[0].rows if row.unit not in (None, unit))
    else:
        curves = study.curves[0]
        name, unit, digits, end, other = curves.y, curves.unit, curves.digits, "", ()
    shown = [value for where, value in known if where.endswith(end) and not where.startswith(other)]
    if not shown:
        return f"{len(known)}"
    ends = " to ".join(dict.fromkeys(f"{value:.{digits}f}" for value in (min(shown), max(shown))))
    return f"{len(known)}; {name} {ends} {unit}".rstrip()


def _hours(study: Study) -> tuple[str | None, str | None]:
    def told(scale: str) -> str | None:
        if scale not in study.cost.minutes:
            return None
        hours = study.cost.minutes[scale] / 60
        return f"{'' if scale in study.cost.measured else '~'}{f'{hours:,.0f}' if hours >= 10 else f'{hours:.2g}'}"

    return told("quick"), told(PAPER)
