"""The cost of a training step: time, memory, share of the machine's peak rate, how busy the GPU is."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

import torch

from situs.bench.cases import StepCase, StepConfig, Timing, make_cases
from situs.bench.clock import measure_ceiling
from situs.bench.crowd import Answer, measure_at_once
from situs.bench.measure import StepRow, measure_case
from situs.config import from_dict, to_dict
from situs.errors import SitusError, counted
from situs.files import read_json
from situs.progress import tracked
from situs.results import Cell, Figure, Provenance, Result, Summary, Table, percent
from situs.train import distributed

Progress = Callable[["StepTable", str], None]
"""Called after each case with the table so far and a line on the case."""

MEANING = """
A step is everything that a run does except loading data: random draws, forward, backward, clipping and optimiser. The
ceiling is the number of operations per second in one large matrix product, measured in the same run and at the
precision of the step. Only the operations in matrix products (including attention) count as operations of a step.
Products that are computed again for the backward pass are not counted. "Busy" is the share of a step in which the GPU
runs a kernel: the time of the kernels in a profiled step, divided by the time of a step without profiling. The first
step includes compilation.
"""


@dataclass(frozen=True)
class StepTable(Result):
    """Rows of measured cases. ceilings: operations per second, by precision. failed: (case, why) of the others.

    machine: from `describe_machine`. timing: how long each case was measured. profile: whether kernels are shown.
    """

    file: ClassVar[str] = "step"
    meaning: ClassVar[str] = MEANING
    rows: tuple[StepRow, ...]
    ceilings: Mapping[str, float]
    machine: Mapping[str, Any]
    timing: Timing
    failed: tuple[tuple[StepCase, str], ...] = ()
    profile: bool = False

    def share(self, row: StepRow) -> float | None:
        """The operations per second of a row over the ceiling of its precision."""
        ceiling = self.ceilings.get(row.case.precision or "")
        return row.flops_per_second / ceiling if ceiling else None

    def summary(self) -> Summary:
        """The table, and notes on what failed or was not measured."""
        table = Table(self.heading(), HEADER, [self._cells(row) for row in self.rows])
        kernels = kernel_tables(self.rows) if self.profile else ()
        fastest = max(self.rows, key=lambda row: row.images_per_second, default=None)
        rate = (
            ()
            if fastest is None
            else ((f"{fastest.images_per_second:,.0f}", f"samples per second, {fastest.case.label}"),)
        )
        return Summary(self._sentence(), (*kernels, table), tuple(self._notes()), rate)

    @property
    def title(self) -> str:
        """Of the page."""
        return "The cost of a training step"

    def figures(self) -> list[Figure]:
        """The time of each step."""
        times = {f"{row.case.label}, batch {row.case.batch}": 1e3 * row.times.median for row in self.rows}
        return [Figure("", "", "bars", (times, "ms"))]

    def details(self) -> list[Table]:
        """The machine."""
        return [Table("The machine", ["", ""], list(self.machine.items()))]

    def heading(self) -> str:
        """The machine, and how it was measured."""
        timing = self.timing
        how = f"medians of {timing.repeats} repeats of {counted(timing.steps, 'steps')}, ± half their spread"
        return f"{self.machine['device']}, torch {self.machine['torch']}: {how}"

    def _cells(self, row: StepRow) -> list[Cell]:
        times, share, busy = row.times, self.share(row), row.times.busy
        spread = 500 * (max(times.seconds) - min(times.seconds))
        return [
            row.case.label,
            row.case.shape,
            row.case.batch,
            f"{1e3 * times.median:.2f}",
            f"{spread:.2f}",
            f"{row.images_per_second:,.0f}" if row.images_per_second >= 100 else f"{row.images_per_second:.2f}",
            f"{1 / times.median:,.1f}",
            None if times.gib is None else f"{times.gib:.2f}",
            None if share is None else percent(share),
            None if busy is None else percent(busy),
            f"{times.first:.1f}",
        ]

    def _sentence(self) -> str:
        if not self.rows:
            return "No case could be measured."
        ceilings = ", ".join(f"{name} {rate / 1e12:,.4g}" for name, rate in self.ceilings.items())
        most = max(self.rows, key=lambda row: self.share(row) or 0.0)
        share = self.share(most)
        best = "" if share is None else f". {most.case.label} comes closest: it reaches {percent(share)} of the ceiling"
        count = f"{len(self.rows)} cases" if len(self.rows) > 1 else "One case"
        return f"{count}. The ceiling is the speed of large matrix products on this machine: {ceilings} TFLOP/s{best}."

    def _notes(self) -> Iterator[str]:
        for case, why in self.failed:
            yield f"failed: {case.label}, {case.shape}, batch {case.batch}: {why}"
        for row in self.rows:
            yield from (f"{row.case.label}, batch {row.case.batch}: {line}" for line in row.notes)
        if any(row.times.kernels is None for row in self.rows):
            yield f"Busy share: not measured{'' if self.machine['kind'] == 'cuda' else ' (there is no GPU)'}."

    def numbers(self) -> dict[str, Any]:
        """All numbers; `read_steps` restores the result."""
        rows = [row.to_json() | {"ceiling_share": self.share(row)} for row in self.rows]
        failed = [{"case": to_dict(case), "why": why} for case, why in self.failed]
        settings = {"machine": dict(self.machine), "timing": to_dict(self.timing), "ceilings": dict(self.ceilings)}
        return {"measures": "step", **settings, "rows": rows, "failed": failed}


HEADER = ("case", "model", "batch", "ms", "±", "img/s", "steps/s", "GiB", "of ceiling", "busy", "first step s")


def kernel_tables(rows: Iterable[StepRow]) -> Iterator[Table]:
    """For each profiled row: ms per step by kind of kernel, and the longest kernels."""
    for row in rows:
        if (kernels := row.times.kernels) is None:
            continue
        title = f"{row.case.label}, {row.case.shape}, batch {row.case.batch}: {kernels.launches:,.0f} kernels in a step"
        counts = {kind: f"{count:,.0f}" for kind, count in kernels.counts.items()}
        kinds = [[kind, f"{length:.3f}", counts.get(kind)] for kind, length in kernels.kinds.items()]
        names = [[f"  {name[:90]}", f"{length:.3f}", None] for name, length in kernels.top.items()]
        union = ["union", f"{kernels.busy_ms:.3f}", f"{kernels.launches:,.0f}"]
        yield Table(title, ("kernels", "ms", "launches"), [*kinds, *names, union])


def bench_step(
    cases: Sequence[str] = ("supervised",),
    config: StepConfig | None = None,
    *,
    device: str | None = None,
    at_once: bool = False,
    profile: bool = False,
    progress: Progress = lambda *_: None,
) -> StepTable:
    """Measures the training step of every case × model × batch on images of noise: time, memory, operations, kernels.

    cases: words for `make_cases`, "mp3:mask_ratio=0.75". at_once: the cases compile in separate processes at the same
    time, and are timed one at a time. profile: the result shows kernels by kind and name. progress: called after each
    case, with the table so far. A case that fails is in `failed`.
    """
    config = config or StepConfig()
    todo, timing = (
        make_cases(cases, config),
        Timing(**{field_.name: getattr(config, field_.name) for field_ in fields(Timing)}),
    )
    place = distributed.start(device).device
    ceilings: dict[str, float] = {}
    answers = measure_at_once if at_once else measure_in_turn
    rows, failed = dict[int, StepRow](), list[tuple[StepCase, str]]()
    table = StepTable((), ceilings, describe_machine(place), timing, profile=profile, provenance=Provenance())
    for number, answer in tracked(answers(todo, timing, place, ceilings), "cases", len(todo)):
        case = todo[number]
        if isinstance(answer, StepRow):
            rows[number] = answer
            line = f"{1e3 * answer.times.median:.2f} ms, {answer.images_per_second:,.0f} img/s"
        else:
            failed.append((case, answer))
            line = f"failed: {answer}"
        ordered = tuple(rows[place] for place in sorted(rows))
        table = replace(table, rows=ordered, failed=tuple(failed), ceilings=dict(ceilings))
        progress(table, f"{case.label}, {case.shape}, batch {case.batch}: {line}")
    return table


def measure_in_turn(
    cases: Sequence[StepCase], timing: Timing, device: torch.device, ceilings: dict[str, float]
) -> Iterator[Answer]:
    """One case after the other in this process; fills `ceilings` by precision."""
    for number, case in enumerate(cases):
        try:
            row = measure_case(case, timing, device)
        except Exception as error:  # noqa: BLE001  (any error is reported, and the other cases are measured)
            yield number, _sentence(error)
            continue
        precision = row.case.precision or ""
        if precision not in ceilings:
            ceilings[precision] = measure_ceiling(device, precision, CEILING_SECONDS.get(device.type, 0.2))
        yield number, row


CEILING_SECONDS = {"cuda": 1.0}
"""Seconds of the ceiling's measurement, after a warm-up of the same length; a CPU needs less."""


