"""`guard`: an audit of single steps of your own training loop, before their gradients are sent.

    watch = situs.audit.guard(model, optimizer, img_size=32, limit="psnr=20", every=100)
    for images, labels in loader:
        loss(model(images), labels).backward()
        optimizer.step()              # every hundredth is attacked first; an image above the limit raises LeakError

A client that sends something else than the gradients of its optimiser (a Flower client: the weights after some local
steps) calls `look` with it. The guard knows the images, and the attackers it runs do not: it measures how close they
come, by an audit's gate (`situs.gate`), to the images and to the input of the first layer. It also recomputes the
step's gradient and measures the noise that is really in the upload (`reference`). "below" needs noise, a closed form
that fits, and an oracle that stays below too; else the look is inconclusive, which is not a pass.

With `expect` the weights that a server sent are checked before the first step (`situs.audit.chosen`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from situs.audit.attacks import create_attack
from situs.audit.attacks.base import Attack, Normalisation, check_server
from situs.audit.captured import Captured, Sent, open_uploads
from situs.audit.cases import ImageFinding
from situs.audit.chosen import ChosenWeightsError, WeightCheck, check_weights
from situs.audit.client import check_inputs, no_gradient
from situs.audit.deadline import Deadline
from situs.audit.defences import Defence, NoDefence, Step, create_defence
from situs.audit.one_step import Memory, OneStep, assumptions
from situs.audit.public import ATTACKED
from situs.audit.reference import Pass, Witness, chance_kept, draws, dropout_of, match_upload, units
from situs.audit.run import run
from situs.audit.scores import METRICS
from situs.audit.stem import pictures_fed, reading_stem
from situs.audit.uploads import attack_uploads, blank_set
from situs.audit.victim import open_victim
from situs.config import checks_arguments
from situs.core.tokens import Size
from situs.errors import SitusError
from situs.findings import Remark
from situs.gate import ABOVE, NOT_JUDGED, PASSED, SCOPE, STATUS, Judgement, judge, parse_limit
from situs.limits import Positive
from situs.models.data import AnyModel

_LOG = logging.getLogger("situs.audit.guard")

_LOOKING = ContextVar("looking", default=False)
"""Whether some guard of this thread looks at a step: its own passes are none of the loop's."""

Answer = Literal["above", "below", "inconclusive"]
"""below: there is noise, a closed form that holds and fits came no closer, nothing was stopped, and the oracle is below
too. inconclusive: all else, which is not a pass."""

ANSWERS: dict[int, Answer] = {PASSED: "below", ABOVE: "above", NOT_JUDGED: "inconclusive"}
"""A gate's status as the answer of a look."""


class LeakError(RuntimeError):
    """The upload gives an image away. look: the look that found it."""

    def __init__(self, look: Look) -> None:
        super().__init__(str(look))
        self.look = look


class Look(NamedTuple):
    """One look at an upload before it is sent. metric, bound, value: of the most exposed image; value is None where
    nothing was attacked. reason: by which attack, or why the attacks prove nothing. seconds: that the look took."""

    step: int
    answer: Answer
    metric: str
    bound: float
    value: float | None
    reason: str
    seconds: float

    def __str__(self) -> str:
        end = ", not a pass" if self.answer == "inconclusive" else " the limit"
        return f"step {self.step}: the upload is {self.answer}{end} ({self.reason}), {SCOPE}"


