"""One client's training on the server: each numbered step is done once, and a repeated message gets the same answer.

forward n, part 0 … backward n, part 0 … commit n        any message may carry the commit of the step before
save n                                                   a checkpoint of both sides after n steps
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from situs.backbones.halves import through
from situs.methods.base import Method
from situs.split.message import Expected, Message, RefusedError
from situs.split.parts import STORED, cut
from situs.train.checkpoint import Checkpoint, RunFolder
from situs.train.checkpoint.state import Files, capture, generators, restore, seed_generators, set_generators
from situs.train.optim import OptimConfig, clip_by, gradient_norms, make_optimizer, set_rate
from situs.train.step import Ema, autocast

MOST_PARTS = 256
MOST_STEPS = 1 << 40
LARGEST_RATE = 1e3
AHEAD, MAX_ANSWERS = 2, 4
"""Number of micro-batches that may wait for their gradient, and of answers that are stored for repeated messages."""


class Session:
    """The state of one training. With shared blocks, several sessions have the same blocks.

    step, forwards, backwards: the current step and the micro-batches of it that went forward and backward. answers: of
    the last messages. incarnation: new whenever the session goes back to a checkpoint, so older messages are refused.
    last_message: when the last answer was given.
    """

    def __init__(self, name: str, owner: str, blocks: Blocks, folder: RunFolder, *, keep: int, shared: bool) -> None:
        self.name, self.owner, self.blocks, self.folder = name, owner, blocks, folder
        self.keep, self.shared = keep, shared
        self.step = self.forwards = self.backwards = 0
        self.answers: dict[tuple[str, int, int], tuple[int, Message]] = {}
        self.incarnation, self.last_message = "", time.monotonic()
        self.restart(0)

    def restart(self, step: int) -> None:
        """Goes to the beginning of step `step`."""
        self.step, self.forwards, self.backwards = step, 0, 0
        self.answers.clear()
        self.incarnation = secrets.token_hex(8)

    def expected(self, kind: str, facts: Mapping[str, Any], largest: int) -> dict[str, Expected]:
        """The tensors that a message of this kind must have. largest: number of samples."""
        backbone, floats = self.blocks.backbone, {STORED[self.blocks.dtype], "F32", "BF16"}
        batch, length = (1, largest), backbone.num_prefix + backbone.num_tokens
        lengths = (1, length) if backbone.input.shape is None else (length, length)
        out_rows = math.prod(backbone.out_grid)
        rows = lengths if backbone.out_grid == backbone.grid else (out_rows, out_rows)
        expected = {}
        if kind in ("forward", "infer"):
            features = Expected(floats, (batch, lengths, (backbone.dim, backbone.dim)))
            expected = {"z": features, "mask": Expected({"BOOL"}, (batch, lengths))}
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

    def _answer(self, message: Message) -> Message:
        if message.kind == "infer":
            return self._infer(message)
        step, part = number(message.facts, "step", MOST_STEPS), number(message.facts, "part", MOST_PARTS)
        key = message.kind, step, part
        if key in self.answers:
            before, answer = self.answers[key]
            if before != message.check():
                raise RefusedError(
                    f"{message.kind} of step {step}, part {part} was sent before with other content", "again"
                )
            return answer
        carries = message.facts.get("commit") is not None
        self._check_turn(message.kind, step, part, carries)
        check = message.check()
        if carries:
            self._commit(message.facts["commit"], message.tensors.get("share"))
        answer = {"forward": self._forward, "backward": self._backward}.get(message.kind, self._status)(message, part)
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
                f"{kind} of step {step}, part {part}{' with a commit' if carries else ''}, while this session is at "
                f"step {self.step} with {self.backwards} of {self.forwards} parts done",
                "early" if early else "step",
            )

    def _commit(self, facts: Any, share: Tensor | None) -> None:
        rate, fine = (facts.get("rate"), facts.get("fine")) if isinstance(facts, dict) else (None, None)
        if not isinstance(rate, int | float) or not 0 <= rate <= LARGEST_RATE or type(fine) is not bool:
            raise RefusedError(f"a commit with the rate {rate!r:.20}: must be 0 to {LARGEST_RATE:g}")
        config = self.blocks.optim
        if (share is None) != (config.clip is None or config.clip_mode != "norm"):
            raise RefusedError("a commit with an unexpected clipping factor, or without the expected one", "tensors")
        if share is not None and not 0 <= float(share) <= 1:
            raise RefusedError("a commit with a clipping factor outside [0, 1]")
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
            raise RefusedError(f"a gradient of shape {list(gradient.shape)} for features of {list(shape)}", "tensors")
        answer = {"gradient": packed(self.blocks.backward(part, gradient), message.facts)}
        self.backwards += 1
        if message.facts.get("last") is True:
            answer["norms"] = self.blocks.norms().cpu()
        return Message("ok", {}, answer)

    def _infer(self, message: Message) -> Message:
        if self.forwards:
            raise RefusedError(f"features for evaluation arrived during step {self.step}", "step")
        z, mask = unpacked(message, self.blocks.dtype)
        output = self.blocks.infer(z, mask, mean=message.facts.get("mean") is True)
        return Message("ok", {}, {"z": packed(output, message.facts)})

    def _status(self, *_: object) -> Message:
        return Message("ok", {"step": self.step})

    def save(self) -> None:
        """Writes the checkpoint of this step; with shared blocks, of all updates so far."""
        number_of = self.blocks.updates if self.shared else self.step
        with self.folder.hold():
            self.folder.save(number_of, self.blocks.capture(), {"updates": self.blocks.updates}, self.keep)


def number(facts: Mapping[str, Any], name: str, most: int) -> int:
    """An integer of a message's facts."""
    value = facts.get(name)
    if type(value) is not int or not 0 <= value < most:
        raise RefusedError(f"{name}={value!r:.40}: must be a whole number from 0 to {most - 1}")
    return value


def unpacked(message: Message, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The features in the blocks' dtype, and the mask, if any."""
    z, mask = message.tensors["z"], message.tensors.get("mask")
    if mask is not None and (mask.shape != z.shape[:2] or not bool(mask.any(dim=1).all())):
        raise RefusedError(
            f"a mask of {list(mask.shape)} for features of {list(z.shape)}, or a sample of padding alone"
        )
    return (z.to(dtype) if message.facts.get("wire") is not None else z), mask


def packed(tensor: Tensor, facts: Mapping[str, Any]) -> Tensor:
    """A tensor as it is sent: on the CPU, in the agreed dtype."""
    return tensor.detach().to("cpu", torch.bfloat16 if facts.get("wire") == "BF16" else tensor.dtype)


# --- the blocks: their gradients, optimiser and running mean ----------------------------------------------------------
# One step is `forward` and `backward` for each micro-batch and then `commit`, which updates the weights with the
# client's learning rate and clipping factor (clipping needs the norms of both sides).


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

    @torch.no_grad()
    def infer(self, z: Tensor, mask: Tensor | None = None, *, mean: bool = False) -> Tensor:
        """The blocks' output in evaluation. mean: with the running mean of their weights, if they have one."""
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
