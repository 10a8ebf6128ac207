"""What run folders hold: curves, configs, progress, speed, machine.

Nothing is trained or loaded here. A run that is still going, was killed or broke is read like any other, and says which
of these it is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from situs.config import flat
from situs.errors import SitusError, counted, unknown_name
from situs.models.model import identity_of
from situs.progress import clock
from situs.results import Cell, Figure, Origin, Provenance, Result, Summary, Table, percent, show
from situs.train.checkpoint import RunFolder, read_config
from situs.train.checkpoint.files import read_table
from situs.train.log import rate
from situs.train.run import is_run

PLACES = ("step", "epoch")
"""What the curves may run over."""

ASIDE = ("seconds", "images_per_second", "data_wait", "memory_gib", "loss_scale")
"""Numbers of a record about speed and memory, not about learning."""

JUDGED = ("val_", "knn", "accuracy")
"""Runs of one method may be compared by metrics with one of these in their names."""

MAJORITY = "val_majority"
"""The share of the validation split's largest class: a number of the data, not of a run."""

Curve = tuple[list[float], list[float]]


class Best(NamedTuple):
    """A metric's best value, and the step and epoch at which it was logged."""

    value: float
    step: int
    epoch: float | None


@dataclass(frozen=True)
class Run:
    """One run folder. name: short, and unique among the runs read together.

    records: the lines of its log. state: the facts of its newest checkpoint, {} where there is none. bad_step: the last
    one that was not finite, saved in its folder; a run may have been resumed since.
    """

    name: str
    config: dict[str, Any]
    records: list[dict[str, Any]]
    state: dict[str, Any]
    bad_step: float | None

    @property
    def method(self) -> str:
        """The method's name and the losses added to it, as in "supervised + mp3:weight=0.1"."""
        return " + ".join(
            [str(self.config.get("method", {}).get("name", "unknown")), *(self.config.get("added") or ())]
        )

    @property
    def step(self) -> int:
        """The last step in the log."""
        return max((record["step"] for record in self.records), default=0)

    @property
    def total(self) -> int | None:
        """The last step of the training, if known."""
        if "total_steps" in self.state:
            return self.state["total_steps"]
        train = self.config.get("train", {})
        ends = [train["max_steps"]] if train.get("max_steps") else []
        dated = [record for record in self.records if record.get("epoch")]
        if dated and train.get("epochs"):
            ends.append(train["epochs"] * round(dated[-1]["step"] / dated[-1]["epoch"]))
        return min(ends) if ends else None

    @property
    def stopped(self) -> bool:
        """Whether a step with a loss that was not finite ended it, and it was not resumed past that step."""
        return self.bad_step is not None and self.step < self.bad_step

    @property
    def finished(self) -> bool:
        """Whether its log reaches its end."""
        return self.total is not None and self.step >= self.total and not self.stopped

    @property
    def status(self) -> str:
        """One clause about its progress."""
        if not self.records:
            return "has logged nothing yet"
        if self.stopped:
            return f"ended after step {self.step:,}: the loss was not finite"
        if self.finished:
            return f"finished, {counted(self.step, 'steps')}"
        end = "" if self.total is None else f" of {self.total:,}"
        return f"not finished: step {self.step:,}{end} (running or stopped)"


