"""The checkpoints of a run: written in the background, dropped when they are old, found again whole."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from situs.config import flat
from situs.errors import SitusError
from situs.train.checkpoint.records import vouched
from situs.train.checkpoint.snapshot import Snapshot, spare_of
from situs.train.checkpoint.storage import FORMATS, fingerprint, read_folder, read_sealed, reason, remove
from situs.train.checkpoint.tensors import Parts
from situs.train.checkpoint.writing import Background, write_checkpoint

MAY_CHANGE = frozenset(
    {
        *("epochs", "max_steps", "workers", "log_every", "save_every", "keep", "probe_every", "trackers"),
        *("keep_at", "keep_best"),
        *("out", "resume", "path"),  # data that moved; the loop checks that it is as much as it was
    }
)
"""Names of config fields that a resumed run may change: none of them alters a step that is already done."""

PARALLEL = "train.parallel"
"""May change too, but checkpoints' hashes of their config have it in them."""

NAME = re.compile(r"step-([0-9]{8,})")


def may_change(name: str) -> bool:
    """A method's own fields may not, whatever they are called (DropPos has `epochs` too)."""
    return name == PARALLEL or (not name.startswith("method.") and name.rsplit(".", maxsplit=1)[-1] in MAY_CHANGE)


@dataclass(frozen=True)
class Checkpoint:
    """One whole checkpoint: the step it was taken after, its facts and its tensors."""

    path: Path
    step: int
    state: dict[str, Any]

    def parts(self, name: str) -> Parts:
        """The tensors of one kind ("model", "optimizer", "ema", "loop"), to be read one by one, whole or in part."""
        own = re.compile(rf"{re.escape(name)}(\.rank[0-9]+)?\.safetensors")
        return Parts([self.path / file for file in sorted(self.state["files"]) if own.fullmatch(file)])

    def tensors(self, name: str) -> dict[str, Tensor]:
        """All tensors of one kind, whole; none where there are none."""
        return self.parts(name).all()


