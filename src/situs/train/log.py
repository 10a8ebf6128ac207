"""The log of a run: metrics.jsonl always, lines for the user, trackers as extras."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

import torch
from rich.console import Console

from situs.config import flat
from situs.errors import SitusError, first_line, missing_extra, unknown_name
from situs.progress import latest
from situs.results import finite
from situs.train.checkpoint import RunFolder

GIB = 2**30


class Tracker(Protocol):
    """Where metrics also go: the numbers of each step, until the run is closed there."""

    close: Callable[[], None]

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...


class TensorBoard:
    """Event files under tensorboard/ in the run folder."""

    def __init__(self, run: RunFolder, start: int) -> None:
        module = _tracking("tensorboard", "torch.utils.tensorboard")
        # Steps after the checkpoint are written again: hide their first records.
        purge_step = start + 1 if run.resumed else None
        self.writer = module.SummaryWriter(str(run.path / "tensorboard"), purge_step=purge_step)

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


def _identity(run: RunFolder) -> str:
    """The same for the same folder, so that a resumed run continues its curves."""
    return hashlib.blake2b(str(run.path.resolve()).encode(), digest_size=8).hexdigest()


def _wandb(run: RunFolder, _: int) -> Tracker:
    """Project, entity and mode come from its own environment variables."""
    arguments = {"name": run.path.name, "id": _identity(run), "dir": str(run.path), "config": dict(run.config)}
    tracked = _tracking("wandb").init(**arguments, resume="allow")
    return _TrackedRun(tracked, tracked.finish)


def _trackio(run: RunFolder, _: int) -> Tracker:
    trackio = _tracking("trackio")
    tracked = trackio.init(project="situs", name=run.path.name, config=dict(run.config), resume="allow")
    return _TrackedRun(tracked, trackio.finish)


class MLflow:
    """A run of MLflow. Its server and experiment come from its own environment variables; the experiment is else
    called situs."""

    def __init__(self, run: RunFolder, _: int) -> None:
        mlflow, self.entities = _tracking("mlflow"), _tracking("mlflow", "mlflow.entities")
        self.lost, tag = False, {"situs.run": _identity(run)}
        try:
            self.client = mlflow.MlflowClient()
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "situs"
            experiment = self.client.get_experiment_by_name(name)
            number = self.client.create_experiment(name) if experiment is None else experiment.experiment_id
            before = (
                self.client.search_runs([number], f"tags.`situs.run` = '{tag['situs.run']}'") if run.resumed else []
            )
            if before:
                self.run = before[0].info.run_id
                self.client.update_run(self.run, status="RUNNING")
                return
            self.run = self.client.create_run(number, run_name=run.path.name, tags=tag).info.run_id
            settings = [*flat(run.config).items()]
            for start in range(0, len(settings), 100):  # the most that its server takes at once
                pairs = [self.entities.Param(key, str(value)[:500]) for key, value in settings[start : start + 100]]
                self.client.log_batch(self.run, params=pairs)
        except Exception as error:  # its stores raise a different class for each failure
            raise SitusError(f"the tracker mlflow cannot start: {first_line(error)}", field="train.trackers") from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        values = [self.entities.Metric(name, value, now, step) for name, value in metrics.items()]
        self._send(lambda: self.client.log_batch(self.run, metrics=values))

    def close(self) -> None:
        self._send(lambda: self.client.set_terminated(self.run))

    def _send(self, call: Callable[[], None]) -> None:
        """Calls the server; one that fails is left alone from then on, and the training goes on."""
        if self.lost:
            return
        try:
            call()
        except Exception as error:  # noqa: BLE001  (as above)
            self.lost = True
            warnings.warn(
                (f"the tracker mlflow failed, and the run continues without it: {first_line(error)}"), stacklevel=2
            )


def _tracking(name: str, module: str = "") -> Any:
    try:
        return import_module(module or name)
    except ImportError:
        extra = name if name in ("mlflow", "trackio") else "track"
        raise missing_extra(name, extra, f"the tracker {name}") from None


TRACKERS: dict[str, Callable[[RunFolder, int], Tracker]] = {
    "mlflow": MLflow,
    "tensorboard": TensorBoard,
    "trackio": _trackio,
    "wandb": _wandb,
}


class Log:
    """Everything a run writes to its log and prints; only on rank 0, elsewhere it does nothing.

    total: the step it ends at. console: where to print; stderr by default, so that stdout stays free for results. On a
    terminal the progress line (`situs.progress`) shows the newest record; elsewhere each record is a line. A closed
    terminal does not end the run.
    """

    def __init__(
        self, run: RunFolder, start: int, total: int, trackers: Sequence[str] = (), console: Console | None = None
    ) -> None:
        self.run, self.total = run, total
        self.enabled = run.writer
        self.console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self.trackers: list[Tracker] = []
        for name in trackers if self.enabled else ():
            if name not in TRACKERS:
                raise unknown_name("tracker", name, TRACKERS)
            self.trackers.append(TRACKERS[name](run, start))

    def say(self, text: str) -> None:
        """One line for the user."""
        if self.enabled:
            with contextlib.suppress(OSError):
                self.console.print(text, markup=False)

    def step(self, record: Mapping[str, Any]) -> None:
        """Writes the record of a log step to the file and the trackers, and shows it."""
        self.keep(record)
        line = f"step {record['step']}/{self.total} · {describe(record, skip=('step',))}"
        (latest if self.console.is_terminal else self.say)(line)

    def keep(self, record: Mapping[str, Any]) -> None:
        """Writes a record to the file and the trackers. JSON has no NaN: such a value is null."""
        if not self.enabled:
            return
        self.run.append(finite(record))
        numbers = {n: float(v) for n, v in record.items() if isinstance(v, (int, float)) and n != "step"}
        for tracker in self.trackers:
            tracker.log(record["step"], numbers)

    def close(self) -> None:
        """Ends the trackers."""
        for tracker in self.trackers:
            tracker.close()


def rate(value: float) -> str:
    """A rate per second, with two digits where it is small: 3,120, 8.4, 0.31."""
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
    """Device, precision and torch version of a run, to compare runs; no host name."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{device.type} ({torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads)"
    return {"device": name, "precision": precision, "torch": torch.__version__}


def memory_gib(device: torch.device) -> float:
    """Peak memory so far: torch's on the GPU, or this process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / GIB if sys.platform == "darwin" else peak * 1024 / GIB
