"""One update of the weights: micro-batches, precision, clipping, EMA. It never waits for the device."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from situs.core.when import When
from situs.errors import SitusError
from situs.methods.base import Batch, Draws, Method, Output
from situs.progress import note
from situs.train import distributed
from situs.train.checkpoint.state import generators
from situs.train.ema import Ema
from situs.train.graph import Graphed
from situs.train.optim import OptimConfig, clip_gradients, make_optimizer, set_rate


class MicroBatch(NamedTuple):
    """One micro-batch, its draws and its share of the step's loss."""

    batch: Batch
    draws: Draws
    share: float


class Update(NamedTuple):
    """Inputs and outputs of one update; kept until the next, so that a step that was not finite can be saved."""

    when: When
    parts: list[MicroBatch]
    generators: Mapping[str, Tensor]
    values: Tensor
    norm: Tensor
    flags: Tensor


def split(batch: Batch, count: int) -> list[tuple[Batch, float]]:
    """The batch in `count` micro-batches of nearly equal size (never an empty one), each with its share.

    A share is samples / samples of the batch, so the weighted sum of mean losses is the mean over the batch.
    """
    if count == 1:
        return [(batch, 1.0)]
    total = batch.ids.shape[0]
    cuts = [total * i // count for i in range(count + 1)]
    spans = [slice(a, b) for a, b in pairwise(cuts) if b > a]
    return [(batch.part(span), (span.stop - span.start) / total) for span in spans]


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """The context in which a forward runs."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=distributed.DTYPES[precision])


class Stepper:
    """Makes the updates of a method."""

    def __init__(
        self,
        method: Method,
        optim: OptimConfig,
        *,
        seed: int,
        precision: str,
        accumulate: int,
        parallel: str,
        compiled: bool,
        graph: bool = False,
    ) -> None:
        """graph: record the update as a CUDA graph, where this is the only rank and its device is a GPU."""
        self.method, self.config = method, optim
        self.seed, self.precision, self.accumulate = seed, precision, accumulate
        self.device = next(method.parameters()).device
        if compiled:
            from situs.backbones.timm.mlp import use_compiled_gelu  # timm takes seconds

            use_compiled_gelu(method)
        self.spread, self.compiled = distributed.spread(method, parallel, precision, compiled), compiled
        self.optimizer = make_optimizer(method, optim)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.ema = None if optim.ema is None else Ema(method, optim.ema)
        self.scaler = torch.amp.GradScaler(self.device.type) if precision == "fp16" else None
        # [not finite, asked to stop], once 1 always 1: after a step that was not finite no update is made, so the
        # weights stay those before it.
        self.flags = torch.zeros(2, device=self.device)
        self.stop = torch.zeros((), device=self.device)
        self.names: tuple[str, ...] = ()
        graph = graph and self.device.type == "cuda" and distributed.world() == 1
        if (graph or compiled) and method.compiled_part != "forward":
            graph, part = False, f"{method.compiled_part} alone is compiled, and " if compiled else ""
            note(f"{type(method).__name__} makes decisions on the host: {part}no CUDA graph is recorded")
        self.compute = Graphed(self._compute, self.device) if graph else self._compute

    def update(self, batch: Batch, when: When, rate: float, ragged: bool) -> Update:
        """Moves the weights once. ragged: the ranks' parts of this batch may differ in size."""
        set_rate(self.optimizer, rate)
        before = generators(self.device)
        weight, count = self._agree(batch) if ragged and distributed.world() > 1 else (1.0, self.accumulate)
        parts = []
        for piece, share in split(batch, count):
            draws = self.method.draw(piece, when._replace(seed=self.seed))
            parts.append(MicroBatch(piece, draws, share * weight))
        measured = self.compute(parts)
        if self.ema is not None:
            self.ema.update(when.step)
        return Update(when, parts, before, measured[:-1], measured[-1], self.flags.clone())

    def _compute(self, parts: list[MicroBatch]) -> Tensor:
        """Forward, backward and the update itself, all on the device: [loss, metrics …, norm of the gradient]."""
        self.optimizer.zero_grad(set_to_none=True)
        values = None
        for number, part in enumerate(parts, start=1):
            with self.spread.local(number == len(parts)):
                output = self._backward(part)
            measured = self._values(output)
            measured = measured if part.share == 1.0 else measured * part.share
            values = measured if values is None else values + measured
        assert values is not None
        norm = self._move(values[0])
        return torch.cat([values, norm.float()[None]])

    def _backward(self, part: MicroBatch) -> Output:
        with autocast(self.device, self.precision):
            output: Output = self.spread.forward(part.batch, part.draws)
        loss = output.loss if part.share == 1.0 else output.loss * part.share
        if self.scaler is not None:
            # NaN gradients are skipped by the scaler: so no later step moves the weights.
            loss = self.scaler.scale(loss * torch.where(self.flags[0] > 0, torch.nan, 1.0))
        loss.backward()
        return output

    def _values(self, output: Output) -> Tensor:
        """Loss and metrics as one vector, so that they cost one kernel a step and one copy a log line."""
        names = ("loss", *output.metrics)
        if names != self.names:
            if self.names:
                raise SitusError(f"{type(self.method).__name__}: metrics were {self.names} and are now {names}")
            self.names = names
        return torch.stack([value.detach().float() for value in (output.loss, *output.metrics.values())])

    def _move(self, loss: Tensor) -> Tensor:
        """Clips and updates, unless the step or one before it was not finite; gives the gradient's norm."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        norm = distributed.full(clip_gradients(self.parameters, self.config))
        if self.scaler is None:
            self._raise_flags(loss, norm)
            # AdamW's fused kernels read this on the device and leave everything as it is where it is 1.
            self.optimizer.found_inf = self.flags[0]  # pyright: ignore[reportAttributeAccessIssue]
            self.optimizer.step()
        else:  # the scaler handles infinite gradients; only the loss counts
            self._raise_flags(loss)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return norm

    def _raise_flags(self, *values: Tensor) -> None:
        """In place, since a recorded update reads this memory. x - x is 0 where x is finite, else NaN: one kernel,
        where `isfinite` takes four."""
        wrong, asked = self.flags.unbind()
        torch.maximum(wrong, reduce(torch.add, [value - value for value in values]) != 0, out=wrong)
        torch.maximum(asked, self.stop, out=asked)
        distributed.most(self.flags)

    def _agree(self, batch: Batch) -> tuple[float, int]:
        """(this rank's samples over a rank's mean, micro-batches) where the ranks' parts may differ in size.

        Gradients are averaged over ranks, not samples, so a larger part must weigh more; and all ranks must make
        the same number of micro-batches, for FSDP gathers the weights in each.
        """
        count = batch.ids.shape[0]
        counts = distributed.rows(torch.tensor(float(count), device=self.device), self.device)
        return count / float(counts.mean()), min(self.accumulate, int(counts.min()))
