"""One client's training on the server: each numbered step is done once, and a repeated message gets the same answer.

forward n, part 0 … backward n, part 0 … commit n        any message may carry the commit of the step before
save n                                                   a checkpoint of both sides after n steps
infer                                                    evaluation, between two steps
extend sequence s from row k on                          generation, between two steps (`sequences`)

A session that only reads has no training: it infers and extends with the weights that the server started from.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from situs.backbones.base import NOT_CAUSAL
from situs.split.blocks import Blocks
from situs.split.message import READING, Expected, Message, RefusedError, number, packed, unpacked
from situs.split.parts import STORED
from situs.split.sequences import Sequences
from situs.train.checkpoint import RunFolder

MOST_PARTS = 256
MOST_STEPS = 1 << 40
LARGEST_RATE = 1e3
AHEAD, MAX_ANSWERS = 2, 4
"""Number of micro-batches that may wait for their gradient, and of answers that are stored for repeated messages."""


class Session:
    """The state of one training. With shared blocks, several sessions have the same blocks. folder: None for a session
    that only reads.

    step, forwards, backwards: the current step and the micro-batches of it that went forward and backward. answers: of
    the last messages. incarnation: new whenever the session goes back to a checkpoint, so older messages are refused.
    last_message: when the last answer was given.
    """

    def __init__(
        self,
        name: str,
        owner: str,
        blocks: Blocks,
        folder: RunFolder | None,
        sequences: Sequences,
        *,
        keep: int = 2,
        shared: bool = False,
    ) -> None:
        self.name, self.owner, self.blocks, self.folder = name, owner, blocks, folder
        self.sequences, self.keep, self.shared = sequences, keep, shared
        self.step = self.forwards = self.backwards = 0
        self.answers: dict[tuple[str, int, int], tuple[int, Message]] = {}
        self.incarnation, self.last_message = "", time.monotonic()
        self.restart(0)

    def restart(self, step: int) -> None:
        """Goes to the beginning of step `step`."""
        self.step, self.forwards, self.backwards = step, 0, 0
        self.answers.clear()
        self.sequences.clear()
        self.incarnation = secrets.token_hex(8)

    def expected(self, kind: str, facts: Mapping[str, Any], largest: int) -> dict[str, Expected]:
        """The tensors that a message of this kind must have. largest: number of samples."""
        self._check_kind(kind)
        backbone, floats = self.blocks.backbone, {STORED[self.blocks.dtype], "F32", "BF16"}
        batch, length = (1, largest), backbone.num_prefix + backbone.num_tokens
        lengths = (1, length) if backbone.input.shape is None else (length, length)
        out_rows = math.prod(backbone.out_grid)
        rows = lengths if backbone.out_grid == backbone.grid else (out_rows, out_rows)
        expected = {}
        if kind in ("forward", "infer"):
            features = Expected(floats, (batch, lengths, (backbone.dim, backbone.dim)))
            expected = {"z": features, "mask": Expected({"BOOL"}, (batch, lengths))}
        elif kind == "extend":
            return {"z": Expected(floats, ((1, 1), lengths, (backbone.dim, backbone.dim)))}
        elif kind == "backward":
            expected = {"gradient": Expected(floats, (batch, rows, (backbone.out_dim, backbone.out_dim)))}
        if facts.get("commit") is not None:
            expected["share"] = Expected({STORED[self.blocks.dtype]}, ())
        return expected

    def answer(self, message: Message) -> Message:
        """Acts on a message; the same message again gets the same answer, and nothing is done twice."""
        try:
            return self._answer(message)
        finally:
            self.last_message = time.monotonic()  # after the computation, whose time is not the client's

    def _check_kind(self, kind: str) -> None:
        if self.folder is None and kind not in READING:
            raise RefusedError(f"{kind}: a session without training accepts only {', '.join(READING)}")
        if kind == "extend" and not self.blocks.backbone.causal:
            raise RefusedError(f"{self.blocks.backbone.name} cannot continue a sequence: {NOT_CAUSAL}")

    def _answer(self, message: Message) -> Message:
        self._check_kind(message.kind)
        if message.kind in READING:
            if message.facts.get("commit") is not None:
                raise RefusedError(f"a message of the kind {message.kind} must not end a training step (commit)")
            return self._read(message)
        step, part = number(message.facts, "step", MOST_STEPS), number(message.facts, "part", MOST_PARTS)
        key = message.kind, step, part
        if key in self.answers:
            before, answer = self.answers[key]
            if before != message.check():
                raise RefusedError(
                    f"the message {message.kind} of step {step}, part {part} was sent before with other content",
                    "again",
                )
            return answer
        carries = message.facts.get("commit") is not None
        self._check_turn(message.kind, step, part, carries)
        check = message.check()
        if carries:
            self._commit(message.facts["commit"], message.tensors.get("share"))
        if message.kind in ("forward", "backward"):
            answer = (self._forward if message.kind == "forward" else self._backward)(message, part)
        else:
            answer = Message("ok", {"step": self.step})
        if message.kind == "save":
            self.save()
        self.answers[key] = check, answer
        while len(self.answers) > MAX_ANSWERS:
            del self.answers[next(iter(self.answers))]
        return answer

    def _check_turn(self, kind: str, step: int, part: int, carries: bool) -> None:
        """Refuses a message that is not next in order. A message of step n may carry the commit of step n - 1.

        "early": it arrived before an earlier one, and may be sent again.
        """
        ready = self.forwards > 0 and self.backwards == self.forwards
        current = self.step + 1 if carries else self.step
        if kind == "forward" and (step, part) == (self.step, self.forwards) and self.forwards - self.backwards >= AHEAD:
            raise RefusedError(f"{AHEAD} parts of step {self.step} already wait for their gradients", "early")
        fits = {
            "forward": step == current and part == (0 if carries else self.forwards),
            "backward": step == self.step and not carries and self.backwards == part < self.forwards,
            "commit": step == self.step and carries and part == 0,
            "save": step == current and part == 0 and (carries or not self.forwards),
        }
        if not fits[kind] or (carries and not ready):
            coming = not carries and {
                "forward": 0 < part - (self.forwards if step == self.step else 0) <= AHEAD,
                "backward": step == self.step and 0 < part - self.backwards <= AHEAD,
            }.get(kind, False)
            early = coming and (step == self.step or (step == self.step + 1 and ready))
            raise RefusedError(
                f"the message {kind} of step {step}, part {part}{' with a commit' if carries else ''} is out of order: "
                f"this session is at step {self.step}, and {self.backwards} of its {self.forwards} parts are done",
                "early" if early else "step",
            )

    def _commit(self, facts: Any, share: Tensor | None) -> None:
        rate, fine = (facts.get("rate"), facts.get("fine")) if isinstance(facts, dict) else (None, None)
        if not isinstance(rate, int | float) or not 0 <= rate <= LARGEST_RATE or type(fine) is not bool:
            raise RefusedError(f"the learning rate of a commit is {rate!r:.20}, but must be 0 to {LARGEST_RATE:g}")
        config = self.blocks.optim
        if (share is None) != (config.clip is None or config.clip_mode != "norm"):
            problem = "no clipping factor, but needs one" if share is None else "an unexpected clipping factor"
            raise RefusedError(f"the commit has {problem}", "tensors")
        if share is not None and not 0 <= float(share) <= 1:
            raise RefusedError("the clipping factor of the commit is outside [0, 1]")
        self.blocks.commit(float(rate), share, fine=fine)
        self.step, self.forwards, self.backwards = self.step + 1, 0, 0

    def _forward(self, message: Message, part: int) -> Message:
        if part == 0:
            self.answers.clear()  # the client has continued, so nothing before can be repeated
        z, mask = unpacked(message, self.blocks.dtype)
        output = self.blocks.forward(part, z, mask)
        self.forwards += 1
        return Message("ok", {}, {"z": packed(output, message.facts)})

    def _backward(self, message: Message, part: int) -> Message:
        gradient, shape = message.tensors["gradient"], self.blocks.output_shape(part)
        if gradient.shape != shape:
            raise RefusedError(
                f"the gradient has the shape {list(gradient.shape)}, but the features have the shape {list(shape)}",
                "tensors",
            )
        answer = {"gradient": packed(self.blocks.backward(part, gradient), message.facts)}
        self.backwards += 1
        if message.facts.get("last") is True:
            answer["norms"] = self.blocks.norms().cpu()
        return Message("ok", {}, answer)

    def _read(self, message: Message) -> Message:
        """Evaluation or generation."""
        if self.forwards:
            raise RefusedError(f"features for evaluation arrived during step {self.step}", "step")
        if message.kind == "extend":
            return self.sequences.extend(message, self.blocks)
        z, mask = unpacked(message, self.blocks.dtype)
        output = self.blocks.infer(z, mask, mean=message.facts.get("mean") is True)
        return Message("ok", {}, {"z": packed(output, message.facts)})

    def save(self) -> None:
        """Writes the checkpoint of this step; with shared blocks, of all updates so far."""
        assert self.folder is not None
        number_of = self.blocks.updates if self.shared else self.step
        with self.folder.hold():
            self.folder.save(number_of, self.blocks.capture(), {"updates": self.blocks.updates}, self.keep)
