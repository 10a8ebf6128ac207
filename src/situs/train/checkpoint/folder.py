"""The run folder: what a training run leaves on disk, and how it is found again after a crash.

    config.json                     the resolved config
    classes.json                    the names of the classes, where the data has labels
    metrics.jsonl                   one line a log step
    checkpoints/step-00001234/      model, optimiser, mean and generators as safetensors, state.json
    nan/                            the step that was not finite, where there was one (see `situs.train.nan`)
    torn/                           what starting over set aside

A checkpoint is written under another name and renamed when every byte is on the disk. Its state.json holds the size and
SHA-256 of each of its files, of the log up to it and of the config; that file, config.json and classes.json end with
the SHA-256 of themselves. So what is damaged is known, and the newest whole checkpoint is used. No pickle anywhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from situs.config import differences, from_dict, to_dict
from situs.errors import SitusError
from situs.files import write_text
from situs.hold import NAME as LOCK
from situs.hold import only_one
from situs.train import distributed
from situs.train.checkpoint.checkpoints import NAME, Checkpoint, Checkpoints, may_change
from situs.train.checkpoint.records import check_log, cut_log, read_metrics
from situs.train.checkpoint.storage import delete, read_sealed, reason, sealed

CLASSES, MARK = "classes.json", ".torchrun"


class RunFolder(Checkpoints):
    """The folder of one run. The writer (rank 0) writes it; other ranks only their parts of checkpoints.

    config: a config or its plain dict. notes: what a resume has to tell the user, one sentence each. limit: the last
    step that may be gone on from; None: whichever is the newest.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], *, resumed: bool, writer: bool) -> None:
        super().__init__(path, config, writer=writer)
        self.resumed, self._held = resumed, False

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], config: Any, *, classes: Sequence[str] | None = None, writer: bool = True
    ) -> RunFolder:
        """A new run, in a folder that is new or empty. classes: the names of the data's classes."""
        run = cls(Path(path), to_dict(config), resumed=False, writer=writer)
        if not writer:
            return run
        with run._writing("the run folder"):
            run.path.mkdir(parents=True, exist_ok=True)
        with run.hold():
            check_target(run.path)
            with run._writing("the run folder"):
                run.checkpoints.mkdir()
            if classes is not None:
                run._write_table(CLASSES, {"classes": list(classes)})
            run._write_table("config.json", run.config)
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str], config: Any = None, *, writer: bool = True) -> RunFolder:
        """A run to go on with. config: the one to go on with; None takes the recorded one as it is."""
        path = Path(path)
        recorded = read_config(path)
        given, filled = recorded if config is None else to_dict(config), recorded
        if is_dataclass(config) and not isinstance(config, type):  # a field that came later has its default
            filled = to_dict(from_dict(type(config), recorded, where=f"{path}/config.json"))
        run = cls(path, _as_recorded(given, recorded, filled), resumed=True, writer=writer)
        changed = differences(filled, given)
        fixed = {name: pair for name, pair in changed.items() if not may_change(name)}
        if fixed:
            listed = ", ".join(f"{name} was {old!r} and is now {new!r}" for name, (old, new) in list(fixed.items())[:3])
            more = f" and {len(fixed) - 3} more fields" if len(fixed) > 3 else ""
            raise SitusError(f"{path}: cannot resume with another config: {listed}{more}", field="resume")
        run.notes += [f"{name}: {old} -> {new}" for name, (old, new) in changed.items()]
        return run

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keeps other writers out, and sweeps away what a crash left half-written. Within itself it does nothing."""
        if not self.writer or self._held:
            yield
            return
        with only_one(self.path):
            self._held = True
            try:
                for leftover in self.checkpoints.glob(".*"):
                    delete(leftover)
                yield
            finally:
                self._held = False

    def check_shared(self, device: torch.device) -> None:
        """Refuses a folder that some rank does not see, where each must write its part of a checkpoint into it."""
        distributed.barrier()
        for _ in range(30):  # a disk that nodes share may show a new folder late
            if seen := (self.path / "config.json").exists():
                break
            time.sleep(1)
        blind = distributed.most(torch.tensor(-1 if seen else distributed.rank(), device=device))
        if int(blind) >= 0:
            raise SitusError(
                f"{self.path}: rank {int(blind)} does not see it, and with parallel=fsdp each rank writes its part of "
                "a checkpoint there; put it on a disk that all nodes share",
                field=("train.parallel", "out"),
            )

    def adopt_config(self) -> None:
        """Writes down the config a resumed run goes on with, once nothing refuses it any more."""
        if self.writer and read_config(self.path) != self.config:
            self._write_table("config.json", self.config)

    def classes(self) -> tuple[str, ...] | None:
        """The names of the classes; None where the data had none."""
        if not (self.path / CLASSES).exists():
            return None
        table = read_sealed(self.path / CLASSES)
        if isinstance(table, str):
            raise SitusError(f"{self.path}: {table}")
        return tuple(table["classes"])

    def _write_table(self, name: str, table: Mapping[str, Any]) -> None:
        with self._writing(name):
            write_text(self.path / name, sealed(table, name))

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SitusError(f"{self.path}: {what} could not be written: {reason(error)}") from error

    @cached_property
    def start(self) -> Checkpoint | None:
        """The checkpoint that a resumed run goes on from; None for one that was killed before its first.

        A run that has lost its checkpoints is refused: going on would begin it again, and that must be asked for.
        """
        told = len(self.notes)
        found = self.latest()
        if found is not None:
            return found
        torn, self.notes = self.notes[told:], self.notes[:told]
        due = self.config.get("train", {}).get("save_every")
        done = max((record["step"] for record in self.records()), default=0)
        gone = not self.checkpoints.is_dir()  # it is made before config.json
        # The first may still be on its way to the disk until the second is due, which waits for it.
        if torn or gone or (due is not None and done > 2 * due):
            lost = torn[0].removesuffix(" and was passed over") if torn else f"step {done} is logged but none is there"
            raise SitusError(
                f"{self.path}: the run has no whole checkpoint left ({lost}); starting over begins it again at step 0 "
                "and sets what is there aside",
                field="start_over",
            )
        return None

    def start_over(self) -> None:
        """Sets checkpoints and log aside in torn/; refused where a checkpoint is whole."""
        if (whole := self.latest()) is not None:
            raise SitusError(
                f"{self.path}: the checkpoint of step {whole.step} is whole, and resuming goes on from it; for a new "
                "run give another folder alone",
                field="out",
            )
        self.notes = [note for note in self.notes if " is torn (" not in note]
        old = [path for path in (*map(self._at, self.steps()), self.metrics) if path.exists()]
        if not self.writer or not old:
            return
        aside = next(p for n in range(1, 10**6) if not (p := self.path / f"torn{'' if n == 1 else f'-{n}'}").exists())
        with self._writing(aside.name):
            aside.mkdir()
            for path in old:
                path.rename(aside / path.name)
        self.notes.append(f"started over: what was there is in {aside}")

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds one line to metrics.jsonl."""
        line = json.dumps(record, ensure_ascii=False) + "\n"
        with self._writing("metrics.jsonl"), self.metrics.open("a", encoding="utf-8") as file:
            file.write(line)

    def rewind(self, checkpoint: Checkpoint | None) -> None:
        """Cuts metrics.jsonl to what it was at the checkpoint: the run will write the rest again."""
        size = 0
        if checkpoint is not None:
            fact = checkpoint.state["metrics"]
            size = fact["bytes"]
            if not self.metrics.exists() and size:
                self.notes.append("metrics.jsonl is gone: the log begins anew")
                return
            check_log(self.metrics, checkpoint.step, fact, "; move it away to go on without its lines")
        with self._writing("metrics.jsonl"):
            cut_log(self.metrics, size)

    def records(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl, which are those that were written."""
        state = self.facts()
        if state and self.metrics.exists():
            check_log(self.metrics, state["step"], state["metrics"])
        return read_metrics(self.metrics)


def run_and_step(path: str | os.PathLike[str]) -> tuple[Path, int | None]:
    """The run folder that a path names; with the step, where it is one of the checkpoints in it."""
    path = Path(path)
    match = NAME.fullmatch(path.name)
    return (path.parent.parent, int(match[1])) if match and path.parent.name == "checkpoints" else (path, None)


def read_config(path: Path) -> dict[str, Any]:
    """The recorded config of a run folder."""
    table = read_sealed(path / "config.json")
    if not isinstance(table, str):
        return table
    if not (path / "config.json").exists():
        raise SitusError(f"{path}: holds no run, there is no config.json in it", field="resume")
    raise SitusError(f"{path}: {table}; a run's settings are changed by flags, never in that file")


def _as_recorded(new: Mapping[str, Any], old: Mapping[str, Any], was: Mapping[str, Any]) -> dict[str, Any]:
    """`new` without the fields that `old`, a config of an earlier version, lacks and that are as they `was` then, and
    with those that it has alone.

    So its checkpoints, which hold a hash of the config they belong to, still belong to it.
    """
    return {name: value for name, value in old.items() if name not in new} | {
        name: _as_recorded(value, old[name], was[name]) if isinstance(old.get(name), Mapping) else value
        for name, value in new.items()
        if name in old or value != was.get(name)
    }


def check_target(path: Path) -> None:
    """Refuses a folder for a new run that is a file, a run, or not empty."""
    if path.exists() and not path.is_dir():
        raise SitusError(f"{path}: is a file; a run is a folder", field="out")
    if (path / "config.json").exists() and (path / "checkpoints").is_dir():
        raise SitusError(f"{path}: already holds a run; resume it or choose another folder", field=("resume", "out"))
    held = sorted(each.name for each in path.iterdir() if each.name not in (LOCK, MARK)) if path.is_dir() else []
    if held:
        more = f" and {len(held) - 1} more" if len(held) > 1 else ""
        raise SitusError(
            f"{path}: is not empty, it holds {held[0]}{more}; a run needs a new or empty folder", field="out"
        )
