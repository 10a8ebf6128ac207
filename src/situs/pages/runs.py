"""The page of runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from situs.measure.runs import (
    MAJORITY,
    Best,
    Run,
    Runs,
    best,
    curve,
    is_held_out,
    is_judged,
    last,
    metric_names,
    speed,
    split_configs,
    spoken,
)
from situs.progress import clock
from situs.report.figures import curve_panels
from situs.report.html import Page, Section
from situs.results import Cell, percent
from situs.train.log import rate

_SPEED: dict[str, tuple[str, Callable[[Any], Cell]]] = {
    "device": ("device", str),
    "processes": ("processes", int),
    "precision": ("precision", str),
    "torch": ("torch", str),
    "global_batch": ("batch", int),
    "images_per_second": ("images per second (median)", rate),
    "data_wait": ("waiting for data (median)", lambda share: percent(share, 0)),
    "memory_gib": ("largest memory", "{:.2f} GiB".format),
    "seconds": ("time", clock),
}
"""Keys of `speed` -> their titles and how they are shown."""


def page(report: Runs) -> Page:
    """Curves, tables, configs, and speed."""
    runs, summary = report.runs, report.summary()
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    page = Page(f"Report: {title}", lead=summary.sentence)
    for run in runs[:4]:
        names = [name for name in metric_names([run]) if is_judged(name)] or ["loss"]
        name = "val_top1" if "val_top1" in names else names[0]
        value, largest = last(run, name), last(run, MAJORITY)
        if value is not None:
            beside = "" if largest is None else f" (largest class {largest:.4g})"
            page.number(f"{value:.4g}", f"last {spoken(name)}, {run.name}{beside}")
    section = page.section("Runs").table(summary.tables[0].header, summary.tables[0].rows)
    if len({run.method for run in runs}) > 1:
        section.note("These runs use different methods, so their losses cannot be compared.")
    _curves(page, runs, report.over)
    _finals(page.section("Final numbers"), runs)
    _speeds(page.section("Machine and speed"), runs)
    _configs(page.section("Configs"), runs)
    return page


def _curves(page: Page, runs: Sequence[Run], over: str) -> None:
    section = page.opening
    held_out, training, marks = {}, {}, {}
    for name in metric_names(runs):
        lines = {run.name: line for run in runs if (line := curve(run, name, over))[0]}
        if name == "val_top1" and (levels := {run.name: curve(run, MAJORITY, over) for run in runs}):
            lines |= {f"largest class, {run}": level for run, level in levels.items() if level[0]}
        if not lines or name == MAJORITY:
            continue
        if is_held_out(name):
            held_out[spoken(name)] = lines
            bests = {run.name: best(run, name) for run in runs}
            marks[spoken(name)] = {
                run: (x, point.value)
                for run, point in bests.items()
                if point is not None and (x := getattr(point, over)) is not None
            }
        else:
            training["learning rate" if name == "lr" else spoken(name)] = lines
    waiting = [run.name for run in runs if not run.records]
    if waiting:
        section.text(f"Nothing logged yet: {', '.join(waiting)}.")
    if not held_out and not training:
        section.text("There are no logged numbers to draw.")
    if held_out:
        section.figure(
            curve_panels(held_out, over, marks=marks),
            f"These values were measured during training, on held-out samples. A ring marks the best {over} of each "
            "run.",
            alt="Curves of " + ", ".join(held_out),
            name="held-out",
        )
    if training:  # one picture on the first screen
        section = page.section("Training curves") if held_out else section
        section.figure(
            curve_panels(training, over),
            "Logged values. Each point of loss, accuracy and gradient norm is the mean over the steps since the "
            "previous point.",
            alt="Curves of " + ", ".join(training),
            name="curves",
        )


def _finals(section: Section, runs: Sequence[Run]) -> None:
    names = [name for name in metric_names(runs) if name != "lr"]
    header = ["metric", *(run.name for run in runs)]
    section.table(header, [[spoken(name), *(last(run, name) for run in runs)] for name in names], "Last values.")
    bests = {name: [best(run, name) for run in runs] for name in names if is_judged(name)}
    rows = [
        [spoken(name), *map(_at, points)]
        for name, points in bests.items()
        if any(point and point.value != last(run, name) for run, point in zip(runs, points, strict=True))
    ]
    if rows:
        section.table(header, rows, "Best values and their steps. Metrics whose last value is the best are left out.")


def _at(point: Best | None) -> str | None:
    if point is None:
        return None
    epoch = "" if point.epoch is None else f"epoch {point.epoch:g}, "
    return f"{point.value:.4g} ({epoch}step {point.step:,})"


def _speeds(section: Section, runs: Sequence[Run]) -> None:
    speeds = [speed(run) for run in runs]
    rows: list[list[Cell]] = []
    for key, (label, form) in _SPEED.items():
        values = [None if facts[key] is None else form(facts[key]) for facts in speeds]
        if any(value is not None for value in values):
            rows.append([label, *values])
    caption = "These values are from the log and the newest checkpoint of each run."
    section.table(["", *(run.name for run in runs)], rows, caption)
    if all(facts["device"] is None for facts in speeds):
        section.text("The device is unknown, because these runs have no checkpoint, or a checkpoint of an old version.")


def _configs(section: Section, runs: Sequence[Run]) -> None:
    differing, shared = split_configs(runs)
    if len(runs) > 1 and differing:
        rows = [[f"`{field}`", *(_config_cell(value) for value in values)] for field, values in differing.items()]
        section.table(["field", *(run.name for run in runs)], rows, "Fields in which the runs differ.")
    elif len(runs) > 1:
        section.text("The configs are equal in every field.")
    if shared:
        lines = "\n".join(f"{field} = {_config_cell(value)}" for field, value in shared.items())
        what = f"{len(shared)} fields that all runs share" if len(runs) > 1 else f"All {len(shared)} fields"
        section.fold(what, Section("").code(lines))


def _config_cell(value: Any) -> str:
    return "–" if value is None else str(value)
