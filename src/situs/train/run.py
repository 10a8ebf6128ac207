"""A whole run: assembled from one config, tried out or trained in a folder, loaded again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from situs.backbones.lora import merge_lora
from situs.config import from_dict
from situs.core.when import When
from situs.data.loader import Loader
from situs.data.sources.memory import check_same
from situs.data.sources.remote import cache_folder as shards_folder
from situs.data.sources.remote import is_remote
from situs.data.sources.webdataset import without_cache_writes
from situs.errors import SitusError, counted, verb
from situs.files import cache_folder
from situs.hub import local_folder
from situs.methods.base import Method
from situs.progress import note, notes_to, silent
from situs.train import distributed
from situs.train.assemble import (
    Assembled,
    RunConfig,
    Setup,
    assemble,
    begun_there,
    check_place,
    make_method,
    mark_start,
    resolve_config,
)
from situs.train.checkpoint import CLASSES, MARK, Checkpoint, RunFolder, read_config, run_and_step
from situs.train.contract import DataReader, StartHook, TrainResult
from situs.train.export import load_checkpoint
from situs.train.log import GIB
from situs.train.loop import fit
from situs.train.optim import OptimConfig
from situs.train.private import KEY_FILE, forget_secret
from situs.train.tuning import TuningConfig, attach, freeze


def train_run(
    config: RunConfig,
    setup: Setup = Setup(),  # noqa: B008  (frozen)
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    device: str | None = None,
    quiet: bool = False,
) -> TrainResult:
    """Trains what `config` describes, in a new folder `out`, or resumes the run in `resume`.

    Restarted by torchrun (--max-restarts), it resumes what it began in `out`. setup: first weights and hooks. quiet:
    the loop prints nothing.
    """
    check_place(config, out, resume)
    requested, config = config, resolve_config(config)
    ranks = distributed.start(device)
    if ranks.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        # The compiler's default is a folder that a reboot empties.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder("compiled")))
    with contextlib.ExitStack() as stack:
        stack.callback(distributed.stop)
        if not ranks.main:
            stack.enter_context(notes_to(silent))
        resume = _begun(out, ranks) if resume is None else resume
        run = None
        if resume is not None:
            check_same(read_config(Path(resume))["data"]["path"], config.data.path)
            run = RunFolder.open(resume, config, writer=ranks.main)
            stack.enter_context(run.hold())
        fresh = distributed.from_main(run is None or (ranks.main and run.start is None), ranks.device)
        parts = stack.enter_context(assemble(requested, config, ranks, setup, fresh=fresh))
        noted = parts.loader.source.left_out()
        for line in noted[len(parts.loader.source.notes) :]:  # the others are in the description of the set
            note(line)
        how: dict[str, Any] = {"hooks": parts.hooks, "quiet": quiet}
        if fresh:
            _begin(parts)
        if run is None:
            assert out is not None
            if ranks.main:
                mark_start(Path(out))
            run = RunFolder.create(out, config, classes=parts.loader.classes, writer=ranks.main)
        try:
            if parts.private is not None:
                how["stepper"], ledger = parts.private.open(run, parts.method, parts.loader, parts.total)
                how["hooks"] = (*parts.hooks, ledger)
            result = fit(parts.method, parts.loader, config.train, parts.optim, run, **how)
        except BaseException:
            if ranks.main and not run.resumed:
                _withdraw(run)
            raise
        if parts.private is not None and result.step == result.total:
            forget_secret(run.path)
        return replace(result, skipped=_note_skipped(parts, noted))


def _begin(parts: Assembled) -> None:
    """Calls the hooks that act before the first update."""
    for hook in parts.hooks:
        if isinstance(hook, StartHook):
            hook.begin(parts.method)


def _begun(out: str | Path | None, ranks: distributed.Ranks) -> str | Path | None:
    """The new folder, if torchrun restarted this run and it had begun there; all ranks call it."""
    if not distributed.from_main(ranks.main and out is not None and begun_there(Path(out)), ranks.device):
        return None
    note(f"torchrun has restarted the ranks (restart {distributed.restarts()}): the run is resumed")
    return out


def _note_skipped(parts: Assembled, noted: Sequence[str]) -> int:
    """Notes at the end of a run what is not in `noted` (a streamed set is read while it is trained on) and, once more,
    every broken sample; gives how many samples were broken."""
    sources = [parts.loader.source, *(hook.loader.source for hook in parts.hooks if isinstance(hook, DataReader))]
    for line in parts.loader.source.notes:
        if line not in noted:
            note(line)
    for report in filter(None, dict.fromkeys(source.skip_report() for source in sources)):
        note(report)
    return sum(len(source.skipped) for source in sources)


def _withdraw(run: RunFolder) -> None:
    """Deletes a new run's folder where nothing was done yet, so that the same command can be repeated."""
    done = (run.metrics, run.path / "nan", *run.checkpoints.glob("*"))
    if not any(path.exists() for path in done):
        for name in ("config.json", CLASSES, MARK, KEY_FILE):
            (run.path / name).unlink(missing_ok=True)
        for folder in (run.checkpoints, run.path):
            with contextlib.suppress(OSError):
                folder.rmdir()


