"""One update of the weights: micro-batches, precision, clipping, EMA. It never waits for the device.

On one GPU an update is recorded as a CUDA graph, so that no step waits for Python to launch its kernels (`Graphed`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten  # the structures torch.compile itself walks

from situs.core.when import When
from situs.errors import SitusError
from situs.methods.base import Batch, Draws, Method, Output
from situs.progress import note
from situs.train import distributed
from situs.train.optim import OptimConfig, clip_gradients, make_optimizer, set_rate

_torch: Any = torch  # its stubs do not export the foreach kernels


class Ema:
    """The mean of a model's trainable parameters, by name; buffers and frozen parameters have none."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.decay = decay
        self.weights = list(trained.values())
        self.mean: dict[str, Tensor] = {name: parameter.detach().clone() for name, parameter in trained.items()}
        self._means = list(self.mean.values())

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Moves the mean towards the weights after update number `step` (t, the first is 0)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        _torch._foreach_lerp_(self._means, self.weights, 1.0 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Puts the mean into the model for an evaluation, and the trained weights back afterwards."""
        trained = [weight.detach().clone() for weight in self.weights]
        self._put(self._means)
        try:
            yield
        finally:
            self._put(trained)

    @torch.no_grad()  # not on `applied`: torch's decorator throws into a generator in a way that Python deprecates
    def _put(self, values: list[Tensor]) -> None:
        # One by one: sharded weights have no copy for all at once.
        for weight, value in zip(self.weights, values, strict=True):
            weight.copy_(value)


WARMUP = 4
"""Eager updates of one shape before it is recorded: the compiler may recompile in the first ones."""


class Graphed:
    """An update as one CUDA graph: calls `update` with any structure of tensors, recorded once their shapes stay the
    same.

    The first updates run eagerly, on a stream of their own: kernels are compiled and workspaces allocated. Then the
    update is recorded over fixed buffers, and every later one copies its tensors there and replays it: the same
    kernels, so the same bits. What cannot be recorded, such as a forward that reads a value on the host, runs eagerly.

    update: works on the device alone and gives one tensor. Where it cannot be recorded, a note says so once.
    """

    def __init__(self, update: Callable[[Any], Tensor], device: torch.device) -> None:
        self.update, self.device = update, device
        self.stream = torch.cuda.Stream(device)
        self.shapes: Any = None
        self.eager = 0
        self.buffers: list[Any] = []
        self.graph: torch.cuda.CUDAGraph | None = None
        self.output = torch.empty(0)
        self.failed = False

    def __call__(self, inputs: Any) -> Tensor:
        """One update; the result is a copy that the caller may keep."""
        leaves, form = tree_flatten(inputs)
        shapes = form, [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if self.graph is not None and shapes != self.shapes:  # a last batch of another size, say
            return self._run_eagerly(inputs)
        if shapes != self.shapes:
            self.shapes, self.eager = shapes, 0
            # All on the device: of a tensor on the host the recording would keep today's value.
            self.buffers = [torch.empty(leaf.shape, dtype=leaf.dtype, device=self.device)
                            if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # fmt: skip
        for buffer, leaf in zip(self.buffers, leaves, strict=True):
            if isinstance(buffer, Tensor):
                buffer.copy_(leaf, non_blocking=True)
        # Over the buffers from the first, so that what is compiled for them need not be compiled again.
        inputs = tree_unflatten(self.buffers, form)
        self.eager += 1
        if self.graph is None and self.eager > WARMUP and not self.failed:
            self._record(inputs)
        if self.graph is None:
            return self._run_eagerly(inputs)
        self.graph.replay()
        return self.output.clone()

    def _run_eagerly(self, inputs: Any) -> Tensor:
        """One update without the graph, on the stream that is recorded later."""
        here = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            output = self.update(inputs)
        here.wait_stream(self.stream)
        return output

    def _record(self, inputs: Any) -> None:
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        state = generator.get_state()
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: the threads that load data may go on with theirs.
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self.output = self.update(inputs)
        except RuntimeError as error:
            self.failed = True
            # A failed recording leaves the generator in capture mode: give it a fresh state.
            fresh = torch.Generator(self.device)
            fresh.set_state(state)
            generator.graphsafe_set_state(fresh.graphsafe_get_state())
            torch.cuda.synchronize(self.device)
            reason = str(error).strip().partition("\n")[0]
            note(f"the step cannot be recorded as a CUDA graph and runs without one: {reason}")
        else:
            self.graph = graph


class MicroBatch(NamedTuple):
    """One micro-batch, its draws and its share of the step's loss."""

    batch: Batch
    draws: Draws
    share: float


class Update(NamedTuple):
    """The outputs of one update; kept until the next, whose start shows whether it was finite."""

    when: When
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
            note(f"{type(method).__name__} makes decisions on the CPU, so {part}no CUDA graph is recorded")
        self.compute = Graphed(self._compute, self.device) if graph else self._compute

    def update(self, batch: Batch, when: When, rate: float, ragged: bool) -> Update:
        """Moves the weights once. ragged: the ranks' parts of this batch may differ in size."""
        set_rate(self.optimizer, rate)
        weight, count = self._agree(batch) if ragged and distributed.world() > 1 else (1.0, self.accumulate)
        parts = []
        for piece, share in split(batch, count):
            draws = self.method.draw(piece, when._replace(seed=self.seed))
            parts.append(MicroBatch(piece, draws, share * weight))
        measured = self.compute(parts)
        if self.ema is not None:
            self.ema.update(when.step)
        return Update(when, measured[:-1], measured[-1], self.flags.clone())

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
                raise SitusError(
                    f"{type(self.method).__name__}: every step must give metrics of the same names, but the names "
                    f"were {self.names} and are now {names}"
                )
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
