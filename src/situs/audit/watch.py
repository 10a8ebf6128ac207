"""`guard`: an attacker beside a training loop of one's own, who tries what is about to be sent before it is.

    watch = situs.audit.guard(model, optimizer, img_size=32, limit="psnr=20", every=100)
    for images, labels in loader:
        loss(model(images), labels).backward()
        optimizer.step()              # every hundredth is tried first; an image above the limit raises LeakError

A client that sends something else than the gradients of its optimiser (a Flower client: the weights after some local
steps) calls `look` with it. The guard knows the images, and the attackers it runs do not: it says how close they came,
by an audit's gate (`situs.gate`), to the images and to what the first layer was fed. It also makes the step's
gradient again and measures what noise is really in what is sent (`reference`). "below" needs noise, a closed form that
fits, and an oracle that stays below too; where anything of that lacks, it is inconclusive, which is no pass.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.audit.attacks import create_attack
from situs.audit.attacks.base import Attack, Knowledge, Normalisation, Ready, Refused
from situs.audit.cases import Case, ImageFinding
from situs.audit.client import check_inputs, least_likely, victim_gradients
from situs.audit.deadline import Deadline
from situs.audit.defences import Defence, Gradients, NoDefence, Noise, Step, create_defence
from situs.audit.engine import conclude
from situs.audit.fed import pictures_fed, reading_stem
from situs.audit.oracle import Oracle, estimate
from situs.audit.public import ATTACKED
from situs.audit.reference import (
    Match,
    Pass,
    Witness,
    chance_kept,
    compare,
    cross_entropy_slopes,
    draws,
    dropout_of,
    guessed_passes,
    replay,
    units,
)
from situs.audit.scores.exposure import CHANCE, METRICS, exposures_of, gaps_of
from situs.audit.scores.metrics import denormalise
from situs.audit.scores.scoring import Scores, closer, facts_of, measure, pictures_of
from situs.audit.victim import open_victim
from situs.core.tokens import Size
from situs.core.when import When
from situs.errors import SitusError
from situs.findings import Certificate, Exposure, Kind, Remark
from situs.gate import ABOVE, NOT_JUDGED, PASSED, SCOPE, Judgement, awaits_bound, exposed, judge, parse_limit
from situs.limits import check_value
from situs.methods.base import Batch

_LOG = logging.getLogger("situs.audit.guard")

LESS = (3, 10, 30, 100)
"""How many times less noise than is stated is tried, where it could not be measured."""

STATED = 1.15
"""Noise that hides the gradient's size may be so many times the stated one."""

ODD = 3.0
"""Deviations by which the factor of a gradient beneath larger noise may be off."""

DECOYS = 32
"""Images of earlier looks that are kept to tell an image from, and looks whose re-identification is."""

THUMB, SIMILAR = 16, 0.9
"""Two images show the same where their pictures of so many pixels correlate by more."""

CROSS_ENTROPY = 0.99
"""The loss is cross entropy where its slopes are as near to those of one class each, as a cosine."""

Answer = Literal["above", "below", "inconclusive"]
"""below: there is noise, a closed form that holds and fits came no closer, nothing was stopped, and the oracle is below
too. inconclusive: all else, which is no pass."""

ANSWERS: dict[int, Answer] = {PASSED: "below", ABOVE: "above", NOT_JUDGED: "inconclusive"}
"""What a gate says of a look."""


class LeakError(RuntimeError):
    """What is about to be sent gives an image away. look: what was found."""

    def __init__(self, look: Look) -> None:
        super().__init__(str(look))
        self.look = look


class Look(NamedTuple):
    """One look at what is about to be sent. metric, bound, value: of the most exposed image; value is None where
    nothing was tried. said: by which attack, and why an attack proves nothing. seconds: what it took."""

    step: int
    answer: Answer
    metric: str
    bound: float
    value: float | None
    said: str
    seconds: float

    def __str__(self) -> str:
        end = ", which is no pass" if self.answer == "inconclusive" else ""
        return f"step {self.step}: what is about to be sent is {self.answer}{end} ({self.said}), {SCOPE}"


class Reference(NamedTuple):
    """What pictures are held against: those of the batch [B, C, H, W] in [0, 1], first in a gallery with other images,
    and the scores of guesses at them that saw no gradient."""

    real: Tensor
    gallery: Tensor
    blind: dict[str, Scores]


