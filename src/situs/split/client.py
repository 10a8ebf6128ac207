"""The client's side, independent of transport: it sends the features and applies the gradient. Labels and images never
leave the client.

`Client` numbers the steps and checks every answer before it is used. A transport is a `Call`: it takes a message and
the tensors that its answer must have, and returns the answer. One that also has `submit`, which returns the answer as a
future, carries several messages at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from situs.errors import SitusError
from situs.locks.veil import Back
from situs.split.message import READING, Expected, Message, RefusedError, finite
from situs.split.parts import STORED

Call = Callable[[Message, Mapping[str, Expected]], Message]


READ_AGAIN = 20
"""Times that a text is sent again to a server that has forgotten it, before the client gives up."""


class RewoundError(Exception):
    """The server has restarted: both sides go back to the newest checkpoint that they share."""


class Welcome(NamedTuple):
    """The answer to a hello. step: where both continue. digest: of the blocks that every training starts from."""

    step: int
    digest: str


def _at_once(call: Call, message: Message, expected: Mapping[str, Expected]) -> Future[Message]:
    """The answer over a transport without `submit`."""
    answer = Future[Message]()
    try:
        answer.set_result(call(message, expected))
    except RefusedError as error:
        answer.set_exception(error)
    return answer


@dataclass
class Flight:
    """A micro-batch at the server. z: what was sent. shape: of the blocks' output. pending: None if the step is lost.

    back: restores the order of the blocks' output. tokens: the embedding's output. leaf: the blocks' output, where the
    graph of the head starts.
    """

    part: int
    z: Tensor
    shape: tuple[int, ...]
    pending: Future[Message] | None
    back: Back | None = None
    tokens: Tensor | None = None
    leaf: Tensor | None = None


class Client:
    """One training's messages to a server. wire: the dtype that features are sent in; None: their own."""

    def __init__(self, call: Call, session: str, *, wire: torch.dtype | None = None) -> None:
        self.session, self.wire = session, wire
        self._call, self._incarnation, self._eager = call, "", False
        self.step, self.parts, self.part, self.mean = 0, 1, 0, False
        self.norms: Tensor | None = None
        self.traffic = 0  # bytes of tensors, both ways
        self.tokens = 0  # of the longest text that the server takes
        self._due_commit: tuple[dict[str, Any], Tensor | None] | None = None
        self._failed = False
        self._hello: dict[str, Any] = {}
        self._welcome: Welcome | None = None
        self._sequences = 0
        self.launching: Callable[[], bool] | None = None
        self.landing: Flight | None = None

    def hello(self, layout: str, training: Mapping[str, Any], steps: Sequence[int]) -> Welcome:
        """Opens the session, or goes back to the newest checkpoint of `steps` that the server also has."""
        return self._open({"layout": layout, "training": dict(training), "steps": list(steps)})

    def hello_reading(self, layout: str) -> Welcome:
        """Opens a session that trains nothing: `infer` and `extend` with the weights that the server started from."""
        return self._open({"layout": layout, "reads": True, "steps": []})

    def _open(self, facts: dict[str, Any]) -> Welcome:
        self._hello = facts
        answer = self._call(Message("hello", {"session": self.session, **facts}), {}).facts
        steps = facts["steps"]
        step, self._incarnation, self._eager = (
            answer.get("step"),
            answer.get("incarnation"),
            answer.get("shared") is True,
        )
        if type(step) is not int or step not in {0, *steps} or not isinstance(self._incarnation, str):
            raise SitusError(
                f"the server wants to start at step {step!r:.40}, but the client has no checkpoint of this step"
            )
        self._due_commit, self._failed = None, False
        self.tokens = tokens if type(tokens := answer.get("tokens")) is int else 0
        self._welcome = Welcome(step, str(answer.get("digest")))
        return self._welcome

    def ask(
        self, kind: str, facts: Mapping[str, Any], tensors: Mapping[str, Tensor], expected: Mapping[str, Expected]
    ) -> Message:
        """Sends a message and waits for its answer."""
        return self._receive(self._send(kind, facts, tensors, expected))

    def _send(
        self, kind: str, facts: Mapping[str, Any], tensors: Mapping[str, Tensor], expected: Mapping[str, Expected]
    ) -> Future[Message]:
        """Sends a message, without waiting if the transport has `submit`. A commit that is due is attached."""
        facts, tensors = {"session": self.session, "incarnation": self._incarnation, **facts}, dict(tensors)
        if kind not in READING and self._due_commit is not None:
            (facts["commit"], share), self._due_commit = self._due_commit, None
            tensors |= {} if share is None else {"share": share}
        if self.wire is not None:
            facts["wire"] = STORED[self.wire]
        message = Message(kind, facts, tensors)
        self.traffic += message.size
        submit = getattr(self._call, "submit", None)
        return _at_once(self._call, message, expected) if submit is None else submit(message, expected)

    def _receive(self, pending: Future[Message]) -> Message:
        try:
            answer = pending.result()
        except RefusedError as error:
            if error.code in ("anew", "step"):
                raise RewoundError(str(error)) from error
            raise
        self.traffic += answer.size
        return answer

    def begin(self, step: int, rate: float) -> None:
        """Starts update number `step` with this learning rate."""
        self.step, self.rate, self.part, self.norms = step, rate, 0, None

    def forward(self, z: Tensor, mask: Tensor | None, shape: Sequence[int]) -> Flight:
        """Sends the features of the next micro-batch to the server's blocks, whose output is [*shape]."""
        part, self.part = self.part, self.part + 1
        if self._failed:  # the training loop notices one step later
            return Flight(part, z, tuple(shape), None)
        facts, expected = {"step": self.step, "part": part}, {"z": self._expected(z, shape)}
        return Flight(part, z, tuple(shape), self._send("forward", facts, self._packed(z, mask), expected))

    def output(self, flight: Flight) -> Tensor:
        """Waits for the blocks' output."""
        z = flight.z
        if flight.pending is None:
            return torch.full(flight.shape, math.nan, dtype=z.dtype, device=z.device)
        return self._unpacked(self._receive(flight.pending).tensors["z"], z)

    def backward(self, flight: Flight, gradient: Tensor, names: int) -> None:
        """Sends the gradient behind the blocks. names: the number of norms that come with the last part."""
        part, flight.pending = flight.part, None
        if self._failed or not finite(gradient):  # the step is lost; the server does not get it
            self._failed = True
            return
        last = part == self.parts - 1
        expected = {"gradient": self._expected(flight.z, flight.z.shape)}
        if last:
            expected["norms"] = Expected({STORED[flight.z.dtype], "F32", "F64"}, ((names, names),))
        facts = {"step": self.step, "part": part, "last": last}
        flight.pending = self._send("backward", facts, {"gradient": self._to_wire(gradient)}, expected)

    def input_gradient(self, flight: Flight) -> Tensor:
        """Waits for the gradient before the blocks."""
        if flight.pending is None:
            return torch.full_like(flight.z, math.nan)
        answer = self._receive(flight.pending)
        self.norms = answer.tensors.get("norms")
        return self._unpacked(answer.tensors["gradient"], flight.z)

    def end_step(self, share: Tensor | None, *, fine: bool) -> None:
        """Ends the step; the commit goes with the next message, or at once if blocks are shared.

        share: the clipping factor. fine: whether loss and gradients were finite.
        """
        if self._failed:
            return
        facts = {"step": self.step, "rate": self.rate, "fine": fine}
        self._due_commit = facts, None if share is None else share.cpu()
        if self._eager:
            self.flush()

    @property
    def failed(self) -> bool:
        """Whether a gradient was not finite here: nothing more is sent until the next hello."""
        return self._failed

    def flush(self) -> None:
        """Sends a commit that is due."""
        if self._due_commit is not None:
            self.ask("commit", {"step": self.step, "part": 0}, {}, {})

    def save(self, step: int) -> None:
        """Makes the server write its checkpoint after `step` updates."""
        self.ask("save", {"step": step, "part": 0}, {}, {})

    def infer(self, z: Tensor, mask: Tensor | None, shape: Sequence[int]) -> Tensor:
        """The output of the server's blocks in evaluation."""
        self.flush()
        answer = self.ask("infer", {"mean": self.mean}, self._packed(z, mask), {"z": self._expected(z, shape)})
        return self._unpacked(answer.tensors["z"], z)

    def text(self) -> RemoteText:
        """A new text to `extend`."""
        self._sequences += 1
        return RemoteText(self, self._sequences)

    def extend(self, number: int, start: int, z: Tensor) -> Tensor:
        """The output of the server's blocks for the last of the rows z [1, n, D], which begin at `start`: [1, 1, D]."""
        self.flush()
        facts = {"mean": self.mean, "sequence": number, "start": start}
        answer = self.ask("extend", facts, self._packed(z, None), {"z": self._expected(z, (1, 1, z.shape[-1]))})
        return self._unpacked(answer.tensors["z"], z)

    def reopen(self) -> None:
        """Opens the session again at a server that has restarted; refused if it has other weights now."""
        before, again = self._welcome, self._open(self._hello)
        if again != before:
            raise SitusError(
                f"the server restarted, and its weights have changed (they are now of step {again.step})",
                field="server",
            )

    def bye(self) -> None:
        """The training is over: the server may let it go."""
        self.flush()
        self.ask("bye", {}, {}, {})

    def _to_wire(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", self.wire or tensor.dtype)

    def _packed(self, z: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        if not finite(z):
            raise SitusError(f"the features of step {self.step} contain NaN or infinite numbers, so they are not sent")
        return {"z": self._to_wire(z)} | ({} if mask is None else {"mask": mask.cpu()})

    def _expected(self, z: Tensor, shape: Sequence[int]) -> Expected:
        dtypes = {STORED[self.wire]} if self.wire is not None else {STORED[z.dtype], "BF16", "F32"}
        return Expected(dtypes, tuple((side, side) for side in shape))

    def _unpacked(self, tensor: Tensor, like: Tensor) -> Tensor:
        return tensor.to(like.device, like.dtype if self.wire is not None else tensor.dtype)


class RemoteText:
    """A text that the server's blocks extend. rows: all that was sent, in case the server forgets it.

    The rows are hidden once: to send them again shows the server nothing new.
    """

    def __init__(self, client: Client, number: int) -> None:
        self.client, self.number = client, number
        self.rows: list[Tensor] = []

    def extend(self, z: Tensor) -> Tensor:
        """The blocks' output [1, 1, D] for the last of the rows z [1, n, D], which follow those of earlier calls."""
        start = sum(rows.shape[1] for rows in self.rows)
        self.rows.append(z)
        for _ in range(READ_AGAIN):
            try:
                return self.client.extend(self.number, start, z)
            except RewoundError:
                self.client.reopen()
            except RefusedError as error:
                if error.code != "length":
                    raise
            start, z = 0, torch.cat(self.rows, dim=1)
        raise SitusError(
            f"the server lost the state of this text {READ_AGAIN} times in a row, so the text was not finished",
            field="server",
        )
