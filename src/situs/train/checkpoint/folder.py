"""The run folder: what a training run writes to disk, and how it is restored after a crash.

    config.json                     the resolved config
    classes.json                    the names of the classes, where the data has labels
    metrics.jsonl                   one line per log step
    checkpoints/step-00001234/      model, optimiser, mean and generators as safetensors, state.json
    nan/state.json                  the number and values of a step that was not finite, where there was one

A checkpoint is written under another name and renamed when every byte is on disk. Its state.json has the size and
SHA-256 of each of its files, the length of the log and a hash of the config; that file, config.json and classes.json
end with their own SHA-256. So damage is detected, and the newest whole checkpoint is used. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from situs.config import differences, flat, from_dict, to_dict
from situs.errors import SitusError, counted, reason_of
from situs.files import write_bytes, write_text
from situs.folder_lock import NAME as LOCK
from situs.folder_lock import lock_folder
from situs.progress import note
from situs.train import distributed
from situs.train.checkpoint.files import (
    FORMATS,
    Parts,
    delete,
    fingerprint,
    read_folder,
    read_table,
    remove,
    sync,
    with_checksum,
)
from situs.train.checkpoint.writing import Background, Snapshot, spare_of, write_checkpoint

CLASSES, MARK = "classes.json", ".torchrun"

MAY_CHANGE = frozenset(
    {
        *("epochs", "max_steps", "workers", "log_every", "save_every", "keep", "probe_every", "trackers"),
        *("keep_at", "keep_best"),
        *("out", "resume", "path"),  # moved data; the loop checks that its samples are the same
    }
)
"""Config fields that a resumed run may change: none of them alters a step that is already done."""

PARALLEL = "train.parallel"
"""May change too, but is part of a checkpoint's hash of the config."""

NAME = re.compile(r"step-([0-9]{8,})")


def may_change(name: str) -> bool:
    """Whether a resumed run may change this config field; a method's fields never."""
    return name == PARALLEL or (not name.startswith("method.") and name.rsplit(".", maxsplit=1)[-1] in MAY_CHANGE)


@dataclass(frozen=True)
class Checkpoint:
    """One whole checkpoint: the step it was taken after, its state.json and its tensors."""

    path: Path
    step: int
    state: dict[str, Any]

    def parts(self, name: str) -> Parts:
        """The tensors of one kind ("model", "optimizer", "ema", "log"), read on demand, whole or in part."""
        pattern = re.compile(rf"{re.escape(name)}(\.rank[0-9]+)?\.safetensors")
        return Parts([self.path / file for file in sorted(self.state["files"]) if pattern.fullmatch(file)])

    def tensors(self, name: str) -> dict[str, Tensor]:
        """All tensors of one kind, whole; empty where the checkpoint has none."""
        return self.parts(name).all()