class Guard:
    """Created by `guard`. looks: all so far; findings: of the last look, as those of an audit; weights: of the last
    check of the weights. `close` removes its hooks."""

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
        expect: AnyModel | Mapping[str, Tensor] | None,
        normalisation: Any = None,
        **model: Any,
    ) -> None:
        _check_count("every", every)
        trained = {id(p) for p in module.parameters()}
        if optimizer is not None and not any(id(p) in trained for g in optimizer.param_groups for p in g["params"]):
            raise SitusError("optimizer: updates none of the module's parameters", field="optimizer")
        if not attacks:
            raise SitusError(field="attacks", value=attacks, allowed="a list of one or more attacks")
        self.module, self.limit, self.every, self.act = module, parse_limit(limit, METRICS, "limit"), every, act
        self.attacks = [create_attack(attack) for attack in attacks]
        check_server(self.attacks)
        self.defence, self.seconds = create_defence(defence), seconds
        self.looks: list[Look] = []
        self.findings: list[ImageFinding] = []
        self.expect, self.weights = expect, None
        self.step = 0
        self._memory = Memory()
        try:
            with self._undisturbed():
                victim = open_victim(module, **model)
                self.stem = reading_stem(victim.model.backbone)
        except SitusError:
            raise
        except Exception as error:
            reason = f"{type(module).__name__}: an audit cannot run this module: {_named(error)}"
            raise SitusError(reason, field="module") from error
        self.backbone = victim.model.backbone
        normalisation = normalisation or victim.model.data.normalisation
        self.normalisation = _checked(normalisation, self.backbone.input.channels)
        ours = {id(parameter): name for name, parameter in self.backbone.named_parameters()}
        self._names = {name: ours[id(p)] for name, p in module.named_parameters() if id(p) in ours}
        if not self._names:
            dtype = next(module.parameters()).dtype
            raise SitusError(
                f"{type(module).__name__}: its weights are {dtype}, but the guard needs a module with float32 weights"
            )
        if expect is not None:
            self.check_weights()
        theirs = {ours: name for name, ours in self._names.items()}
        self._module_stem = None  # by the module's own names
        if self.stem is not None and self.stem.weight in theirs:
            self._module_stem = replace(self.stem, weight=theirs[self.stem.weight])
        self._witness: Witness | None = None
        self._hooks: list[Any] = []
        if optimizer is not None:
            self._witness = Witness(module, self._module_stem, self._recording)
            self._hooks = [self._witness, optimizer.register_step_pre_hook(self._before_step)]

    def close(self) -> None:
        """Removes the hooks from the module and the optimiser."""
        for hook in self._hooks:
            hook.close() if isinstance(hook, Witness) else hook.remove()
        self._hooks = []

    def check_weights(self) -> WeightCheck:
        """Whether the module's weights look chosen by a server; raises `ChosenWeightsError` or logs.

        Done when a guard with `expect` is made; call it again whenever a server has sent new weights.
        """
        with self._undisturbed():
            self.weights = check_weights(self.backbone, like="random" if self.expect is None else self.expect)
        if self.weights.reasons and self.act == "raise":
            raise ChosenWeightsError(self.weights)
        _LOG.log(logging.WARNING if self.weights.status else logging.INFO, "%s", self.weights.sentence)
        return self.weights

    def look(self, images: Tensor, gradients: Mapping[str, Tensor] | None = None, *, local_steps: int = 1) -> Look:
        """Attacks the upload of these images, and raises or logs as the guard was set up.

        images: [B, C, H, W] as the module takes them. gradients: by the module's own names, or what is sent instead;
        None for those in `.grad`. local_steps: of an update (weights before - after) / (rate · steps).
        """
        self.findings = []  # not those of the last look, should this one fail
        self._check_images(images)
        upload = self._upload(gradients)
        _check_count("local_steps", local_steps)
        return self._look(upload, images, local_steps, None)

    def look_upload(
        self, upload: Any, images: Tensor | None = None, *, batch: int = 1, sent: Sent | None = None
    ) -> Look:
        """Attacks an upload as an engine sends it, before it leaves; the module holds the weights before the step.

        upload: the weights after it, their difference or gradients, by name or as a list in the model's order (see
        `audit_gradients`). images: those of the step. Without them an image counts as above where an attack proves that
        it has it, and nothing is below. batch: how many there are.
        """
        self.findings = []
        captured = open_uploads(upload, self.backbone, [self.defence], sent)
        if images is None:
            _check_count("batch", batch)
            return self._judged(lambda: self._by_certificate(captured, batch))
        if len(captured) > 1:
            reason = f"{len(captured)} uploads were given with the images of one step: give one upload"
            raise SitusError(reason, field="upload")
        self._check_images(images)
        [one] = captured
        gradients, rounding = one.under(self.defence)
        one = Captured(one.name, gradients, "gradient", rounding, one.rounded_to)
        return self._look(one, images, self.defence.step(Step()).local_steps, None)

    def _by_certificate(self, captured: list[Captured], batch: int) -> Judgement:
        """The worst judgement of uploads whose images are not known, under the stated defence and under none."""
        assert self.backbone.input.shape is not None
        height, width = self.backbone.input.shape
        like = (self.normalisation, True, next(self.module.parameters()).device)
        test = blank_set(captured, (self.backbone.input.channels, height, width), batch, *like)
        stated = list(dict.fromkeys([self.defence, NoDefence()]))
        deadline = Deadline(seconds=self.seconds)
        fields: dict[str, Any] = {"step": Step(batch), "deadline": deadline, "limit": self.limit}
        audit = attack_uploads(self.backbone, test, self.attacks, stated, **fields)
        if deadline.interrupted:
            raise KeyboardInterrupt
        assert audit.ruling is not None
        self.findings = list(audit.findings)
        return min(audit.ruling.judgements, key=lambda judged: list(STATUS).index(judged.answer))

    def _look(self, upload: Captured, images: Tensor, local_steps: int, passes: list[Pass] | None) -> Look:
        return self._judged(lambda: self._judge(upload, images.detach(), local_steps, passes))

    def _judged(self, judge_upload: Callable[[], Judgement]) -> Look:
        """The look of a judgement; what fails in it makes it inconclusive."""
        start = time.perf_counter()
        try:
            with self._undisturbed():
                judged = judge_upload()
        except SitusError as error:
            judged = _unjudged(str(error))
        except Exception as error:  # noqa: BLE001  (the loop goes on, whatever fails in a look)
            _LOG.debug("the check of this step failed", exc_info=True)
            judged = _unjudged(f"the audit of this step failed: {_named(error)}")
        return self._report(judged, time.perf_counter() - start)

    def _report(self, judged: Judgement, seconds: float = 0.0, late: int = 0) -> Look:
        """late: steps since the one that was looked at."""
        worst = judged.worst
        metric, bound, value = self.limit.metric, self.limit.bound, None
        if worst is not None:
            metric, value = worst.metric, worst.value
            bound = bound if worst.limit is None else worst.limit
        look = Look(self.step - late, ANSWERS[judged.status], metric, bound, value, judged.reason, seconds)
        self.looks.append(look)
        if callable(self.act):
            self.act(look)
        elif look.answer == "above" and self.act == "raise":
            raise LeakError(look)
        else:
            _LOG.log(logging.INFO if look.answer == "below" else logging.WARNING, "%s", look)
        return look

    # --- the verdict ------------------------------------------------------------------------------------------------

    def _judge(self, upload: Captured, images: Tensor, local_steps: int, passes: list[Pass] | None) -> Judgement:
        """How close attackers come to the images of an upload, and what that proves. passes: None if none was seen."""
        deadline = Deadline(seconds=self.seconds)
        normalisation, foreign = units(images, self.normalisation)
        fed, unknown = self._fed(images, passes)
        batches = {"original": images} | {f"view {number}": batch for number, batch in enumerate(fed)}
        references = {n: self._memory.reference(batch, normalisation, self.backbone) for n, batch in batches.items()}
        match, steps, unmatched = match_upload(
            self.module, self._names, upload.gradients, images, self.defence, local_steps, passes
        )
        step = Step(len(images), local_steps, dropout=dropout_of(self.module, steps))
        scenario = OneStep(
            self.backbone,
            self.attacks,
            assumptions(upload, match, self.defence, step),
            references,
            normalisation,
            self.defence,
            self.limit,
            deadline,
            self._memory,
            match,
            [one.slopes if one.implied is None else one.implied for one in steps if one.slopes is not None],
            [Remark("gap", text) for text in (foreign, unknown, unmatched) if text],
        )
        known = scenario.assumed[0]
        audit = run(scenario, deadline, enough=scenario.enough, later=int(known.proves), bounds=scenario.bounds)
        if deadline.interrupted:  # an attack keeps its result; Ctrl-C is for the loop
            raise KeyboardInterrupt
        self._memory.keep(references["original"].real)
        self.findings = list(audit.findings)
        [judged] = judge(audit.findings, self.limit, hardest=not scenario.cross_entropy).judgements
        noise = f"; the measured noise is {known.defence.noise_level(len(images)):.3g}"
        return judged._replace(reason=judged.reason + noise * (judged.status == PASSED))

    def _fed(self, images: Tensor, passes: list[Pass] | None) -> tuple[list[Tensor], str]:
        """The inputs of the patch embedding as normalised images [B, C, H, W], view after view, where they are not
        `images`; and why they are not known."""
        if passes is None:
            inputs, unknown = draws(self.module, self._module_stem, images)
            views = [[rows] for rows in inputs]
        else:
            calls = {len(step.fed) for step in passes}
            unknown = (
                "" if len(calls) == 1 and 0 not in calls else "the input of the module's first layer was not recorded"
            )
            views = [[step.fed[k] for step in passes] for k in range(min(calls))]
            if any(len(rows) != len(step.images) for step in passes if step.images is not None for rows in step.fed):
                unknown = "the module's first layer got another number of images than the module itself"
            if self._witness is not None and self._witness.stray:
                unknown = "images also went through the module's first layer outside of a forward pass in training mode"
        pictures = [pictures_fed(self.backbone, self.stem, view, images) for view in views]
        return [batch for batch in pictures if batch is not None and bool(batch.isfinite().all())], unknown

    # --- arguments --------------------------------------------------------------------------------------------------

    def _check_images(self, images: Any) -> None:
        """Refuses what is no batch of normalised images for the module."""
        if not isinstance(images, Tensor):
            raise SitusError(f"images: must be a tensor [B, C, H, W], not {type(images).__name__}", field="images")
        shape, expected = list(images.shape), self.backbone.input
        if images.dim() != 4:
            raise SitusError(f"images of shape {shape}: must be [B, C, H, W]", field="images")
        if not len(images):
            raise SitusError(f"images of shape {shape}: the batch is empty", field="images")
        if expected.channels and images.shape[1] != expected.channels:
            raise SitusError(f"images of shape {shape}: the module takes {expected.channels} channels", field="images")
        if expected.shape is not None and tuple(images.shape[2:]) != tuple(expected.shape):
            size = "the guard was set up for images of {} × {} pixels (img_size)".format(*expected.shape)
            raise SitusError(f"images of shape {shape}: {size}", field="images")
        like = next(self.module.parameters())
        if images.device != like.device:
            raise SitusError(f"images: are on {images.device}, but the module is on {like.device}", field="images")
        if images.is_floating_point() and images.dtype not in (torch.float32, like.dtype):
            raise SitusError(f"images: are {images.dtype}, but the module takes {like.dtype}", field="images")
        check_inputs(images, torch.zeros(len(images), dtype=torch.int64, device=images.device))

    def _upload(self, gradients: Any = None) -> Captured:
        """Gradients by the module's own names as an upload, by default those in `.grad`; refuses what are none."""
        parameters = dict(self.module.named_parameters())
        if gradients is None:
            gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        if not isinstance(gradients, Mapping):
            kind = type(gradients).__name__
            raise SitusError(f"gradients: must be a dict of tensors by parameter name, not {kind}", field="gradients")
        if not gradients:
            raise SitusError("gradients: are missing; call backward first, or give the gradients", field="gradients")
        for name, gradient in gradients.items():
            if name not in self._names:
                raise SitusError(f"gradients: {name} is not a parameter of the guarded module", field="gradients")
            if reason := no_gradient(gradient, parameters[name]):
                raise SitusError(f"gradients: {name} {reason}", field="gradients")
        return Captured("the step", {self._names[name]: g.detach() for name, g in gradients.items()}, "gradient")

    # --- hooks in a loop --------------------------------------------------------------------------------------------

    @property
    def _due(self) -> bool:
        return self.step % self.every == 0

    def _recording(self) -> bool:
        """Whether a forward pass now may belong to a step that is looked at."""
        return self._due and torch.is_grad_enabled() and not _LOOKING.get()

    def _before_step(self, _: Any, args: Any, named: Any) -> tuple[Any, Any] | None:
        """Called before the optimiser's step. Where its loss is a closure, the look follows the closure's call."""
        closure = named.get("closure", next(iter(args[1:]), None))
        if closure is None:
            self._look_at_step()
            return None
        calls = 0

        def watched() -> Any:
            nonlocal calls
            loss, calls = closure(), calls + 1
            self._look_at_step(calls)
            return loss

        return args[:1], {**named, "closure": watched}

    def _look_at_step(self, calls: int = 1) -> None:
        """A look at the gradients of the step if it is due. calls: of its closure so far."""
        assert self._witness is not None
        try:
            if self._due and calls == 1:
                self._look_at(self._witness.passes)
            elif calls == 2 and (self.step - 1) % self.every == 0:
                several = (
                    "the optimizer computes the loss of this step several times, but only the first pass was attacked"
                )
                self._report(_unjudged(several), late=1)
        finally:
            self._witness.forget()
            self.step += calls == 1

    def _look_at(self, passes: list[Pass]) -> None:
        """A look at the step of these passes; where that is not possible it is inconclusive, and the loop goes on."""
        self.findings, batches = [], [step.images for step in passes if step.images is not None]
        try:
            if not batches:
                raise SitusError("no images went through the module in training mode since the last step")
            if len({images.shape[1:] for images in batches}) > 1:
                raise SitusError(
                    "images of several sizes went through the module in one step, but the attacks need one size"
                )
            images = torch.cat(batches)
            images = images.float() if images.is_floating_point() else images  # autocast takes half as well
            self._check_images(images)
            upload = self._upload()
        except SitusError as error:
            self._report(_unjudged(str(error)))
        else:
            self._look(upload, images, 1, passes)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """The module in eval mode within; its modes and the loop's random state are restored afterwards."""
        modes = {part: part.training for part in self.module.modules()}
        looking = _LOOKING.set(True)
        try:
            with chance_kept():
                self.module.eval()
                yield
        finally:
            _LOOKING.reset(looking)
            for part, mode in modes.items():
                part.training = mode


