"""The gradient audit: every attack against every defence on the same images, with what can be said of each pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from situs.audit.attack import Attack, Fact, Knowledge
from situs.audit.matching import Matching
from situs.audit.metrics import BEST_PSNR, Mean, baselines, denormalise, mean_of
from situs.audit.proof import doubt_of
from situs.audit.scoring import Lpips, Normalisation, Scores, facts_of, measure, pictures_of
from situs.audit.search import MatchingConfig
from situs.audit.threat import Defence, Gradients, NoDefence, lower_bound_of, method_of, victim_gradients
from situs.audit.watch import Watch
from situs.backbones.base import Backbone
from situs.config import check_range
from situs.errors import SitusError
from situs.methods.base import Method

EXACT = 54.15
"""PSNR in dB from which an image counts as recovered exactly: a mean error below half a grey level of 255."""


@dataclass(frozen=True)
class Step:
    """How the audited step is made: images in it, local steps, the type of what is sent, and the seed.

    labels_known: whether the attacker is told the labels. epoch: of the run, for its method's draws and schedules.
    """

    batch: int = 1
    local_steps: int = 1
    dtype: torch.dtype = torch.float32
    seed: int = 0
    labels_known: bool = False
    epoch: int = 0

    def __post_init__(self) -> None:
        check_range("batch", self.batch, 1, flag="--batch")
        check_range("local_steps", self.local_steps, 1, flag="--local-steps")


@dataclass(frozen=True)
class Pair:
    """One attack against one defence. reason: why it does not apply (then nothing else is there).

    caveat: why it is not exact here. lower_bound: whether one who knows the defence could get more. scores and facts:
    per image. images: recovered, [n, C, H, W] in [0, 1]. partial: how far it came where it was stopped; n may then
    be less than the images of the audit, and they are the first. closed: whether the attack is a closed form. doubt:
    why a closed form that gets little proves nothing (`proof`). unasked: a search that the audit made by itself.
    """

    attack: str
    defence: str
    reason: str | None = None
    caveat: str | None = None
    scores: Scores = field(default_factory=dict)
    facts: list[dict[str, Fact]] = field(default_factory=list)
    images: Tensor | None = None
    lower_bound: bool = False
    partial: str | None = None
    closed: bool = False
    doubt: str | None = None
    unasked: bool = False

    @property
    def exact(self) -> int:
        """How many images were recovered exactly."""
        return sum(value >= EXACT for value in self.scores.get("psnr") or ())

    @property
    def to_the_byte(self) -> int:
        """Of how many images the attacker himself can say that every byte is right."""
        return sum(fact.get("bytes") is True for fact in self.facts)

    @property
    def mean_psnr(self) -> float:
        """Mean PSNR in dB; 0 where nothing was attacked."""
        return mean_of(self.scores.get("psnr") or [0.0]).mean

    @property
    def worst_psnr(self) -> float:
        """PSNR in dB of the image that came back best, which is the worst for its owner; 0 where nothing was attacked.

        A gate takes this one, and so does the page."""
        return max(self.scores.get("psnr") or [0.0])

    @property
    def count(self) -> int:
        """How many images were attacked."""
        return len(self.scores.get("psnr") or ())


class Fallback(Matching):
    """Matching that an audit makes by itself, against a defence to which no closed form of its attacks applies.

    On the first images and for some seconds: it can show a leak, and says nothing where it shows none.
    """

    images: ClassVar[int] = 4
    seconds: ClassVar[float] = 120.0

    def __init__(self, config: MatchingConfig | None = None) -> None:
        super().__init__(replace(config or MatchingConfig(), iterations=300))


@dataclass(frozen=True)
class Audit:
    """pairs: attacks × defences. baselines: scores of who saw nothing. images: originals, [n, C, H, W] in [0, 1].

    stopped: by what and how far the audit came, None where it is whole. undone: (attack, defence) never begun.
    """

    model: str
    step: Step
    names: list[str]
    images: Tensor
    pairs: list[Pair]
    baselines: dict[str, Scores]
    about: dict[str, str]
    stopped: str | None = None
    undone: list[tuple[str, str]] = field(default_factory=list)


def audit_gradients(
    victim: Backbone | Method,
    images: Tensor,
    labels: Tensor,
    attacks: Sequence[Attack],
    defences: Sequence[Defence],
    *,
    normalisation: Normalisation,
    step: Step | None = None,
    names: Sequence[str] = (),
    lpips: Lpips | None = None,
    watch: Watch | None = None,
) -> Audit:
    """Runs the victim's step on `images` [n, C, H, W] (normalised) in batches, and every attack on what it sends.

    victim: a backbone, trained as each defence says, or a run's own method. When the watch's time is over, or on
    Ctrl-C, what is there is returned and says so (`Audit.stopped`); after Ctrl-C `watch.interrupted` is set. A
    `Fallback` among the attacks is made where it is needed.
    """
    step, watch = step or Step(), watch or Watch()
    if images.shape[0] % step.batch:
        raise SitusError(f"{images.shape[0]} images do not make whole batches of {step.batch} (--count, --batch)")
    backbone = victim if isinstance(victim, Backbone) else victim.backbone
    trial = _Trial(victim, backbone, images, labels, denormalise(images, *normalisation), normalisation, step, lpips)
    fallback = next((attack for attack in attacks if isinstance(attack, Fallback)), None)
    attacks = [attack for attack in attacks if attack is not fallback]
    todo = [(attack, defence) for defence in defences for attack in attacks]
    pairs: list[Pair] = []
    try:
        _attack_all(trial, attacks, defences, pairs, watch, fallback)
    except KeyboardInterrupt:
        watch.interrupt()
    asked = [pair for pair in pairs if not pair.unasked]
    undone = [(attack.name, defence.label) for attack, defence in todo[len(asked) :]]
    cut = any(pair.partial for pair in (pairs if watch.spent() else asked))
    halted = undone or cut or watch.interrupted
    done = sum(pair.partial is None for pair in asked)
    return Audit(
        backbone.name,
        step,
        [*names, *(str(i) for i in range(len(names), len(images)))],
        trial.real,
        pairs,
        _measure_baselines(trial) if any(pair.reason is None for pair in pairs) else {},
        {defence.label: f"{defence.about}. The attacker knows: {defence.known}" for defence in defences},
        f"{watch.reason}, with {done} of {len(todo)} pairs of attack and defence finished" if halted else None,
        undone,
    )


@dataclass(frozen=True)
class _Trial:
    """What stays the same for every pair of an audit."""

    victim: Backbone | Method
    backbone: Backbone
    images: Tensor
    labels: Tensor
    real: Tensor
    normalisation: Normalisation
    step: Step
    lpips: Lpips | None

    def known(self, defence: Defence, uploads: int) -> Knowledge:
        """What the attacker is told."""
        step, (height, width) = self.step, self.images.shape[2:]
        labels = self.labels.view(-1, step.batch)[:uploads] if step.labels_known else None
        method = None if isinstance(self.victim, Backbone) else method_of(defence, self.victim, step.seed)
        fields = (labels, method, step.local_steps, step.epoch, (height, width), self.normalisation)
        return Knowledge(defence, step.batch, step.seed, *fields)


def _attack_all(
    trial: _Trial,
    attacks: Sequence[Attack],
    defences: Sequence[Defence],
    pairs: list[Pair],
    watch: Watch,
    fallback: Fallback | None,
) -> None:
    """Adds pair after pair to `pairs`, so that those done are there when it is stopped."""
    refused = {attack.name: attack.applies(trial.backbone) for attack in attacks}
    able = [attack for attack in attacks if refused[attack.name] is None]
    left = len(attacks) * len(defences)
    for defence in defences:
        impossible = defence.refuses(trial.backbone)
        wanted = able and impossible is None and not watch.spent()
        uploads = _uploads(trial, defence, able, watch) if wanted else []
        for attack in attacks:
            reason = refused[attack.name] or impossible
            if reason is None and watch.spent():
                return
            watch.begin(left)
            pairs.append(_pair(trial, attack, defence, uploads, reason, watch))
            left -= 1
        solved = any(pair.closed and pair.reason is None for pair in pairs if pair.defence == defence.label)
        if fallback is not None and not solved and impossible is None and not watch.spent():
            watch.begin(left + 1, fallback.seconds)
            pairs.append(_fall_back(trial, fallback, defence, watch))


def _fall_back(trial: _Trial, attack: Fallback, defence: Defence, watch: Watch) -> Pair:
    """The search that is made by itself on the first images; its pair says so."""
    batch = trial.step.batch
    few = replace(trial, images=trial.images[: max(batch, attack.images // batch * batch)])
    said = (
        f"no closed form applies, so {attack.name} is run by itself on {len(few.images)} of {len(trial.images)} images "
        f"({attack.config.iterations} iterations, at most {attack.seconds:g} s)"
    )
    watch.say(f"{defence.label}: {said}")
    reason = attack.applies(trial.backbone)
    uploads = _uploads(few, defence, [attack], watch) if reason is None else []
    pair = _pair(trial, attack, defence, uploads, reason, watch, len(few.images))
    caveat = None if pair.reason else "; ".join(filter(None, (said, pair.caveat)))
    return replace(pair, unasked=True, caveat=caveat)


def _pair(
    trial: _Trial,
    attack: Attack,
    defence: Defence,
    uploads: Sequence[Gradients],
    reason: str | None,
    watch: Watch,
    wanted: int | None = None,
) -> Pair:
    """One attack on what one defence sent. wanted: images it is to see, all where None."""
    backbone, step = trial.backbone, trial.step
    known = trial.known(defence, len(uploads))
    reason = reason or attack.missing(backbone, uploads[0], known)
    if reason is not None:
        return Pair(attack.name, defence.label, reason, closed=attack.closed_form)
    watch.say(f"{attack.name} against {defence.label}")
    found = attack.recover(backbone, uploads, known, watch)
    pictures = pictures_of(found, trial.real, step.batch, trial.normalisation)
    scores = measure(pictures, trial.real, backbone, trial.lpips)
    facts = facts_of(found, trial.labels, step.batch)
    bound = "" if attack.knows_mjp else lower_bound_of(defence, known.trained(backbone))
    caveat = "; ".join(filter(None, (attack.caveat(backbone, step.batch), bound))) or None
    wanted = len(trial.real) if wanted is None else wanted
    fewer = None if len(pictures) == wanted else f"{len(pictures)} of {wanted} images"
    partial = ", ".join(filter(None, (found.partial, fewer))) or None
    fields = (caveat, scores, facts, pictures, bool(bound), partial, attack.closed_form)
    return Pair(attack.name, defence.label, None, *fields, _doubt(trial, attack, defence, caveat, facts))


def _doubt(
    trial: _Trial, attack: Attack, defence: Defence, caveat: str | None, facts: list[dict[str, Fact]]
) -> str | None:
    """Why a closed form proves nothing here, by its own facts and by the control: without noise and in float32."""
    if not attack.closed_form:
        return None
    noise, step = defence.noise_level(trial.step.batch), trial.step
    quiet = NoDefence() if noise else defence

    def control() -> list[dict[str, Fact]]:
        one = replace(trial, images=trial.images[: step.batch], step=replace(step, dtype=torch.float32))
        [upload] = _uploads(one, quiet, [attack], Watch())
        known = replace(one.known(quiet, 1), normalisation=None)  # bytes are not read: it is about the equations
        return attack.recover(trial.backbone, [upload], known).facts

    clean = noise == 0 and step.dtype == torch.float32
    return doubt_of(caveat, facts, noise, None if clean else control)


def _measure_baselines(trial: _Trial) -> dict[str, Scores]:
    guesses = baselines(trial.real).items()
    return {name: measure(guess, trial.real, trial.backbone, trial.lpips) for name, guess in guesses}


def _uploads(trial: _Trial, defence: Defence, attacks: Sequence[Attack], watch: Watch) -> list[Gradients]:
    """What is sent for each batch, of it only what some attack reads: whole gradients of many images fill memory.

    Where the time ends, those of the first batches.
    """
    step = trial.step
    wanted = {name for attack in attacks for name in attack.reads(trial.backbone)}
    everything = any(attack.reads_all for attack in attacks)
    ids = torch.arange(trial.images.shape[0])
    parts = [part[: len(ids)].split(step.batch) for part in (trial.images, trial.labels, ids)]
    sent = []
    for number, (x, y, i) in enumerate(zip(*parts, strict=True)):
        if sent and watch.spent():
            break
        watch.say(f"gradients under {defence.label}: batch {number + 1} of {len(parts[0])}")
        fields = {"dtype": step.dtype, "local_steps": step.local_steps, "seed": step.seed, "epoch": step.epoch}
        upload = victim_gradients(trial.victim, x, y, defence=defence, ids=i, **fields)
        sent.append({name: g for name, g in upload.items() if everything or name in wanted})
    return sent


# --- what follows from an audit ------------------------------------------------------------------------------


def summary(scores: Scores) -> dict[str, Mean | None]:
    """Each metric's mean over the images with its 95 % interval, which ends where the metric does."""
    means = {name: None if v is None else mean_of(v, share=name == "reidentified") for name, v in scores.items()}
    ends = {"ssim": 1.0, "order_accuracy": 1.0, "psnr": BEST_PSNR, "patch_psnr": BEST_PSNR}
    for name, end in ends.items():
        mean = means.get(name)
        if mean is not None and mean.high is not None:
            means[name] = mean._replace(high=min(end, mean.high))
    return means