class RunFolder:
    """The folder of one run. The writer (rank 0) writes it; other ranks only their parts of checkpoints.

    config: a plain dict. resumed: whether the run existed before.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], *, resumed: bool, writer: bool) -> None:
        self.path, self.config, self.resumed, self.writer = path, config, resumed, writer
        self.checkpoints, self.metrics = path / "checkpoints", path / "metrics.jsonl"
        self._locked = False
        self._background: Background | None = None
        self._begun = 0
        self._spare: int | None = None

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
        """An existing run. config: the one to resume it with; None: the recorded one."""
        path = Path(path)
        recorded = read_config(path)
        new, filled = recorded if config is None else to_dict(config), recorded
        if is_dataclass(config) and not isinstance(
            config, type
        ):  # a field that the recorded config lacks has its default
            filled = to_dict(from_dict(type(config), recorded, where=f"{path}/config.json"))
        run = cls(path, _as_recorded(new, recorded, filled), resumed=True, writer=writer)
        changed = differences(filled, new)
        fixed = {name: pair for name, pair in changed.items() if not may_change(name)}
        if fixed:
            listed = ", ".join(f"{name} was {old!r} and is now {new!r}" for name, (old, new) in list(fixed.items())[:3])
            more = f" and {counted(len(fixed) - 3, 'more fields')}" if len(fixed) > 3 else ""
            raise SitusError(f"{path}: cannot resume with another config: {listed}{more}", field="resume")
        for name, (old, value) in changed.items():
            note(f"{name}: {old} -> {value}")
        return run

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Locks the folder against other writers and deletes what a crash left half-written; may be nested."""
        if not self.writer or self._locked:
            yield
            return
        with lock_folder(self.path):
            self._locked = True
            try:
                for leftover in self.checkpoints.glob(".*"):
                    delete(leftover)
                yield
            finally:
                self._locked = False

    def check_shared(self, device: torch.device) -> None:
        """Refuses a folder that some rank does not see, where each rank writes its part of a checkpoint."""
        distributed.barrier()
        for _ in range(30):  # a disk that nodes share may show a new folder late
            if visible := (self.path / "config.json").exists():
                break
            time.sleep(1)
        blind = distributed.most(torch.tensor(-1 if visible else distributed.rank(), device=device))
        if int(blind) >= 0:
            raise SitusError(
                f"{self.path}: rank {int(blind)} cannot access this folder, but with parallel=fsdp every "
                "rank writes a part of each checkpoint to this folder; put the folder on a disk that all nodes share",
                field=("train.parallel", "out"),
            )

    def adopt_config(self) -> None:
        """Writes the config of a resumed run, once it has been accepted."""
        if self.writer and read_config(self.path) != self.config:
            self._write_table("config.json", self.config)

    def classes(self) -> tuple[str, ...] | None:
        """The names of the classes; None where the data had none."""
        if not (self.path / CLASSES).exists():
            return None
        table = read_table(self.path / CLASSES)
        if isinstance(table, str):
            raise SitusError(f"{self.path}: {table}")
        return tuple(table["classes"])

    def _write_table(self, name: str, table: Mapping[str, Any]) -> None:
        with self._writing(name):
            write_text(self.path / name, with_checksum(table, name))

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SitusError(f"{self.path}: {what} could not be written: {reason_of(error)}") from error

    # --- checkpoints ------------------------------------------------------------------------------------------

    def save(self, step: int, files: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], keep: int) -> Path:
        """Writes the checkpoint of `step` and drops all but the newest `keep`; see `begin`."""
        self.begin(step, files, state, keep)
        saved = self.wait()
        assert saved is not None
        return saved

    def begin(
        self,
        step: int,
        files: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        keep: int,
        stay: Collection[int] = (),
    ) -> None:
        """Copies the tensors as they are now and writes them in the background; waits for the previous write first.

        All ranks call it. The checkpoint records the present length of the log. stay: steps whose checkpoints are kept.
        """
        if self._background is None:
            self._background = Background()
        self.wait()
        if self._spare is None:
            devices = [tensor.device for tensors in files.values() for tensor in tensors.values()]
            self._spare = max(map(spare_of, devices), default=0)
        snapshot, background, self._begun = Snapshot(files, self._spare), self._background, step
        log = {"bytes": self.metrics.stat().st_size if self.metrics.is_file() else 0}

        def facts() -> dict[str, Any]:
            if self.metrics.exists():
                sync(self.metrics)
            return {"step": step, **state, "config": self._config_hash(), "metrics": log}

        def write() -> Path:
            write_checkpoint(self._at(step), snapshot, facts, background, main=self.writer)
            if self.writer:
                self._drop_others(step, keep, stay)
            return self._at(step)

        background.begin(write)

    def _drop_others(self, step: int, keep: int, stay: Collection[int]) -> None:
        """Deletes other checkpoints; newer ones than `step` are damaged, or the run would have resumed from them."""
        older = [other for other in sorted(self._steps(), reverse=True) if other <= step]
        for other in {*self._steps()} - {*older[:keep], *(other for other in older if other in stay)}:
            remove(self._at(other))

    def wait(self) -> Path | None:
        """Waits for the current write and raises its error; None where there is no write."""
        try:
            return None if self._background is None else self._background.wait()
        except (OSError, RuntimeError) as error:  # of gloo, where another rank is gone
            why = reason_of(error) if isinstance(error, OSError) else "another rank is gone"
            text = f"{self.path}: the checkpoint of step {self._begun} could not be written: {why}"
            if not self.writer:
                raise SitusError(text) from error
            if (whole := self.latest()) is None:
                raise SitusError(f"{text}; there is no earlier checkpoint") from error
            text += f"; the checkpoint of step {whole.step} is whole: resume {self.path} to continue from there"
            raise SitusError(text) from error

    @property
    def failed(self) -> bool:
        """Whether a write has failed, so that `wait` raises; does not wait."""
        return self._background is not None and self._background.failed

    def close(self, *, at_once: bool = False) -> None:
        """Waits for the current write and ignores its error. at_once: aborts it."""
        if self._background is not None:
            self._background.close(at_once)

    def _config_hash(self, parallel: str | None = None) -> str:
        """A hash of the settings that no resume may change, by which a checkpoint is known to be of this run."""
        named = flat(self.config)
        fixed = {name: value for name, value in named.items() if not may_change(name)}
        if PARALLEL in named:
            fixed[PARALLEL] = parallel or named[PARALLEL]
        return fingerprint(fixed)

    def _at(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.checkpoints / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, whole or damaged; waits for one that is being written."""
        if self._background is not None:
            self._background.join()
        return self._steps()

    def _steps(self) -> list[int]:
        numbers = [int(m[1]) for path in self.checkpoints.glob("step-*") if (m := NAME.fullmatch(path.name))]
        return [step for step in numbers if self._at(step).exists()]

    def look(self, step: int) -> Checkpoint | str:
        """The checkpoint of a step, or what is wrong with it."""
        state = read_folder(self._at(step))
        if isinstance(state, str):
            return f"the checkpoint of step {step} is damaged ({state})"
        if state.get("step") != step:
            return f"the checkpoint of step {step} is damaged (it is the checkpoint of step {state.get('step')})"
        if state.get("config") not in {self._config_hash(parallel) for parallel in ("ddp", "fsdp")}:
            return f"the checkpoint of step {step} is damaged (it belongs to a run with another config)"
        return self.checkpoint(state)

    def checkpoint(self, state: Mapping[str, Any]) -> Checkpoint:
        """The checkpoint with this state.json, read here or by another rank."""
        return Checkpoint(self._at(state["step"]), state["step"], dict(state))

    def whole(self, step: int) -> Checkpoint | None:
        """The checkpoint of a step; None where it is damaged."""
        return None if isinstance(checkpoint := self.look(step), str) else checkpoint

    def latest(self, limit: int | None = None) -> Checkpoint | None:
        """The newest whole checkpoint, of step `limit` at most."""
        steps = sorted((step for step in self.steps() if limit is None or step <= limit), reverse=True)
        return next((whole for step in steps if (whole := self.whole(step)) is not None), None)

    def chosen(self, step: int | None = None) -> Checkpoint:
        """The checkpoint that is the run's model: of this step, else the best validated if kept, else the newest."""
        if step is None and self.config.get("train", {}).get("keep_best"):
            step = self.facts().get("best", {}).get("step")
        if step is None:
            return self.newest()
        if step not in (steps := sorted(self.steps())):
            listed = ", ".join(map(str, steps)) or "none"
            raise SitusError(f"{self.path}: has no checkpoint of step {step}; steps with a checkpoint: {listed}")
        if isinstance(checkpoint := self.look(step), str):
            raise SitusError(f"{self.path}: {checkpoint}")
        return checkpoint

    def newest(self) -> Checkpoint:
        """The newest whole checkpoint; an error where there is none, or only damaged ones."""
        if (checkpoint := self.latest()) is None:
            steps = self.steps()
            raise SitusError(
                f"{self.path}: the run has "
                + (f"no whole checkpoint: {self.look(min(steps))}" if steps else "no checkpoint yet")
            )
        return checkpoint

    @cached_property
    def start(self) -> Checkpoint | None:
        """The checkpoint that a resumed run starts from; None for a run that was killed before its first.

        A run that has lost its checkpoints is refused: resuming would start it from the beginning.
        """
        damaged = []
        for step in sorted(self.steps(), reverse=True):
            if not isinstance(checkpoint := self.look(step), str):
                for problem in damaged:
                    note(f"{problem} and was skipped")
                return checkpoint
            damaged.append(checkpoint)
        due = self.config.get("train", {}).get("save_every")
        done = max((record["step"] for record in self.records()), default=0)
        gone = not self.checkpoints.is_dir()  # it is made before config.json
        # The first may still be written until the second is due, which waits for it.
        if damaged or gone or (due is not None and done > 2 * due):
            lost = damaged[0] if damaged else f"step {done} is logged, but no checkpoint exists"
            raise SitusError(
                f"{self.path}: all checkpoints of this run are damaged or missing ({lost}); start the run again in "
                "another folder",
                field="out",
            )
        return None

    def facts(self) -> dict[str, Any]:
        """The state.json of the newest checkpoint whose state.json is intact; its tensors are not read."""
        for step in sorted(self.steps(), reverse=True):
            state = read_table(self._at(step) / "state.json")
            if not isinstance(state, str) and state.get("format") in FORMATS and state.get("step") == step:
                return state
        return {}

    # --- the log ----------------------------------------------------------------------------------------------

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds one line to metrics.jsonl."""
        line = json.dumps(record, ensure_ascii=False) + "\n"
        with self._writing("metrics.jsonl"), self.metrics.open("a", encoding="utf-8") as file:
            file.write(line)

    def rewind(self, checkpoint: Checkpoint | None) -> None:
        """Cuts metrics.jsonl to its length at the checkpoint: the run will write the rest again."""
        size = 0 if checkpoint is None else checkpoint.state["metrics"]["bytes"]
        if self.metrics.exists() and not self.metrics.is_file():
            raise SitusError(
                f"{self.metrics}: must be a file, but is a folder or something else; move it away", field="resume"
            )
        data = self.metrics.read_bytes() if self.metrics.exists() else b""
        valid = data[: data[:size].rfind(b"\n") + 1]
        if len(valid) < size:
            note("metrics.jsonl has lost lines: the log has a gap")
        if valid != data:
            with self._writing("metrics.jsonl"):
                write_bytes(self.metrics, valid)

    def records(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl."""
        return read_metrics(self.metrics)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics.jsonl; a last line that a crash cut short is left out."""
    if not path.is_file():
        return []
    records = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines):
                break
            raise SitusError(f"{path}: line {number} is not JSON") from None
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise SitusError(f"{path}: line {number} is not the record of a step")
        records.append(record)
    return records


def run_and_step(path: str | os.PathLike[str]) -> tuple[Path, int | None]:
    """The run folder that a path names; with the step, where it is one of the checkpoints in it."""
    path = Path(path)
    match = NAME.fullmatch(path.name)
    return (path.parent.parent, int(match[1])) if match and path.parent.name == "checkpoints" else (path, None)


def read_config(path: Path) -> dict[str, Any]:
    """The recorded config of a run folder."""
    table = read_table(path / "config.json")
    if not isinstance(table, str):
        return table
    if not (path / "config.json").exists():
        raise SitusError(f"{path}: is not a run: it has no config.json", field="resume")
    raise SitusError(f"{path}: {table}; do not edit this file; use flags to change the settings of a run")


def _as_recorded(new: Mapping[str, Any], old: Mapping[str, Any], was: Mapping[str, Any]) -> dict[str, Any]:
    """The config `new` as the earlier version that wrote `old` would have written it.

    Fields that version did not have, and whose value still means what it did then (`was`), are left out; fields that
    only it had are kept. Checkpoints hold a hash of their run's config, and so still belong to it.
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
        raise SitusError(
            f"{path}: already contains a run; resume this run, or choose another folder", field=("resume", "out")
        )
    names = sorted(p.name for p in path.iterdir() if p.name not in (LOCK, MARK)) if path.is_dir() else []
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise SitusError(
            f"{path}: is not empty: it has {names[0]}{more}; a run needs a new or empty folder", field="out"
        )
