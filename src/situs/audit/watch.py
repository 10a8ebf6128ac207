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
from situs.audit.attacks.base import Attack, Knowledge, Normalisation, Ready, Refused, check_server
from situs.audit.captured import Captured, Sent, open_uploads
from situs.audit.cases import Case, ImageFinding
from situs.audit.chosen import ChosenWeightsError, WeightCheck, check_weights
from situs.audit.client import check_inputs, least_likely, no_gradient, victim_gradients
from situs.audit.deadline import Deadline
from situs.audit.defences import Defence, Gradients, NoDefence, Noise, Step, create_defence
from situs.audit.engine import conclude
from situs.audit.oracle import Oracle, estimate
from situs.audit.public import ATTACKED
from situs.audit.reference import (
    Match,
    Pass,
    Witness,
    chance_kept,
    cross_entropy_slopes,
    draws,
    dropout_of,
    match_upload,
    units,
)
from situs.audit.scores import (
    CHANCE,
    METRICS,
    Scores,
    closer,
    denormalise,
    exposures_of,
    facts_of,
    gaps_of,
    measure,
    pictures_of,
)
from situs.audit.stem import pictures_fed, reading_stem
from situs.audit.uploads import attack_uploads, blank_set
from situs.audit.victim import open_victim
from situs.config import checks_arguments
from situs.core.tokens import Size
from situs.core.when import When
from situs.errors import SitusError
from situs.findings import Certificate, Exposure, Kind, Remark
from situs.gate import ABOVE, NOT_JUDGED, PASSED, SCOPE, STATUS, Judgement, awaits_bound, exposed, judge, parse_limit
from situs.limits import check_value
from situs.methods.base import Batch
from situs.models.data import AnyModel

_LOG = logging.getLogger("situs.audit.guard")

LESS = (3, 10, 30, 100)
"""Factors by which the stated noise is divided in further attempts, where it could not be measured."""

DECOYS = 32
"""Images of earlier looks that are kept as a gallery, and looks whose re-identification counts."""

THUMB, SIMILAR = 16, 0.9
"""Two images show the same where their thumbnails of that many pixels a side correlate by more."""

CROSS_ENTROPY = 0.99
"""The loss counts as cross entropy where its slopes have at least this cosine with those of one class each."""

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
        end = ", not a pass" if self.answer == "inconclusive" else ""
        return f"step {self.step}: the upload is {self.answer}{end} ({self.reason}), {SCOPE}"


class Reference(NamedTuple):
    """What recovered pictures are compared with: those of the batch [B, C, H, W] in [0, 1], the gallery (these first,
    then others), and the scores of blind guesses."""

    real: Tensor
    gallery: Tensor
    blind: dict[str, Scores]


class Attempt(NamedTuple):
    """An upload as an attacker reads it, and the attacker's knowledge. proves: whether that knowledge is known to be
    true, so that a failure says something."""

    upload: Gradients
    known: Knowledge
    proves: bool = False