class Try(NamedTuple):
    """An upload as an attacker reads it, and what he is told. proves: whether he is told what is true, so that what he
    does not find says something."""

    upload: Gradients
    known: Knowledge
    proves: bool = False


class Again(NamedTuple):
    """How often an attack found images again among others, in one look."""

    hits: int
    count: int
    chance: float


class Guard:
    """Made by `guard`. looks: what it found so far; findings: of the last look, as those of an audit. `close` takes its
    hooks away."""

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
        _check_asked(module, optimizer, every, seconds, act, attacks)
        self.module, self.limit, self.every, self.act = module, parse_limit(limit, METRICS, "limit"), every, act
        self.attacks = [create_attack(each) for each in attacks]
        self.defence, self.seconds = create_defence(defence), seconds
        self.looks: list[Look] = []
        self.findings: list[ImageFinding] = []
        self.step, self._inside = 0, False
        self._decoys: deque[Tensor] = deque(maxlen=DECOYS)
        self._again: dict[str, deque[Again]] = {}
        with self._aside():
            victim = open_victim(module, **{name: value for name, value in model.items() if name != "normalisation"})
        self.backbone = victim.model.backbone
        asked = model.get("normalisation") or victim.model.data.normalisation
        self.normalisation = _checked(asked, self.backbone.input.channels)
        ours = {id(parameter): name for name, parameter in self.backbone.named_parameters()}
        self._names = {name: ours[id(p)] for name, p in module.named_parameters() if id(p) in ours}
        if not self._names:
            raise SitusError(f"{type(module).__name__}: is in half precision; guard a module with float32 weights")
        self.stem = reading_stem(self.backbone)
        theirs = {each: name for name, each in self._names.items()}
        self._local = None  # the same by the module's own names
        if self.stem is not None and self.stem.weight in theirs:
            self._local = replace(self.stem, weight=theirs[self.stem.weight])
        self._witness: Witness | None = None
        self._hooks: list[Any] = []
        if optimizer is not None:
            self._witness = Witness(module, self._local, self._wanted)
            self._hooks = [self._witness, optimizer.register_step_pre_hook(lambda *_: self._before())]

    def close(self) -> None:
        """Takes the hooks off the module and the optimiser."""
        for hook in self._hooks:
            hook.close() if isinstance(hook, Witness) else hook.remove()
        self._hooks = []

    def look(self, images: Tensor, gradients: Mapping[str, Tensor] | None = None, *, local_steps: int = 1) -> Look:
        """Tries what would be sent for these images, and raises or logs as the guard was asked to.

        images: [B, C, H, W] as the module takes them. gradients: by the module's own names, or what stands for them;
        None takes those in `.grad`. local_steps: behind an update (weights before - after) / (rate · steps).
        """
        return self._look(images, gradients, local_steps, None)

    def _look(
        self, images: Tensor, gradients: Mapping[str, Tensor] | None, local_steps: int, passes: list[Pass] | None
    ) -> Look:
        self.findings = []  # none of the look before, should this one fail
        sent = gradients
        if sent is None:
            sent = {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}
        self._check_images(images)
        self._check_gradients(sent)
        _check_count("local_steps", local_steps)
        upload = {self._names[name]: g.detach() for name, g in sent.items()}
        began = time.perf_counter()
        try:
            with self._aside():
                judged = self._judge(upload, images.detach(), local_steps, passes)
        except SitusError as error:
            judged = _unjudged(str(error))
        except Exception as error:  # noqa: BLE001  (a loop goes on whatever a look ends with)
            _LOG.debug("a look was not ended", exc_info=True)
            reason = str(error).strip().partition("\n")[0]
            judged = _unjudged(f"the look could not be ended: {type(error).__name__}: {reason}")
        return self._tell(judged, time.perf_counter() - began)

    def _tell(self, judged: Judgement, seconds: float = 0.0) -> Look:
        worst = judged.worst
        metric, bound, value = self.limit.metric, self.limit.bound, None
        if worst is not None:
            metric, value = worst.metric, worst.value
            bound = bound if worst.limit is None else worst.limit
        seen = Look(self.step, ANSWERS[judged.status], metric, bound, value, judged.reason, seconds)
        self.looks.append(seen)
        if callable(self.act):
            self.act(seen)
        elif seen.answer == "above" and self.act == "raise":
            raise LeakError(seen)
        else:
            _LOG.log(logging.INFO if seen.answer == "below" else logging.WARNING, "%s", seen)
        return seen

    # --- the verdict ------------------------------------------------------------------------------------------------

    def _judge(self, upload: Gradients, images: Tensor, local_steps: int, passes: list[Pass] | None) -> Judgement:
        """What attackers make of an upload of these images, and what that proves. passes: None where none was seen."""
        deadline = Deadline(seconds=self.seconds)
        normalisation, foreign = units(images, self.normalisation)
        fed, unknown = self._fed(images, passes)
        references = [self._reference(each, normalisation) for each in (images, *fed)]
        match, steps, unmatched = self._match(upload, images, passes, local_steps)
        tries = self._tries(upload, match, images, local_steps, normalisation, steps)
        gaps = [Remark("gap", text) for text in (foreign, unknown, unmatched) if text]
        findings = [
            replace(finding, defence=self.defence.label, remarks=[*gaps, *finding.remarks])
            for finding in self._findings(tries, references, images, deadline)
        ]
        plain = True
        if awaits_bound(findings, self.limit):
            findings[0] = replace(findings[0], remarks=[*findings[0].remarks, *self._found_again()])
        if match is not None and awaits_bound(findings, self.limit):
            plain, bounds = self._bounds(match, tries[0], [images, *fed][-1], references[-1], steps, deadline)
            findings += [replace(bound, defence=self.defence.label) for bound in bounds]
        self._keep(references[0].real)
        self.findings = findings
        [judged] = judge(findings, self.limit, hardest=not plain).judgements
        noise = tries[0].known.defence.noise_level(len(images))
        measured = f"; there is noise of {noise:.3g}, as measured" if judged.status == PASSED else ""
        return judged._replace(reason=judged.reason + measured)

    def _findings(
        self, tries: Sequence[Try], references: Sequence[Reference], images: Tensor, deadline: Deadline
    ) -> list[ImageFinding]:
        """What every attack finds in every try; where one is above, those behind it are spared."""
        findings, left = list[ImageFinding](), len(tries) * len(self.attacks)
        for attack, one in ((attack, one) for attack in self.attacks for one in tries):
            first = one is tries[0]
            if first and any(exposed(finding, self.limit) for finding in findings):
                break
            case = Case("", self.backbone, one.known.defence, attack, batch=len(images))
            ready = attack.prepare(self.backbone, one.upload, one.known)
            if isinstance(ready, Refused):
                findings += [case.refused(ready.reason)] if first else []
            elif deadline.spent():
                late = Remark("gap", f"{attack.name} was not tried to its end within {self.seconds:g} s")
                findings.append(case.finding("not_run", remarks=[late]))
            else:
                deadline.begin(left + one.proves, ready.seconds)  # the oracle has a turn too
                finding = self._attack(case, ready, one, references, images, deadline)
                findings.append(finding if first and one.proves else replace(finding, hardest=True))
            left -= 1
            if deadline.interrupted:  # an attack keeps what it has; Ctrl-C is the loop's
                raise KeyboardInterrupt
        return findings

    def _attack(
        self,
        case: Case,
        ready: Ready,
        one: Try,
        references: Sequence[Reference],
        images: Tensor,
        deadline: Deadline,
    ) -> ImageFinding:
        """What one attack finds in one try, held against every reference."""
        attack, known = case.attack, one.known
        result = attack.recover(self.backbone, [known.read(one.upload)], known, deadline)
        noise = known.noise_beyond_rounding([one.upload], ready.reads)
        clean = known.defence.noise_level(len(images)) == 0 and all(
            g.dtype == torch.float32 for g in one.upload.values()
        )
        inexact = "; ".join(filter(None, (ready.caveat, attack.spoiled(known, noise))))
        labels = torch.zeros(len(images), dtype=torch.int64)
        facts = facts_of(replace(result, labels=None), labels, len(images))
        control = None if clean else partial(self._control, attack, one, images, deadline)
        scores: list[Scores] = []
        exposures: list[Exposure] = []
        for reference in references:
            pictures = pictures_of(result, reference.real, len(images), known.normalisation or self.normalisation)
            scores.append(measure(pictures.nan_to_num(0.0, 0.0, 0.0), reference.gallery, self.backbone, None))
            exposures += self._exposures(case, scores[-1], reference)
        if one.proves:
            again = scores[-1].get("reidentified") or [0.0] * len(images)
            chance = min(1.0, len(images) / len(references[-1].gallery))
            row = self._again.setdefault(attack.name, deque(maxlen=DECOYS))
            row.append(Again(round(sum(again)), len(again), chance))
        reasons: dict[Kind, str] = {"inexact": inexact, "stopped": result.partial or ""}
        finding = conclude(case, reduce(closer, scores), facts, reasons, noise, control)
        broken = sum(fact.get("broken") is True for fact in facts)
        gaps = gaps_of(attack.name, finding.scores, broken, len(images))
        return replace(finding, samples=_names(len(images)), exposures=exposures, remarks=[*finding.remarks, *gaps])

    def _control(self, attack: Attack, one: Try, images: Tensor, deadline: Deadline) -> list[Certificate]:
        """What the same attack proves without noise and in float32, by a loss of the guard's own: it is about the
        equations of the model."""
        labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)
        clean = victim_gradients(self.backbone, images.float(), labels)
        quiet = Knowledge(step=Step(one.known.step.batch), size=one.known.size)
        upload = {name: clean[name] for name in one.upload}
        return attack.recover(self.backbone, [upload], quiet, deadline).certificates

    def _bounds(
        self,
        match: Match,
        one: Try,
        images: Tensor,
        reference: Reference,
        steps: Sequence[Pass],
        deadline: Deadline,
    ) -> tuple[bool, list[ImageFinding]]:
        """Whether the loss is cross entropy, and what the oracle has.

        It is asked of a step of cross entropy with the labels of this one, under the very noise of this one; where the
        loss is another, with the least likely labels too.
        """
        known, images = one.known, images.float()
        slopes = torch.cat([each.slopes for each in steps if each.slopes is not None])
        method, labels = known.trained(self.backbone), slopes.argmin(dim=1)
        usual = cross_entropy_slopes(self.backbone(images).detach(), labels)
        plain = float(F.cosine_similarity(slopes.to(usual.dtype), usual).min()) > CROSS_ENTROPY
        bounds: list[ImageFinding] = []
        for hardest in [False] if plain else [False, True]:
            case = Case("", self.backbone, known.defence, Oracle(), hardest=hardest, batch=len(images))
            asked = least_likely(method, images) if hardest else labels

            def held(picture: Tensor, case: Case = case) -> list[Exposure]:
                shown = denormalise(picture, *(known.normalisation or self.normalisation), clip=False)
                return self._exposures(case, measure(shown, reference.gallery, self.backbone, None), reference)

            def enough(picture: Tensor, case: Case = case, held: Any = held) -> bool:
                return bool(exposed(case.finding("done", exposures=held(picture)), self.limit))

            deadline.begin(1)
            clean = victim_gradients(self.backbone, images, asked)
            noisy = {n: clean[n] + (g - match.clean[n]) for n, g in one.upload.items() if n in match.clean}
            numbers = torch.arange(len(images), device=images.device)
            drawn = method.draw(Batch(images, numbers, {"label": asked}), When(seed=0, epoch=0))
            result = estimate(method, noisy, images, asked, drawn, known, enough, deadline.over)
            exposures = [each for picture in result.pictures for each in held(picture)]
            late = f"less than its whole search, within {self.seconds:g} s"
            bound = case.finding(
                "done" if result.ended else "stopped",
                range(len(images)),
                exposures=exposures,
                remarks=[] if result.ended else [Remark("stopped", late)],
            )
            bounds.append(replace(bound, samples=_names(len(images))))
            if not result.ended or exposed(bound, self.limit):
                break
        return plain, bounds

    def _fed(self, images: Tensor, passes: list[Pass] | None) -> tuple[list[Tensor], str]:
        """What the patch embedding was fed as normalised images [B, C, H, W], view after view, where that is not
        `images`; and why it is not known."""
        if passes is None:
            inputs, unknown = draws(self.module, self._local, images)
            views = [[each] for each in inputs]
        else:
            calls = {len(each.fed) for each in passes}
            unknown = "" if len(calls) == 1 and 0 not in calls else "what its first layer was fed was not recorded"
            views = [[each.fed[k] for each in passes] for k in range(min(calls, default=0))]
            if any(len(part) != len(each.images) for each in passes if each.images is not None for part in each.fed):
                unknown = "its first layer was fed another number of images than the module was given"
        shown = [pictures_fed(self.backbone, self.stem, view, images) for view in views]
        return [each for each in shown if each is not None and bool(each.isfinite().all())], unknown

    def _match(
        self, upload: Gradients, images: Tensor, passes: list[Pass] | None, local_steps: int
    ) -> tuple[Match | None, list[Pass], str]:
        """What is sent against the step's gradient made again, the passes that made it, and why that says nothing."""
        named = {theirs: upload[ours] for theirs, ours in self._names.items() if ours in upload}
        ways = [passes] if passes is not None else [[each] for each in guessed_passes(self.module, images, named)]
        tried: list[tuple[Match, list[Pass]]] = []
        for way in ways:
            made = replay(self.module, way)
            if isinstance(made, str):
                return None, way, f"the step's gradient could not be made again: {made}"
            match = compare(upload, {self._names[name]: g for name, g in made.items() if name in self._names})
            match = match._replace(wrong=match.wrong or self._unlike_stated(match, len(images), local_steps))
            tried.append((match, way))
            if not match.wrong:
                return match, way, ""
        if not tried:
            said = (
                "the step's gradient could not be made again, so that nobody can say how much noise is in what is sent"
            )
            return None, [], f"{said}: let the guard watch the optimizer, or send the gradient of the classifier too"
        match, way = max(tried, key=lambda pair: bool(pair[0].factors))
        return match, way, match.wrong

    def _unlike_stated(self, match: Match, batch: int, local_steps: int) -> str:
        """Why it is not believed that there is but the gradient beneath noise that is larger; "" where it is.

        Where the noise hides the gradient's numbers, another step would hide there too (Adam's are all of one size).
        """
        stated, step = self.defence.noise_level(batch), self.defence.step(Step(batch, local_steps))
        clean = [c.double() for c in match.clean.values()]
        size, count = math.sqrt(sum(float(c.square().sum()) for c in clean)), sum(c.numel() for c in clean)
        if match.quiet or match.factor * size > match.sigma * math.sqrt(count):
            return ""
        if step.adam or step.local_steps > 1:
            what = "a step of Adam" if step.adam else f"{step.local_steps} local steps"
            return f"it is the update of {what}, and noise hides what that made of the gradient"
        off = (match.factor - 1) * size / match.sigma  # in deviations
        if match.resolved and off <= ODD:
            return ""  # all of it was made less: clipped
        if match.sigma <= STATED * stated and abs(off) <= ODD:
            return ""
        return (
            f"what is sent has a deviation of {match.sigma:.3g} around {match.factor:.3g} times the gradient of these "
            f"images, where noise of {stated:g} is stated: it may be something else"
        )

    def _tries(
        self,
        upload: Gradients,
        match: Match | None,
        images: Tensor,
        local_steps: int,
        normalisation: Normalisation,
        steps: Sequence[Pass],
    ) -> list[Try]:
        """What the attackers are given and told: the noise that was measured. Where it could not be, the defence as
        stated first, then none, less noise, and the upload without the factors of its tensors."""
        batch, (height, width) = len(images), images.shape[2:]
        asked = self.defence.step(Step(batch, local_steps))  # how the step was made
        came = next((g.dtype for g in upload.values() if g.dtype != torch.float32), torch.float32)
        shared = {"size": (height, width), "normalisation": normalisation}
        sent = torch.int8 if asked.dtype == torch.int8 else came
        dropout = max(asked.dropout, dropout_of(self.module, steps))
        if match is not None and not match.wrong:
            factor = match.factor if match.resolved else 1.0
            noise = NoDefence() if match.quiet else Noise(match.sigma / factor)
            known = Knowledge(noise, Step(batch, dtype=came, dropout=dropout), **shared)
            return [Try({name: g / factor for name, g in upload.items()}, known, proves=True)]
        known = Knowledge(self.defence, replace(asked, batch=batch, dtype=sent, dropout=dropout), **shared)
        plain = Knowledge(step=Step(batch, local_steps, came), **shared)
        noise = self.defence.noise_level(batch)
        told = [known] if isinstance(self.defence, NoDefence) else [known, plain]
        told += [replace(known, defence=Noise(noise / part)) for part in LESS if noise]
        tries = [Try(upload, each) for each in told]
        if match is not None and match.factors:
            even = {name: g / (match.factors.get(name) or 1.0) for name, g in upload.items()}
            tries += [Try(even, each) for each in told]
        return tries

    # --- what pictures are held against -----------------------------------------------------------------------------

    def _reference(self, images: Tensor, normalisation: Normalisation) -> Reference:
        """The batch's pictures with others to be told from, and blind guesses at them: the grey is the mean of the
        normalisation, which everyone has."""
        real, grey = (denormalise(each, *normalisation) for each in (images, torch.zeros_like(images)))
        others = [each for each in self._decoys if each.shape == real.shape[1:]]
        decoys = torch.stack(others).to(real) / 255 if others else real[:0]
        decoys = decoys[~alike(real, decoys).any(dim=0)]  # the same image in another epoch is no blind guess at it
        gallery = torch.cat([real, decoys])
        free = ~alike(real, gallery)
        free[range(len(real)), range(len(real))] = False
        guesses = {"grey": grey}
        if bool(free.any()):
            mean, other = guesses["grey"].clone(), guesses["grey"].clone()
            for place, each in enumerate(free):
                if bool(each.any()):
                    mean[place], other[place] = gallery[each].mean(dim=0), gallery[each][0]
            guesses |= {"mean image": mean, "another image": other}
        return Reference(
            real, gallery, {name: measure(each, gallery, self.backbone, None) for name, each in guesses.items()}
        )

    def _exposures(self, case: Case, scores: Scores, reference: Reference) -> list[Exposure]:
        """What the gate reads: each image against the blind guesses at it, and whether images are found again beyond
        all chance; that they are so in many looks is another matter (`_found_again`)."""
        count, total = len(reference.real), len(reference.gallery)
        chance, again = min(1.0, count / total), scores.get("reidentified") or []
        wished = scores if self.limit.metric == "reidentified" else scores | {"reidentified": None}
        rows = exposures_of(wished, _names(total), range(count), reference.blind, case.patches, chance)
        if again and not case.attack.is_bound and tail([Again(round(sum(again)), len(again), chance)]) < CHANCE**2:
            share, among = sum(again) / len(again), f"{round(sum(again))} of {len(again)} among {total}"
            rows.append(Exposure("image 0", METRICS["reidentified"], share, chance, above=True, among=among))
        return rows

    def _found_again(self) -> list[Remark]:
        """Why images that are found again, or too few others to tell, keep what is sent from being below."""
        remarks = []
        for attack, row in self._again.items():
            if tail([each._replace(hits=each.count) for each in row]) >= CHANCE:
                said = "too few other images were seen to tell finding an image again from chance: look more often"
                return [Remark("few", said)]
            if tail(row) < CHANCE:
                said = f"{attack} finds images of the last looks again among others more often than chance"
                remarks.append(Remark("gap", said))
        return remarks

    def _keep(self, real: Tensor) -> None:
        """Keeps pictures [B, C, H, W] as others for later looks, each once."""
        for each in (real * 255).round().to(torch.uint8).cpu():
            held = [other for other in self._decoys if other.shape == each.shape]
            if not held or not bool(alike(each[None] / 255, torch.stack(held) / 255).any()):
                self._decoys.append(each)

    # --- what it is given -------------------------------------------------------------------------------------------

    def _check_images(self, images: Any) -> None:
        """Refuses what is no batch of normalised images for the module."""
        if not isinstance(images, Tensor):
            raise SitusError(f"images: is {type(images).__name__}; it must be a tensor [B, C, H, W]", field="images")
        shape, wanted = list(images.shape), self.backbone.input
        if images.dim() != 4:
            raise SitusError(f"images of shape {shape}: must be [B, C, H, W]", field="images")
        if not len(images):
            raise SitusError(f"images of shape {shape}: there are none in it", field="images")
        if wanted.channels and images.shape[1] != wanted.channels:
            raise SitusError(f"images of shape {shape}: the module takes {wanted.channels} channels", field="images")
        if wanted.shape is not None and tuple(images.shape[2:]) != tuple(wanted.shape):
            size = "the guard was made for images of {} × {} pixels (img_size)".format(*wanted.shape)
            raise SitusError(f"images of shape {shape}: {size}", field="images")
        like = next(self.module.parameters())
        if images.device != like.device:
            raise SitusError(f"images: are on {images.device}, and the module is on {like.device}", field="images")
        if images.is_floating_point() and images.dtype not in (torch.float32, like.dtype):
            raise SitusError(f"images: are {images.dtype}, and the module takes {like.dtype}", field="images")
        check_inputs(images, torch.zeros(len(images), dtype=torch.int64, device=images.device))

    def _check_gradients(self, sent: Any) -> None:
        """Refuses what are no gradients of the module."""
        if not isinstance(sent, Mapping):
            kind = type(sent).__name__
            raise SitusError(f"gradients: is {kind}; it must be a dict of tensors by parameter name", field="gradients")
        if not sent:
            raise SitusError("gradients: there are none; call backward first, or give them", field="gradients")
        parameters = dict(self.module.named_parameters())
        for name, gradient in sent.items():
            if name not in self._names:
                raise SitusError(f"gradients: {name} is no parameter of the module that is guarded", field="gradients")
            if why := _no_gradient(gradient, parameters[name]):
                raise SitusError(f"gradients: {name} {why}", field="gradients")

    # --- beside a loop ----------------------------------------------------------------------------------------------

    @property
    def _due(self) -> bool:
        return self.step % self.every == 0

    def _wanted(self) -> bool:
        """Whether the forward pass that begins is one of a step that is looked at."""
        return self._due and self.module.training and torch.is_grad_enabled() and not self._inside

    def _before(self) -> None:
        """Called before the optimiser's step."""
        assert self._witness is not None
        passes, self._witness.passes = self._witness.passes, []
        try:
            if self._due:
                self._look_at(passes)
        finally:
            self.step += 1

    def _look_at(self, passes: list[Pass]) -> None:
        """A look at the step of these passes; what cannot be looked at is said, and the loop goes on."""
        seen = [each.images for each in passes if each.images is not None]
        try:
            if not seen:
                raise SitusError("no images went through the module in training mode since the last step")
            if len({images.shape[1:] for images in seen}) > 1:
                raise SitusError("images of several sizes went through the module")
            images = torch.cat(seen)
            images = images.float() if images.is_floating_point() else images  # autocast takes half as well
            self._check_images(images)
            self._check_gradients({n: p.grad for n, p in self.module.named_parameters() if p.grad is not None})
        except SitusError as error:
            self._tell(_unjudged(str(error)))
        else:
            self._look(images, None, 1, passes)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """The module in eval mode and as it was afterwards, and the loop's chance untouched."""
        modes = {part: part.training for part in self.module.modules()}
        self._inside = True
        try:
            with chance_kept():
                self.module.eval()
                yield
        finally:
            self._inside = False
            for part, mode in modes.items():
                part.training = mode