@dataclass(frozen=True)
class Runs(Result):
    """Runs side by side. over: what their curves run over, epoch or step."""

    file: ClassVar[str] = "runs"
    runs: Sequence[Run]
    over: str = "epoch"

    def summary(self) -> Summary:
        """Progress and results of the runs; a row for each."""
        runs, done = self.runs, sum(run.finished for run in self.runs)
        if len(runs) == 1:
            sentence = f"{runs[0].method}: {runs[0].status}.{_went(runs[0])}"
        else:
            finished = f"{done} of" if done < len(runs) else "All"
            sentence = f"{finished} {len(runs)} runs are finished.{_ranked(runs)}"
        rows = []
        for run in runs:
            seconds, loss = last(run, "seconds"), last(run, "loss")
            rows.append([run.name, run.method, run.status, None if seconds is None else clock(seconds), loss])
        notes = ()
        if len({run.method for run in runs}) > 1:
            notes = ("These runs use different methods, so their losses cannot be compared.",)
        table = Table("Runs", ["run", "method", "progress", "time", "last loss"], rows)
        return Summary(sentence, (table,), notes, tuple(filter(None, map(_headline, runs[:4]))))

    @property
    def title(self) -> str:
        """Of the page."""
        return f"Report: {self.runs[0].name if len(self.runs) == 1 else f'{len(self.runs)} runs compared'}"

    def figures(self) -> list[Figure]:
        """Curves of what was measured on held-out samples, with the best of each run; then those of the training."""
        held_out, training, marks = {}, {}, {}
        for name in metric_names(self.runs):
            lines = {run.name: line for run in self.runs if (line := curve(run, name, self.over))[0]}
            if not lines or name == MAJORITY:
                continue
            if name == "val_top1":
                levels = {run.name: curve(run, MAJORITY, self.over) for run in self.runs}
                lines |= {f"largest class, {run}": level for run, level in levels.items() if level[0]}
            if is_held_out(name):
                held_out[spoken(name)] = lines
                points = {run.name: (getattr(p, self.over), p.value) for run in self.runs if (p := best(run, name))}
                marks[spoken(name)] = {run: point for run, point in points.items() if point[0] is not None}
            else:
                training["learning rate" if name == "lr" else spoken(name)] = lines
        measured = (
            "These values were measured during training, on held-out samples. A ring marks the best "
            f"{self.over} of each run."
        )
        means = (
            "Logged values. Each point of loss, accuracy and gradient norm is the mean over the steps since the "
            "previous point."
        )
        draw, title = "figures.curve_panels", "Training curves"
        return [
            *([Figure("held-out", measured, draw, (held_out, self.over), {"marks": marks})] if held_out else []),
            *([Figure("curves", means, draw, (training, self.over), section=title)] if training else []),
        ]

    def details(self) -> list[Table]:
        """Last and best values, machine and speed, configs."""
        runs, names = self.runs, [name for name in metric_names(self.runs) if name != "lr"]
        header = [run.name for run in runs]
        finals = [[spoken(name), *(last(run, name) for run in runs)] for name in names]
        bests = {name: [best(run, name) for run in runs] for name in names if is_judged(name)}
        better = [
            [spoken(name), *map(_at, points)]
            for name, points in bests.items()
            if any(point and point.value != last(run, name) for run, point in zip(runs, points, strict=True))
        ]
        speeds = [speed(run) for run in runs]
        shown = [
            [label, *(None if facts[key] is None else form(facts[key]) for facts in speeds)]
            for key, (label, form) in _SPEED.items()
            if any(facts[key] is not None for facts in speeds)
        ]
        differing, shared = split_configs(runs)
        differences = [[f"`{name}`", *map(show, map(_cell, values))] for name, values in differing.items()]
        return [
            Table("Final numbers", ["metric", *header], finals, "Last values."),
            *([Table("Best numbers", ["metric", *header], better, BETTER)] if better else []),
            Table(
                "Machine and speed",
                ["", *header],
                shown,
                "These values are from the log and the newest checkpoint of each run.",
            ),
            *(
                [Table("Configs", ["field", *header], differences, "Fields in which the runs differ.")]
                * bool(differing)
            ),
            Table("Settings", ["field", ""], [[f"`{name}`", _cell(value)] for name, value in shared.items()], SHARED),
        ]

    def numbers(self) -> dict[str, Any]:
        """Every run, and the fields in which their configs differ."""
        names = metric_names(self.runs)
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
                        name: point._asdict()
                        for name in names
                        if name != "lr" and (point := best(run, name)) is not None
                    },
                    "speed": speed(run),
                }
                for run in self.runs
            ],
            "config_differences": split_configs(self.runs)[0],
        }


