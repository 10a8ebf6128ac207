"""The client's side, free of transport: send the features, apply the gradient. Labels and pictures never leave it.

    Client       the conversation: numbers the steps, checks every answer before it is used
    attach       a backbone whose blocks are the server's: training, evaluation and inference run through it as ever
    SplitStepper the update of `situs.train.step`, its clipping and its commit shared with the server

`Call` is all that a transport is: a message and the tensors that its answer must have go in, the answer comes out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from situs.backbones.base import Backbone, Stream, Taps
from situs.errors import SitusError
from situs.methods.base import Batch
from situs.split.message import Expected, Message, RefusedError
from situs.split.parts import STORED, server_names
from situs.split.view import View
from situs.train.ema import Ema
from situs.train.optim import BACKBONE, clip_by, clip_share, gradient_norms
from situs.train.step import MicroBatch, Moment, Stepper, Update

Call = Callable[[Message, Mapping[str, Expected]], Message]


class RewoundError(Exception):
    """The server began anew: both sides go back to the newest checkpoint that they share."""


class Welcome(NamedTuple):
    """What a server says to a hello. step: where both go on. digest: of the blocks that every training starts from."""

    step: int
    digest: str


class Client:
    """One training's conversation with a server. wire: the dtype that features are sent in; None: their own."""

    def __init__(self, call: Call, session: str, *, wire: torch.dtype | None = None) -> None:
        self.session, self.wire = session, wire
        self._call, self._incarnation, self._eager = call, "", False
        self.step, self.parts, self.part, self.mean = 0, 1, 0, False
        self.norms: Tensor | None = None
        self.sent = 0
        self._due: tuple[dict[str, Any], Tensor | None] | None = None
        self._failed = False

    def hello(self, layout: str, training: Mapping[str, Any], steps: Sequence[int]) -> Welcome:
        """Opens the session, or goes back to the newest of the checkpoints `steps` that the server has too."""
        facts = {"session": self.session, "layout": layout, "training": dict(training), "steps": list(steps)}
        answer = self._call(Message("hello", facts), {}).facts
        step, self._incarnation, self._eager = (
            answer.get("step"),
            answer.get("incarnation"),
            answer.get("shared") is True,
        )
        if type(step) is not int or step not in {0, *steps} or not isinstance(self._incarnation, str):
            raise SitusError(f"the server answered a hello with step {step!r:.40}, which was not offered")
        self._due, self._failed = None, False
        return Welcome(step, str(answer.get("digest")))

    def ask(
        self, kind: str, facts: Mapping[str, Any], tensors: Mapping[str, Tensor], expected: Mapping[str, Expected]
    ) -> Message:
        """One question. A commit that is due goes with it."""
        facts, tensors = {"session": self.session, "incarnation": self._incarnation, **facts}, dict(tensors)
        if kind not in ("infer", "bye") and self._due is not None:
            facts["commit"], share = self._due
            tensors |= {} if share is None else {"share": share}
        if self.wire is not None:
            facts["wire"] = STORED[self.wire]
        message = Message(kind, facts, tensors)
        self.sent += message.size
        try:
            answer = self._call(message, expected)
        except RefusedError as error:
            if error.code in ("anew", "step"):
                raise RewoundError(str(error)) from error
            raise
        if kind not in ("infer", "bye"):
            self._due = None
        self.sent += answer.size
        return answer

    def begin(self, step: int, rate: float) -> None:
        """The next forward is of update number `step` at this rate."""
        self.step, self.rate, self.part, self.norms = step, rate, 0, None

    def forward(self, z: Tensor, mask: Tensor | None, shape: Sequence[int]) -> tuple[int, Tensor]:
        """Features of the next micro-batch through the server's blocks; its number, and what comes out ([*shape])."""
        part, self.part = self.part, self.part + 1
        if self._failed:  # the loop looks back one step late
            return part, torch.full(tuple(shape), math.nan, dtype=z.dtype, device=z.device)
        answer = self.ask(
            "forward", {"step": self.step, "part": part}, self._packed(z, mask), {"z": self._like(z, shape)}
        )
        return part, self._unpacked(answer.tensors["z"], z)

    def backward(self, part: int, gradient: Tensor, entered: Tensor, names: int) -> Tensor:
        """The gradient behind the blocks -> before them. names: how many norms come with the last."""
        if self._failed or not bool(gradient.isfinite().all()):  # the step is lost, and the server need not see it
            self._failed = True
            return torch.full_like(entered, math.nan)
        last = part == self.parts - 1
        expected = {"gradient": self._like(entered, entered.shape)}
        if last:
            expected["norms"] = Expected({STORED[entered.dtype], "F32", "F64"}, ((names, names),))
        facts = {"step": self.step, "part": part, "last": last}
        answer = self.ask("backward", facts, {"gradient": self._sent(gradient)}, expected)
        self.norms = answer.tensors.get("norms")
        return self._unpacked(answer.tensors["gradient"], entered)

    def settle(self, share: Tensor | None, *, fine: bool) -> None:
        """The step is over here; the server learns of it with the next question, or at once where blocks are shared."""
        if self._failed:
            return
        facts = {"step": self.step, "rate": self.rate, "fine": fine}
        self._due = facts, None if share is None else share.cpu()
        if self._eager:
            self.flush()

    @property
    def failed(self) -> bool:
        """Whether a gradient was not finite here: the server hears no more of this training until the next hello."""
        return self._failed

    def flush(self) -> None:
        """Sends a commit that is due."""
        if self._due is not None:
            self.ask("commit", {"step": self.step, "part": 0}, {}, {})

    def save(self, step: int) -> None:
        """Has the server write its checkpoint after `step` updates."""
        self.ask("save", {"step": step, "part": 0}, {}, {})

    def infer(self, z: Tensor, mask: Tensor | None, shape: Sequence[int]) -> Tensor:
        """Through the server's blocks as they are in evaluation."""
        self.flush()
        answer = self.ask("infer", {"mean": self.mean}, self._packed(z, mask), {"z": self._like(z, shape)})
        return self._unpacked(answer.tensors["z"], z)

    def bye(self) -> None:
        """The training is over: the server may let it go."""
        self.flush()
        self.ask("bye", {}, {}, {})

    def _sent(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", self.wire or tensor.dtype)

    def _packed(self, z: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        if not bool(z.detach().isfinite().all()):
            raise SitusError(f"the features of step {self.step} are not finite, and are not sent")
        return {"z": self._sent(z)} | ({} if mask is None else {"mask": mask.cpu()})

    def _like(self, z: Tensor, shape: Sequence[int]) -> Expected:
        dtypes = {STORED[self.wire]} if self.wire is not None else {STORED[z.dtype], "BF16", "F32"}
        return Expected(dtypes, tuple((side, side) for side in shape))

    def _unpacked(self, tensor: Tensor, like: Tensor) -> Tensor:
        return tensor.to(like.device, like.dtype if self.wire is not None else tensor.dtype)


class _ThroughServer(torch.autograd.Function):
    """The blocks as one operation: forward asks the server, backward asks it again."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, mask: Tensor | None, client: Client, shape: Sequence[int], names: int) -> Tensor:
        ctx.client, ctx.names = client, names
        ctx.part, left = client.forward(z, mask, shape)
        ctx.save_for_backward(z)
        return left

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (z,) = ctx.saved_tensors
        return ctx.client.backward(ctx.part, gradients[0], z, ctx.names), None, None, None, None


def attach(backbone: Backbone, client: Client, view: View, trained: int) -> Backbone:
    """Makes a backbone, in place, one whose blocks are the server's. trained: parameters that the server trains."""
    backbone.__class__ = _remote_class(type(backbone))
    for name, value in (("client", client), ("view", view), ("trained", trained)):
        object.__setattr__(backbone, name, value)
    return backbone


@cache
def _remote_class(kind: type[Backbone]) -> type[Backbone]:
    """The same backbone with the server where every stream goes into its blocks (`Backbone.entry`)."""

    def through(self: Any, z: Tensor, mask: Tensor | None) -> Tensor:
        client, view, training = self.client, self.view, torch.is_grad_enabled() and self.training
        at = (client.session, str(client.step), str(client.part)) if training else None
        z, mask, back = view.show(z, mask, prefix=self.num_prefix, grid=self.grid, at=at)
        rows = z.shape[1] if self.out_grid == self.grid else math.prod(self.out_grid)
        shape = (z.shape[0], rows, self.out_dim)
        if not training:
            return back(client.infer(z, mask, shape))
        if not z.requires_grad:  # a frozen embedding: the server's blocks want their gradient all the same
            z = z.detach().requires_grad_()
        return back(cast(Tensor, _ThroughServer.apply(z, mask, client, shape, self.trained)))

    def run_layers(self: Any, stream: Stream, keys: int | None, taps: Taps = ()) -> Tensor:
        if keys is not None or taps:
            raise SitusError(f"{self.name}: its blocks are a server's, which gives what leaves the last of them alone")
        return through(self, stream.z, stream.mask)

    def run_grid(self: Any, z: Tensor, grid: tuple[int, ...], taps: Taps = ()) -> Tensor:
        if grid != self.grid or taps:
            raise SitusError(f"{self.name}: its blocks are a server's, which gives what leaves the last of them alone")
        return through(self, z, None)

    way = {"run_layers": run_layers, "run_grid": run_grid}[kind.entry]
    return cast("type[Backbone]", type(f"Remote{kind.__name__}", (kind,), {kind.entry: way}))


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

    def update(self, batch: Batch, moment: Moment, rate: float, ragged: bool) -> Update:
        self.client.begin(moment.step, rate)
        return super().update(batch, moment, rate, ragged)

    def _compute(self, parts: list[MicroBatch]) -> Tensor:
        self.client.parts = len(parts)
        return super()._compute(parts)

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
