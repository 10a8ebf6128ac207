"""The weakest setting of each defence that passes the gate, found with few trials, and what it costs.

Only attacks decide. A setting is named if it passes the gate of an audit (`situs.gate`): a closed form that knows the
defence solved all images, its equations fit, and no image is above the limit. Where no attack applies there is no pass.
The search assumes that a stronger setting reveals no more. Whatever it names was tried, also on images that the search
had not seen; the setting below it was tried too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from situs.audit.attacks.base import Attack
from situs.audit.cases import TestSet
from situs.audit.client import honest_only, split_options
from situs.audit.deadline import Deadline, StoppedError
from situs.audit.gradients import attack_gradients
from situs.audit.public import ATTACKED, COUNT, NOTHING, AuditConfig, open_audit
from situs.audit.scores import METRICS
from situs.audit.sweep.ladder import Answer, CostConfig, Remedies, Remedy, Rung, Trial, cost_of, ladders
from situs.backbones.base import Backbone
from situs.config import checks_arguments
from situs.errors import SitusError, counted
from situs.gate import Judgement, Limit, parse_limit
from situs.methods.base import Method
from situs.models.data import AnyData, AnyModel
from situs.progress import tracked

ROUNDS = 3
"""How often a setting may fail on unseen images and the next stronger one be tried on others."""

ANSWERS: dict[str, Answer] = {"above": "above", "passed": "passed"}


# --- on one ladder ----------------------------------------------------------------------------------------------


class Climbed(NamedTuple):
    """first_kept: the weakest rung on which no image was above; None where there is none. named: the weakest that
    passes; None where none does."""

    first_kept: int | None
    named: int | None


def climb(rungs: int, ask: Callable[[int], Answer]) -> Climbed:
    """The two on a ladder of so many rungs. ask: gives the gate's answer for a rung, at most once each."""
    answers: dict[int, Answer] = {}

    def answer(rung: int) -> Answer:
        if rung not in answers:
            answers[rung] = ask(rung)
        return answers[rung]

    kept = _least(0, rungs - 1, lambda rung: answer(rung) != "above")
    if kept is None:
        return Climbed(None, None)
    named = _least(kept, rungs - 1, lambda rung: answer(rung) == "passed")
    if named is None:  # the strongest may be beyond what any attack applies to, and one between may pass
        named = min((rung for rung, answered in answers.items() if answered == "passed" and rung >= kept), default=None)
    return Climbed(kept, named)


def _least(low: int, high: int, holds: Callable[[int], bool]) -> int | None:
    """The least rung from `low` to `high` that holds, where all above it do; None where not even the highest does."""
    if not holds(high):
        return None
    if holds(low):
        return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


# --- the search -------------------------------------------------------------------------------------------------


