"""Attacks × defences: every attack against every defence on the same images, with what can be said of each pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from situs.audit.attacks.base import Attack
from situs.audit.attacks.matching import Matching, MatchingConfig
from situs.audit.bound import consult
from situs.audit.cases import Case, Outcome, TestSet
from situs.audit.collect import Leak, collect
from situs.audit.deadline import Deadline
from situs.audit.defences import Defence, Step
from situs.audit.engine import SHOWN
from situs.audit.judge.gate import Limit, Ruling, judge, parse_limit
from situs.audit.judge.record import audit_numbers
from situs.audit.remedies.result import Remedies
from situs.audit.scores.metrics import mean_of
from situs.audit.scores.scoring import Lpips, Scores, measure_guesses
from situs.audit.tables import reasons, table
from situs.backbones.base import Backbone
from situs.errors import SitusError, counted
from situs.methods.base import Method
from situs.results import Summary, Table, Tone


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
class Audit(Leak):
    """Attacks × defences, by defence. baselines: scores of who saw nothing. about: what each defence is. limit: of the
    gate, None without one. remedies: what a search for defences found, for the page.
    """

    file: ClassVar[str] = "gradients"

    model: str
    step: Step
    baselines: dict[str, Scores]
    about: dict[str, str]
    limit: Limit | None = field(default=None, kw_only=True)
    remedies: Remedies | None = field(default=None, kw_only=True)

    def judge(self, **limit: float) -> Ruling:
        """Whether no image came back closer than blind guesses do, nor than a further limit, as `judge(psnr=20)`: see
        `gate`."""
        if len(limit) > 1:
            raise SitusError(field="limit", value=limit, allowed="one metric with its bound, as psnr=20")
        return judge(self, *(parse_limit(f"{metric}={bound}") for metric, bound in limit.items()))

    @property
    def ruling(self) -> Ruling | None:
        """What the gate says; None without one."""
        return None if self.limit is None else judge(self, self.limit)

    @property
    def tone(self) -> Tone:
        """Bad where an image came back whole, whatever the gate allows; good only where a whole audit passed a gate."""
        ruling, found = self.ruling, super().tone
        if found == "bad" or ruling is None or (ruling.passed and self.stopped is not None):
            return found
        return ruling.tone

    @property
    def undone(self) -> list[tuple[str, str]]:
        """(attack, defence) never begun."""
        return [(each.attack, each.defence) for each in self.outcomes if each.status == "not_run"]

    def told(self, defence: str, metric: str) -> list[str]:
        """A line for each attack on a defence: its most exposed image, or why there is none."""
        lines = [f"{attack}: not run before the stop" for attack, other in self.undone if other == defence]
        for pair in self.pairs:
            if pair.defence != defence:
                continue
            values = pair.scores.get(metric)
            seen = counted(pair.count, "images")
            found = f"{metric} {max(values):.4g} of the most exposed of {seen}" if values else f"{metric} not defined"
            lines.append(f"{pair.attack}: {found if pair.reason is None else f'not attacked here: {pair.reason}'}")
        return lines

    def summary(self) -> Summary:
        """The verdict, the pairs and the reasons; below them what the gate says."""
        tables = []
        if self.attacked:
            things = self.provenance.things
            title = f"{self.model}, {self.provenance.facts.get('images', counted(len(self.names), things))}"
            tables.append(Table(title, *table(self, ("psnr", "ssim", "order_accuracy", "reidentified"))))
        if said := reasons(self):
            tables.append(Table("Does not apply, or is not exact", (), said))
        ruling = self.ruling
        return Summary(verdict(self), tuple(tables), () if ruling is None else (ruling.sentence,))

    def numbers(self) -> dict[str, Any]:
        """Every image's numbers, means and intervals, and what the gate says."""
        return audit_numbers(self, verdict(self))


