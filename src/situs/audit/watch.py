"""`guard`: an attacker beside a training loop of one's own, who tries what is about to be sent before it is.

    watch = situs.audit.guard(model, optimizer, img_size=32, limit="psnr=20", every=100)
    for images, labels in loader:
        loss(model(images), labels).backward()
        optimizer.step()              # every hundredth is tried first; an image above the limit raises LeakError

A client that sends something else than the gradients of its optimiser (a Flower client: the weights after some local
steps) calls `look` with it. The guard knows the images, and the attackers it runs do not: it only says how close they
came. Where no attack of its applies or proves anything it says so; that is no pass.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from situs.audit.attacks import create_attack
from situs.audit.attacks.base import Attack, Fact, Knowledge, Ready, Recovery, Refused
from situs.audit.client import check_inputs, victim_gradients
from situs.audit.deadline import Deadline
from situs.audit.defences import Defence, Gradients, NoDefence, Noise, Step, create_defence
from situs.audit.judge.gate import doubt_of, parse_limit
from situs.audit.public import ATTACKED
from situs.audit.scores.metrics import denormalise, psnr
from situs.audit.scores.scoring import measure, pictures_of
from situs.audit.victim import open_victim
from situs.core.tokens import Size
from situs.errors import SitusError
from situs.limits import check_value

_LOG = logging.getLogger("situs.audit.guard")

LESS = (3, 10, 30, 100)
"""How many times less noise than is stated is tried."""

Answer = Literal["above", "below", "not judged"]
"""below: a closed form that holds and fits came no closer, and no attack was stopped. not judged: all else, which is no
pass."""


class LeakError(RuntimeError):
    """What is about to be sent gives an image away. look: what was found."""

    def __init__(self, look: Look) -> None:
        super().__init__(str(look))
        self.look = look


class Look(NamedTuple):
    """One look at what is about to be sent. value: of the image that came back best, by the limit's metric; None where
    nothing was tried. said: by which attack, and why an attack proves nothing. seconds: what it took."""

    step: int
    answer: Answer
    metric: str
    bound: float
    value: float | None
    said: str
    seconds: float

    def __str__(self) -> str:
        found = "" if self.value is None else f"{self.metric} {self.value:.4g}, limit {self.bound:g}; "
        end = ", which is no pass" if self.answer == "not judged" else ""
        return f"step {self.step}: what is about to be sent is {self.answer}{end} ({found}{self.said})"


class Guard:
    """Made by `guard`. looks: what it found so far; `close` takes its hooks away."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        limit: str,
        every: int,
        act: Literal["raise", "log"] | Callable[[Look], None],
        attacks: Sequence[str | Attack],
        defence: str | Defence,
        seconds: float,
        model: Mapping[str, Any],
    ) -> None:
        check_value("every", every, ">= 1")
        check_value("seconds", seconds, "> 0")
        if not callable(act) and act not in ("raise", "log"):  # a slip would only log
            raise SitusError(field="act", value=act, allowed='"raise", "log" or a function that is given each look')
        if not attacks:
            raise SitusError(field="attacks", value=list(attacks), allowed="one or more of them")
        self.module, self.limit, self.every, self.act = module, parse_limit(limit, "limit"), every, act
        self.attacks = [create_attack(each) for each in attacks]
        self.defence, self.seconds = create_defence(defence), seconds
        self.looks: list[Look] = []
        self.step, self._inside = 0, False
        self._seen: list[Tensor] = []
        with self._aside():
            victim = open_victim(module, **model)
        self.backbone, self.normalisation = victim.model.backbone, victim.model.data.normalisation
        own = {id(parameter): name for name, parameter in self.backbone.named_parameters()}
        self._names = {name: own[id(p)] for name, p in module.named_parameters() if id(p) in own}
        if not self._names:
            raise SitusError(
                f"{type(module).__name__}: is held in half precision; guard a module whose weights are float32"
            )
        self._hooks: list[Any] = []
        if optimizer is not None:
            self._hooks = [
                module.register_forward_pre_hook(self._note, with_kwargs=True),
                optimizer.register_step_pre_hook(lambda *_: self._before()),
            ]

    def close(self) -> None:
        """Takes the hooks off the module and the optimiser."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def look(self, images: Tensor, gradients: Mapping[str, Tensor] | None = None, *, local_steps: int = 1) -> Look:
        """Tries what would be sent for these images, and raises or logs as the guard was asked to.

        images: [B, C, H, W] as the module takes them. gradients: by the module's own names, or what stands for them;
        None takes those in `.grad`. local_steps: behind an update (weights before - after) / (rate · steps).
        """
        _check(images)
        given = gradients
        if given is None:
            given = {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}
        unknown = [name for name in given if name not in self._names]
        if unknown:
            raise SitusError(
                f"gradients: {unknown[0]} is no parameter of the module that is guarded", field="gradients"
            )
        upload = {self._names[name]: g.detach() for name, g in given.items()}
        began = time.perf_counter()
        with self._aside():
            answer, value, said = self._attack(upload, images.detach(), local_steps)
        return self._tell(answer, value, said, time.perf_counter() - began)

    def _tell(self, answer: Answer, value: float | None, said: str, seconds: float = 0.0) -> Look:
        found = Look(self.step, answer, self.limit.metric, self.limit.bound, value, said, seconds)
        self.looks.append(found)
        if callable(self.act):
            self.act(found)
        elif answer == "above" and self.act == "raise":
            raise LeakError(found)
        else:
            _LOG.log(logging.INFO if answer == "below" else logging.WARNING, "%s", found)
        return found

    def _attack(self, upload: Gradients, images: Tensor, local_steps: int) -> tuple[Answer, float | None, str]:
        """What the attackers make of an upload of these images."""
        real, deadline = denormalise(images, *self.normalisation), Deadline(seconds=self.seconds)
        told = self._told(upload, images, local_steps)
        tries = [(attack, known) for attack in self.attacks for known in told]
        best, by, proofs, doubts, gaps = -math.inf, "", list[str](), list[str](), list[str]()
        for number, (attack, known) in enumerate(tries):
            ready = attack.prepare(self.backbone, upload, known)
            if isinstance(ready, Refused):
                doubts += [f"{attack.name} does not apply: {ready.reason}"] if known is told[0] else []
                continue
            if deadline.spent():
                gaps.append(f"{attack.name} was not tried to its end within {self.seconds:g} s")
                continue
            deadline.begin(len(tries) - number, ready.seconds)
            found = attack.recover(self.backbone, [known.read(upload)], known, deadline)
            gaps += [] if found.partial is None else [f"{attack.name} was stopped after {found.partial}"]
            pictures = pictures_of(found, real, len(images), self.normalisation)
            gaps += [f"{attack.name} gave back an image that holds NaN"] if bool(pictures.isnan().any()) else []
            value = self._closest(pictures.nan_to_num(0.0), real)
            if value > best:
                best, by = value, attack.name
            if known is told[0]:
                doubt = self._doubt(attack, ready, found, upload, images, known, deadline)
                proofs += [attack.name] if doubt is None else []
                doubts += [] if doubt is None else [f"{attack.name} proves nothing: {doubt}"]
            if deadline.interrupted:  # an attack keeps what it has; Ctrl-C is the loop's
                raise KeyboardInterrupt
        value = None if best == -math.inf else best
        if value is not None and value > self.limit.bound:
            return "above", value, f"by {by}"
        if proofs and not gaps:
            return "below", value, f"by {by}; {' and '.join(proofs)} solved it and the equations fit"
        return "not judged", value, "; ".join(dict.fromkeys([*gaps, *doubts]))

    def _told(self, upload: Gradients, images: Tensor, local_steps: int) -> list[Knowledge]:
        """What the attackers are told: the defence first. Nobody sees whether it is there, so that they are also told
        of none, and of less noise."""
        batch, (height, width) = len(images), images.shape[2:]
        asked = self.defence.step(Step(batch, local_steps))  # how the step was made
        came = next((g.dtype for g in upload.values() if g.dtype != torch.float32), torch.float32)
        shared = {"size": (height, width), "normalisation": self.normalisation}
        sent = torch.int8 if asked.dtype == torch.int8 else came
        more = {"local_steps": asked.local_steps, "sent": sent, "training": asked.training}
        known = Knowledge(self.defence, batch, **shared, **more)
        if isinstance(self.defence, NoDefence):
            return [known]
        noise = self.defence.noise_level(batch)
        less = [replace(known, defence=Noise(noise / part)) for part in LESS if noise]
        return [known, Knowledge(batch=batch, local_steps=local_steps, sent=came, **shared), *less]

    def _doubt(
        self,
        attack: Attack,
        ready: Ready,
        found: Recovery,
        upload: Gradients,
        images: Tensor,
        known: Knowledge,
        deadline: Deadline,
    ) -> str | None:
        """Why what an attack found proves nothing; None where it does."""
        if not attack.closed_form:
            return "it is a search"
        noise = known.noise_beyond_rounding([upload], ready.reads)
        clean = self.defence.noise_level(len(images)) == 0 and all(g.dtype == torch.float32 for g in upload.values())
        control = None if clean else partial(self._control, attack, upload, images, known, deadline)
        caveat = "; ".join(filter(None, (ready.caveat, attack.spoiled(known, noise)))) or None
        return doubt_of(caveat, found.facts, noise, control)

    def _control(
        self, attack: Attack, upload: Gradients, images: Tensor, known: Knowledge, deadline: Deadline
    ) -> list[dict[str, Fact]]:
        """The facts of the same attack without noise and in float32, by a loss of the guard's own: it is about the
        equations of the model."""
        labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)
        made = victim_gradients(self.backbone, images.float(), labels)
        quiet = Knowledge(NoDefence(), known.batch, size=known.size)
        return attack.recover(self.backbone, [{name: made[name] for name in upload}], quiet, deadline).facts

    def _closest(self, pictures: Tensor, real: Tensor) -> float:
        """The worst image's value of the limit's metric."""
        if self.limit.metric == "psnr":
            return float(psnr(pictures, real).max())
        values = measure(pictures, real, self.backbone, None)[self.limit.metric]
        if values is None:
            raise SitusError(f"limit={self.limit}: is not defined for images so few or so small", field="limit")
        return max(values)

    # --- beside a loop ----------------------------------------------------------------------------------------------

    @property
    def _due(self) -> bool:
        return self.step % self.every == 0

    def _note(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Keeps the images of a step that is looked at, the first tensor given; of several micro-batches all."""
        if self._due and module.training and torch.is_grad_enabled() and not self._inside:
            tensors = (each for each in (*given, *named.values()) if isinstance(each, Tensor))
            self._seen += [each.detach().clone() for each in islice(tensors, 1)]  # the module may write into them

    def _before(self) -> None:
        """Called before the optimiser's step."""
        seen, self._seen = self._seen, []
        try:
            if self._due and (said := self._unlike(seen)):
                self._tell("not judged", None, said)
            elif self._due:
                self.look(torch.cat(seen))
        finally:
            self.step += 1

    @staticmethod
    def _unlike(seen: list[Tensor]) -> str:
        """Why a step of these images cannot be looked at; "" where it can. A loop goes on beside it."""
        if not seen:
            return "no images went through the module in training mode since the last step"
        if len({images.shape[1:] for images in seen}) > 1:
            return "images of several sizes went through the module"
        try:
            _check(torch.cat(seen))
        except SitusError as error:
            return str(error)
        return ""

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """The module in eval mode and as it was afterwards, and the loop's chance untouched."""
        modes = {part: part.training for part in self.module.modules()}
        devices = {p.device.index for p in self.module.parameters() if p.device.type == "cuda"}
        self._inside = True
        try:
            with torch.random.fork_rng(devices=[each for each in devices if each is not None]):
                self.module.eval()
                yield
        finally:
            self._inside = False
            for part, mode in modes.items():
                part.training = mode


