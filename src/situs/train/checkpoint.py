"""The run folder: what a training run leaves on disk, and how it is found again after a crash.

    config.json                     the resolved config
    metrics.jsonl                   one line a log step
    checkpoints/step-00001234/      model, optimiser, mean and generators as safetensors, state.json
    nan/                            the step that was not finite, where there was one (see `situs.train.nan`)

A checkpoint is written under another name and renamed when every byte is on the disk; state.json holds the
size and digest of its files, so a torn one is known and the newest whole one is used. No pickle anywhere.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from situs.config import differences, to_dict, write_text
from situs.errors import SitusError
from situs.train.tensors import digest, read_tensors, sync, write_tensors

FORMAT = 1
MAY_CHANGE = frozenset(
    {
        "epochs",
        "max_steps",
        "out",
        "path",  # data that moved; the loop checks that it is as much as it was
        "workers",
        "log_every",
        "save_every",
        "keep",
        "probe_every",
        "trackers",
        "resume",
    }
)
"""Names of config fields that a resumed run may change: none of them alters a step that is already done."""

_NAME = re.compile(r"step-(\d+)")


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
        path = self.path / f"{name}.safetensors"
        return read_tensors(path) if path.exists() else {}


class RunFolder:
    """The folder of one run. Only the writer (rank 0) writes; the others may ask it for paths.

    config: a config or its plain dict. notes: what a resume has to tell the user, one sentence each.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], *, resumed: bool, writer: bool) -> None:
        self.path, self.config = path, config
        self.resumed, self.writer = resumed, writer
        self.notes: list[str] = []

    @classmethod
    def create(cls, path: str | os.PathLike[str], config: Any, *, writer: bool = True) -> RunFolder:
        """A new run. A folder that already holds one is refused, never overwritten."""
        run = cls(Path(path), to_dict(config), resumed=False, writer=writer)
        if writer:
            if (run.path / "config.json").exists():
                raise SitusError(f"{path}: already holds a run; go on with --resume {path} or choose another --out")
            run._write("the run folder", lambda: run.checkpoints.mkdir(parents=True, exist_ok=True))
            run._write_config()
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str], config: Any = None, *, writer: bool = True) -> RunFolder:
        """A run to go on with. config: the one to go on with; None takes the recorded one as it is."""
        path = Path(path)
        recorded = read_config(path)
        run = cls(path, recorded if config is None else to_dict(config), resumed=True, writer=writer)
        changed = differences(recorded, run.config)
        fixed = {name: pair for name, pair in changed.items() if not _may_change(name)}
        if fixed:
            listed = ", ".join(f"{name} was {old!r} and is now {new!r}" for name, (old, new) in list(fixed.items())[:3])
            more = f" and {len(fixed) - 3} more fields" if len(fixed) > 3 else ""
            raise SitusError(f"{path}: cannot resume with another config: {listed}{more} (--resume)")
        if changed:
            run.notes += [f"{name}: {old} -> {new}" for name, (old, new) in changed.items()]
        if writer:
            for leftover in run.checkpoints.glob(".*"):
                shutil.rmtree(leftover, ignore_errors=True)
        return run

    def adopt_config(self) -> None:
        """Writes down the config a resumed run goes on with, once nothing refuses it any more."""
        if self.writer and read_config(self.path) != self.config:
            self._write_config()

    @cached_property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @cached_property
    def metrics(self) -> Path:
        """The file of the log."""
        return self.path / "metrics.jsonl"

    def _write_config(self) -> None:
        text = json.dumps(self.config, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        self._write("config.json", lambda: write_text(self.path / "config.json", text))

    def _write(self, what: str, action: Any) -> None:
        try:
            action()
        except OSError as error:
            raise SitusError(f"{self.path}: {what} could not be written: {_reason(error)}") from error

    # --- checkpoints ----------------------------------------------------------------------------------------

    def save(self, step: int, files: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], keep: int) -> Path:
        """Writes the checkpoint of `step` aside, renames it, and drops all but the newest `keep`."""
        final = self.checkpoints / f"step-{step:08d}"
        aside = self.checkpoints / f".writing-{final.name}"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            write_folder(aside, files, {"step": step, **state})
            if final.exists():  # a torn one of the same step: the run came past it again
                _remove(final)
            aside.rename(final)
            sync(self.checkpoints)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise SitusError(self._not_saved(step, error)) from error
        # Newer ones than this were torn, or the run would have gone on from them.
        others = sorted(self.steps(), reverse=True)
        kept = [other for other in others if other <= step][:keep]
        for other in set(others) - set(kept):
            _remove(self.checkpoints / f"step-{other:08d}")
        return final

    def _not_saved(self, step: int, error: OSError) -> str:
        text = f"{self.path}: the checkpoint of step {step} could not be written: {_reason(error)}"
        if (whole := self.latest()) is None:
            return f"{text}; there is no earlier one"
        return f"{text}; that of step {whole.step} is whole, go on from it with --resume {self.path}"

    def steps(self) -> list[int]:
        """The steps of which a checkpoint lies here, whole or torn."""
        return [int(m[1]) for path in self.checkpoints.glob("step-*") if (m := _NAME.fullmatch(path.name))]

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint. Torn ones on the way to it are told in `notes`."""
        for step in sorted(self.steps(), reverse=True):
            path = self.checkpoints / f"step-{step:08d}"
            state = read_folder(path)
            if not isinstance(state, str):
                return Checkpoint(path, step, state)
            self.notes.append(f"the checkpoint of step {step} is torn ({state}) and was passed over")
        return None

    def newest(self) -> Checkpoint:
        """The newest whole checkpoint; an error where there is none, which tells a torn one from none at all."""
        if (found := self.latest()) is None:
            said = f"no whole checkpoint: {self.notes[-1]}" if self.steps() else "no checkpoint yet"
            raise SitusError(f"{self.path}: the run has {said}")
        return found

    # --- metrics --------------------------------------------------------------------------------------------

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds one line to metrics.jsonl."""
        line = json.dumps(record, ensure_ascii=False) + "\n"

        def write() -> None:
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(line)

        self._write("metrics.jsonl", write)

    def truncate(self, step: int) -> None:
        """Drops the lines of steps after `step`, and a torn last one: the run will write them again."""
        if self.metrics.exists():
            kept = [
                json.dumps(record, ensure_ascii=False) + "\n" for record in self.records() if record["step"] <= step
            ]
            self._write("metrics.jsonl", lambda: write_text(self.metrics, "".join(kept)))

    def records(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl."""
        return read_metrics(self.metrics)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics.jsonl; a last line that a crash cut short is left out."""
    if not path.exists():
        return []
    found = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            if line:
                found.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise SitusError(f"{path}: line {number} is no JSON") from None
    return found


def read_config(path: Path) -> dict[str, Any]:
    """The recorded config of a run folder."""
    try:
        return json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SitusError(f"{path}: holds no run, there is no config.json in it (--resume)") from None
    except (OSError, ValueError) as error:
        raise SitusError(f"{path}: config.json cannot be read: {error} (--resume)") from None


# --- one folder of tensors and facts ------------------------------------------------------------------------


def write_folder(folder: Path, files: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
    """Writes safetensors files and, last, a state.json that vouches for them; waits for the disk."""
    vouched = {}
    for name, tensors in files.items():
        path = folder / f"{name}.safetensors"
        write_tensors(path, tensors)
        vouched[path.name] = {"bytes": path.stat().st_size, "sha256": digest(path)}
    text = json.dumps({"format": FORMAT, **state, "files": vouched}, indent=2, allow_nan=False) + "\n"
    write_text(folder / "state.json", text)
    sync(folder)


def read_folder(folder: Path) -> dict[str, Any] | str:
    """The state.json of a folder whose files are whole, or else what is wrong with it."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "state.json is missing or cut short"
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        return f"state.json is not of format {FORMAT}"
    for name, fact in state["files"].items():
        path = folder / name
        size = path.stat().st_size if path.exists() else 0
        if size != fact["bytes"]:
            return f"{name} has {size:,} of {fact['bytes']:,} bytes"
        if digest(path) != fact["sha256"]:
            return f"{name} has other bytes than were written"
    return state


def _remove(folder: Path) -> None:
    """Takes a checkpoint away: first its name, so that a crash leaves no half of it under that name."""
    away = folder.with_name(f".removing-{folder.name}")
    shutil.rmtree(away, ignore_errors=True)
    folder.rename(away)
    shutil.rmtree(away, ignore_errors=True)


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
