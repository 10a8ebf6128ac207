"""The page of `situs report`: runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from situs.analyze.runs import Run, best, curve, last, metric_names, speed, split_configs
from situs.config import flat
from situs.report.figures import png
from situs.report.html import Page, Section
from situs.report.runs import curve_panels
from situs.results import Cell, percent
from situs.train.log import clock

_JUDGED = ("val_", "knn", "accuracy")
"""Metrics with one of these in their names measure what runs of one kind may be compared by."""

_SPEED_LABELS = {
    "device": "device",
    "processes": "processes",
    "precision": "precision",
    "torch": "torch",
    "global_batch": "batch",
    "images_per_second": "images a second (median)",
    "data_wait": "waiting for data (median)",
    "memory_gib": "largest memory",
    "seconds": "time",
}


def runs_numbers(runs: Sequence[Run]) -> dict[str, Any]:
    """What the page says, as JSON holds it."""
    names = metric_names(runs)
    return {
        "runs": [
            {
                "name": run.name,
                "method": run.method,
                "status": run.status,
                "finished": run.finished,
                "step": run.step,
                "total_steps": run.total,
                "last": {name: value for name in names if (value := last(run, name)) is not None},
                "best": {
                    name: {"value": found[0], "step": found[1]}
                    for name in names
                    if name != "lr" and (found := best(run, name)) is not None
                },
                "speed": speed(run),
                "results": [result.name for result in run.results],
            }
            for run in runs
        ],
        "config_differences": split_configs(runs)[0],
    }


STATUS = ("run", "method", "how far", "time", "last loss")
"""What the columns of `status_rows` are."""


def status_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Run, method, how far it came, time and its last loss, as text."""
    rows = []
    for run in runs:
        seconds, loss = last(run, "seconds"), last(run, "loss")
        rows.append([run.name, run.method, run.status, "" if seconds is None else clock(seconds), _short(loss)])
    return rows


