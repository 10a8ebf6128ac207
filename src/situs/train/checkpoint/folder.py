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
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from situs.config import differences, flat, from_dict, to_dict
from situs.errors import SitusError
from situs.files import write_bytes, write_text
from situs.hold import NAME as LOCK
from situs.hold import only_one
from situs.train.checkpoint.storage import (
    FORMAT,
    delete,
    fingerprint,
    read_folder,
    read_sealed,
    read_tensors,
    reason,
    remove,
    sealed,
    sync,
    write_folder,
)

CLASSES = "classes.json"
MAY_CHANGE = frozenset(
    {
        *("epochs", "max_steps", "workers", "log_every", "save_every", "keep", "probe_every", "trackers"),
        *("out", "resume", "path"),  # data that moved; the loop checks that it is as much as it was
    }
)
"""Names of config fields that a resumed run may change: none of them alters a step that is already done."""

_NAME = re.compile(r"step-([0-9]{8,})")


def _may_change(name: str) -> bool:
    """A method's own fields may not, whatever they are called (DropPos has `epochs` too)."""
    return not name.startswith("method.") and name.rsplit(".", maxsplit=1)[-1] in MAY_CHANGE


@dataclass(frozen=True)
class Checkpoint:
    """One whole checkpoint: the step it was taken after, its facts and its tensors."""

    path: Path
    step: int
    state: dict[str, Any]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of one file ("model", "optimizer", "ema", "loop"); none where there is no such file."""
        file = f"{name}.safetensors"
        return read_tensors(self.path / file) if file in self.state["files"] else {}


class RunFolder:
    """The folder of one run. Only the writer (rank 0) writes; the others may ask it for paths.

    config: a config or its plain dict. notes: what a resume has to tell the user, one sentence each. limit: the last
    step that may be gone on from; None: whichever is the newest.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], *, resumed: bool, writer: bool) -> None:
        self.path, self.config = path, config
        self.checkpoints, self.metrics = path / "checkpoints", path / "metrics.jsonl"
        self.resumed, self.writer = resumed, writer
        self.notes: list[str] = []
        self.limit: int | None = None
        self._held = False

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
        fixed = {name: pair for name, pair in changed.items() if not _may_change(name)}
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

    def _at(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self.checkpoints / f"step-{step:08d}"

    def save(self, step: int, files: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], keep: int) -> Path:
        """Writes the checkpoint of `step` aside, renames it, and drops all but the newest `keep`."""
        final = self._at(step)
        aside = self.checkpoints / f".writing-{final.name}"
        try:
            delete(aside)
            aside.mkdir(parents=True)
            facts = {"step": step, **state, "config": self._fixed_config(), "metrics": self._log_so_far()}
            write_folder(aside, files, facts)
            if final.exists():  # a torn one of the same step: the run came past it again
                remove(final)
            aside.rename(final)
            sync(self.checkpoints)
        except OSError as error:
            delete(aside)
            raise SitusError(self._not_saved(step, error)) from error
        # Newer ones than this were torn, or the run would have gone on from them.
        others = sorted(self.steps(), reverse=True)
        kept = [other for other in others if other <= step][:keep]
        for other in set(others) - set(kept):
            remove(self._at(other))
        return final

    def _not_saved(self, step: int, error: OSError) -> str:
        text = f"{self.path}: the checkpoint of step {step} could not be written: {reason(error)}"
        if (whole := self.latest()) is None:
            return f"{text}; there is no earlier one"
        return f"{text}; that of step {whole.step} is whole, and resuming {self.path} goes on from it"

    def _fixed_config(self) -> str:
        """A hash of the settings that no resume may change: a checkpoint is of the run whose config has it."""
        return fingerprint({name: value for name, value in flat(self.config).items() if not _may_change(name)})

    def steps(self) -> list[int]:
        """The steps of which a checkpoint lies here, whole or torn."""
        found = [int(m[1]) for path in self.checkpoints.glob("step-*") if (m := _NAME.fullmatch(path.name))]
        return [step for step in found if self._at(step).exists()]

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint, of step `limit` at most. Torn ones on the way to it are told in `notes`."""
        steps = [step for step in self.steps() if self.limit is None or step <= self.limit]
        return next((found for step in sorted(steps, reverse=True) if (found := self.whole(step)) is not None), None)

    def whole(self, step: int) -> Checkpoint | None:
        """The checkpoint of a step; None, and a note, where it is torn."""
        path = self._at(step)
        state = read_folder(path)
        if not isinstance(state, str):
            if state.get("step") == step and state.get("config") == self._fixed_config():
                return Checkpoint(path, step, state)
            other = "a run with another config" if state.get("step") == step else f"step {state.get('step')}"
            state = f"it is the checkpoint of {other}"
        self.notes.append(f"the checkpoint of step {step} is torn ({state}) and was passed over")
        return None

    def newest(self) -> Checkpoint:
        """The newest whole checkpoint; an error where there is none, which tells a torn one from none at all."""
        if (found := self.latest()) is None:
            said = f"no whole checkpoint: {self.notes[-1]}" if self.steps() else "no checkpoint yet"
            raise SitusError(f"{self.path}: the run has {said}")
        return found

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
        if torn or (due is not None and done >= due):
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

    def _log_so_far(self) -> dict[str, Any]:
        """Size and hash of metrics.jsonl, which is on the disk then."""
        if self.metrics.exists():
            sync(self.metrics)
        data = self._log()
        return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def _log(self) -> bytes:
        """The bytes of metrics.jsonl, none where there is no such file."""
        if not self.metrics.exists():
            return b""
        if not self.metrics.is_file():
            raise SitusError(f"{self.metrics}: is no file; move it away", field="resume")
        return self.metrics.read_bytes()

    def rewind(self, checkpoint: Checkpoint | None) -> None:
        """Cuts metrics.jsonl to what it was at the checkpoint: the run will write the rest again."""
        size = 0
        if checkpoint is not None:
            if not self.metrics.exists() and checkpoint.state["metrics"]["bytes"]:
                self.notes.append("metrics.jsonl is gone: the log begins anew")
                return
            self._check_log(checkpoint.step, checkpoint.state, "; move it away to go on without its lines")
            size = checkpoint.state["metrics"]["bytes"]
        data = self._log()
        if len(data) > size:
            with self._writing("metrics.jsonl"):
                write_bytes(self.metrics, data[:size])

    def _check_log(self, step: int, state: Mapping[str, Any], way_out: str = "") -> None:
        """Refuses a log that is not as it was when the checkpoint of `step` was written."""
        begun = self._log()[: state["metrics"]["bytes"]]
        if hashlib.sha256(begun).hexdigest() != state["metrics"]["sha256"]:
            raise SitusError(f"{self.metrics}: is not as it was written up to step {step}{way_out}", field="resume")

    def facts(self) -> dict[str, Any]:
        """The state.json of the newest checkpoint that has one as it was written; its tensors are not read."""
        for step in sorted(self.steps(), reverse=True):
            state = read_sealed(self._at(step) / "state.json")
            if not isinstance(state, str) and state.get("format") == FORMAT and state.get("step") == step:
                return state
        return {}

    def records(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl, which are those that were written."""
        state = self.facts()
        if state and self.metrics.exists():
            self._check_log(state["step"], state)
        return read_metrics(self.metrics)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics.jsonl; a last line that a crash cut short is left out."""
    if not path.is_file():
        return []
    found = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines):
                break
            raise SitusError(f"{path}: line {number} is no JSON") from None
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise SitusError(f"{path}: line {number} is no record of a step")
        found.append(record)
    return found


def read_config(path: Path) -> dict[str, Any]:
    """The recorded config of a run folder."""
    table = read_sealed(path / "config.json")
    if not isinstance(table, str):
        return table
    if not (path / "config.json").exists():
        raise SitusError(f"{path}: holds no run, there is no config.json in it", field="resume")
    raise SitusError(f"{path}: {table}; a run's settings are changed by flags, never in that file")


def _as_recorded(new: Mapping[str, Any], old: Mapping[str, Any], was: Mapping[str, Any]) -> dict[str, Any]:
    """`new` without the fields that `old`, a config of an earlier version, lacks and that are as they `was` then.

    So its checkpoints, which hold a hash of the config they belong to, still belong to it.
    """
    return {
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
    held = sorted(each.name for each in path.iterdir() if each.name != LOCK) if path.is_dir() else []
    if held:
        more = f" and {len(held) - 1} more" if len(held) > 1 else ""
        raise SitusError(
            f"{path}: is not empty, it holds {held[0]}{more}; a run needs a new or empty folder", field="out"
        )