class Loaded(NamedTuple):
    """A trained run, loaded. classes: names in label order, where it has a classifier. checkpoint: the one its weights
    come from. ema: whether they are the mean of the run's."""

    config: RunConfig
    method: Method
    run: RunFolder
    classes: tuple[str, ...] | None
    checkpoint: Checkpoint
    ema: bool


CLIENTS_PART = "split.json"
"""The file of `situs.split` beside the client's part of a training whose blocks are on a server."""


def load_run(
    path: str | Path, device: torch.device | str = "cpu", *, ema: bool | None = None, as_trained: bool = False
) -> Loaded:
    """A trained run: its method with the weights of its newest checkpoint, or of its best if kept, in eval mode.

    path: the run's folder, or one of its checkpoints. ema: the mean of the weights; None takes it if there is one.
    as_trained: LoRA's products stay apart and frozen weights frozen, as in the run's steps; else an ordinary model.
    """
    if not is_run(path):
        raise SitusError(f"{path}: is not a run: a run is a folder that contains config.json and checkpoints")
    path, step = run_and_step(path)
    if (Path(path) / CLIENTS_PART).is_file():
        raise SitusError(
            f"{path}: is the client's part of a split training and lacks the server's blocks; join both parts with "
            "situs split merge, or evaluate this part together with the server (situs split infer)"
        )
    config = from_dict(RunConfig, read_config(path), where=f"{path}/config.json")
    run = RunFolder.open(path, writer=False)
    checkpoint = run.chosen(step)
    classes = run.classes()
    # The weights are the checkpoint's: the files that the run started from may be gone.
    bare = replace(
        config,
        init=None,
        tuning=TuningConfig(),
        backbone=replace(config.backbone, name=_bare_name(config), weights=None),
    )
    method = make_method(bare, classes)
    attach(method, config.tuning)
    mean = load_checkpoint(method, checkpoint, ema=ema)
    if as_trained:
        freeze(method, config.tuning, new_positions=not config.init_positions)
    else:
        merge_lora(method.backbone)
    return Loaded(config, method.to(device).eval(), run, classes, checkpoint, mean)


def _bare_name(config: RunConfig) -> str:
    """The model's name; for a folder the path of its config.json, which must still exist."""
    name = config.backbone.name
    folder = local_folder(name)
    if not folder.is_absolute():
        return name
    file = folder if folder.is_file() else folder / "config.json"
    if not file.is_file():
        raise SitusError(
            f"{folder}: no longer exists, but the run's model needs the config.json in this folder; restore the folder"
        )
    return str(file)


def is_run(path: str | Path) -> bool:
    """Whether a path is a run folder or one of its checkpoints (and not an export, a file or a name)."""
    path = run_and_step(path)[0] if Path(path).is_dir() else Path(path)
    return (Path(path) / "config.json").is_file() and (Path(path) / "checkpoints").is_dir()


