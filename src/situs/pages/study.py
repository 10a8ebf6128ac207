"""The page of a study: the paper's table with three numbers a cell, its curves, what was drawn, how each job ended."""

from __future__ import annotations

from situs.progress import clock
from situs.report.figures import curves as draw_curves
from situs.report.html import Page, Section
from situs.results import percent
from situs.studies.form import PAPERS, Curves
from situs.studies.result import Drawn, StudyResult


def page(found: StudyResult) -> Page:
    """Tables first, curves below."""
    said, study = found.summary(), found.study
    where = f"{PAPERS[study.paper]}, {study.place}. " if study.paper else ""
    page = Page(study.title, lead=f"{said.sentence}\n\n{where}{study.shows}")
    done = sum(task.state in ("done", "taken") for task in found.tasks)
    page.number(f"{done} of {len(found.tasks)}", "jobs done")
    if found.tasks and done < len(found.tasks):
        page.judge("unsure", "Not all jobs are done")
    section = page.section(study.place or "Results")
    for table in said.tables[: len(study.tables)]:
        section.table(table.header, table.rows, table.title)
    section.note(*said.notes)
    if study.curves:
        section = page.section("Curves")
        for number, (curves, lines) in enumerate(zip(study.curves, found.lines, strict=True)):
            _draw(section if number else page.opening, curves, lines, number)
        for table in said.tables[len(study.tables) :]:
            section.table(table.header, table.rows, table.title)
    if found.drawn:
        section = page.section("Pictures")
        for title, file in found.drawn:
            section.figure(file.read_bytes(), title)
    if not page.opening.blocks:
        page.opening.bars({"jobs done": done, "jobs in all": len(found.tasks)}, "jobs")
    _jobs(page.section("Jobs"), found)
    return page.end(
        {
            **found.provenance.facts,
            "study": found.name,
            "scale": found.scale,
            "seeds": found.seeds,
            "ours": "the mean over the seeds ± their standard deviation; the difference is ours less the paper's",
        }
    )


def _draw(section: Section, curves: Curves, lines: tuple[Drawn, ...], number: int) -> None:
    """The paper's lines beside ours; nothing where there is no number of either."""
    series: dict[str, tuple[list[float], list[float]]] = {}
    alone = not any(line.paper for line in curves.lines)
    for line in lines:
        paper = [(x, float(cell.paper)) for x, cell in line.points if not isinstance(cell.paper, str)]
        ours = [(x, cell.mean) for x, cell in line.points if cell.mean is not None]
        for name, points in ((f"{line.name}, paper", paper), (line.name if alone else f"{line.name}, ours", ours)):
            if points:
                series[name] = ([x for x, _ in points], [y for _, y in points])
    if not series:
        return
    unit = f", {curves.unit}" if curves.unit else ""
    figure = draw_curves(series, curves.x, f"{curves.y}{unit}", title=curves.title)
    if curves.scale == "log":
        figure.axes[0].set_xscale("log")
    read = f" The paper's numbers were read from its axis (± {curves.reading:g})." if curves.reading else ""
    section.figure(figure, f"{curves.y[:1].upper()}{curves.y[1:]} over {curves.x}.{read}", name=f"curves{number or ''}")


def _jobs(section: Section, found: StudyResult) -> None:
    done = sum(task.state in ("done", "taken") for task in found.tasks)
    if not found.tasks:
        section.text("None was run.")
        return
    rows = [
        [task.name, task.state, None if task.seconds is None else clock(task.seconds), task.why or None]
        for task in found.tasks
    ]
    section.table(["job", "state", "time", "why"], rows, f"{percent(done / len(rows), 0)} are done.")
