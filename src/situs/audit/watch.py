"""`guard`: an attacker beside a training loop of one's own, who tries what is about to be sent before it is.

    watch = situs.audit.guard(model, optimizer, img_size=32, limit="psnr=20", every=100)
    for images, labels in loader:
        loss(model(images), labels).backward()
        optimizer.step()              # every hundredth is tried first; an image above the limit raises LeakError

A client that sends something else than the gradients of its optimiser (a Flower client: the weights after some local
steps) calls `look` with it. The guard knows the images, and the attackers it runs do not: it says how close they came,
by the metrics of a gate (`judge.gate`), to the images and to what the first layer was fed. It also makes the step's
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
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.audit.attacks import create_attack
from situs.audit.attacks.base import Attack, Fact, Knowledge, Normalisation, Ready, Recovery, Refused
from situs.audit.cases import Case, Outcome
from situs.audit.client import check_inputs, least_likely, victim_gradients
from situs.audit.deadline import Deadline
from situs.audit.defences import Defence, Gradients, NoDefence, Noise, Step, Training, create_defence
from situs.audit.fed import pictures_fed, reading_stem
from situs.audit.judge.gate import CHANCE, MARGINS, SCOPE, WISHED, Worst, doubt_of, exposed, parse_limit
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
from situs.audit.scores.metrics import denormalise
from situs.audit.scores.scoring import Scores, measure, pictures_of
from situs.audit.victim import open_victim
from situs.core.tokens import Size
from situs.core.when import When
from situs.errors import SitusError
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
        shown = "" if self.value is None else f"{self.metric} {self.value:.4g}, limit {self.bound:.4g}; "
        end = ", which is no pass" if self.answer == "inconclusive" else ""
        return f"step {self.step}: what is about to be sent is {self.answer}{end} ({shown}{self.said}), {SCOPE}"


class Verdict(NamedTuple):
    """What a look comes to. worst: the most exposed image."""

    answer: Answer
    said: str
    worst: Worst | None = None


class Against(NamedTuple):
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


class Found(NamedTuple):
    """What attacks come to. above: images that are; scored: all. proofs: attacks that prove something. gaps: what was
    stopped or is missing. doubts: why an attack proves nothing."""

    above: list[Worst]
    scored: list[Worst]
    proofs: list[str]
    gaps: list[str]
    doubts: list[str]


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
        _check_asked(module, optimizer, every, seconds, act, attacks)
        self.module, self.limit, self.every, self.act = module, parse_limit(limit, "limit"), every, act
        self.attacks = [create_attack(each) for each in attacks]
        self.defence, self.seconds = create_defence(defence), seconds
        self.looks: list[Look] = []
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
            raise SitusError(
                f"{type(module).__name__}: is held in half precision; guard a module whose weights are float32"
            )
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
                verdict = self._verdict(upload, images.detach(), local_steps, passes)
        except SitusError as error:
            verdict = Verdict("inconclusive", str(error))
        except Exception as error:  # noqa: BLE001  (a loop goes on whatever a look ends with)
            _LOG.debug("a look was not ended", exc_info=True)
            told = str(error).strip().partition("\n")[0]
            verdict = Verdict("inconclusive", f"the look could not be ended: {type(error).__name__}: {told}")
        return self._tell(verdict, time.perf_counter() - began)

    def _tell(self, verdict: Verdict, seconds: float = 0.0) -> Look:
        worst = verdict.worst
        metric, bound, value = self.limit.metric, self.limit.bound, None
        if worst is not None:
            metric, value = worst.metric, worst.value
            bound = bound if worst.limit is None else worst.limit
        seen = Look(self.step, verdict.answer, metric, bound, value, verdict.said, seconds)
        self.looks.append(seen)
        if callable(self.act):
            self.act(seen)
        elif seen.answer == "above" and self.act == "raise":
            raise LeakError(seen)
        else:
            _LOG.log(logging.INFO if seen.answer == "below" else logging.WARNING, "%s", seen)
        return seen

    # --- the verdict ------------------------------------------------------------------------------------------------

    def _verdict(self, upload: Gradients, images: Tensor, local_steps: int, passes: list[Pass] | None) -> Verdict:
        """What attackers make of an upload of these images, and what that proves. passes: None where none was seen."""
        deadline = Deadline(seconds=self.seconds)
        normalisation, foreign = units(images, self.normalisation)
        fed, unknown = self._fed(images, passes)
        against = [self._against(each, normalisation) for each in (images, *fed)]
        match, steps, unmatched = self._match(upload, images, passes, local_steps)
        tries = self._tries(upload, match, images, local_steps, normalisation, steps)
        found = self._attack(tries, against, images, normalisation, deadline)
        worst = max(found.above or found.scored, key=_excess, default=None)
        if found.above and worst is not None:
            self._keep(against[0].real)
            return Verdict("above", "; ".join(filter(None, (f"by {worst.attack}", foreign))), worst)
        reasons = [*filter(None, (foreign, unknown, unmatched)), *found.gaps, *([] if found.proofs else found.doubts)]
        if not reasons and not found.proofs:
            reasons.append("no closed form was tried, and what a search does not find may still be there")
        reasons += [] if reasons else self._found_again()
        if not reasons and match is not None:
            over = self._oracle(match, tries[0], [images, *fed][-1], against[-1], steps, deadline)
            reasons += [over] if over else []
        self._keep(against[0].real)
        if reasons:
            return Verdict("inconclusive", "; ".join(dict.fromkeys(reasons)), worst)
        noise = tries[0].known.defence.noise_level(len(images))
        said = f"{' and '.join(found.proofs)} solved it and the equations fit, with noise of {noise:.3g} as measured"
        return Verdict("below", said, worst)

    def _attack(
        self,
        tries: Sequence[Try],
        against: Sequence[Against],
        images: Tensor,
        normalisation: Normalisation,
        deadline: Deadline,
    ) -> Found:
        """What every attack finds in every try; where one is above, those behind it are spared."""
        found, left = Found([], [], [], [], []), len(tries) * len(self.attacks)
        for attack, one in ((attack, one) for attack in self.attacks for one in tries):
            first = one is tries[0]
            if found.above and first:
                break
            ready = attack.prepare(self.backbone, one.upload, one.known)
            if isinstance(ready, Refused):
                found.doubts.extend([f"{attack.name} does not apply: {ready.reason}"] if first else [])
            elif deadline.spent():
                found.gaps.append(f"{attack.name} was not tried to its end within {self.seconds:g} s")
            else:
                deadline.begin(left + one.proves, ready.seconds)  # the oracle has a turn too
                result = attack.recover(self.backbone, [one.known.read(one.upload)], one.known, deadline)
                found.gaps.extend(
                    [] if result.partial is None else [f"{attack.name} was stopped after {result.partial}"]
                )
                case = Case("", self.backbone, one.known.defence, attack, batch=len(images))
                for held in against:
                    self._score(found, case, result, held, normalisation, one.proves and held is against[-1])
                doubt = self._doubt(attack, ready, result, one, images, deadline) if first else None
                found.proofs.extend([attack.name] if first and doubt is None and one.proves else [])
                found.doubts.extend([] if doubt is None else [f"{attack.name} proves nothing: {doubt}"])
            left -= 1
            if deadline.interrupted:  # an attack keeps what it has; Ctrl-C is the loop's
                raise KeyboardInterrupt
        return found

    def _score(
        self, found: Found, case: Case, result: Recovery, held: Against, normalisation: Normalisation, keep: bool
    ) -> None:
        """Adds what a recovery is worth against one reference. keep: whether re-identification is remembered."""
        name, pictures = case.attack.name, pictures_of(result, held.real, len(held.real), normalisation)
        found.gaps.extend([f"{name} gave back an image that holds NaN"] if bool(pictures.isnan().any()) else [])
        scores = measure(pictures.nan_to_num(0.0, 0.0, 0.0), held.gallery, self.backbone, None)
        found.above.extend(self._exposed(case, scores, held))
        found.scored.extend(self._best(case, scores, held))
        for metric in dict.fromkeys([*MARGINS, self.limit.metric]):
            if scores.get(metric) is None and metric != "reidentified":
                found.gaps.append(f"{metric} is not defined for images so few or so small")
        if keep:
            again = scores.get("reidentified") or [0.0] * len(held.real)
            row = self._again.setdefault(name, deque(maxlen=DECOYS))
            row.append(Again(round(sum(again)), len(again), min(1.0, len(held.real) / len(held.gallery))))

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
        if step.training.adam or step.local_steps > 1:
            what = "a step of Adam" if step.training.adam else f"{step.local_steps} local steps"
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
        dropout = max(asked.training.dropout, dropout_of(self.module, steps))
        more = {"local_steps": asked.local_steps, "sent": sent}
        if match is not None and not match.wrong:
            factor = match.factor if match.resolved else 1.0
            noise = NoDefence() if match.quiet else Noise(match.sigma / factor)
            known = Knowledge(noise, batch, **shared, sent=came, training=Training(dropout=dropout))
            return [Try({name: g / factor for name, g in upload.items()}, known, proves=True)]
        known = Knowledge(self.defence, batch, **shared, **more, training=replace(asked.training, dropout=dropout))
        plain = Knowledge(batch=batch, local_steps=local_steps, sent=came, **shared)
        noise = self.defence.noise_level(batch)
        told = [known] if isinstance(self.defence, NoDefence) else [known, plain]
        told += [replace(known, defence=Noise(noise / part)) for part in LESS if noise]
        tries = [Try(upload, each) for each in told]
        if match is not None and match.factors:
            even = {name: g / (match.factors.get(name) or 1.0) for name, g in upload.items()}
            tries += [Try(even, each) for each in told]
        return tries

    def _doubt(
        self, attack: Attack, ready: Ready, result: Recovery, one: Try, images: Tensor, deadline: Deadline
    ) -> str | None:
        """Why what an attack found proves nothing; None where it does."""
        if not attack.closed_form:
            return "it is a search"
        noise = one.known.noise_beyond_rounding([one.upload], ready.reads)
        level = one.known.defence.noise_level(len(images))
        clean = level == 0 and all(g.dtype == torch.float32 for g in one.upload.values())
        control = None if clean else partial(self._control, attack, one, images, deadline)
        caveat = "; ".join(filter(None, (ready.caveat, attack.spoiled(one.known, noise)))) or None
        return doubt_of(caveat, result.facts, noise, control)

    def _control(self, attack: Attack, one: Try, images: Tensor, deadline: Deadline) -> list[dict[str, Fact]]:
        """The facts of the same attack without noise and in float32, by a loss of the guard's own: it is about the
        equations of the model."""
        labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)
        clean = victim_gradients(self.backbone, images.float(), labels)
        quiet = Knowledge(NoDefence(), one.known.batch, size=one.known.size)
        return attack.recover(self.backbone, [{name: clean[name] for name in one.upload}], quiet, deadline).facts

    def _oracle(
        self,
        match: Match,
        one: Try,
        images: Tensor,
        held: Against,
        steps: Sequence[Pass],
        deadline: Deadline,
    ) -> str:
        """Why the oracle keeps what is sent from being below: it is above, or was stopped; else "".

        It is asked of a step of cross entropy with the labels of this one, under the very noise of this one; where the
        loss is another, with the least likely labels too.
        """
        known, images = one.known, images.float()
        slopes = torch.cat([each.slopes for each in steps if each.slopes is not None])
        method, labels = known.trained(self.backbone), slopes.argmin(dim=1)
        usual = cross_entropy_slopes(self.backbone(images).detach(), labels)
        plain = float(F.cosine_similarity(slopes.to(usual.dtype), usual).min()) > CROSS_ENTROPY
        case = Case("", self.backbone, known.defence, Oracle(), batch=len(images))

        def above(found: Tensor) -> list[Worst]:
            shown = denormalise(found, *(known.normalisation or self.normalisation), clip=False)
            return self._exposed(case, measure(shown, held.gallery, self.backbone, None), held)

        for asked in [labels] if plain else [labels, least_likely(method, images)]:
            deadline.begin(1)
            clean = victim_gradients(self.backbone, images, asked)
            noisy = {n: clean[n] + (g - match.clean[n]) for n, g in one.upload.items() if n in match.clean}
            numbers = torch.arange(len(images), device=images.device)
            drawn = method.draw(Batch(images, numbers, {"label": asked}), When(seed=0, epoch=0))
            result = estimate(
                method, noisy, images, asked, drawn, known, lambda found: bool(above(found)), deadline.over
            )
            if over := [one for picture in result.pictures for one in above(picture)]:
                return f"no attack is above, but the oracle is, which knows where to look: {max(over, key=_excess)}"
            if not result.ended:
                return f"the oracle, which a pass needs, did not come to its end within {self.seconds:g} s"
        return ""

    # --- what pictures are held against -----------------------------------------------------------------------------

    def _against(self, images: Tensor, normalisation: Normalisation) -> Against:
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
        return Against(
            real, gallery, {name: measure(each, gallery, self.backbone, None) for name, each in guesses.items()}
        )

    def _exposed(self, case: Case, scores: Scores, held: Against) -> list[Worst]:
        """The images that are above: closer than blind guesses, above the limit, or found again beyond all chance."""
        names = [f"image {number}" for number in range(len(held.gallery))]
        again = scores.get("reidentified") or []
        kept = scores if self.limit.metric == "reidentified" else scores | {"reidentified": None}
        above = exposed(Outcome(case, "done", kept), held.blind, names, self.limit)
        chance = min(1.0, len(held.real) / len(names))
        if again and not case.attack.is_bound and _tail([Again(round(sum(again)), len(again), chance)]) < CHANCE**2:
            shown = f"{case.attack.name}, which finds {round(sum(again))} of {len(again)} among {len(names)}"
            above.append(Worst(shown, "image 0", sum(again) / len(again), "reidentified", chance, chance))
        return above

    def _best(self, case: Case, scores: Scores, held: Against) -> list[Worst]:
        """The image that came back best by the limit's metric, with what it may reach."""
        metric, values = self.limit.metric, scores.get(self.limit.metric) or []
        blind = [each.get(metric) or [] for each in held.blind.values()]
        shown: list[Worst] = []
        for number, value in enumerate(values):
            guess = max((each[number] for each in blind if number < len(each)), default=None)
            bound = self.limit.bound
            if not math.isfinite(bound):
                bound = math.inf if guess is None else guess + MARGINS[metric]
            shown.append(Worst(case.attack.name, f"image {number}", value, metric, bound, guess))
        return shown

    def _found_again(self) -> list[str]:
        """Why images that are found again, or too few others to tell, keep what is sent from being below."""
        reasons = []
        for attack, row in self._again.items():
            if _tail([each._replace(hits=each.count) for each in row]) >= CHANCE:
                return ["too few other images were seen to tell finding an image again from chance: look more often"]
            if _tail(row) < CHANCE:
                reasons.append(f"{attack} finds images of the last looks again among others more often than chance")
        return reasons

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
            raise SitusError(f"images: is {type(images).__name__}, and must be a tensor [B, C, H, W]", field="images")
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
            raise SitusError(f"gradients: is {kind}, and must be tensors by parameter name", field="gradients")
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
            self._tell(Verdict("inconclusive", str(error)))
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