TRIED = 4
"""Samples of the first batch whose loss is computed: enough to find what does not fit, in no time."""


@dataclass(frozen=True)
class Rehearsal:
    """What a run would do. notes: lines for the user. batch: shape of the first batch. loss: the loss of a few of its
    samples. state_gib: GiB of weights, gradients and optimiser state, without activations."""

    notes: tuple[str, ...]
    batch: tuple[int, ...]
    loss: float
    parameters: int
    trained: int
    state_gib: float
    steps: int
    steps_per_epoch: int
    begins_at: int
    cached: str | None = None
    """Folder for the downloaded shards of a remote data set."""

    def lines(self) -> list[str]:
        """For people."""
        shape = " × ".join(map(str, self.batch))
        count = f"{self.steps / self.steps_per_epoch:.4g}"
        epochs = f"{count} epoch{'s' * (count != '1')} of {counted(self.steps_per_epoch, 'steps')}"
        memory = f"{self.state_gib:.2g} GiB"
        done = f"; {self.begins_at:,} {verb(self.begins_at, 'are')} already done" if self.begins_at else ""
        return [
            *self.notes,
            f"a batch has the shape {shape}; the loss of {min(TRIED, self.batch[0])} of its samples is {self.loss:.4g}",
            f"trained parameters: {self.trained:,} of {self.parameters:,}",
            f"weights, gradients and Adam's moments need {memory}",
            f"{counted(self.steps, 'steps')}: {epochs}{done}",
            "nothing was written: this was a dry run"
            if self.cached is None
            else f"this was a dry run: no run was written; the fetched shards stay in {self.cached}",
        ]


@without_cache_writes()
def rehearse(
    config: RunConfig,
    setup: Setup = Setup(),  # noqa: B008  (frozen)
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    device: str | None = None,
) -> Rehearsal:
    """Does what `train_run` does before its first step, computes the loss of a few samples, and writes nothing."""
    check_place(config, out, resume)
    requested, config = config, resolve_config(config)
    ranks, notes = distributed.start(device), list[str]()
    try:
        run = None if resume is None else RunFolder.open(resume, config, writer=False)
        newest = None if run is None else run.latest()
        with notes_to(notes.append), assemble(requested, config, ranks, setup, fresh=newest is None) as parts:
            method, loader = parts.method, parts.loader
            if parts.private is not None:
                notes.append(parts.private.rehearse(method, loader, parts.total))
            shape, loss = _try_out(method, loader, config.train.seed)
            count, trained = _counts(method)
            return Rehearsal(
                tuple(notes),
                shape,
                loss,
                count,
                trained,
                state_bytes(count, trained, config.optim) / GIB,
                parts.total,
                loader.steps_per_epoch,
                0 if newest is None else newest.step,
                str(shards_folder()) if is_remote(config.data.path) else None,
            )
    finally:
        distributed.stop()


def _try_out(method: Method, loader: Loader, seed: int) -> tuple[tuple[int, ...], float]:
    """The shape of the first batch, and the loss of a few of its samples."""
    batch = next(loader.iterate(), None)
    if batch is None:
        raise SitusError(f"{loader.source.name}: contains no batch", field="data")
    few = batch.part(slice(0, TRIED))
    method.train()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        loss = float(method(few, method.draw(few, When(seed=seed))).loss)
    return tuple(batch.inputs.shape), loss


def _counts(method: Method) -> tuple[int, int]:
    """How many parameters there are, and how many are trained."""
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in method.parameters()]
    return sum(count for count, _ in counts), sum(count for count, trained in counts if trained)


def state_bytes(count: int, trained: int, optim: OptimConfig) -> int:
    """Bytes of the weights, the trained ones' gradients and two moments, and the mean (EMA), all in float32."""
    return 4 * (count + 3 * trained + (count if optim.ema else 0))
