"""The list of all studies: what each shows, what it needs, the paper's numbers, ours where measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from situs.results import Table
from situs.studies.form import PAPER, Study
from situs.studies.load import study_names
from situs.studies.result import StudyResult, read_study


@dataclass(frozen=True)
class StudyList:
    """Studies by name, each with the numbers its file holds."""

    studies: dict[str, StudyResult]

    def table(self) -> Table:
        """A row each."""
        header = ["study", "what it shows", "data", "GPU hours: quick", "paper", "numbers", "ours", "missing"]
        return Table("Studies", header, [[name, *_row(found)] for name, found in self.studies.items()])

    def sentence(self) -> str:
        """How many there are, and how many can be run."""
        run = sum(found.study.runs for found in self.studies.values())
        machine = ", ".join(dict.fromkeys(found.study.cost.machine for found in self.studies.values()))
        return (
            f"{len(self.studies)} tables and figures, of which {run} can be run. Hours are of {machine} for one seed; "
            "~: estimated, not measured. numbers: how many the paper prints; ours: how many were measured, and how far "
            "they are from the paper's."
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
    cells = [cell for _, cell in found.cells()]
    printed = sum(not isinstance(cell.paper, str) for cell in cells)
    ours = [cell for cell in cells if cell.mean is not None]
    gaps = [cell.difference for cell in ours if cell.difference is not None]
    told = f"{len(ours)}" + (f" ({min(gaps):+.1f} to {max(gaps):+.1f})" if gaps else "") if ours else None
    if told and study.measured and study.measured.scale != PAPER:
        told += f", {study.measured.scale}"
    missing = "; ".join(dict.fromkeys(f"{each.package}: {each.why}" for each in study.missing))
    where = f"{study.title}" if not study.paper else f"{study.place}: {study.title}"
    return [where, ", ".join(study.data) or "none", *_hours(study), str(printed), told, missing or None]


def _hours(study: Study) -> tuple[str | None, str | None]:
    def told(scale: str) -> str | None:
        if scale not in study.cost.minutes:
            return None
        return f"{'' if scale in study.cost.measured else '~'}{study.cost.minutes[scale] / 60:.2g}"

    return told("quick"), told(PAPER)