@torch.no_grad()
def alike(one: Tensor, other: Tensor) -> Tensor:
    """Which of pictures [B, C, H, W] and others [G, C, H, W] show the same, [B, G]: small and grey they correlate,
    moved or mirrored as may be."""
    if not len(other):
        return torch.zeros(len(one), 0, dtype=torch.bool, device=one.device)
    small = [F.adaptive_avg_pool2d(each.double().mean(dim=1), THUMB) for each in (one, other)]
    x, y = (each - each.mean(dim=(1, 2), keepdim=True) for each in small)
    x, y = (each / each.flatten(1).norm(dim=1).clamp(min=1e-9).view(-1, 1, 1) for each in (x, y))
    best = x.new_full((len(x), len(y)), -1.0)
    for dims in ((), (1,), (2,), (1, 2)):
        spectra = torch.fft.rfft2(x.flip(dims))[:, None] * torch.fft.rfft2(y).conj()
        best = torch.maximum(best, torch.fft.irfft2(spectra, s=(THUMB, THUMB)).amax(dim=(2, 3)))
    return best > SIMILAR


def tail(seen: Iterable[Again]) -> float:
    """The probability that chance finds as many images again in such looks, or more."""
    wanted, odds = 0, [1.0]  # odds[k]: of k so far
    for each in seen:
        wanted += each.hits
        for _ in range(each.count):
            more, less = [p * each.chance for p in odds], [p * (1 - each.chance) for p in odds]
            odds = [a + b for a, b in zip([*less, 0.0], [0.0, *more], strict=True)]
    return sum(odds[wanted:])