class Reidentified(NamedTuple):
    """How often an attack re-identified images in a gallery, in one look. chance: the probability of one hit."""

    hits: int
    count: int
    chance: float


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
        normalisation: Normalisation | None = None,
        expect: AnyModel | Mapping[str, Tensor] | None = None,
        **model: Any,
    ) -> None:
        _check_options(module, optimizer, every, seconds, attacks)
        self.module, self.limit, self.every, self.act = module, parse_limit(limit, METRICS, "limit"), every, act
        self.attacks = [create_attack(attack) for attack in attacks]
        check_server(self.attacks)
        self.defence, self.seconds = create_defence(defence), seconds
        self.looks: list[Look] = []
        self.findings: list[ImageFinding] = []
        self.expect, self.weights = expect, None
        self.step, self._inside = 0, False
        self._decoys: deque[Tensor] = deque(maxlen=DECOYS)
        self._reidentified: dict[str, deque[Reidentified]] = {}
        with self._undisturbed():
            victim = open_victim(module, **model)
        self.backbone = victim.model.backbone
        normalisation = normalisation or victim.model.data.normalisation
        self.normalisation = _checked(normalisation, self.backbone.input.channels)
        ours = {id(parameter): name for name, parameter in self.backbone.named_parameters()}
        self._names = {name: ours[id(p)] for name, p in module.named_parameters() if id(p) in ours}
        if not self._names:
            raise SitusError(f"{type(module).__name__}: is in half precision; guard a module with float32 weights")
        if expect is not None:
            self.check_weights()
        self.stem = reading_stem(self.backbone)
        theirs = {ours: name for name, ours in self._names.items()}
        self._module_stem = None  # by the module's own names
        if self.stem is not None and self.stem.weight in theirs:
            self._module_stem = replace(self.stem, weight=theirs[self.stem.weight])
        self._witness: Witness | None = None
        self._hooks: list[Any] = []
        if optimizer is not None:
            self._witness = Witness(module, self._module_stem, self._recording)
            self._hooks = [self._witness, optimizer.register_step_pre_hook(lambda *_: self._before_step())]

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
        return self._look(images, gradients, local_steps, None)

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
        if images is not None and len(captured) > 1:
            raise SitusError(
                f"{len(captured)} uploads were given with the images of one step: give one upload", field="upload"
            )
        if images is not None:
            theirs = {ours: name for name, ours in self._names.items()}
            gradients, _ = captured[0].under(self.defence)
            named = {theirs[name]: g for name, g in gradients.items()}
            return self._look(images, named, self.defence.step(Step()).local_steps, None)
        _check_count("batch", batch)
        return self._judged(lambda: self._by_certificate(captured, batch))

    def _by_certificate(self, captured: list[Captured], batch: int) -> Judgement:
        """The worst judgement of uploads whose images are not known, under the stated defence and under none."""
        if self.backbone.input.shape is None:
            raise SitusError(f"{self.backbone.name}: takes images of any size; say which", field="img_size")
        height, width = self.backbone.input.shape
        like = (self.normalisation, True, next(self.module.parameters()).device)
        test = blank_set(captured, (self.backbone.input.channels, height, width), batch, *like)
        stated = list(dict.fromkeys([self.defence, NoDefence()]))
        limits: dict[str, Any] = {"deadline": Deadline(seconds=self.seconds), "limit": self.limit}
        audit = attack_uploads(self.backbone, test, self.attacks, stated, step=Step(batch), **limits)
        assert audit.ruling is not None
        self.findings = list(audit.findings)
        return min(audit.ruling.judgements, key=lambda judged: list(STATUS).index(judged.answer))

    def _look(
        self, images: Tensor, gradients: Mapping[str, Tensor] | None, local_steps: int, passes: list[Pass] | None
    ) -> Look:
        self.findings = []  # not those of the last look, should this one fail
        if gradients is None:
            gradients = {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}
        self._check_images(images)
        self._check_gradients(gradients)
        _check_count("local_steps", local_steps)
        upload = {self._names[name]: g.detach() for name, g in gradients.items()}
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
            reason = str(error).strip().partition("\n")[0]
            judged = _unjudged(f"the audit of this step failed: {type(error).__name__}: {reason}")
        return self._report(judged, time.perf_counter() - start)

    def _report(self, judged: Judgement, seconds: float = 0.0) -> Look:
        worst = judged.worst
        metric, bound, value = self.limit.metric, self.limit.bound, None
        if worst is not None:
            metric, value = worst.metric, worst.value
            bound = bound if worst.limit is None else worst.limit
        look = Look(self.step, ANSWERS[judged.status], metric, bound, value, judged.reason, seconds)
        self.looks.append(look)
        if callable(self.act):
            self.act(look)
        elif look.answer == "above" and self.act == "raise":
            raise LeakError(look)
        else:
            _LOG.log(logging.INFO if look.answer == "below" else logging.WARNING, "%s", look)
        return look

    # --- the verdict ------------------------------------------------------------------------------------------------

    def _judge(self, upload: Gradients, images: Tensor, local_steps: int, passes: list[Pass] | None) -> Judgement:
        """How close attackers come to the images of an upload, and what that proves. passes: None if none was seen."""
        deadline = Deadline(seconds=self.seconds)
        normalisation, foreign = units(images, self.normalisation)
        fed, unknown = self._fed(images, passes)
        references = [self._reference(batch, normalisation) for batch in (images, *fed)]
        match, steps, unmatched = match_upload(
            self.module, self._names, upload, images, self.defence, local_steps, passes
        )
        attempts = self._attempts(upload, match, images, local_steps, normalisation, steps)
        gaps = [Remark("gap", text) for text in (foreign, unknown, unmatched) if text]
        findings = [
            replace(finding, defence=self.defence.label, remarks=[*gaps, *finding.remarks])
            for finding in self._findings(attempts, references, images, deadline)
        ]
        cross_entropy = True
        if awaits_bound(findings, self.limit):
            findings[0] = replace(findings[0], remarks=[*findings[0].remarks, *self._reidentification()])
        if match is not None and awaits_bound(findings, self.limit):
            bounded = [images, *fed][-1]
            cross_entropy, bounds = self._bounds(match, attempts[0], bounded, references[-1], steps, deadline)
            findings += [replace(bound, defence=self.defence.label) for bound in bounds]
        self._keep(references[0].real)
        self.findings = findings
        [judged] = judge(findings, self.limit, hardest=not cross_entropy).judgements
        noise = attempts[0].known.defence.noise_level(len(images))
        measured = f"; the measured noise is {noise:.3g}" if judged.status == PASSED else ""
        return judged._replace(reason=judged.reason + measured)

    def _findings(
        self, attempts: Sequence[Attempt], references: Sequence[Reference], images: Tensor, deadline: Deadline
    ) -> list[ImageFinding]:
        """The finding of every attack in every attempt; once one is above, later attacks are skipped."""
        findings, left = list[ImageFinding](), len(attempts) * len(self.attacks)
        for attack, attempt in ((attack, attempt) for attack in self.attacks for attempt in attempts):
            first = attempt is attempts[0]
            if first and any(exposed(finding, self.limit) for finding in findings):
                break
            case = Case("", self.backbone, attempt.known.defence, attack, batch=len(images))
            ready = attack.prepare(self.backbone, attempt.upload, attempt.known)
            if isinstance(ready, Refused):
                findings += [case.refused(ready.reason)] if first else []
            elif deadline.spent():
                late = Remark("gap", f"{attack.name} did not finish within {self.seconds:g} s")
                findings.append(case.finding("not_run", remarks=[late]))
            else:
                deadline.begin(left + attempt.proves, ready.seconds)  # the oracle has a turn too
                finding = self._attack(case, ready, attempt, references, images, deadline)
                findings.append(finding if first and attempt.proves else replace(finding, hardest=True))
            left -= 1
            if deadline.interrupted:  # an attack keeps its result; Ctrl-C is for the loop
                raise KeyboardInterrupt
        return findings

    def _attack(
        self,
        case: Case,
        ready: Ready,
        attempt: Attempt,
        references: Sequence[Reference],
        images: Tensor,
        deadline: Deadline,
    ) -> ImageFinding:
        """The finding of one attack in one attempt, compared with every reference."""
        attack, known = case.attack, attempt.known
        result = attack.recover(self.backbone, [known.read(attempt.upload)], known, deadline)
        noise = known.noise_beyond_rounding([attempt.upload], ready.reads)
        float32 = all(g.dtype == torch.float32 for g in attempt.upload.values())
        clean = known.defence.noise_level(len(images)) == 0 and float32
        inexact = "; ".join(filter(None, (ready.caveat, attack.spoiled(known, noise))))
        labels = torch.zeros(len(images), dtype=torch.int64)
        facts = facts_of(replace(result, labels=None), labels, len(images))
        control = None if clean else partial(self._control, attack, attempt, images, deadline)
        scores: list[Scores] = []
        exposures: list[Exposure] = []
        for reference in references:
            pictures = pictures_of(result, reference.real, len(images), known.normalisation or self.normalisation)
            scores.append(measure(pictures.nan_to_num(0.0, 0.0, 0.0), reference.gallery, self.backbone, None))
            exposures += self._exposures(case, scores[-1], reference)
        if attempt.proves:
            hits = scores[-1].get("reidentified") or [0.0] * len(images)
            chance = min(1.0, len(images) / len(references[-1].gallery))
            looks = self._reidentified.setdefault(attack.name, deque(maxlen=DECOYS))
            looks.append(Reidentified(round(sum(hits)), len(hits), chance))
        reasons: dict[Kind, str] = {"inexact": inexact, "stopped": result.partial or ""}
        finding = conclude(case, reduce(closer, scores), facts, reasons, noise, control)
        broken = sum(fact.get("broken") is True for fact in facts)
        gaps = gaps_of(attack.name, finding.scores, broken, len(images))
        return replace(finding, samples=_names(len(images)), exposures=exposures, remarks=[*finding.remarks, *gaps])

    def _control(self, attack: Attack, attempt: Attempt, images: Tensor, deadline: Deadline) -> list[Certificate]:
        """What the same attack proves without noise and in float32, with another loss: whether its equations hold for
        the model."""
        labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)
        clean = victim_gradients(self.backbone, images.float(), labels)
        noiseless = Knowledge(step=Step(attempt.known.step.batch), size=attempt.known.size)
        upload = {name: clean[name] for name in attempt.upload}
        return attack.recover(self.backbone, [upload], noiseless, deadline).certificates

    def _bounds(
        self,
        match: Match,
        attempt: Attempt,
        images: Tensor,
        reference: Reference,
        steps: Sequence[Pass],
        deadline: Deadline,
    ) -> tuple[bool, list[ImageFinding]]:
        """Whether the loss is cross entropy, and the oracle's findings.

        The oracle is run on a step of cross entropy with the labels and the very noise of this one; where the loss is
        another, with the least likely labels too.
        """
        known, images = attempt.known, images.float()
        slopes = torch.cat([step.slopes for step in steps if step.slopes is not None])
        method, labels = known.trained(self.backbone), slopes.argmin(dim=1)
        expected = cross_entropy_slopes(self.backbone(images).detach(), labels)
        cross_entropy = float(F.cosine_similarity(slopes.to(expected.dtype), expected).min()) > CROSS_ENTROPY
        bounds: list[ImageFinding] = []
        for hardest in [False] if cross_entropy else [False, True]:
            case = Case("", self.backbone, known.defence, Oracle(), hardest=hardest, batch=len(images))
            target = least_likely(method, images) if hardest else labels

            def compared(picture: Tensor, case: Case = case) -> list[Exposure]:
                shown = denormalise(picture, *(known.normalisation or self.normalisation), clip=False)
                return self._exposures(case, measure(shown, reference.gallery, self.backbone, None), reference)

            def enough(picture: Tensor, case: Case = case, compared: Any = compared) -> bool:
                return bool(exposed(case.finding("done", exposures=compared(picture)), self.limit))

            deadline.begin(1)
            clean = victim_gradients(self.backbone, images, target)
            noisy = {n: clean[n] + (g - match.clean[n]) for n, g in attempt.upload.items() if n in match.clean}
            numbers = torch.arange(len(images), device=images.device)
            drawn = method.draw(Batch(images, numbers, {"label": target}), When(seed=0, epoch=0))
            result = estimate(method, noisy, images, target, drawn, known, enough, deadline.over)
            exposures = [exposure for picture in result.pictures for exposure in compared(picture)]
            late = f"only a part of its search within {self.seconds:g} s"
            bound = case.finding(
                "done" if result.ended else "stopped",
                range(len(images)),
                exposures=exposures,
                remarks=[] if result.ended else [Remark("stopped", late)],
            )
            bounds.append(replace(bound, samples=_names(len(images))))
            if not result.ended or exposed(bound, self.limit):
                break
        return cross_entropy, bounds

    def _fed(self, images: Tensor, passes: list[Pass] | None) -> tuple[list[Tensor], str]:
        """The inputs of the patch embedding as normalised images [B, C, H, W], view after view, where they are not
        `images`; and why they are not known."""
        if passes is None:
            inputs, unknown = draws(self.module, self._module_stem, images)
            views = [[rows] for rows in inputs]
        else:
            calls = {len(step.fed) for step in passes}
            unknown = "" if len(calls) == 1 and 0 not in calls else "the input of its first layer was not recorded"
            views = [[step.fed[k] for step in passes] for k in range(min(calls, default=0))]
            if any(len(rows) != len(step.images) for step in passes if step.images is not None for rows in step.fed):
                unknown = "its first layer got another number of images than the module"
        pictures = [pictures_fed(self.backbone, self.stem, view, images) for view in views]
        return [batch for batch in pictures if batch is not None and bool(batch.isfinite().all())], unknown

    def _attempts(
        self,
        upload: Gradients,
        match: Match | None,
        images: Tensor,
        local_steps: int,
        normalisation: Normalisation,
        steps: Sequence[Pass],
    ) -> list[Attempt]:
        """The upload and the attackers' knowledge: the measured noise. Where it could not be measured, the defence as
        stated first, then none, less noise, and the upload without the factors of its tensors."""
        batch, (height, width) = len(images), images.shape[2:]
        stated = self.defence.step(Step(batch, local_steps))
        dtype = next((g.dtype for g in upload.values() if g.dtype != torch.float32), torch.float32)
        shared = {"size": (height, width), "normalisation": normalisation}
        dropout = max(stated.dropout, dropout_of(self.module, steps))
        if match is not None and not match.wrong:
            factor = match.factor if match.resolved else 1.0
            noise = NoDefence() if match.quiet else Noise(match.sigma / factor)
            known = Knowledge(noise, Step(batch, dtype=dtype, dropout=dropout), **shared)
            return [Attempt({name: g / factor for name, g in upload.items()}, known, proves=True)]
        sent = torch.int8 if stated.dtype == torch.int8 else dtype
        known = Knowledge(self.defence, replace(stated, batch=batch, dtype=sent, dropout=dropout), **shared)
        undefended = Knowledge(step=Step(batch, local_steps, dtype), **shared)
        noise = self.defence.noise_level(batch)
        knowledge = [known] if isinstance(self.defence, NoDefence) else [known, undefended]
        knowledge += [replace(known, defence=Noise(noise / part)) for part in LESS if noise]
        uploads = [upload]
        if match is not None and match.factors:
            uploads.append({name: g / (match.factors.get(name) or 1.0) for name, g in upload.items()})
        return [Attempt(gradients, known) for gradients in uploads for known in knowledge]

    # --- what pictures are compared with ----------------------------------------------------------------------------

    def _reference(self, images: Tensor, normalisation: Normalisation) -> Reference:
        """The batch's pictures, a gallery with others, and blind guesses: grey is the mean of the normalisation, which
        everyone has."""
        real, grey = (denormalise(batch, *normalisation) for batch in (images, torch.zeros_like(images)))
        others = [decoy for decoy in self._decoys if decoy.shape == real.shape[1:]]
        decoys = torch.stack(others).to(real) / 255 if others else real[:0]
        decoys = decoys[~alike(real, decoys).any(dim=0)]  # the same image in another epoch is no blind guess
        gallery = torch.cat([real, decoys])
        different = ~alike(real, gallery)
        different[range(len(real)), range(len(real))] = False
        guesses = {"grey": grey}
        if bool(different.any()):
            mean, other = grey.clone(), grey.clone()
            for number, rows in enumerate(different):
                if bool(rows.any()):
                    mean[number], other[number] = gallery[rows].mean(dim=0), gallery[rows][0]
            guesses |= {"mean image": mean, "another image": other}
        blind = {name: measure(guess, gallery, self.backbone, None) for name, guess in guesses.items()}
        return Reference(real, gallery, blind)

    def _exposures(self, case: Case, scores: Scores, reference: Reference) -> list[Exposure]:
        """What the gate reads: each image against its blind guesses, and whether images are re-identified far more
        often than by chance in this look alone; over many looks: `_reidentification`."""
        count, total = len(reference.real), len(reference.gallery)
        chance, hits = min(1.0, count / total), scores.get("reidentified") or []
        limited = scores if self.limit.metric == "reidentified" else scores | {"reidentified": None}
        rows = exposures_of(limited, _names(total), range(count), reference.blind, case.patches, chance)
        if hits and not case.attack.is_bound and tail([Reidentified(round(sum(hits)), len(hits), chance)]) < CHANCE**2:
            share, among = sum(hits) / len(hits), f"{round(sum(hits))} of {len(hits)} among {total}"
            rows.append(Exposure("image 0", METRICS["reidentified"], share, chance, above=True, among=among))
        return rows

    def _reidentification(self) -> list[Remark]:
        """Why re-identified images, or a gallery that is too small to tell, keep an upload from being below."""
        remarks = []
        for attack, looks in self._reidentified.items():
            if tail([look._replace(hits=look.count) for look in looks]) >= CHANCE:
                few = (
                    "the guard has seen too few other images to distinguish re-identification from chance: audit "
                    "more steps"
                )
                return [Remark("few", few)]
            if tail(looks) < CHANCE:
                remarks.append(Remark("gap", f"{attack} re-identifies recent images more often than chance"))
        return remarks

    def _keep(self, real: Tensor) -> None:
        """Keeps pictures [B, C, H, W] for the galleries of later looks, each once."""
        for picture in (real * 255).round().to(torch.uint8).cpu():
            others = [decoy for decoy in self._decoys if decoy.shape == picture.shape]
            if not others or not bool(alike(picture[None] / 255, torch.stack(others) / 255).any()):
                self._decoys.append(picture)

    # --- arguments --------------------------------------------------------------------------------------------------

    def _check_images(self, images: Any) -> None:
        """Refuses what is no batch of normalised images for the module."""
        if not isinstance(images, Tensor):
            raise SitusError(f"images: is {type(images).__name__}; it must be a tensor [B, C, H, W]", field="images")
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
            raise SitusError(f"images: are on {images.device}, and the module is on {like.device}", field="images")
        if images.is_floating_point() and images.dtype not in (torch.float32, like.dtype):
            raise SitusError(f"images: are {images.dtype}, and the module takes {like.dtype}", field="images")
        check_inputs(images, torch.zeros(len(images), dtype=torch.int64, device=images.device))

    def _check_gradients(self, gradients: Any) -> None:
        """Refuses what are no gradients of the module."""
        if not isinstance(gradients, Mapping):
            kind = type(gradients).__name__
            raise SitusError(f"gradients: is {kind}; it must be a dict of tensors by parameter name", field="gradients")
        if not gradients:
            raise SitusError("gradients: there are none; call backward first, or give them", field="gradients")
        parameters = dict(self.module.named_parameters())
        for name, gradient in gradients.items():
            if name not in self._names:
                raise SitusError(f"gradients: {name} is not a parameter of the guarded module", field="gradients")
            if reason := no_gradient(gradient, parameters[name]):
                raise SitusError(f"gradients: {name} {reason}", field="gradients")

    # --- hooks in a loop --------------------------------------------------------------------------------------------

    @property
    def _due(self) -> bool:
        return self.step % self.every == 0

    def _recording(self) -> bool:
        """Whether the forward pass that begins belongs to a step that is looked at."""
        return self._due and self.module.training and torch.is_grad_enabled() and not self._inside

    def _before_step(self) -> None:
        """Called before the optimiser's step."""
        assert self._witness is not None
        passes, self._witness.passes = self._witness.passes, []
        try:
            if self._due:
                self._look_at(passes)
        finally:
            self.step += 1

    def _look_at(self, passes: list[Pass]) -> None:
        """A look at the step of these passes; where that is not possible it is inconclusive, and the loop goes on."""
        batches = [step.images for step in passes if step.images is not None]
        try:
            if not batches:
                raise SitusError("no images went through the module in training mode since the last step")
            if len({images.shape[1:] for images in batches}) > 1:
                raise SitusError("images of several sizes went through the module")
            images = torch.cat(batches)
            images = images.float() if images.is_floating_point() else images  # autocast takes half as well
            self._check_images(images)
            self._check_gradients({n: p.grad for n, p in self.module.named_parameters() if p.grad is not None})
        except SitusError as error:
            self._report(_unjudged(str(error)))
        else:
            self._look(images, None, 1, passes)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """The module in eval mode within; its modes and the loop's random state are restored afterwards."""
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
    """Which of pictures [B, C, H, W] and others [G, C, H, W] show the same, [B, G]: their grey thumbnails correlate,
    shifted or mirrored."""
    if not len(other):
        return torch.zeros(len(one), 0, dtype=torch.bool, device=one.device)
    thumbs = [F.adaptive_avg_pool2d(pictures.double().mean(dim=1), THUMB) for pictures in (one, other)]
    x, y = (thumb - thumb.mean(dim=(1, 2), keepdim=True) for thumb in thumbs)
    x, y = (thumb / thumb.flatten(1).norm(dim=1).clamp(min=1e-9).view(-1, 1, 1) for thumb in (x, y))
    best = x.new_full((len(x), len(y)), -1.0)
    for dims in ((), (1,), (2,), (1, 2)):
        spectra = torch.fft.rfft2(x.flip(dims))[:, None] * torch.fft.rfft2(y).conj()
        best = torch.maximum(best, torch.fft.irfft2(spectra, s=(THUMB, THUMB)).amax(dim=(2, 3)))
    return best > SIMILAR