def _tail(seen: Iterable[Again]) -> float:
    """The probability that chance finds as many images again in such looks, or more."""
    wanted, odds = 0, [1.0]  # odds[k]: of k so far
    for each in seen:
        wanted += each.hits
        for _ in range(each.count):
            more, less = [p * each.chance for p in odds], [p * (1 - each.chance) for p in odds]
            odds = [a + b for a, b in zip([*less, 0.0], [0.0, *more], strict=True)]
    return sum(odds[wanted:])


def _excess(one: Worst) -> float:
    """By how much an image is above its limit, in units of its metric."""
    limit = one.value if one.limit is None else one.limit
    return (one.value - limit) / (MARGINS.get(one.metric) or WISHED.get(one.metric) or 0.1)


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
        raise SitusError(f"module: is {type(module).__name__}, and must be an nn.Module", field="module")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise SitusError(f"optimizer: is {kind}, and must be a torch.optim.Optimizer", field="optimizer")
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
    """Tries what a loop of your own is about to send, every so many steps of its optimiser, from the first on.

    module: what turns normalised images into logits. optimizer: whose steps are watched; None where `Guard.look` is
    called by hand. img_size: of a module that Situs does not know. limit: by the image that comes back best, beside
    what blind guesses at it get; "blind" for that alone. act: raise `LeakError`, log (the logger situs.audit.guard), or
    a function that is given each `Look`. defence: what you do to the gradients ("noise=1e-3"); the noise that is really
    there is measured, and the attackers know it. seconds: for all of a look together; where something is stopped, what
    is not above is inconclusive. model: more for `open_model` (normalisation, in_chans).
    """
    asked = {**model, **({} if img_size is None else {"img_size": img_size})}
    options = {"limit": limit, "every": every, "act": act, "attacks": attacks, "defence": defence, "seconds": seconds}
    return Guard(module, optimizer, **options, model=asked)
