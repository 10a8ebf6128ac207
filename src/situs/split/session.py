"""One client's training on the server: steps have numbers, each is done once, and a repeated question gets its answer.

forward n, part 0 … backward n, part 0 … commit n        any message may carry the commit of the step before
save n                                                   a checkpoint of both sides after n steps
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from situs.split.blocks import Blocks
from situs.split.message import Expected, Message, RefusedError
from situs.split.parts import STORED
from situs.train.checkpoint import RunFolder

MOST_PARTS = 256
MOST_STEPS = 1 << 40
LARGEST_RATE = 1e3
AHEAD, KEPT = 2, 4
"""Micro-batches that may wait for their gradient, and answers that are kept: a server holds no more for a client."""


class Session:
    """The numbers of one training over its blocks. In shared use several sessions have the same blocks.

    incarnation: drawn anew whenever the session goes back to a checkpoint, so that no message of before is taken.
    """

    def __init__(self, name: str, owner: str, blocks: Blocks, folder: RunFolder, *, keep: int, shared: bool) -> None:
        self.name, self.owner, self.blocks, self.folder = name, owner, blocks, folder
        self.keep, self.shared = keep, shared
        self.step = self.begun = self.done = 0
        self.kept: dict[tuple[str, int, int], tuple[int, Message]] = {}
        self.incarnation, self.heard = "", time.monotonic()
        self.anew(0)

    def anew(self, step: int) -> None:
        """Stands before step `step`, with nothing of it begun."""
        self.step, self.begun, self.done = step, 0, 0
        self.kept.clear()
        self.incarnation = secrets.token_hex(8)

    def expected(self, kind: str, facts: Mapping[str, Any], largest: int) -> dict[str, Expected]:
        """The tensors that a message of this kind must have. largest: samples in it."""
        backbone, floats = self.blocks.backbone, {STORED[self.blocks.dtype], "F32", "BF16"}
        batch, length = (1, largest), backbone.num_prefix + backbone.num_tokens
        lengths = (1, length) if backbone.input.shape is None else (length, length)
        entered = Expected(floats, (batch, lengths, (backbone.dim, backbone.dim)))
        leaving = math.prod(backbone.out_grid)
        rows = lengths if backbone.out_grid == backbone.grid else (leaving, leaving)
        left = Expected(floats, (batch, rows, (backbone.out_dim, backbone.out_dim)))
        found = {}
        if kind in ("forward", "infer"):
            found = {"z": entered, "mask": Expected({"BOOL"}, (batch, lengths))}
        elif kind == "backward":
            found = {"gradient": left}
        if facts.get("commit") is not None:
            found["share"] = Expected({STORED[self.blocks.dtype]}, ())
        return found

    def answer(self, message: Message) -> Message:
        """Does what a message asks; the same message again gets the same answer, and nothing is done twice."""
        try:
            return self._answer(message)
        finally:
            self.heard = time.monotonic()  # the time that was computed is not the client's

    def _answer(self, message: Message) -> Message:
        if message.kind == "infer":
            return self._infer(message)
        step, part = number(message.facts, "step", MOST_STEPS), number(message.facts, "part", MOST_PARTS)
        key = message.kind, step, part
        if key in self.kept:
            before, answer = self.kept[key]
            if before != message.check():
                raise RefusedError(
                    f"{message.kind} of step {step}, part {part} came before with other content", "again"
                )
            return answer
        carries = message.facts.get("commit") is not None
        self._check_turn(message.kind, step, part, carries)
        check = message.check()
        if carries:
            self._commit(message.facts["commit"], message.tensors.get("share"))
        answer = {"forward": self._forward, "backward": self._backward}.get(message.kind, self._stand)(message, part)
        if message.kind == "save":
            self.save()
        self.kept[key] = check, answer
        while len(self.kept) > KEPT:
            del self.kept[next(iter(self.kept))]
        return answer

    def _check_turn(self, kind: str, step: int, part: int, carries: bool) -> None:
        """Refuses what is not next. A message of step n may carry the commit of n - 1; one alone is of its own step.

        early: it overtook those before it on the wire, and will be next.
        """
        ready = self.begun > 0 and self.done == self.begun
        stands = self.step + 1 if carries else self.step
        if kind == "forward" and (step, part) == (self.step, self.begun) and self.begun - self.done >= AHEAD:
            raise RefusedError(f"{AHEAD} parts of step {self.step} wait for their gradients already", "early")
        fits = {
            "forward": step == stands and part == (0 if carries else self.begun),
            "backward": step == self.step and not carries and self.done == part < self.begun,
            "commit": step == self.step and carries and part == 0,
            "save": step == stands and part == 0 and (carries or not self.begun),
        }
        if not fits[kind] or (carries and not ready):
            coming = not carries and {
                "forward": 0 < part - (self.begun if step == self.step else 0) <= AHEAD,
                "backward": step == self.step and 0 < part - self.done <= AHEAD,
            }.get(kind, False)
            early = coming and (step == self.step or (step == self.step + 1 and ready))
            raise RefusedError(
                f"{kind} of step {step}, part {part}{' with a commit' if carries else ''}, while this session is at "
                f"step {self.step} with {self.done} of {self.begun} parts done",
                "early" if early else "step",
            )

    def _commit(self, facts: Any, share: Tensor | None) -> None:
        rate, fine = (facts.get("rate"), facts.get("fine")) if isinstance(facts, dict) else (None, None)
        if not isinstance(rate, int | float) or not 0 <= rate <= LARGEST_RATE or type(fine) is not bool:
            raise RefusedError(f"a commit with the rate {rate!r:.20}: 0 to {LARGEST_RATE:g} is taken")
        config = self.blocks.optim
        if (share is None) != (config.clip is None or config.clip_mode != "norm"):
            raise RefusedError("a commit that is clipped and must not be, or is not and must be", "tensors")
        if share is not None and not 0 <= float(share) <= 1:
            raise RefusedError("a commit whose gradients would grow: the share must be in [0, 1]")
        self.blocks.commit(float(rate), share, fine=fine)
        self.step, self.begun, self.done = self.step + 1, 0, 0

    def _forward(self, message: Message, part: int) -> Message:
        if part == 0:
            self.kept.clear()  # the client has gone on, so that nothing before can be asked again
        z, mask = unpacked(message, self.blocks.dtype)
        left = self.blocks.forward(part, z, mask)
        self.begun += 1
        return Message("ok", {}, {"z": packed(left, message.facts)})

    def _backward(self, message: Message, part: int) -> Message:
        gradient, shape = message.tensors["gradient"], self.blocks.leaving(part)
        if gradient.shape != shape:
            raise RefusedError(f"a gradient of shape {list(gradient.shape)} for features of {list(shape)}", "tensors")
        answer = {"gradient": packed(self.blocks.backward(part, gradient), message.facts)}
        self.done += 1
        if message.facts.get("last") is True:
            answer["norms"] = self.blocks.norms().cpu()
        return Message("ok", {}, answer)

    def _infer(self, message: Message) -> Message:
        if self.begun:
            raise RefusedError(f"features for evaluation, while step {self.step} is under way", "step")
        z, mask = unpacked(message, self.blocks.dtype)
        left = self.blocks.infer(z, mask, mean=message.facts.get("mean") is True)
        return Message("ok", {}, {"z": packed(left, message.facts)})

    def _stand(self, *_: object) -> Message:
        return Message("ok", {"step": self.step})

    def save(self) -> None:
        """Writes the checkpoint of this step; in shared use, of all updates so far."""
        number_of = self.blocks.updates if self.shared else self.step
        with self.folder.hold():
            self.folder.save(number_of, self.blocks.capture(), {"updates": self.blocks.updates}, self.keep)


def number(facts: Mapping[str, Any], name: str, most: int) -> int:
    """A whole number of a message's facts."""
    value = facts.get(name)
    if type(value) is not int or not 0 <= value < most:
        raise RefusedError(f"{name}={value!r:.40}: must be a whole number from 0 to {most - 1}")
    return value


def unpacked(message: Message, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Features as the blocks take them, and the mask where there is one."""
    z, mask = message.tensors["z"], message.tensors.get("mask")
    if mask is not None and (mask.shape != z.shape[:2] or not bool(mask.any(dim=1).all())):
        raise RefusedError(
            f"a mask of {list(mask.shape)} for features of {list(z.shape)}, or a sample of padding alone"
        )
    return (z.to(dtype) if message.facts.get("wire") is not None else z), mask


def packed(tensor: Tensor, facts: Mapping[str, Any]) -> Tensor:
    """A tensor as it is sent: on the CPU, in the dtype of the wire where one was agreed on."""
    return tensor.detach().to("cpu", torch.bfloat16 if facts.get("wire") == "BF16" else tensor.dtype)
