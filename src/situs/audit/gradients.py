"""The gradient audit: every attack against every defence on the same images, with what can be said of each pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from situs.audit.attacks import create_attack
from situs.audit.attacks.base import Attack
from situs.audit.attacks.matching.attack import Matching
from situs.audit.attacks.matching.search import MatchingConfig
from situs.audit.cases import Case, Outcome, Step, TestSet
from situs.audit.deadline import Deadline
from situs.audit.defences import Defence, create_defence
from situs.audit.engine import SHOWN, run
from situs.audit.judge.gate import Ruling, judge, parse_limit
from situs.audit.scores.metrics import BEST_PSNR, Mean, mean_of
from situs.audit.scores.scoring import Lpips, Scores, measure_guesses
from situs.audit.victim import Victim, load_test_set, open_victim
from situs.backbones.base import Backbone
from situs.methods.base import Method


@dataclass(frozen=True)
class Fallback:
    """The search that an audit makes by itself against a defence to which no closed form of its attacks applies.

    On the first images and for some seconds: it can show a leak, and says nothing where it shows none.
    """

    images: int = 4
    seconds: float = 120.0
    iterations: int = 300


FALLBACK = Fallback()


@dataclass(frozen=True)
class Audit:
    """outcomes: attacks × defences, by defence. baselines: scores of who saw nothing. images: the first originals,
    [m, C, H, W] in [0, 1]; names: of all. about: what each defence is. stopped: by what and how far the audit came,
    None where it is whole.
    """

    model: str
    step: Step
    names: Sequence[str]
    images: Tensor
    outcomes: Sequence[Outcome]
    baselines: dict[str, Scores]
    about: dict[str, str]
    stopped: str | None = None

    @property
    def pairs(self) -> list[Outcome]:
        """What was begun, or refused."""
        return [outcome for outcome in self.outcomes if outcome.status != "not_run"]

    @property
    def attacked(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.attacked]

    def judge(self, **limit: float) -> Ruling:
        """Whether no image came back closer than a limit on one metric, as `judge(psnr=20)`: see `gate`."""
        [(metric, bound)] = limit.items()
        return judge(self, parse_limit(f"{metric}={bound}"))

    @property
    def undone(self) -> list[tuple[str, str]]:
        """(attack, defence) never begun."""
        return [(each.attack, each.defence) for each in self.outcomes if each.status == "not_run"]


def audit_gradients(
    model: Any,
    data: TestSet | str | Path,
    attacks: Sequence[Attack | str] = ("patchembed", "april"),
    defences: Sequence[Defence | str] = ("none",),
    *,
    count: int = 12,
    step: Step | None = None,
    search: MatchingConfig | None = None,
    lpips: Lpips | None = None,
    deadline: Deadline | None = None,
    keep: Callable[[Audit], None] | None = None,
    **asked: Any,
) -> Audit:
    """What a model's training gradients give away: its step on images, and every attack on what it sends.

    model: whatever `open_model` opens (which is given `asked`), an opened `Victim`, or a backbone, trained as each
    defence says, or a run's own method. data: where images lie, of which the first `count` are taken; a backbone or a
    method wants them as a `TestSet`. attacks, defences: or their names, "noise=1e-3". search: how matching searches
    where no closed form applies; None for no such search. When the deadline's time is over, or on Ctrl-C, what is there
    is returned and says so (`Audit.stopped`); after Ctrl-C `deadline.interrupted` is set. keep: is given the audit as
    it stands whenever there is more of it. `Audit.judge(psnr=20)` says whether a limit is kept.
    """
    step, deadline = step or Step(), deadline or Deadline()
    if not isinstance(model, Backbone | Method):
        victim = model if isinstance(model, Victim) else open_victim(model, **asked)
        data = data if isinstance(data, TestSet) else load_test_set(victim, data, count)
        model, step = victim.trains, replace(step, epoch=victim.epoch)
    assert isinstance(data, TestSet), "a backbone by itself does not say how its images are prepared"
    test = data
    attacks = [create_attack(attack) if isinstance(attack, str) else attack for attack in attacks]
    defences = [create_defence(defence) if isinstance(defence, str) else defence for defence in defences]
    test.whole_batches(step.batch)
    backbone = model if isinstance(model, Backbone) else model.backbone
    cases = _cases(model, len(test), attacks, defences, step, search)
    found: dict[Case, Outcome] = {case: Outcome(case, "not_run") for case in cases if not case.by_itself}
    about = {defence.label: f"{defence.about}. The attacker knows: {defence.known}" for defence in defences}

    guesses: dict[str, Scores] = {}

    def so_far(reason: str) -> Audit:
        outcomes = [found[case] for case in cases if case in found]
        if not guesses and any(outcome.attacked for outcome in outcomes):
            guesses.update(measure_guesses(test.real(), backbone, lpips))
        pictures, stopped = test.real()[:SHOWN].clone(), _stopped(outcomes, deadline, reason)
        return Audit(backbone.name, step, test.names, pictures, outcomes, guesses, about, stopped)

    try:
        for outcome in run(cases, test, step, deadline, lpips):
            found[outcome.case] = outcome
            if keep is not None and outcome.attacked:
                keep(so_far("the end of its process"))
    except KeyboardInterrupt:
        deadline.interrupt()
    return so_far(deadline.reason)


def _cases(
    model: Backbone | Method,
    count: int,
    attacks: Sequence[Attack],
    defences: Sequence[Defence],
    step: Step,
    search: MatchingConfig | None,
) -> list[Case]:
    """All attacks against a defence, then against the next; behind them the search that is made where none applies."""
    cases = []
    for defence in defences:
        cases += [Case("", model, defence, attack) for attack in attacks]
        if search is not None:
            few = min(count, max(step.batch, FALLBACK.images // step.batch * step.batch))
            matching = Matching(replace(search, iterations=FALLBACK.iterations))
            said = (
                f"no closed form applies, so {matching.name} is run by itself on {few} of {count} images "
                f"({FALLBACK.iterations} iterations, at most {FALLBACK.seconds:g} s)"
            )
            limits = {"images": few, "seconds": FALLBACK.seconds}
            cases.append(Case("", model, defence, matching, by_itself=said, **limits))
    return cases


def _stopped(outcomes: Sequence[Outcome], deadline: Deadline, reason: str) -> str | None:
    """By what and how far the audit came; None where all that was asked for is there."""
    asked = [outcome for outcome in outcomes if not outcome.case.by_itself]
    cut = any(outcome.partial for outcome in (outcomes if deadline.spent() else asked))
    if not (cut or deadline.interrupted or any(outcome.status == "not_run" for outcome in asked)):
        return None
    done = sum(outcome.status in ("done", "refused") for outcome in asked)
    return f"{reason}, with {done} of {len(asked)} pairs of attack and defence finished"


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
    if not audit.attacked:
        if audit.undone:
            return f"Stopped by {audit.stopped}, before anything was attacked: this page says nothing about the model."
        return (
            "No attack of this audit applies to what this model sends: see the reasons. Not attacked does not mean "
            "private; gradient matching applies to any model (--attack matching)."
        )
    return "" if audit.stopped is None else f"A partial result: stopped by {audit.stopped}."


def findings(audit: Audit) -> dict[str, str]:
    """For each defence what the strongest attack got, and last what a guess gets; empty where nothing was attacked."""
    if not audit.attacked:
        return {}
    found = {}
    for defence in audit.about:
        tried = [pair for pair in audit.attacked if pair.defence == defence]
        left = any(other == defence for _, other in audit.undone)
        best = max(tried, key=strength, default=None)
        refused = "not attacked before the stop." if left else "not attacked here: no attack of this audit applies."
        found[defence] = refused if best is None else _finding(best, audit.step)
    guesses = [f"{name} {mean_of(s['psnr'] or [0.0]).mean:.1f} dB" for name, s in audit.baselines.items()]
    return {**found, "Without any gradient": f"{', '.join(guesses)}."}


def steps_of(step: Step) -> str:
    """What was sent: "one step", "3 local steps"."""
    return "one step" if step.local_steps == 1 else f"{step.local_steps} local steps"


def strength(pair: Outcome) -> tuple[int, float, float]:
    """By what attacks are compared: images recovered exactly, then the worst image, then the mean."""
    return pair.exact, pair.worst_psnr, pair.mean_psnr


def seen(pair: Outcome) -> str:
    """How much came back, where it is not exact: "mean PSNR 13.1 dB, worst image 15.0 dB, 1 of 12 re-identified"."""
    found = f"mean PSNR {pair.mean_psnr:.1f} dB, worst image {pair.worst_psnr:.1f} dB"
    known = pair.scores.get("reidentified")
    return found if known is None else f"{found}, {sum(known):.0f} of {pair.count} re-identified"


def _finding(best: Outcome, step: Step) -> str:
    found = "at least " * best.lower_bound
    found += f"{best.exact} of {best.count} images recovered exactly from {steps_of(step)}"
    found += f", every pixel of {best.to_the_byte} read to its exact byte" if best.to_the_byte else ""
    open_end = "; a lower bound, see below" * best.lower_bound
    open_end += "" if best.partial is None else f"; stopped after {best.partial}"
    return f"{found} (best attack {best.attack}, {seen(best)}{open_end})."