def _names(count: int) -> list[str]:
    return [f"image {number}" for number in range(count)]


def _unjudged(reason: str) -> Judgement:
    return Judgement("", "incomplete", reason)


def _no_gradient(gradient: Any, parameter: Tensor) -> str:
    """Why something is no gradient of a parameter; "" where it is."""
    if not isinstance(gradient, Tensor):
        return f"is {type(gradient).__name__}, and must be a tensor"
    if gradient.layout != torch.strided:
        return "is sparse: give gradient.to_dense()"
    if not gradient.is_floating_point():
        return f"is {gradient.dtype}: give numbers times their scale, as floats"
    if gradient.shape != parameter.shape:
        return f"has shape {list(gradient.shape)}, and the parameter {list(parameter.shape)}"
    if gradient.device != parameter.device:
        return f"is on {gradient.device}, and the module is on {parameter.device}"
    if bool(gradient.isnan().any()):
        return "holds NaN"
    coarse = torch.finfo(gradient.dtype).bits < 32  # which may overflow on the way
    return "" if coarse or bool(gradient.isfinite().all()) else "holds infinity"


def _checked(normalisation: Any, channels: int) -> Normalisation:
    """A mean and a deviation for each channel."""
    try:
        mean, deviation = ([float(each) for each in part] for part in normalisation)
    except (TypeError, ValueError):
        mean, deviation = [], []
    whole = all(map(math.isfinite, [*mean, *deviation])) and all(each > 0 for each in deviation)
    if not whole or not len(mean) == len(deviation) == channels:
        allowed = f"the means and the deviations of {channels} channels, as ((0.5, …), (0.5, …))"
        raise SitusError(field="normalisation", value=normalisation, allowed=allowed)
    return mean, deviation


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SitusError(field=name, value=value, allowed="a whole number, >= 1")