def verdict(audit: Audit) -> str:
    """What a manager can read: for each defence what the strongest attack got, and what a mere guess gets."""
    return " ".join([opening(audit), *(f"{name}: {said}" for name, said in findings(audit).items())]).strip()


def opening(audit: Audit) -> str:
    """What is not as it should be: nothing was attacked, or not all; else ""."""
    if not any(pair.reason is None for pair in audit.pairs):
        if audit.undone:
            return f"Stopped by {audit.stopped}, before anything was attacked: this page says nothing about the model."
        return (
            "No attack of this audit applies to what this model sends: see the reasons. Not attacked does not mean "
            "private; gradient matching applies to any model (--attack matching)."
        )
    return "" if audit.stopped is None else f"A partial result: stopped by {audit.stopped}."


def findings(audit: Audit) -> dict[str, str]:
    """For each defence what the strongest attack got, and last what a guess gets; empty where nothing was attacked."""
    worked = [pair for pair in audit.pairs if pair.reason is None]
    if not worked:
        return {}
    found = {}
    for defence in audit.about:
        tried = [pair for pair in worked if pair.defence == defence]
        left = any(other == defence for _, other in audit.undone)
        best = max(tried, key=strength, default=None)
        refused = "not attacked before the stop." if left else "not attacked here: no attack of this audit applies."
        found[defence] = refused if best is None else _finding(best, audit.step)
    guesses = [f"{name} {mean_of(s['psnr'] or [0.0]).mean:.1f} dB" for name, s in audit.baselines.items()]
    return {**found, "Without any gradient": f"{', '.join(guesses)}."}