BETTER = "Best values and their steps. Metrics whose last value is the best are left out."
SHARED = "Fields of the config that are the same in all runs."

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


def _headline(run: Run) -> tuple[str, str] | None:
    """The last value of the metric that a run is judged by."""
    names = [name for name in metric_names([run]) if is_judged(name)] or ["loss"]
    name = "val_top1" if "val_top1" in names else names[0]
    value, largest = last(run, name), last(run, MAJORITY)
    beside = "" if largest is None else f" (largest class {largest:.4g})"
    return None if value is None else (f"{value:.4g}", f"last {spoken(name)}, {run.name}{beside}")


def _at(point: Best | None) -> str | None:
    if point is None:
        return None
    epoch = "" if point.epoch is None else f"epoch {point.epoch:g}, "
    return f"{point.value:.4g} ({epoch}step {point.step:,})"


def _cell(value: Any) -> str | None:
    return None if value is None else str(value)


def _went(run: Run) -> str:
    """First and last value of the loss and the judged metrics of one run."""
    text = ""
    for name in metric_names([run]):
        values = curve(run, name, "step")[1]
        if len(values) > 1 and (name == "loss" or is_judged(name)):
            text += f" {spoken(name).capitalize()} went from {show(values[0])} to {show(values[-1])}."
    return text + _baseline(run)


def _baseline(run: Run) -> str:
    """The top-1 of always predicting the largest class, where the run has a top-1."""
    top1, largest = last(run, "val_top1"), last(run, MAJORITY)
    if top1 is None or largest is None:
        return ""
    worth = " The run's top-1 is not higher." if top1 <= largest else ""
    return f" A model that always predicts the largest class has a top-1 of {show(largest)}.{worth}"


def _ranked(runs: Sequence[Run]) -> str:
    """The judged metrics that all runs have: the best and the worst run, or all values where methods differ."""
    text = ""
    same = len({run.method for run in runs}) == 1
    for name in metric_names(runs):
        values = {run.name: last(run, name) for run in runs}
        known = {run: value for run, value in values.items() if value is not None}
        if len(known) < len(runs) or not is_judged(name):
            continue
        order = sorted(known, key=known.__getitem__, reverse=not falls(name))
        if same or name.startswith(("val_", "knn")):
            text += f" {spoken(name).capitalize()} is {_ends({run: show(known[run]) for run in order})}."
        else:
            listed = ", ".join(f"{show(value)} in {run}" for run, value in known.items())
            text += f" {spoken(name).capitalize()} (each method on its own task): {listed}."
    return text


def _ends(shown: Mapping[str, str]) -> str:
    """The best and the worst of runs sorted by their values, with the runs that show the same value."""
    first, *_, last = shown.values()
    if first == last:
        return f"{first} in each"
    alike = (", ".join(run for run, value in shown.items() if value == end) for end in (first, last))
    return " and ".join(
        f"{what} in {runs} ({end})" for what, runs, end in zip(("best", "worst"), alike, (first, last), strict=True)
    )


def is_judged(name: str) -> bool:
    """Whether it is among `JUDGED`."""
    return name != MAJORITY and any(part in name for part in JUDGED)


def falls(name: str) -> bool:
    """Whether a lower value of a metric is the better one."""
    return "loss" in name or "perplexity" in name


def is_held_out(name: str) -> bool:
    """Whether a metric is measured on samples that the run does not train on: by validation or by a probe."""
    return name != MAJORITY and (name.startswith(("val_", "knn")) or name.endswith("_test"))


def spoken(name: str) -> str:
    """A metric's name in words."""
    return name.replace("_", " ")


