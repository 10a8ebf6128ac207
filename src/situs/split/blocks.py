"""The server's side of a training, free of transport: blocks forward, their gradient, their optimiser, their mean.

One step is `forward` and `backward` for each micro-batch and then `commit`, which moves the weights by what the client
says: this step's rate, and by how much all gradients shrink (clipping needs the norms of both sides).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from situs.backbones.base import Stream
from situs.methods.base import Method
from situs.split.parts import cut
from situs.train.checkpoint import Checkpoint
from situs.train.checkpoint.state import Files, capture, generators, restore, seed_generators, set_generators
from situs.train.ema import Ema
from situs.train.optim import OptimConfig, clip_by, gradient_norms, make_optimizer, set_rate
from situs.train.step import autocast


class Blocks:
    """A method's blocks with all that trains them; what is the client's is let go of."""

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
        """Torch's own generators as this training left them; whoever else draws in this process is not disturbed."""
        outside = generators(self.device)
        set_generators(self._generators, self.device)
        try:
            yield
            self._generators = generators(self.device)
        finally:
            set_generators(outside, self.device)

    def _run(self, z: Tensor, mask: Tensor | None) -> Tensor:
        backbone = self.backbone
        places = backbone.positions((z.shape[1],) if backbone.input.shape is None else None)
        stream = Stream(z, backbone.num_prefix, places.rotary, places.bias, mask)
        with autocast(self.device, self.precision):
            return backbone.blocks(stream).z

    def forward(self, part: int, z: Tensor, mask: Tensor | None = None) -> Tensor:
        """Micro-batch `part` of a step through the blocks; the first lets go of the last step's gradients."""
        if part == 0:
            self.abandon()
        entered = z.to(self.device).requires_grad_()
        with self._drawing(), torch.enable_grad():
            left = self._run(entered, None if mask is None else mask.to(self.device))
        self._pending[part] = entered, left
        return left.detach()

    def leaving(self, part: int) -> torch.Size:
        """The shape of what a forward gave."""
        return self._pending[part][1].shape

    def backward(self, part: int, gradient: Tensor) -> Tensor:
        """The gradient of the loss behind the blocks -> the gradient before them; the blocks' own are added up."""
        entered, left = self._pending.pop(part)
        torch.autograd.backward(left, gradient.to(left))
        assert entered.grad is not None
        return entered.grad

    def norms(self) -> Tensor:
        """The norm of each trained parameter's gradient, in the optimiser's order; -1 where it has none."""
        found = gradient_norms([p.grad for p in self.parameters if p.grad is not None])
        missing, given = torch.full((), -1.0, dtype=self.dtype, device=self.device), iter(found)
        return torch.stack([missing if p.grad is None else next(given) for p in self.parameters])

    def commit(self, rate: float, share: Tensor | None, *, fine: bool) -> None:
        """Moves the weights once, unless the step was not finite on the client's side."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        clip_by(gradients, self.optim, None if share is None else share.to(self.device))
        set_rate(self.optimizer, rate)
        if fine:
            self.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.updates)
        self.updates += 1

    def abandon(self) -> None:
        """Lets go of a step that is not to be committed, or was."""
        self._pending.clear()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def infer(self, z: Tensor, mask: Tensor | None = None, *, mean: bool = False) -> Tensor:
        """As in evaluation. mean: with the running mean of their weights, if they have one."""
        self.method.eval()
        try:
            if mean and self.ema is not None:
                with self.ema.applied():
                    return self._run(z.to(self.device), None if mask is None else mask.to(self.device))
            return self._run(z.to(self.device), None if mask is None else mask.to(self.device))
        finally:
            self.method.train()

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