class Checkpoints:
    """The checkpoints in the folder of a run whose config is given. writer: whether this rank gives them their names.

    notes: what a user should know of them, one sentence each.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], *, writer: bool) -> None:
        self.path, self.config, self.writer = path, config, writer
        self.checkpoints, self.metrics = path / "checkpoints", path / "metrics.jsonl"
        self.notes: list[str] = []
        self.limit: int | None = None
        self._background: Background | None = None
        self._spare: int | None = None

    def _at(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self.checkpoints / f"step-{step:08d}"

    def save(self, step: int, files: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], keep: int) -> Path:
        """Writes the checkpoint of `step` and drops all but the newest `keep`; see `begin`."""
        self.begin(step, files, state, keep)
        saved = self.settle()
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
        """Holds the tensors as they are now and writes them in the background; waits for the write before this one.

        All ranks call it. The log counts up to its present end. stay: steps whose checkpoints are not dropped either.
        """
        if self._background is None:
            self._background = Background()
        self.settle()
        if self._spare is None:
            held = [tensor.device for tensors in files.values() for tensor in tensors.values()]
            self._spare = max(map(spare_of, held), default=0)
        snapshot = Snapshot(files, self._spare)
        size = self.metrics.stat().st_size if self.metrics.is_file() else 0
        self._background.begin(lambda: self._write(step, snapshot, state, size, keep, stay))

    def settle(self) -> Path | None:
        """Waits for the write that is under way, and raises what went wrong with it; None where none was."""
        return None if self._background is None else self._background.wait()

    @property
    def writing(self) -> bool:
        """Whether a write is under way; nothing waits."""
        return self._background is not None and self._background.busy

    @property
    def failed(self) -> bool:
        """Whether a write has failed, which `settle` would tell; nothing waits."""
        return self._background is not None and self._background.failed

    def close(self, *, at_once: bool = False) -> None:
        """Waits for the write that is under way, without a word of how it went. at once: it is given up."""
        if self._background is not None:
            self._background.close(at_once)

    def _write(
        self, step: int, snapshot: Snapshot, state: Mapping[str, Any], size: int, keep: int, stay: Collection[int]
    ) -> Path:
        """The background's work: the files aside, the name, and the end of older checkpoints."""
        final = self._at(step)

        def facts() -> dict[str, Any]:
            return {"step": step, **state, "config": self._own_config(), "metrics": vouched(self.metrics, size)}

        assert self._background is not None
        try:
            write_checkpoint(final, snapshot, facts, self._background, main=self.writer)
        except (OSError, RuntimeError) as error:  # of gloo, where another rank is gone
            raise SitusError(self._not_saved(step, error)) from error
        if self.writer:
            # Newer ones than this were torn, or the run would have gone on from them.
            others = sorted(self.steps(), reverse=True)
            older = [other for other in others if other <= step]
            kept = {*older[:keep], *(other for other in older if other in stay)}
            for other in set(others) - kept:
                remove(self._at(other))
        return final

    def _not_saved(self, step: int, error: Exception) -> str:
        said = reason(error) if isinstance(error, OSError) else "another rank is gone"
        text = f"{self.path}: the checkpoint of step {step} could not be written: {said}"
        if not self.writer:
            return text
        if (whole := self.latest()) is None:
            return f"{text}; there is no earlier one"
        return f"{text}; that of step {whole.step} is whole, and resuming {self.path} goes on from it"

    def _own_config(self, parallel: str | None = None) -> str:
        """A hash of the settings that no resume may change: a checkpoint is of the run whose config has it."""
        named = flat(self.config)
        fixed = {name: value for name, value in named.items() if not may_change(name)}
        if PARALLEL in named:
            fixed[PARALLEL] = parallel or named[PARALLEL]
        return fingerprint(fixed)

    def _is_own(self, state: Mapping[str, Any]) -> bool:
        return state.get("config") in {self._own_config(parallel) for parallel in ("ddp", "fsdp")}

    def steps(self) -> list[int]:
        """The steps of which a checkpoint lies here, whole or torn; one that is being written is waited for."""
        if self._background is not None:
            self._background.join()
        found = [int(m[1]) for path in self.checkpoints.glob("step-*") if (m := NAME.fullmatch(path.name))]
        return [step for step in found if self._at(step).exists()]

    def checkpoint(self, state: Mapping[str, Any]) -> Checkpoint:
        """The checkpoint whose state.json another rank has read."""
        return Checkpoint(self._at(state["step"]), state["step"], dict(state))

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint, of step `limit` at most. Torn ones on the way to it are told in `notes`."""
        steps = [step for step in self.steps() if self.limit is None or step <= self.limit]
        return next((found for step in sorted(steps, reverse=True) if (found := self.whole(step)) is not None), None)

    def whole(self, step: int) -> Checkpoint | None:
        """The checkpoint of a step; None, and a note, where it is torn."""
        path = self._at(step)
        state = read_folder(path)
        if not isinstance(state, str):
            if state.get("step") == step and self._is_own(state):
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

    def chosen(self, step: int | None = None) -> Checkpoint:
        """The checkpoint that is the run's model: of this step, or of the best validation where that was kept, or the
        newest."""
        best = self.facts().get("best") if step is None and self.config.get("train", {}).get("keep_best") else None
        if step is None and best is None:
            return self.newest()
        wanted = best["step"] if step is None and best is not None else step
        assert wanted is not None
        if wanted not in (there := sorted(self.steps())):
            told = ", ".join(map(str, there)) or "none"
            raise SitusError(f"{self.path}: has no checkpoint of step {wanted}, only of {told}")
        if (found := self.whole(wanted)) is None:
            raise SitusError(f"{self.path}: {self.notes[-1].removesuffix(' and was passed over')}")
        return found

    def facts(self) -> dict[str, Any]:
        """The state.json of the newest checkpoint that has one as it was written; its tensors are not read."""
        for step in sorted(self.steps(), reverse=True):
            state = read_sealed(self._at(step) / "state.json")
            if not isinstance(state, str) and state.get("format") in FORMATS and state.get("step") == step:
                return state
        return {}