def analyze_runs(folders: Sequence[str | Path], *, over: str = "epoch") -> Runs:
    """Several runs side by side, finished or not. over: what their curves run over, epoch or step."""
    if over not in PLACES:
        raise unknown_name("axis", over, PLACES, field="over")
    runs = read_runs(folders)
    places = dict.fromkeys(Path(folder).resolve().as_posix() for folder in folders)
    origins = (Origin(run.name, identity_of(place)) for run, place in zip(runs, places, strict=True))
    return Runs(runs, over, provenance=Provenance(of=tuple(origins)))


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """The runs at `paths` in this order, without repeats; refuses what is no run, a broken log, and logs all empty."""
    folders = list({Path(path).resolve(): Path(path) for path in paths}.values())
    if not folders:
        raise SitusError("name at least one run folder", field="runs")
    for folder in folders:
        if not is_run(folder):
            raise SitusError(f"{folder}: is not a run: it lacks config.json and checkpoints", field="runs")
    runs = []
    for folder, name in zip(folders, short_names(folders), strict=True):
        config = read_config(folder)
        run = RunFolder(folder, config, resumed=False, writer=False)
        runs.append(Run(name, config, run.records(), run.facts(), _bad_step(folder)))
    if not any(run.records for run in runs):
        these = "this run has" if len(runs) == 1 else "these runs have"
        raise SitusError(
            f"{', '.join(map(str, folders))}: {these} logged nothing yet (metrics.jsonl is empty)", field="runs"
        )
    return runs


def _bad_step(folder: Path) -> float | None:
    if not (folder / "nan").is_dir():
        return None
    state = read_table(folder / "nan" / "state.json")
    return math.inf if isinstance(state, str) else state["step"]  # str: it cannot be read


def short_names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that differ from one another."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder.resolve()) for folder in folders]  # one of them stands twice


def metric_names(runs: Iterable[Run]) -> list[str]:
    """The metrics that the runs logged, without `PLACES` and `ASIDE`; losses first, the learning rate last."""
    names = dict.fromkeys(name for run in runs for record in run.records for name in record)
    shown = [name for name in names if name not in (*PLACES, *ASIDE)]
    return sorted(shown, key=lambda name: (name == "lr") - ("loss" in name))


def curve(run: Run, metric: str, over: str = "epoch") -> Curve:
    """A metric over epochs or steps; lines where it is missing or was not finite are left out."""
    lines = [record for record in run.records if _number(record.get(metric)) and _number(record.get(over))]
    return [record[over] for record in lines], [record[metric] for record in lines]


def last(run: Run, metric: str) -> float | None:
    """A metric's last value, or None."""
    values = curve(run, metric, "step")[1]
    return values[-1] if values else None


def best(run: Run, metric: str) -> Best | None:
    """Where a metric is best: lowest for a loss or a perplexity, highest for others; the first of equal ones."""
    records = [record for record in run.records if _number(record.get(metric)) and _number(record.get("step"))]
    if not records:
        return None
    record = (min if falls(metric) else max)(records, key=lambda record: record[metric])
    return Best(record[metric], int(record["step"]), record.get("epoch"))


def speed(run: Run) -> dict[str, Any]:
    """Speed, memory and machine, from the log and the checkpoints; None where they do not say."""

    def median(name: str) -> float | None:
        values = curve(run, name, "step")[1]
        return statistics.median(values) if values else None

    memory = curve(run, "memory_gib", "step")[1]
    machine = run.state.get("machine") or {}
    return {
        **{name: median(name) for name in ("images_per_second", "data_wait")},
        "memory_gib": max(memory, default=None),
        "seconds": last(run, "seconds"),
        "global_batch": run.state.get("global_batch"),
        "processes": run.state.get("world"),
        **{name: machine.get(name) for name in ("device", "precision", "torch")},
    }


def split_configs(runs: Sequence[Run]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """(fields in which the runs differ -> one value per run, None where it has no such field; fields they share)."""
    tables = [flat(run.config) for run in runs]
    fields = dict.fromkeys(field for table in tables for field in table)
    values = {field: [table.get(field) for table in tables] for field in fields}
    same = {f for f in fields if all(f in table and table[f] == values[f][0] for table in tables)}
    differing = {field: row for field, row in values.items() if field not in same}
    return differing, {field: values[field][0] for field in fields if field in same}


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