def _sentence(error: Exception) -> str:
    message = " ".join(str(error).split()) or type(error).__name__
    return message if isinstance(error, SitusError) else f"{type(error).__name__}: {message[:300]}"


def read_steps(path: str | Path) -> StepTable:
    """A table read from its JSON file."""
    table = read_json(path)
    if table.get("measures") != "step":
        raise SitusError(f"{path}: must be a table of steps, as `situs bench` writes it")
    try:
        rows = tuple(StepRow.from_json(row) for row in table["rows"])
        failed = tuple((from_dict(StepCase, entry["case"]), entry["why"]) for entry in table["failed"])
        timing = from_dict(Timing, table["timing"])
        if lacks := {"kind", "device", "torch"} - {*table["machine"]}:
            raise KeyError(*lacks)
        if not all(row.times.seconds and min(row.times.seconds) > 0 for row in rows):
            raise TypeError("a case without times")
        return StepTable(rows, table["ceilings"], table["machine"], timing, failed)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, SitusError):
            raise error.prefixed(str(path)) from None
        raise SitusError(f"{path}: the table of steps is damaged: {error!r}") from None


# --- the machine ----------------------------------------------------------------------------------------------------

PACKAGES = "situs", "torch", "triton", "timm"


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Device, system and versions, by name."""
    facts: dict[str, Any] = {"kind": device.type, "device": _name(device)}
    facts |= {"cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()}
    facts |= {"threads": torch.get_num_threads(), "system": f"{platform.system()} {platform.machine()}"}
    facts |= {"python": platform.python_version(), "cuda": torch.version.cuda if device.type == "cuda" else None}
    return facts | {name: _version(name) for name in PACKAGES}


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.backends.cpu.get_cpu_capability()}" if device.type == "cpu" else device.type


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