def _check(images: Tensor) -> None:
    """Refuses what is no batch of normalised images."""
    check_inputs(images, torch.zeros(len(images), dtype=torch.int64, device=images.device))


def guard(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    img_size: Size | None = None,
    limit: str = "psnr=20",
    every: int = 100,
    act: Literal["raise", "log"] | Callable[[Look], None] = "raise",
    attacks: Sequence[str | Attack] = ATTACKED,
    defence: str | Defence = "none",
    seconds: float = 120.0,
    **model: Any,
) -> Guard:
    """Tries what a loop of your own is about to send, every so many steps of its optimiser, from the first on.

    module: what turns normalised images into logits. optimizer: whose steps are watched; None where `Guard.look` is
    called by hand. img_size: of a module that Situs does not know. limit: by the image that comes back best. act: raise
    `LeakError`, log (the logger situs.audit.guard), or a function that is given each `Look`. defence: what you do to
    the gradients, which the attackers then know ("noise=1e-3"), and try without and with less noise. seconds: for all
    attacks of a look together; where one is stopped, what is not above is not judged. model: more for `open_model`
    (normalisation, in_chans).
    """
    asked = {**model, **({} if img_size is None else {"img_size": img_size})}
    given = {"limit": limit, "every": every, "act": act, "attacks": attacks, "defence": defence, "seconds": seconds}
    return Guard(module, optimizer, **given, model=asked)