@dataclass
class Search:
    """One victim, its attackers and a limit. trials: all that was tried."""

    victim: Backbone | Method
    attacks: Sequence[Attack]
    limit: Limit
    deadline: Deadline
    trials: list[Trial] = field(default_factory=list)

    def ask(self, rung: Rung, test: TestSet, *, unseen: bool = False) -> Trial:
        """What the gate says of a setting on these images; of a batch, on as many as make whole ones."""
        if self.deadline.spent():
            raise StoppedError
        self.deadline.say(
            f"{rung.label}: attacking {counted(len(test), 'images')}{' that the search has not seen' * unseen}"
        )
        part = part_of(test, slice(0, len(test) // rung.step.batch * rung.step.batch))
        few, quick = part_of(part, slice(0, rung.step.batch)), self.attacks[:1]
        judged = None
        if len(few) < len(part) and not any(attack.slow for attack in quick):
            judged = self._judge(rung, few, quick)  # far from the limit one upload and one attack tell as much as all
        if judged is None or judged.answer != "above":
            few, judged = part, self._judge(rung, part, self.attacks)
        one = judged.worst
        value, by, metric = (None, "", "") if one is None else (one.value, one.attack, one.metric)
        answer = ANSWERS.get(judged.answer, "inconclusive")
        trial = Trial(rung.label, answer, value, by, judged.reason, len(few), unseen, metric)
        self.trials.append(trial)
        return trial

    def _judge(self, rung: Rung, test: TestSet, attacks: Sequence[Attack]) -> Judgement:
        self.deadline.closed = False  # an audit closes it at its end, and there is another behind it
        fields = {"step": rung.step, "deadline": self.deadline, "limit": self.limit}
        audit = attack_gradients(
            self.victim, test, attacks, [rung.defence], bounded=len(test) > rung.step.batch, **fields
        )
        assert audit.ruling is not None
        [judged] = audit.ruling.judgements
        # An attack's own time may be over: it is not judged. An image that is above is, however it ends.
        if audit.stopped is not None and self.deadline.spent() and judged.answer != "above":
            raise StoppedError
        return judged

    def remedy(self, name: str, rungs: Sequence[Rung], searched: TestSet, others: Sequence[TestSet]) -> Remedy:
        """Searches one ladder, and tries what it names on unseen images."""
        seen: dict[int, Trial] = {}

        def ask(rung: int) -> Answer:
            seen[rung] = self.ask(rungs[rung], searched)
            return seen[rung].answer

        climbed = climb(len(rungs), ask)
        if climbed.named is None:
            return Remedy(name, None, _why(climbed.first_kept, rungs, seen), tried=tuple(seen.values()))
        named, failed = climbed.named, list[Trial]()
        for fresh in others:
            if len(fresh) < rungs[named].step.batch:
                continue
            trial = self.ask(rungs[named], fresh, unseen=True)
            if trial.answer == "passed" and (seen[named].answer if named in seen else ask(named)) == "passed":
                weaker = failed[-1] if failed else seen.get(named - 1)
                reason, tried = _remark(named, weaker, failed), (*seen.values(), *failed)
                return Remedy(name, rungs[named].label, reason, seen.get(named), trial, weaker, tried=tried)
            failed.append(trial)
            if named + 1 == len(rungs):
                break
            named += 1
        reason = _failed(failed) or "too few images were left to test a setting on"
        last = failed[-1].setting if failed and failed[-1].setting != rungs[-1].label else None
        reason += "" if last is None else f"; no setting stronger than {last} was tried"
        return Remedy(name, None, reason, tried=(*seen.values(), *failed), untried_from=last)


def _failed(trials: Sequence[Trial]) -> str:
    """Of a setting that the search alone would have named; "" without one."""
    return f"{trials[0].setting} passed in the search, but not on unseen images" if trials else ""


def _cut(rungs: Sequence[Rung], tried: Sequence[Trial]) -> str:
    """How far a ladder was climbed before the stop."""
    parts = ["stopped before a setting was found"]
    above = {trial.setting for trial in tried if trial.answer == "above"}
    parts += [f"images still exceed the limit at {last}" for last in [r.label for r in rungs if r.label in above][-1:]]
    passed = {trial.setting for trial in tried if trial.answer == "passed" and not trial.unseen} - above
    parts += [
        f"{first} passed on the images of the search" for first in [r.label for r in rungs if r.label in passed][:1]
    ]
    return "; ".join(parts)


def _remark(named: int, weaker: Trial | None, failed: Sequence[Trial]) -> str:
    """What a reader must know of a rung that is named."""
    if not named:
        return "no weaker setting was tried"
    if failed:
        return _failed(failed)
    if weaker is not None and weaker.answer == "inconclusive":
        return "the next weaker setting is inconclusive"
    return ""


def _why(kept: int | None, rungs: Sequence[Rung], seen: Mapping[int, Trial]) -> str:
    if kept is None:
        return f"images exceed the limit even at the strongest setting ({rungs[-1].label})"
    reason = f"from {rungs[kept].label} on, the result is inconclusive (not a pass): {seen[kept].reason}"
    return reason if kept == 0 else f"images still exceed the limit at {rungs[kept - 1].label}; {reason}"


def part_of(test: TestSet, span: slice) -> TestSet:
    """Some of the images."""
    names, public = test.names[span], test.public
    return TestSet(test.pixels[span], test.labels[span], test.normalisation, names, public=public)


@checks_arguments("data")
def find_defences(
    model: AnyModel,
    data: AnyData = None,
    limit: str = "psnr=20",
    *,
    attacks: Sequence[str | Attack] = ATTACKED,
    deadline: Deadline | None = None,
    keep: Callable[[Remedies], Any] | None = None,
    facts: Mapping[str, Any] = NOTHING,
    **options: Any,
) -> Remedies:
    """Finds the weakest setting of each defence that keeps every attack below a limit, and its cost.

    Defences: noise, clipping with noise (DP-SGD's form), batch size, names withheld, precision. limit: as psnr=20, for
    the image that comes back best. options: as of `audit_gradients`; the search uses `count` images, and as many others
    check its result; and fields of `CostConfig` (situs.audit.sweep.ladder), on the cost in accuracy. After the
    deadline, `situs.audit.Deadline(seconds=60)`, the result so far is returned, and says so.

    >>> search = situs.find_defences("runs/ft", "samples", "psnr=20", count=1, attacks=["patchembed"])
    """
    costs = CostConfig(**{cost.name: options.pop(cost.name) for cost in fields(CostConfig) if cost.name in options})
    config, open_args = split_options(AuditConfig, options)
    honest_only(config)
    bound = parse_limit(limit, METRICS, "find_defence")
    wanted = config.count or COUNT
    searching = replace(config, fail_above=limit)  # a limit as a gate has it
    opened = open_audit(model, data, attacks, searching, open_args, count=wanted * (1 + ROUNDS))
    victim, test = opened.victim, opened.test
    if len(test) < 2:
        raise SitusError(
            "there is only one image, but the search keeps half of the images for the final test; give two or more "
            "images",
            field=("data", "count"),
        )
    size = min(wanted, len(test) // 2)
    searched, rest = part_of(test, slice(0, size)), part_of(test, slice(size, None))
    others = [part_of(rest, slice(at, at + size)) for at in range(0, len(rest) - size + 1, size)]
    step = opened.step
    search = Search(victim.trains, opened.attacks, bound, deadline or Deadline())
    remedies: list[Remedy] = []
    names = [attack.name for attack in opened.attacks]
    stopped = None

    def result() -> Remedies:
        facts_of_search = (victim.model.backbone.name, bound, tuple(remedies), size, size, names)
        return Remedies(*facts_of_search, stopped=stopped, notes=victim.notes, provenance=opened.provenance(facts))

    name, rungs, before = "", list[Rung](), 0
    try:
        for name, rungs in tracked([*ladders(victim.trains, searched, step).items()], "defences"):
            before = len(search.trials)
            remedy = search.remedy(name, rungs, searched, others)
            if remedy.named is not None:
                rung = next(rung for rung in rungs if rung.label == remedy.named)
                remedy = replace(remedy, cost=cost_of(victim.trains, rung, searched, costs))
            remedies.append(remedy)
            if keep is not None:
                keep(result())
    except (StoppedError, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt):
            search.deadline.interrupt()
        search.deadline.closed = True
        stopped = f"{search.deadline.reason}, with {counted(len(remedies), 'defences')} finished"
        if name not in {remedy.defence for remedy in remedies} and (tried := search.trials[before:]):
            remedies.append(Remedy(name, None, _cut(rungs, tried), tried=tuple(tried), cut=True))
    return result()
