"""The blocks on the server: their gradients, optimiser and running mean, and what they compute for a client.

One step is `forward` and `backward` for each micro-batch and then `commit`, which updates the weights with the client's
learning rate and clipping factor (clipping needs the norms of both sides).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property

import torch
from torch import Tensor

from situs.backbones.base import Past
from situs.backbones.halves import extend, through
from situs.methods.base import Method
from situs.split.parts import cut
from situs.train.checkpoint import Checkpoint
from situs.train.checkpoint.state import Files, capture, generators, restore, seed_generators, set_generators
from situs.train.optim import OptimConfig, clip_by, gradient_norms, make_optimizer, set_rate
from situs.train.step import Ema, autocast


class Blocks:
    """A method's blocks with their optimiser and running mean; the client's tensors are dropped."""

    def __init__(self, method: Method, optim: OptimConfig, *, seed: int, precision: str) -> None:
        self.method, self.optim, self.precision = cut(method, "server"), optim, precision
        self.backbone = method.backbone
        self.optimizer = make_optimizer(method, optim)
        self.ema = None if optim.ema is None else Ema(method, optim.ema)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.device, self.dtype = self.parameters[0].device, self.parameters[0].dtype
        self.updates = 0
        self._pending: dict[int, tuple[Tensor, Tensor]] = {}
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            seed_generators(seed)
            self._generators = generators(self.device)
        self.method.train()

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Torch's generators in this training's state; the state outside is restored afterwards."""
        outside = generators(self.device)
        set_generators(self._generators, self.device)
        try:
            yield
            self._generators = generators(self.device)
        finally:
            set_generators(outside, self.device)

    def _run(self, z: Tensor, mask: Tensor | None) -> Tensor:
        with autocast(self.device, self.precision):
            return through(self.backbone, z, mask)

    def forward(self, part: int, z: Tensor, mask: Tensor | None = None) -> Tensor:
        """Micro-batch `part` of a step through the blocks; the first discards the last step's gradients."""
        if part == 0:
            self.abandon()
        inputs = z.to(self.device).requires_grad_()
        with self._drawing(), torch.enable_grad():
            output = self._run(inputs, None if mask is None else mask.to(self.device))
        self._pending[part] = inputs, output
        return output.detach()

    def output_shape(self, part: int) -> torch.Size:
        """The shape of the output of a forward that waits for its gradient."""
        return self._pending[part][1].shape

    def backward(self, part: int, gradient: Tensor) -> Tensor:
        """The gradient behind the blocks -> the gradient before them; those of the weights are accumulated."""
        inputs, output = self._pending.pop(part)
        torch.autograd.backward(output, gradient.to(output))
        assert inputs.grad is not None
        return inputs.grad

    def norms(self) -> Tensor:
        """The norm of each trained parameter's gradient, in the optimiser's order; -1 if it has none."""
        norms = iter(gradient_norms([p.grad for p in self.parameters if p.grad is not None]))
        missing = torch.full((), -1.0, dtype=self.dtype, device=self.device)
        return torch.stack([missing if p.grad is None else next(norms) for p in self.parameters])

    def commit(self, rate: float, share: Tensor | None, *, fine: bool) -> None:
        """Updates the weights; without a step if the client's side was not finite (`fine`)."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        clip_by(gradients, self.optim, None if share is None else share.to(self.device))
        set_rate(self.optimizer, rate)
        if fine:
            self.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.updates)
        self.updates += 1

    def abandon(self) -> None:
        """Discards the pending micro-batches and gradients."""
        self._pending.clear()
        self.optimizer.zero_grad(set_to_none=True)

    @contextmanager
    def _evaluating(self, *, mean: bool) -> Iterator[None]:
        """Evaluation. mean: with the running mean of the weights, if they have one."""
        self.method.eval()
        try:
            with torch.no_grad(), nullcontext() if self.ema is None or not mean else self.ema.applied():
                yield
        finally:
            self.method.train()

    def infer(self, z: Tensor, mask: Tensor | None = None, *, mean: bool = False) -> Tensor:
        """The blocks' output in evaluation. mean: with the running mean of their weights, if they have one."""
        with self._evaluating(mean=mean):
            return self._run(z.to(self.device), None if mask is None else mask.to(self.device))

    def extend(self, z: Tensor, past: Past, *, mean: bool = False) -> Tensor:
        """The same for tokens that follow those of `past`, to which theirs are added; in the weights' own precision, so
        that a generated text equals that of the whole model."""
        with self._evaluating(mean=mean):
            return extend(self.backbone, z.to(self.device), past)

    @cached_property
    def token_bytes(self) -> int:
        """The size of the keys and values of one token."""
        past = self.backbone.new_past()
        self.extend(torch.zeros(1, 1, self.backbone.dim, dtype=self.dtype), past)
        return past.nbytes

    def capture(self) -> Files:
        """The tensors of a checkpoint."""
        with self._drawing():
            return capture(self.method, self.optimizer, self.ema, self.device)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Goes back to a checkpoint."""
        self.abandon()
        self.optimizer.state.clear()
        with self._drawing():
            restore(checkpoint, self.method, self.optimizer, self.ema, self.device)
        self.updates = checkpoint.state["updates"]