def _check_asked(module: Any, optimizer: Any, every: Any, seconds: Any, act: Any, attacks: Any) -> None:
    """Refuses what no guard can be made of."""
    if not isinstance(module, nn.Module):
        raise SitusError(f"module: is {type(module).__name__}; it must be an nn.Module", field="module")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise SitusError(f"optimizer: is {kind}; it must be a torch.optim.Optimizer", field="optimizer")
    trained = {id(p) for p in module.parameters()}
    if optimizer is not None and not any(id(p) in trained for g in optimizer.param_groups for p in g["params"]):
        raise SitusError("optimizer: steps none of the module's parameters", field="optimizer")
    _check_count("every", every)
    if not isinstance(seconds, int | float) or isinstance(seconds, bool):
        raise SitusError(field="seconds", value=seconds, allowed="> 0")
    check_value("seconds", seconds, "> 0")
    if not callable(act) and act not in ("raise", "log"):  # a slip would only log
        raise SitusError(field="act", value=act, allowed='"raise", "log" or a function that is given each look')
    if isinstance(attacks, str) or not attacks:
        raise SitusError(field="attacks", value=attacks, allowed="a list of one or more of them")


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
    """Attacks the gradients of your own training loop every so many steps; raises or logs if they leak.

    module: what turns normalised images into logits. optimizer: whose steps are watched; None where `Guard.look` is
    called by hand. img_size: of a module that Situs does not know. limit: by the image that comes back best, beside
    what blind guesses at it get; "blind" for that alone. act: raise `LeakError`, log (the logger situs.audit.guard), or
    a function that is given each `Look`. defence: what you do to the gradients ("noise=1e-3"); the noise that is really
    there is measured, and the attackers know it. seconds: for all of a look together; where something is stopped, what
    is not above is inconclusive. model: more for `open_model` (normalisation, in_chans).

    >>> model = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=3)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> watch = situs.guard(model, optimizer, limit="psnr=20", every=100)
    """
    asked = {**model, **({} if img_size is None else {"img_size": img_size})}
    options = {"limit": limit, "every": every, "act": act, "attacks": attacks, "defence": defence, "seconds": seconds}
    return Guard(module, optimizer, **options, model=asked)
