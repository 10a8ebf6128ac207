"""The page of a study: the paper's table with three numbers per cell, curves, images, and the state of each job."""

from __future__ import annotations

from situs.progress import clock
from situs.report.figures import curves as draw_curves
from situs.report.html import Page, Section
from situs.results import percent
from situs.studies.form import PAPERS, Curves
from situs.studies.result import Drawn, StudyResult


def page(result: StudyResult) -> Page:
    """Tables first, then curves, images and jobs."""
    summary, study = result.summary(), result.study
    where = f"{PAPERS[study.paper]}, {study.place}. " if study.paper else ""
    page = Page(study.title, lead=f"{summary.sentence}\n\n{where}{study.shows}")
    done = sum(task.state in ("done", "taken") for task in result.tasks)
    page.number(f"{done} of {len(result.tasks)}", "jobs done")
    if result.tasks and done < len(result.tasks):
        page.judge("unsure", "Not all jobs are done")
    section = page.section(study.place or "Results")
    for table in summary.tables[: len(study.tables)]:
        section.table(table.header, table.rows, table.title)
    section.note(*summary.notes)
    if study.curves:
        section = page.section("Curves")
        for number, (curves, lines) in enumerate(zip(study.curves, result.lines, strict=True)):
            _draw(section if number else page.opening, curves, lines, number)
        for table in summary.tables[len(study.tables) :]:
            section.table(table.header, table.rows, table.title)
    if result.drawn:
        section = page.section("Pictures")
        for title, file in result.drawn:
            section.figure(file.read_bytes(), title)
    if not page.opening.blocks:
        page.opening.bars({"jobs done": done, "jobs in all": len(result.tasks)}, "jobs")
    _jobs(page.section("Jobs"), result)
    return page.end(
        {
            **result.provenance.facts,
            "study": result.name,
            "scale": result.scale,
            "seeds": result.seeds,
            "ours": "mean over the seeds ± standard deviation; the difference is our number minus the paper's number",
        }
    )


def _draw(section: Section, curves: Curves, lines: tuple[Drawn, ...], number: int) -> None:
    """The paper's lines and ours; nothing if there are no numbers."""
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
    read = f" The paper's numbers were read from its figure (± {curves.reading:g})." if curves.reading else ""
    section.figure(figure, f"{curves.y[:1].upper()}{curves.y[1:]} over {curves.x}.{read}", name=f"curves{number or ''}")


def _jobs(section: Section, result: StudyResult) -> None:
    done = sum(task.state in ("done", "taken") for task in result.tasks)
    if not result.tasks:
        section.text("No job was run.")
        return
    rows = [
        [task.name, task.state, None if task.seconds is None else clock(task.seconds), task.why or None]
        for task in result.tasks
    ]
    section.table(["job", "state", "time", "why"], rows, f"{percent(done / len(rows), 0)} of the jobs are done.")