def tail(looks: Iterable[Reidentified]) -> float:
    """The probability of as many hits or more in such looks by chance."""
    hits, odds = 0, [1.0]  # odds[k]: of k hits so far
    for look in looks:
        hits += look.hits
        for _ in range(look.count):
            more, less = [p * look.chance for p in odds], [p * (1 - look.chance) for p in odds]
            odds = [a + b for a, b in zip([*less, 0.0], [0.0, *more], strict=True)]
    return sum(odds[hits:])


def _names(count: int) -> list[str]:
    return [f"image {number}" for number in range(count)]


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
        allowed = f"the means and the deviations of {channels} channels, as ((0.5, …), (0.5, …))"
        raise SitusError(field="normalisation", value=normalisation, allowed=allowed)
    return mean, deviation


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SitusError(field=name, value=value, allowed="a whole number, >= 1")


def _check_options(module: nn.Module, optimizer: Any, every: int, seconds: float, attacks: Sequence[Any]) -> None:
    """Refuses options that make no guard; their types are checked by `guard`."""
    trained = {id(p) for p in module.parameters()}
    if optimizer is not None and not any(id(p) in trained for g in optimizer.param_groups for p in g["params"]):
        raise SitusError("optimizer: updates none of the module's parameters", field="optimizer")
    _check_count("every", every)
    check_value("seconds", seconds, "> 0")
    if not attacks:
        raise SitusError(field="attacks", value=attacks, allowed="a list of one or more of them")


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
    seconds: float = 120.0,
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
    options["expect"] = expect
    options |= model if img_size is None else {**model, "img_size": img_size}
    return Guard(module, optimizer, **options)