def steps_of(step: Step) -> str:
    """What was sent: "one step", "3 local steps"."""
    return "one step" if step.local_steps == 1 else f"{step.local_steps} local steps"


def strength(pair: Pair) -> tuple[int, float, float]:
    """By what attacks are compared: images recovered exactly, then the worst image, then the mean."""
    return pair.exact, pair.worst_psnr, pair.mean_psnr


def seen(pair: Pair) -> str:
    """How much came back, where it is not exact: "mean PSNR 13.1 dB, worst image 15.0 dB, 1 of 12 re-identified"."""
    found = f"mean PSNR {pair.mean_psnr:.1f} dB, worst image {pair.worst_psnr:.1f} dB"
    known = pair.scores.get("reidentified")
    return found if known is None else f"{found}, {sum(known):.0f} of {pair.count} re-identified"


def _finding(best: Pair, step: Step) -> str:
    found = "at least " * best.lower_bound
    found += f"{best.exact} of {best.count} images recovered exactly from {steps_of(step)}"
    found += f", every pixel of {best.to_the_byte} read to its exact byte" if best.to_the_byte else ""
    open_end = "; a lower bound, see below" * best.lower_bound
    open_end += "" if best.partial is None else f"; stopped after {best.partial}"
    return f"{found} (best attack {best.attack}, {seen(best)}{open_end})."
