"""A backbone whose blocks are a server's, and the update of `situs.train.step` with it.

    attach       training, evaluation and inference run through the server as ever
    SplitStepper clipping and commit shared with the server; micro-batches one behind the other on the wire

Of a step's micro-batches two are under way: while the server computes one, the client embeds and sends the next and
takes in the last. The weights stay as they are within a step, and each parameter's gradients are added up in the order
of the micro-batches, so that no bit differs from one at a time. Where the embedding itself draws random numbers
(a dropout), the order of the draws would change, and they go one at a time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from situs.backbones.base import Backbone, Taps
from situs.core.when import When
from situs.errors import SitusError
from situs.locks.veil import Cut, Entrance, Run, stand_before
from situs.methods.base import Batch, Output
from situs.split.client import Client, Flight
from situs.split.parts import server_names
from situs.train.checkpoint.state import generators, set_generators
from situs.train.ema import Ema
from situs.train.optim import BACKBONE, clip_by, clip_share, gradient_norms
from situs.train.step import MicroBatch, Stepper, Update, autocast

AHEAD = 2
"""Micro-batches at the server at once; it takes no more."""


class _LaunchedError(Exception):
    """Ends a forward where its features are on their way; flight: None where the embedding drew random numbers."""

    def __init__(self, flight: Flight | None) -> None:
        super().__init__()
        self.flight = flight


class _ThroughServer(torch.autograd.Function):
    """The blocks as one operation: forward asks the server, backward asks it again."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, mask: Tensor | None, client: Client, shape: Sequence[int], names: int) -> Tensor:
        ctx.client, ctx.names, ctx.flight = client, names, client.forward(z, mask, shape)
        return client.left(ctx.flight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.client.backward(ctx.flight, gradients[0], ctx.names)
        return ctx.client.entered(ctx.flight), None, None, None, None


@dataclass
class Remote(Entrance):
    """The server in the place of the blocks. trained: parameters that it trains. tokens: of the last embedding."""

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
        """Tokens through the server's blocks, hidden as the veil says: in evaluation, in training, or in two halves."""
        if taps or not whole:
            said = "its blocks are a server's, which gives what leaves the last of them alone"
            raise SitusError(f"{backbone.name}: {said}")
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
        if not z.requires_grad:  # a frozen embedding: the server's blocks want their gradient all the same
            z = z.detach().requires_grad_()
        return back(cast(Tensor, _ThroughServer.apply(z, mask, client, shape, self.trained)))


def attach(backbone: Backbone, client: Client, cut: Cut, trained: int) -> Backbone:
    """Makes a backbone, in place, one whose blocks are the server's. trained: parameters that the server trains."""
    return stand_before(backbone, Remote(client, cut, trained))


def _landed(client: Client, flight: Flight) -> Tensor:
    """What came back of a flight, as the beginning of another graph."""
    assert flight.back is not None
    flight.leaf = client.left(flight).detach().requires_grad_()
    return flight.back(flight.leaf)


class SplitEma(Ema):
    """The client's part of the mean; while it is applied, the server is asked for its own."""

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
    """One update of both sides. order: every trained parameter, the server's too, as local training orders them."""

    def __init__(self, *args: Any, client: Client, order: Sequence[str], **options: Any) -> None:
        super().__init__(*args, **options)
        self.client, self.order = client, list(order)
        if self.scaler is not None:
            raise SitusError("precision='fp16': split training takes bf16 or fp32", field="train.precision")
        if self.ema is not None:
            self.ema.__class__ = SplitEma
            cast(SplitEma, self.ema).client = client
        served = {f"{BACKBONE}{name}" for name in server_names(self.method.backbone)}
        self.served = [name for name in self.order if name in served]
        self.drawing: bool | None = None
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
                asked = self._flights.popleft().asked
                if asked is not None:
                    asked.cancel()

    def _backward(self, part: MicroBatch) -> Output:
        """As ever, or of a micro-batch that is at the server already, and the next is sent meanwhile."""
        while len(self._flights) < AHEAD and self._launch():
            pass
        if not self._flights:
            self._parts.popleft()
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
        gradient = self.client.entered(flight)
        if flight.z.requires_grad:
            torch.autograd.backward(flight.z, gradient)
        return output

    def _launch(self) -> bool:
        """Embeds the next micro-batch and sends it off, unless there is none or its draws have an order to keep.

        Whether it draws is seen with the first, while nothing is under way: in one process a server draws from the
        same generators.
        """
        if not self._parts or self.client.parts == 1 or self.drawing:
            return False
        before, flight = None if self.drawing is False else generators(self.device), None
        self.client.launching = lambda: before is not None and _moved(before, generators(self.device))
        try:
            with autocast(self.device, self.precision):
                self.spread.forward(self._parts[0].batch, self._parts[0].draws)
        except _LaunchedError as launched:
            flight = launched.flight
        finally:
            self.client.launching = None
        self.drawing = flight is None
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
            self.client.settle(share, fine=not bool(self.flags[0]))
        return norm

    def _common_norm(self, gradients: list[Tensor]) -> Tensor:
        """The norm over both sides' gradients, added up in local training's order, so that no bit differs."""
        if self.client.norms is None:
            return torch.full((), math.nan, device=self.device)
        own = {
            name: p
            for group in self.optimizer.param_groups
            for name, p in zip(group["names"], group["params"], strict=True)
        }
        names = [name for name, p in own.items() if p.grad is not None]
        found = dict(zip(names, gradient_norms(gradients), strict=True))
        theirs = self.client.norms.to(self.device)
        found |= {name: norm for name, norm in zip(self.served, theirs, strict=True) if norm >= 0}
        return torch.linalg.vector_norm(torch.stack([found[name] for name in self.order if name in found]))


def _moved(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> bool:
    return any(not torch.equal(before[kind], state) for kind, state in after.items())
