"""A backbone whose blocks are a server's, and the update of `situs.train.step` with it.

    attach       training, evaluation and inference use the server's blocks
    SplitStepper clipping and commit together with the server; micro-batches are pipelined

Up to two micro-batches of a step are at the server: while it computes one, the client embeds and sends the next and
receives the last. Weights do not change within a step, and each parameter's gradients are summed in the order of the
micro-batches, so the result is bit for bit that of one at a time. If the embedding draws random numbers (dropout), the
order of the draws would change, so micro-batches are sent one at a time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from situs.backbones.base import Backbone, Taps
from situs.core.when import When
from situs.errors import SitusError
from situs.locks.veil import Cut, Entrance, Run, set_entrance
from situs.methods.base import Batch, Output
from situs.split.client import Client, Flight
from situs.split.parts import server_names
from situs.train.checkpoint.state import generators, set_generators
from situs.train.optim import BACKBONE, clip_by, clip_share, gradient_norms
from situs.train.step import Ema, MicroBatch, Stepper, Update, autocast

AHEAD = 2
"""Micro-batches at the server at once; it accepts no more."""


class _LaunchedError(Exception):
    """Stops a forward once its features are sent; flight: None if the embedding drew random numbers."""

    def __init__(self, flight: Flight | None) -> None:
        super().__init__()
        self.flight = flight


class _ThroughServer(torch.autograd.Function):
    """The server's blocks as one operation of autograd."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, mask: Tensor | None, client: Client, shape: Sequence[int], names: int) -> Tensor:
        ctx.client, ctx.names, ctx.flight = client, names, client.forward(z, mask, shape)
        return client.output(ctx.flight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.client.backward(ctx.flight, gradients[0], ctx.names)
        return ctx.client.input_gradient(ctx.flight), None, None, None, None


@dataclass
class Remote(Entrance):
    """The server instead of the blocks. trained: number of parameters that it trains. tokens: of the last embedding."""

    client: Client
    cut: Cut
    trained: int
    tokens: Tensor | None = None

    def embed(self, embed: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        landing = self.client.landing
        if landing is not None and landing.tokens is not None:
            return landing.tokens  # embedded when it was sent
        tokens = embed(x)
        self.tokens = tokens.detach() if self.client.launching is not None else None
        return tokens

    def through(
        self, backbone: Backbone, run: Run, z: Tensor, mask: Tensor | None, taps: Taps, *, whole: bool  # noqa: ARG002
    ) -> Tensor:  # fmt: skip
        """Tokens through the server's blocks, hidden by the veil: in evaluation, in training, or pipelined."""
        if taps or not whole:
            raise SitusError(
                f"{backbone.name}: its blocks are on a server, so only the output of the last block is available"
            )
        client, training = self.client, torch.is_grad_enabled() and backbone.training
        if training and client.landing is not None:
            return _landed(client, client.landing)
        if client.launching is not None and client.launching():
            raise _LaunchedError(None)
        at = (client.session, str(client.step), str(client.part)) if training else None
        z, mask, back = self.cut.enter(z, mask, at)
        rows = z.shape[1] if backbone.out_grid == backbone.grid else math.prod(backbone.out_grid)
        shape = (z.shape[0], rows, backbone.out_dim)
        if not training:
            return back(client.infer(z, mask, shape))
        if client.launching is not None:
            flight = client.forward(z, mask, shape)
            flight.back, flight.tokens = back, self.tokens
            raise _LaunchedError(flight)
        if not z.requires_grad:  # a frozen embedding; the server's blocks still need their gradient
            z = z.detach().requires_grad_()
        return back(cast(Tensor, _ThroughServer.apply(z, mask, client, shape, self.trained)))


def attach(backbone: Backbone, client: Client, cut: Cut, trained: int) -> Backbone:
    """Replaces the blocks of a backbone by the server, in place. trained: number of parameters that it trains."""
    return set_entrance(backbone, Remote(client, cut, trained))


def _landed(client: Client, flight: Flight) -> Tensor:
    """The server's output for a flight, where a new graph starts."""
    assert flight.back is not None
    flight.leaf = client.output(flight).detach().requires_grad_()
    return flight.back(flight.leaf)


class SplitEma(Ema):
    """The client's part of the mean; while it is applied, the server uses its part."""

    client: Client

    @contextmanager
    def applied(self) -> Iterator[None]:
        self.client.mean = True
        try:
            with super().applied():
                yield
        finally:
            self.client.mean = False


class SplitStepper(Stepper):
    """One update of both sides. order: every trained parameter of both sides, in local training's order."""

    def __init__(self, *args: Any, client: Client, order: Sequence[str], **options: Any) -> None:
        super().__init__(*args, **options)
        self.client, self.order = client, list(order)
        if self.ema is not None:
            self.ema.__class__ = SplitEma
            cast(SplitEma, self.ema).client = client
        served = {f"{BACKBONE}{name}" for name in server_names(self.method.backbone)}
        self.served = [name for name in self.order if name in served]
        self.embedding_draws: bool | None = None  # None: not known yet
        self._parts: deque[MicroBatch] = deque()
        self._flights: deque[Flight] = deque()

    def update(self, batch: Batch, moment: When, rate: float, ragged: bool) -> Update:
        self.client.begin(moment.step, rate)
        return super().update(batch, moment, rate, ragged)

    def _compute(self, parts: list[MicroBatch]) -> Tensor:
        self.client.parts, self._parts = len(parts), deque(parts)
        try:
            return super()._compute(parts)
        finally:
            while self._flights:
                pending = self._flights.popleft().pending
                if pending is not None:
                    pending.cancel()

    def _backward(self, part: MicroBatch) -> Output:
        """The backward pass of one micro-batch; if it is already at the server, the next is sent meanwhile."""
        while len(self._flights) < AHEAD and self._launch():
            pass
        if not self._flights:
            return super()._backward(part)
        self.client.landing = flight = self._flights.popleft()
        try:
            output = super()._backward(part)
        finally:
            self.client.landing = None
        assert flight.leaf is not None
        assert flight.leaf.grad is not None
        self.client.backward(flight, flight.leaf.grad, len(self.served))
        self._launch()
        gradient = self.client.input_gradient(flight)
        if flight.z.requires_grad:
            torch.autograd.backward(flight.z, gradient)
        return output

    def _launch(self) -> bool:
        """Embeds and sends the next micro-batch; False if there is none or if the embedding draws random numbers.

        Whether it draws is determined with the first, while no other is at the server: a server in the same process
        draws from the same generators.
        """
        if not self._parts or self.client.parts == 1 or self.embedding_draws:
            return False
        before, flight = None if self.embedding_draws is False else generators(self.device), None
        self.client.launching = lambda: (
            before is not None
            and any(not torch.equal(before[kind], state) for kind, state in generators(self.device).items())
        )
        try:
            with autocast(self.device, self.precision):
                self.spread.forward(self._parts[0].batch, self._parts[0].draws)
        except _LaunchedError as launched:
            flight = launched.flight
        finally:
            self.client.launching = None
        self.embedding_draws = flight is None
        if flight is None:
            assert before is not None
            set_generators(before, self.device)
            return False
        self._parts.popleft()
        self._flights.append(flight)
        return True

    def _move(self, loss: Tensor) -> Tensor:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = self._common_norm(gradients)
        share = clip_share(norm, self.config)
        clip_by(gradients, self.config, share)
        self._raise_flags(loss, norm)
        self.optimizer.found_inf = self.flags[0]  # pyright: ignore[reportAttributeAccessIssue]
        self.optimizer.step()
        if not self.client.failed:
            self.client.end_step(share, fine=not bool(self.flags[0]))
        return norm

    def _common_norm(self, gradients: list[Tensor]) -> Tensor:
        """The norm of both sides' gradients, summed in local training's order, so it is equal bit for bit."""
        if self.client.norms is None:
            return torch.full((), math.nan, device=self.device)
        names = [
            name
            for group in self.optimizer.param_groups
            for name, p in zip(group["names"], group["params"], strict=True)
            if p.grad is not None
        ]
        norms = dict(zip(names, gradient_norms(gradients), strict=True))
        theirs = self.client.norms.to(self.device)
        norms |= {name: norm for name, norm in zip(self.served, theirs, strict=True) if norm >= 0}
        return torch.linalg.vector_norm(torch.stack([norms[name] for name in self.order if name in norms]))
