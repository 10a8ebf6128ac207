"""How a run goes: metrics.jsonl always, a live line on a terminal, plain lines elsewhere, trackers as extras."""

from __future__ import annotations

import contextlib
import hashlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from situs.errors import missing_extra, unknown_name
from situs.progress import clock
from situs.train.checkpoint import RunFolder

GIB = 2**30
FIRST, PATIENCE, REDRAW = 10.0, 30.0, 1.0
"""Seconds without a word: until the first line, between two lines, and between two looks of a live line."""


class Tracker(Protocol):
    """Where metrics also go: the numbers of each step, until the run is closed there."""

    close: Callable[[], None]

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...


class TensorBoard:
    """Event files under tensorboard/ in the run folder."""

    def __init__(self, run: RunFolder, start: int) -> None:
        module = _tracking("tensorboard", "torch.utils.tensorboard")
        # What lies after the checkpoint is written again: hide the first writing of it.
        purged = start + 1 if run.resumed else None
        self.writer = module.SummaryWriter(str(run.path / "tensorboard"), purge_step=purged)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class _TrackedRun:
    """A run of Weights & Biases, or of Trackio, which has the same calls."""

    def __init__(self, run: Any, finish: Callable[[], None]) -> None:
        self.run, self.close = run, finish

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)


def _wandb(run: RunFolder, _: int) -> Tracker:
    """Project, entity and mode come from its own environment variables."""
    # The same folder is the same run there, so that a resume goes on with its curves.
    own = hashlib.blake2b(str(run.path.resolve()).encode(), digest_size=8).hexdigest()
    given = {"name": run.path.name, "id": own, "dir": str(run.path), "config": dict(run.config), "resume": "allow"}
    made = _tracking("wandb").init(**given)
    return _TrackedRun(made, made.finish)


def _trackio(run: RunFolder, _: int) -> Tracker:
    trackio = _tracking("trackio")
    made = trackio.init(project="situs", name=run.path.name, config=dict(run.config), resume="allow")
    return _TrackedRun(made, trackio.finish)


def _tracking(name: str, module: str = "") -> Any:
    try:
        return import_module(module or name)
    except ImportError:
        raise missing_extra(name, "trackio" if name == "trackio" else "track", f"the tracker {name}") from None


TRACKERS: dict[str, Callable[[RunFolder, int], Tracker]] = {
    "tensorboard": TensorBoard,
    "trackio": _trackio,
    "wandb": _wandb,
}


