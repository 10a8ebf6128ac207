"""A dry run: data, model, one batch and the length of a run, as training would have them; nothing is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from situs.core.when import When
from situs.data.loader import Loader
from situs.data.sources.remote.cache import cache_folder
from situs.data.sources.remote.transfer import is_remote
from situs.data.sources.webdataset import without_cache_writes
from situs.errors import SitusError, counted, verb
from situs.methods.base import Method
from situs.progress import notes_to
from situs.train import distributed
from situs.train.assemble import RunConfig, Setup, assemble, check_place, resolve_config
from situs.train.checkpoint import RunFolder
from situs.train.optim import OptimConfig

GIB = 2**30
FEW = 4
"""Samples of the first batch whose loss is computed: enough to find what does not fit, in no time."""


@dataclass(frozen=True)
class Rehearsal:
    """What a run would do. notes: lines for the user. batch: shape of the first; loss: of a few of its samples.
    state_gib: GiB of weights, gradients and optimiser state, without activations."""

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
    """Folder with the fetched shards of a remote set."""

    def lines(self) -> list[str]:
        """For people."""
        shape = " × ".join(map(str, self.batch))
        count = f"{self.steps / self.steps_per_epoch:.4g}"
        epochs = f"{count} epoch{'s' * (count != '1')} of {self.steps_per_epoch:,}"
        memory = f"{self.state_gib:.2g} GiB"
        done = f", of which {self.begins_at:,} {verb(self.begins_at, 'are')} done" if self.begins_at else ""
        return [
            *self.notes,
            f"a batch: {shape}; the loss of {min(FEW, self.batch[0])} of its samples is {self.loss:.4g}",
            f"{self.parameters:,} parameters, {self.trained:,} trained: {memory} with gradients and moments",
            f"{counted(self.steps, 'steps')}, {epochs}{done}",
            "nothing was written: this was a dry run"
            if self.cached is None
            else f"this was a dry run: no run was written; shards that were fetched stay in {self.cached}",
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
                str(cache_folder()) if is_remote(config.data.path) else None,
            )
    finally:
        distributed.stop()


def _try_out(method: Method, loader: Loader, seed: int) -> tuple[tuple[int, ...], float]:
    """The shape of the first batch, and the loss of a few of its samples."""
    batch = next(loader.iterate(), None)
    if batch is None:
        raise SitusError(f"{loader.source.name}: has not a single batch", field="data")
    few = batch.part(slice(0, FEW))
    method.train()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        loss = float(method(few, method.draw(few, When(seed=seed, epoch=0, progress=0.0))).loss)
    return tuple(batch.inputs.shape), loss


def _counts(method: Method) -> tuple[int, int]:
    """How many parameters there are, and how many are trained."""
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in method.parameters()]
    return sum(count for count, _ in counts), sum(count for count, trained in counts if trained)


def state_bytes(count: int, trained: int, optim: OptimConfig) -> int:
    """Bytes of the weights, the trained ones' gradients and two moments, and the mean (EMA), all in float32."""
    return 4 * (count + 3 * trained + (count if optim.ema else 0))