def attack_gradients(
    model: Backbone | Method,
    test: TestSet,
    attacks: Sequence[Attack],
    defences: Sequence[Defence],
    *,
    step: Step | None = None,
    search: MatchingConfig | None = None,
    lpips: Lpips | None = None,
    deadline: Deadline | None = None,
    keep: Callable[[Audit], None] | None = None,
    bounded: bool = False,
    **fields: Any,
) -> Audit:
    """Every attack on what a model's step sends under every defence; deadline and keep: see `collect`.

    model: a backbone, trained as each defence says, or a run's own method. search: how matching searches where no
    closed form applies; None for no such search. bounded: whether what a gate needs to pass is tried too (`consult`).
    fields: of the `Audit`.
    """
    step, deadline = step or Step(), deadline or Deadline()
    test.whole_batches(step.batch)
    backbone = model if isinstance(model, Backbone) else model.backbone
    about = {defence.label: defence.described for defence in defences}
    guesses: dict[str, Scores] = {}

    def make(outcomes: list[Outcome], stopped: str | None) -> Audit:
        if not guesses and any(outcome.attacked for outcome in outcomes):
            guesses.update(measure_guesses(test.real(), backbone, lpips, test.normalisation))
        shown = (outcomes, test.names, test.real()[:SHOWN].clone())
        return Audit(*shown, backbone.name, step, guesses, about, stopped=stopped, **fields)

    cases = _cases(model, len(test), attacks, defences, step, search)
    audit = collect(cases, test, make, step=step, deadline=deadline, lpips=lpips, keep=keep)
    if not bounded or deadline.spent():
        return audit
    deadline.closed = False
    more, stopped = dict[Case, Outcome](), audit.stopped
    try:
        for each in consult(model, test, audit.outcomes, audit.baselines, step, deadline):
            more[each.case] = each
    except KeyboardInterrupt:  # an image that is above stays so; without the whole bound nothing passes
        deadline.interrupt()
        stopped = stopped or "Ctrl-C, before the oracle had answered"
    audit = replace(audit, outcomes=[*audit.outcomes, *more.values()], stopped=stopped)
    deadline.closed = True
    if keep is not None:
        keep(audit)
    return audit


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
        cases += [Case("", model, defence, attack, batch=step.batch) for attack in attacks]
        if search is not None:
            few = min(count, max(step.batch, FALLBACK.images // step.batch * step.batch))
            matching = Matching(replace(search, iterations=FALLBACK.iterations))
            said = (
                f"no closed form applies, so {matching.name} is run by itself on {few} of {counted(count, 'images')} "
                f"({FALLBACK.iterations} iterations, at most {FALLBACK.seconds:g} s)"
            )
            limits = {"images": few, "seconds": FALLBACK.seconds, "batch": step.batch}
            cases.append(Case("", model, defence, matching, by_itself=said, **limits))
    return cases


# --- what follows from an audit ------------------------------------------------------------------------------


def verdict(audit: Audit) -> str:
    """What a manager can read: for each defence what the strongest attack got, and what a mere guess gets."""
    return " ".join([opening(audit), *(f"{name}: {said}" for name, said in findings(audit).items())]).strip()


def opening(audit: Audit) -> str:
    """What is not as it should be: nothing was attacked, or not all; else ""."""
    if not audit.attacked:
        if audit.undone:
            return (
                f"Stopped by {audit.stopped}, before any attack had a result: this page says nothing about the model."
            )
        return (
            "No attack of this audit applies to what this model sends: see the reasons. Not attacked does not mean "
            "private; gradient matching applies to any model (the attack matching)."
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
        found[defence] = refused if best is None else _finding(best, audit.step, audit.provenance.things)
    guesses = [f"{name} {mean_of(s['psnr'] or [0.0]).mean:.1f} dB" for name, s in audit.baselines.items()]
    return {**found, "Without any gradient": f"{', '.join(guesses)}."}


def steps_of(pair: Outcome, step: Step) -> str:
    """What was sent: "one step", "3 local steps"."""
    step = pair.case.defence.step(step)
    return "one step" if step.local_steps == 1 else f"{step.local_steps} local steps"


def strength(pair: Outcome) -> tuple[int, float, float]:
    """By what attacks are compared: images recovered exactly, then the most exposed image, then the mean."""
    return pair.exact, pair.worst_psnr, pair.mean_psnr


def seen(pair: Outcome) -> str:
    """How much came back, where it is not exact: "mean PSNR 13.1 dB, most exposed image 15.0 dB, …"."""
    found = f"mean PSNR {pair.mean_psnr:.1f} dB, most exposed image {pair.worst_psnr:.1f} dB"
    known = pair.scores.get("reidentified")
    return found if known is None else f"{found}, {sum(known):.0f} of {pair.count} re-identified"


def _finding(best: Outcome, step: Step, things: str) -> str:
    found = "at least " * best.lower_bound
    found += f"{best.exact} of {counted(best.count, things)} recovered exactly from {steps_of(best, step)}"
    found += f", every pixel of {best.to_the_byte} read to its exact byte" if best.to_the_byte else ""
    open_end = "; a lower bound, see below" * best.lower_bound
    open_end += "" if best.partial is None else f"; stopped after {best.partial}"
    return f"{found} (best attack {best.attack}, {seen(best)}{open_end})."