class Log:
    """Everything a run says. Only rank 0 speaks; the others hold a silent one.

    start: the step the run begins at. total: the step it ends at. console: where to speak; stderr by default, so
    that stdout stays free for results. A console that is gone (its terminal was closed) ends no run.
    """

    def __init__(
        self, run: RunFolder, start: int, total: int, trackers: Sequence[str] = (), console: Console | None = None
    ) -> None:
        self.run, self.total, self.start = run, total, start
        self.loud = run.writer
        self.console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self.spoke = time.perf_counter()
        self.marks = [(start, self.spoke)]
        """Steps that were shown and when, of the later half of what is done: the beginning compiles and warms up."""
        self.patience = FIRST
        self.trackers: list[Tracker] = []
        for name in trackers if self.loud else ():
            if name not in TRACKERS:
                raise unknown_name("tracker", name, TRACKERS)
            self.trackers.append(TRACKERS[name](run, start))
        self.live: Progress | None = None
        if self.loud and self.console.is_terminal:
            # Redrawn between steps: a thread of its own would compete with the loop for the interpreter.
            facts = TextColumn("{task.fields[facts]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=12), TextColumn("{task.fields[left]}"))
            self.live = Progress(*columns, facts, console=self.console, auto_refresh=False, transient=True, expand=True)
            self.task = self.live.add_task("", total=total, completed=start, facts="", left="")
            self.patience = REDRAW
            self.live.start()

    def say(self, text: str) -> None:
        """One line for the user."""
        if self.loud:
            with self._unheard():
                self.console.print(text, markup=False)

    @contextlib.contextmanager
    def _unheard(self) -> Iterator[None]:
        """Goes on in silence where the console cannot be written to any more; metrics.jsonl still is."""
        try:
            yield
        except OSError:
            self.console, self.live = Console(quiet=True), None

    def step(self, record: Mapping[str, Any]) -> None:
        """The record of a log step: kept, tracked and shown."""
        self.keep(record)
        if not self.loud:
            return
        self._show(record)

    def pulse(self, step: int, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Shows how far the run is where nothing was said for a while; it goes to the console alone.

        facts: more to show, asked for only then.
        """
        if self.loud and time.perf_counter() - self.spoke >= self.patience:
            self._show({"step": step, **facts()})

    def _show(self, record: Mapping[str, Any]) -> None:
        step = record["step"]
        self.spoke = time.perf_counter()
        left = self._left(step)
        if self.live is None:
            self.patience = PATIENCE
            self.say(f"step {step}/{self.total} · {describe(record, skip=('step',))} · {clock(left)} left")
            return
        with self._unheard():
            self.live.update(
                self.task,
                completed=step,
                description=f"step {step:,}/{self.total:,}",
                left=f"{clock(left)} left",
                facts=describe(record, skip=("step",)),
            )
            self.live.refresh()

    def _left(self, step: int) -> float:
        """Seconds to the end, at the pace of the later half of what is done."""
        while len(self.marks) > 1 and self.marks[1][0] <= (self.start + step) / 2:
            self.marks.pop(0)
        first, then = self.marks[0]
        self.marks.append((step, self.spoke))
        return (self.spoke - then) / max(1, step - first) * (self.total - step)

    def keep(self, record: Mapping[str, Any]) -> None:
        """A record for the file and the trackers alone. JSON has no NaN: such a value is null."""
        if not self.loud:
            return
        self.run.append({name: plain(value) for name, value in record.items()})
        numbers = {n: float(v) for n, v in record.items() if isinstance(v, (int, float)) and n != "step"}
        for tracker in self.trackers:
            tracker.log(record["step"], numbers)

    def close(self) -> None:
        """Gives the terminal back and ends the trackers."""
        if self.live is not None:
            with self._unheard():
                self.live.stop()
        for tracker in self.trackers:
            tracker.close()


def plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def rate(value: float) -> str:
    """So many a second, with two digits where they are few: 3,120, 8.4, 0.31."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


_FORMS: dict[str, Callable[[Any], str]] = {
    "epoch": lambda v: f"epoch {v:.2f}",
    "lr": lambda v: f"lr {v:.2e}",
    "images_per_second": lambda v: f"{rate(v)} samples/s",
    "data_wait": lambda v: f"data-wait {100 * v:.0f} %",
    "memory_gib": lambda v: f"{v:.1f} GiB",
}
_UNSHOWN = ("seconds", "gradient_norm", "loss_scale")


def describe(record: Mapping[str, Any], skip: Sequence[str] = ()) -> str:
    """A record as a person reads it: `epoch 1.50 · loss 2.31 · accuracy 0.412 · 3,120 samples/s · …`."""
    shown = []
    for name, value in record.items():
        if name in skip or name in _UNSHOWN:
            continue
        if name in _FORMS:
            shown.append(_FORMS[name](value))
        else:
            shown.append(f"{name.replace('_', ' ')} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return " · ".join(shown)


def machine(device: torch.device, precision: str) -> dict[str, str]:
    """What a run is trained on, for who compares runs later: the device by name, no host."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{device.type} ({torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads)"
    return {"device": name, "precision": precision, "torch": torch.__version__}


def memory_gib(device: torch.device) -> float:
    """The most memory held so far: on the GPU by torch, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    if sys.platform == "win32":
        return 0.0  # has no getrusage
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / GIB if sys.platform == "darwin" else peak * 1024 / GIB
