"""A run without the run: data, model, one batch and the length, as training would have them; nothing is written."""

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
from situs.train.assemble import RunConfig, Setup, assemble, check_place, settled
from situs.train.checkpoint import RunFolder
from situs.train.optim import OptimConfig

GIB = 2**30
FEW = 4
"""Samples of the first batch that are computed: as many show what does not fit, and take no time."""


@dataclass(frozen=True)
class Rehearsal:
    """What a run would do. batch: shape of its first; loss: of a few of its samples. held: GiB of weights, gradients
    and what the optimiser keeps, to which activations come."""

    said: tuple[str, ...]
    batch: tuple[int, ...]
    loss: float
    parameters: int
    trained: int
    held_gib: float
    steps: int
    steps_per_epoch: int
    begins_at: int
    cached: str | None = None
    """Where the shards of a remote set stay that were fetched."""

    def lines(self) -> list[str]:
        """For people."""
        shape = " × ".join(map(str, self.batch))
        count = f"{self.steps / self.steps_per_epoch:.4g}"
        epochs = f"{count} epoch{'s' * (count != '1')} of {self.steps_per_epoch:,}"
        held = f"{self.held_gib:.2g} GiB"
        gone = f", of which {self.begins_at:,} {verb(self.begins_at, 'are')} done" if self.begins_at else ""
        return [
            *self.said,
            f"a batch: {shape}; the loss of {min(FEW, self.batch[0])} of its samples is {self.loss:.4g}",
            f"{self.parameters:,} parameters, {self.trained:,} trained: {held} with gradients and moments",
            f"{counted(self.steps, 'steps')}, {epochs}{gone}",
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
    asked, config = config, settled(config)
    ranks, said = distributed.start(device), list[str]()
    try:
        run = None if resume is None else RunFolder.open(resume, config, writer=False)
        newest = None if run is None else run.latest()
        with notes_to(said.append), assemble(asked, config, ranks, setup, fresh=newest is None) as parts:
            method, loader = parts.method, parts.loader
            if parts.private is not None:
                said.append(parts.private.rehearse(method, loader, parts.total))
            shape, loss = _try_out(method, loader, config.train.seed)
            count, trained = _counts(method)
            return Rehearsal(
                tuple(said),
                shape,
                loss,
                count,
                trained,
                held_bytes(count, trained, config.optim) / GIB,
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
        raise SitusError(f"{loader.source.name}: gives no batch", field="data")
    few = batch.part(slice(0, FEW))
    method.train()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        loss = float(method(few, method.draw(few, When(seed=seed, epoch=0, progress=0.0))).loss)
    return tuple(batch.inputs.shape), loss


def _counts(method: Method) -> tuple[int, int]:
    every = [(each.numel(), each.requires_grad) for each in method.parameters()]
    return sum(count for count, _ in every), sum(count for count, trained in every if trained)


def held_bytes(count: int, trained: int, optim: OptimConfig) -> int:
    """Weights, and of the trained ones a gradient and AdamW's two moments, all in float32; and the weights' mean."""
    return 4 * (count + 3 * trained + (count if optim.ema else 0))