def runs_page(runs: Sequence[Run], over: str = "epoch") -> tuple[Page, dict[str, bytes]]:
    """The page, and its figures by name. over: "epoch" or "step"."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs side by side"
    page = Page(f"Report: {title}", lead=_lead(runs))
    section = page.section("Runs").table(STATUS, [[cell or None for cell in row] for row in status_rows(runs)])
    if len({run.method for run in runs}) > 1:
        section.note("These runs learn by different methods: their losses measure different things.")
    pictures = _curves(page.section("Curves"), runs, over)
    _finals(page.section("Final numbers"), runs)
    _speeds(page.section("Machine and speed"), runs)
    _configs(page.section("Configs"), runs)
    _results(page, runs)
    return page, pictures


def _lead(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return f"{runs[0].method}: {runs[0].status}.{_went(runs[0])}"
    done = sum(run.finished for run in runs)
    text = f"{done} of {len(runs)} runs are finished." if done < len(runs) else f"All {len(runs)} runs are finished."
    return text + _ranked(runs)


def _went(run: Run) -> str:
    """Where the loss and the judged metrics of one run went."""
    said = ""
    for name in metric_names([run]):
        values = curve(run, name, "step")[1]
        if len(values) > 1 and (name == "loss" or _is_judged(name)):
            said += f" {_spoken(name).capitalize()} went from {_short(values[0])} to {_short(values[-1])}."
    return said


def _ranked(runs: Sequence[Run]) -> str:
    """The judged metrics that all runs have: the best and the worst run, or all values where methods differ."""
    said = ""
    same = len({run.method for run in runs}) == 1
    for name in metric_names(runs):
        values = {run.name: last(run, name) for run in runs}
        found = {run: value for run, value in values.items() if value is not None}
        if len(found) < len(runs) or not _is_judged(name):
            continue
        order = sorted(found, key=found.__getitem__, reverse="loss" not in name)
        if same or name.startswith(("val_", "knn")):
            ends = " and worst in ".join(f"{run} ({_short(found[run])})" for run in (order[0], order[-1]))
            said += f" {_spoken(name).capitalize()} is best in {ends}."
        else:
            listed = ", ".join(f"{_short(value)} in {run}" for run, value in found.items())
            said += f" {_spoken(name).capitalize()}, each method on its own task: {listed}."
    return said


def _is_judged(name: str) -> bool:
    return any(part in name for part in _JUDGED)


def _spoken(name: str) -> str:
    return name.replace("_", " ")


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _curves(section: Section, runs: Sequence[Run], over: str) -> dict[str, bytes]:
    panels = {}
    for name in metric_names(runs):
        lines = {run.name: found for run in runs if (found := curve(run, name, over))[0]}
        if lines:
            panels["learning rate" if name == "lr" else _spoken(name)] = lines
    picture = png(curve_panels(panels, over))
    waiting = [run.name for run in runs if not run.records]
    if waiting:
        section.text(f"Nothing is logged yet by {', '.join(waiting)}.")
    section.figure(
        picture,
        "What the runs logged. Loss, accuracy and gradient norm of training are means over the steps between two "
        "points.",
        alt="Curves of " + ", ".join(panels),
    )
    return {"curves": picture}


def _finals(section: Section, runs: Sequence[Run]) -> None:
    names = [name for name in metric_names(runs) if name != "lr"]
    header = ["metric", *(run.name for run in runs)]
    section.table(header, [[_spoken(name), *(last(run, name) for run in runs)] for name in names], "Last values.")
    judged = [name for name in names if _is_judged(name)]
    passed = [name for name in judged if any(_is_past_its_best(run, name) for run in runs)]
    if passed:
        rows = [[_spoken(name), *(_at(run, name) for run in runs)] for name in passed]
        section.table(header, rows, "Best values where the last is not the best, and the step each was reached at.")


def _is_past_its_best(run: Run, name: str) -> bool:
    found = best(run, name)
    return found is not None and found[0] != last(run, name)


def _at(run: Run, name: str) -> str | None:
    found = best(run, name)
    return None if found is None else f"{found[0]:.4g} (step {found[1]:,})"


def _speeds(section: Section, runs: Sequence[Run]) -> None:
    found = [speed(run) for run in runs]
    rows: list[list[Cell]] = []
    for key, label in _SPEED_LABELS.items():
        values = [_speed_cell(key, each[key]) for each in found]
        if any(value is not None for value in values):
            rows.append([label, *values])
    section.table(["", *(run.name for run in runs)], rows, "From the log and the newest checkpoint of each run.")
    if all(each["device"] is None for each in found):
        section.text("The machine is told by checkpoints, and these have none or are older than that.")


def _speed_cell(key: str, value: Any) -> Cell:
    if value is None:
        return None
    forms = {
        "images_per_second": lambda v: f"{v:,.0f}",
        "data_wait": lambda v: percent(v, 0),
        "memory_gib": lambda v: f"{v:.2f} GiB",
        "seconds": clock,
    }
    return forms[key](value) if key in forms else value


def _configs(section: Section, runs: Sequence[Run]) -> None:
    differing, shared = split_configs(runs)
    if len(runs) > 1 and differing:
        rows = [[f"`{field}`", *(_config_cell(value) for value in values)] for field, values in differing.items()]
        section.table(["field", *(run.name for run in runs)], rows, "Only the fields in which the runs differ.")
    elif len(runs) > 1:
        section.text("The configs are equal in every field.")
    if shared:
        lines = "\n".join(f"{field} = {_config_cell(value)}" for field, value in shared.items())
        what = f"{len(shared)} fields that all runs share" if len(runs) > 1 else f"All {len(shared)} fields"
        section.fold(what, lines)


def _config_cell(value: Any) -> str:
    return "–" if value is None else str(value)


def _results(page: Page, runs: Sequence[Run]) -> None:
    """What verbs left in the run folders, one section a result, runs side by side."""
    for name in dict.fromkeys(result.name for run in runs for result in run.results):
        section = page.section(f"Result: {name}")
        held = {run.name: result for run in runs for result in run.results if result.name == name}
        scalars = {run: _scalars(result.numbers) for run, result in held.items()}
        keys = dict.fromkeys(key for numbers in scalars.values() for key in numbers)
        if keys:
            rows = [[_spoken(key), *(numbers.get(key) for numbers in scalars.values())] for key in keys]
            section.table(["", *held], rows, f"Single numbers of {name}.json.")
        for run, result in held.items():
            for picture, content in result.pictures.items():
                section.figure(content, f"{run}: {picture}")


def _scalars(numbers: dict[str, Any]) -> dict[str, Cell]:
    """The single numbers of a result, those in tables of tables too; lists are left to the result's own page."""
    return {
        key: value
        for key, value in flat(numbers).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
