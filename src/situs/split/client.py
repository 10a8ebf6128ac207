"""The client's side, free of transport: send the features, apply the gradient. Labels and pictures never leave it.

`Client` is the conversation: it numbers the steps and checks every answer before it is used. `Call` is all that a
transport is: a message and the tensors that its answer must have go in, the answer comes out. One that also has
`submit`, which gives an `Asked`, carries several questions at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from situs.errors import SitusError
from situs.locks.veil import Back
from situs.split.message import Expected, Message, RefusedError, finite
from situs.split.parts import STORED

Call = Callable[[Message, Mapping[str, Expected]], Message]


class RewoundError(Exception):
    """The server began anew: both sides go back to the newest checkpoint that they share."""


class Welcome(NamedTuple):
    """What a server says to a hello. step: where both go on. digest: of the blocks that every training starts from."""

    step: int
    digest: str


class Asked(Protocol):
    """A question under way."""

    def result(self) -> Message:
        """Its answer, once it is there."""
        ...

    def cancel(self) -> object:
        """Gives it up."""
        ...


class _Called:
    """A question over a transport that knows no `submit`: asked when it is put."""

    def __init__(self, call: Call, message: Message, expected: Mapping[str, Expected]) -> None:
        self.answer: Message | RefusedError
        try:
            self.answer = call(message, expected)
        except RefusedError as error:
            self.answer = error

    def result(self) -> Message:
        if isinstance(self.answer, RefusedError):
            raise self.answer
        return self.answer

    def cancel(self) -> None:
        pass


@dataclass
class Flight:
    """A micro-batch at the server. z: what was sent. shape: of what leaves the blocks. asked: None where all is lost.

    back: puts the blocks' output in order. tokens: what the embedding gave. leaf: the blocks' output, which the graph
    of the head begins with.
    """

    part: int
    z: Tensor
    shape: tuple[int, ...]
    asked: Asked | None
    back: Back | None = None
    tokens: Tensor | None = None
    leaf: Tensor | None = None


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
        self.launching: Callable[[], bool] | None = None
        self.landing: Flight | None = None

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
        """One question and its answer."""
        return self._heard(self._asked(kind, facts, tensors, expected))

    def _asked(
        self, kind: str, facts: Mapping[str, Any], tensors: Mapping[str, Tensor], expected: Mapping[str, Expected]
    ) -> Asked:
        """One question, which is on its way where the transport can (`submit`). A commit that is due goes with it."""
        facts, tensors = {"session": self.session, "incarnation": self._incarnation, **facts}, dict(tensors)
        if kind not in ("infer", "bye") and self._due is not None:
            (facts["commit"], share), self._due = self._due, None
            tensors |= {} if share is None else {"share": share}
        if self.wire is not None:
            facts["wire"] = STORED[self.wire]
        message = Message(kind, facts, tensors)
        self.sent += message.size
        submit = getattr(self._call, "submit", None)
        return _Called(self._call, message, expected) if submit is None else submit(message, expected)

    def _heard(self, asked: Asked) -> Message:
        try:
            answer = asked.result()
        except RefusedError as error:
            if error.code in ("anew", "step"):
                raise RewoundError(str(error)) from error
            raise
        self.sent += answer.size
        return answer

    def begin(self, step: int, rate: float) -> None:
        """The next forward is of update number `step` at this rate."""
        self.step, self.rate, self.part, self.norms = step, rate, 0, None

    def forward(self, z: Tensor, mask: Tensor | None, shape: Sequence[int]) -> Flight:
        """Sends the features of the next micro-batch to the server's blocks; what comes out is [*shape]."""
        part, self.part = self.part, self.part + 1
        if self._failed:  # the loop looks back one step late
            return Flight(part, z, tuple(shape), None)
        facts, expected = {"step": self.step, "part": part}, {"z": self._like(z, shape)}
        return Flight(part, z, tuple(shape), self._asked("forward", facts, self._packed(z, mask), expected))

    def left(self, flight: Flight) -> Tensor:
        """What came out of the blocks."""
        z = flight.z
        if flight.asked is None:
            return torch.full(flight.shape, math.nan, dtype=z.dtype, device=z.device)
        return self._unpacked(self._heard(flight.asked).tensors["z"], z)

    def backward(self, flight: Flight, gradient: Tensor, names: int) -> None:
        """Sends the gradient behind the blocks. names: how many norms come with the last."""
        part, flight.asked = flight.part, None
        if self._failed or not finite(gradient):  # the step is lost, and the server need not see it
            self._failed = True
            return
        last = part == self.parts - 1
        expected = {"gradient": self._like(flight.z, flight.z.shape)}
        if last:
            expected["norms"] = Expected({STORED[flight.z.dtype], "F32", "F64"}, ((names, names),))
        facts = {"step": self.step, "part": part, "last": last}
        flight.asked = self._asked("backward", facts, {"gradient": self._sent(gradient)}, expected)

    def entered(self, flight: Flight) -> Tensor:
        """The gradient before the blocks."""
        if flight.asked is None:
            return torch.full_like(flight.z, math.nan)
        answer = self._heard(flight.asked)
        self.norms = answer.tensors.get("norms")
        return self._unpacked(answer.tensors["gradient"], flight.z)

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
        if not finite(z):
            raise SitusError(f"the features of step {self.step} are not finite, and are not sent")
        return {"z": self._sent(z)} | ({} if mask is None else {"mask": mask.cpu()})

    def _like(self, z: Tensor, shape: Sequence[int]) -> Expected:
        dtypes = {STORED[self.wire]} if self.wire is not None else {STORED[z.dtype], "BF16", "F32"}
        return Expected(dtypes, tuple((side, side) for side in shape))

    def _unpacked(self, tensor: Tensor, like: Tensor) -> Tensor:
        return tensor.to(like.device, like.dtype if self.wire is not None else tensor.dtype)