def _named(error: Exception) -> str:
    """An error's class and first line."""
    return f"{type(error).__name__}: " + str(error).strip().partition("\n")[0]


def _unjudged(reason: str) -> Judgement:
    return Judgement("", "incomplete", reason)


def _checked(normalisation: Any, channels: int) -> Normalisation:
    """A mean and a deviation for each channel."""
    try:
        mean, deviation = ([float(number) for number in part] for part in normalisation)
    except (TypeError, ValueError):
        mean, deviation = [], []
    valid = all(map(math.isfinite, [*mean, *deviation])) and all(number > 0 for number in deviation)
    if not valid or not len(mean) == len(deviation) == channels:
        allowed = f"the means and the deviations of {channels} channels, for example ((0.5, …), (0.5, …))"
        raise SitusError(field="normalisation", value=normalisation, allowed=allowed)
    return mean, deviation


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SitusError(field=name, value=value, allowed="a whole number, >= 1")


@checks_arguments()
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
    seconds: Positive = 120.0,
    expect: AnyModel | Mapping[str, Tensor] | None = None,
    **model: Any,
) -> Guard:
    """Attacks the gradients of your own training loop every so many steps; raises or logs if they leak.

    module: turns normalised images into logits. optimizer: its steps are watched, the first and every `every`-th; None
    where you call `Guard.look`. img_size: needed for a module that Situs does not know. limit: "psnr=20": an image that
    an attack recovers with more than 20 dB is a leak, and so is one recovered better than by a blind guess; "blind":
    only the latter. act: raise `LeakError`, log (logger situs.audit.guard), or a function that gets each `Look`.
    defence: what you do to the gradients ("noise=1e-3"); the real noise is measured, and the attackers know it.
    seconds: for one look; where it is stopped and nothing is above, it is inconclusive. expect: a public model, its
    state dict, or "random" if there is none: weights that look chosen beside it raise `ChosenWeightsError` or are
    logged, now and at each `Guard.check_weights`. model: normalisation (mean and deviation of each channel) and options
    of `open_model`.

    >>> model = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=3)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> watch = situs.guard(model, optimizer, limit="psnr=20", every=100, act="log", attacks=["patchembed"])
    >>> torch.nn.functional.cross_entropy(model(torch.rand(1, 3, 224, 224)), torch.tensor([0])).backward()
    >>> optimizer.step()  # the first step is attacked
    >>> len(watch.looks)
    1
    """
    options = {"limit": limit, "every": every, "act": act, "attacks": attacks, "defence": defence, "seconds": seconds}
    options |= model if img_size is None else {**model, "img_size": img_size}
    return Guard(module, optimizer, expect=expect, **options)
