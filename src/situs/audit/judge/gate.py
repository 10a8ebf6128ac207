"""The gate of an audit: a limit on one metric, and for each defence whether what was found stays below it.

The worst image decides, not the mean. `PASSED`: a closed form ran on all images to the end, its equations hold and fit
(`doubt_of`), nothing was stopped, and no image is above the limit. `ABOVE`: some image is, also in a stopped audit.
`NOT_JUDGED`: everything else. What was stopped, does not apply or does not fit is no pass, and a search that finds
nothing proves nothing: it can fail a gate and never pass it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from situs.audit.attacks.base import Fact
from situs.audit.attacks.patchembed.equations import FIT
from situs.audit.cases import Outcome
from situs.audit.scores.metrics import BEST_PSNR, HIGHER_IS_CLOSER, LOWER_IS_CLOSER
from situs.errors import SitusError, counted, unknown_name
from situs.results import Tone

if TYPE_CHECKING:
    from situs.audit.gradients import Audit

Answer = Literal["above", "incomplete", "nothing_applied", "passed"]
"""What a gate says. incomplete: something was stopped, is missing or proves nothing; nothing_applied: no attack could
be made at all. Neither is a pass."""

PASSED, ABOVE, NOT_JUDGED = 0, 3, 4
"""What a gate says, as exit statuses."""

STATUS: dict[Answer, int] = {"above": ABOVE, "incomplete": NOT_JUDGED, "nothing_applied": NOT_JUDGED, "passed": PASSED}
"""The worst first: an audit's answer is the worst of its defences'."""

OUTCOMES = {PASSED: "passed", NOT_JUDGED: "not judged", ABOVE: "above"}
"""The same in words."""

TONES: dict[int, Tone] = {PASSED: "good", NOT_JUDGED: "unsure", ABOVE: "bad"}


class Limit(NamedTuple):
    """A metric that rises with the leak, and the value it must not pass."""

    metric: str
    bound: float

    def __str__(self) -> str:
        return f"{self.metric}={self.bound:g}"


class Worst(NamedTuple):
    """The image that came back best by the limit's metric."""

    attack: str
    image: str
    value: float


class Judgement(NamedTuple):
    """One defence. said: why it stands there, without its name and a full stop. worst: None where nothing was tried."""

    defence: str
    answer: Answer
    said: str
    worst: Worst | None = None

    @property
    def status(self) -> int:
        return STATUS[self.answer]

    @property
    def outcome(self) -> str:
        return OUTCOMES[self.status]

    def to_json(self) -> dict[str, Any]:
        worst = None if self.worst is None else self.worst._asdict()
        return {**self._asdict(), "status": self.status, "outcome": self.outcome, "worst": worst}


@dataclass(frozen=True)
class Ruling:
    """What the gate says of each defence that was judged."""

    limit: Limit
    judgements: Sequence[Judgement]

    @property
    def answer(self) -> Answer:
        """The worst of the defences'; nothing at all is no pass."""
        found: list[Answer] = [judged.answer for judged in self.judgements] or ["incomplete"]
        return min(found, key=list(STATUS).index)

    @property
    def status(self) -> int:
        return STATUS[self.answer]

    def __str__(self) -> str:
        return self.sentence

    @property
    def passed(self) -> bool:
        return self.status == PASSED

    @property
    def tone(self) -> Tone:
        """Not judged is no pass."""
        return TONES[self.status]

    @property
    def sentence(self) -> str:
        """For a reader: passed or not, and by what."""
        opened = {PASSED: "passed", ABOVE: "not passed", NOT_JUDGED: "not judged, which is no pass"}[self.status]
        said = "; ".join(f"{judged.defence}, {judged.outcome}: {judged.said}" for judged in self.judgements)
        return f"The gate {self.limit} is {opened}. {said or 'There was no defence to judge'}."

    def to_json(self) -> dict[str, Any]:
        return {
            "limit": str(self.limit),
            "status": self.status,
            "outcome": OUTCOMES[self.status],
            "answer": self.answer,
            "passed": self.passed,
            "defences": [judged.to_json() for judged in self.judgements],
        }


def parse_limit(text: str, asked: str = "fail_above") -> Limit:
    """ "psnr=20" as a limit. asked: the field that holds it."""
    name, _, number = text.partition("=")
    if name in LOWER_IS_CLOSER:
        rising = ", ".join(sorted(HIGHER_IS_CLOSER))
        raise SitusError(
            f"{asked}={text}: {name} falls as an image leaks, so this gate would pass the worst; choose one of: "
            f"{rising}",
            field=asked,
        )
    if name not in HIGHER_IS_CLOSER and not number:
        metrics = ", ".join(sorted(HIGHER_IS_CLOSER))
        raise SitusError(field=asked, value=text, allowed=f"METRIC=NUMBER, as psnr=20; metrics: {metrics}")
    if name not in HIGHER_IS_CLOSER:
        raise unknown_name("metric of a gate", name, HIGHER_IS_CLOSER, field=asked)
    try:
        bound = float(number)
    except ValueError:
        bound = math.nan
    if not math.isfinite(bound):
        raise SitusError(field=asked, value=text, allowed="METRIC=NUMBER, as psnr=20")
    most = BEST_PSNR if name.endswith("psnr") else 1.0
    if bound >= most:
        raise SitusError(
            f"{asked}={text}: {name} is at most {most:g}, so this gate would pass a perfect copy; give less",
            field=asked,
        )
    return Limit(name, bound)


def judge(audit: Audit, limit: Limit) -> Ruling:
    """Every defence of the audit against the limit."""
    return Ruling(limit, [_judge(audit, defence, limit) for defence in audit.about])


def _judge(audit: Audit, defence: str, limit: Limit) -> Judgement:
    pairs = [pair for pair in audit.pairs if pair.defence == defence]
    found = [
        (number, value, pair.attack)
        for pair in pairs
        for number, value in enumerate(pair.scores.get(limit.metric) or ())
        if math.isfinite(value)
    ]
    worst, shown = None, ""
    if found:
        number, value, attack = max(found, key=lambda one: one[1])
        worst = Worst(attack, audit.names[number], value)
        shown = f"the worst, {worst.image}, has {limit.metric} {value:.4g} by {attack}"
        if over := {number for number, value, _ in found if value > limit.bound}:
            said = f"{len(over)} of {counted(len(audit.names), 'images')} above {limit.bound:g}; {shown}"
            return Judgement(defence, "above", said, worst)
    proofs = [pair.attack for pair in pairs if _proves(pair, audit)]
    gaps = _gaps(audit, defence, pairs, limit) + ([] if proofs else _lacking(audit, pairs))
    if gaps or not proofs:
        applied = any(each.status != "refused" for each in audit.outcomes if each.defence == defence)
        answer: Answer = "incomplete" if applied else "nothing_applied"
        return Judgement(defence, answer, "; ".join([*gaps, *([shown] if shown else [])]), worst)
    said = f"{' and '.join(proofs)} solved all {counted(len(audit.names), 'images')} and the equations fit; {shown}"
    return Judgement(defence, "passed", said + _margin(limit, worst), worst)


def _margin(limit: Limit, worst: Worst | None) -> str:
    """A caution where the worst image stays below a limit in dB by less than one; else ""."""
    if worst is None or not limit.metric.endswith("psnr") or (left := limit.bound - worst.value) >= 1:
        return ""
    below = "less than 0.1" if left < 0.1 else f"only {left:.1f}"
    return f"; that is {below} dB below the limit of {limit.bound:g}, and other images may come back above it"


def _proves(pair: Outcome, audit: Audit) -> bool:
    """Whether a pair alone could pass a gate: a closed form, all images, to the end, without a doubt."""
    whole = pair.reason is None and pair.partial is None and pair.count == len(audit.names)
    return pair.closed and whole and pair.doubt is None


def _gaps(audit: Audit, defence: str, pairs: Sequence[Outcome], limit: Limit) -> list[str]:
    """What was begun or asked for and is not there; any of it keeps a gate from being passed."""
    gaps = [f"{attack} was not run before the stop" for attack, other in audit.undone if other == defence]
    gaps += [f"{pair.attack} was stopped after {pair.partial}" for pair in pairs if pair.partial is not None]
    for pair in pairs:
        if broken := sum(fact.get("broken") is True for fact in pair.facts):
            gaps.append(f"{pair.attack} gave back NaN for {broken} of {counted(len(pair.facts), 'images')}")
        values = pair.scores.get(limit.metric)
        if pair.reason is None and values is None:
            gaps.append(f"{limit.metric} is not defined for images so few or so small")
        elif not all(math.isfinite(value) for value in values or ()):
            gaps.append(f"{pair.attack} has an image whose {limit.metric} is no number")
    return gaps


def _lacking(audit: Audit, pairs: Sequence[Outcome]) -> list[str]:
    """Why none of the pairs proves anything."""
    tried = [pair for pair in pairs if pair.reason is None]
    closed = [pair for pair in tried if pair.closed]
    few = [pair for pair in closed if pair.doubt is None and pair.count < len(audit.names)]
    found = [f"{pair.attack} proves nothing: {pair.doubt}" for pair in closed if pair.doubt is not None]
    found += [f"{pair.attack} saw {pair.count} of {counted(len(audit.names), 'images')}" for pair in few]
    if not closed:
        asked = any(pair.closed for pair in pairs)
        found.append("no closed form applies" if asked else "no closed form was run, such as patchembed")
        searched = " and ".join(pair.attack for pair in tried)
        found += [f"what {searched} does not find may still be there"] if searched else []
    return found


# --- when a closed form that gets little proves something -----------------------------------------------------------
# Its equations must hold for the model, fit as well as the stated noise and precision predict, and have one solution.
# Noise hides from the residual that equations are wrong, and that they have too few directions. So there is a control:
# the same attack on the first upload as it is without noise and in float32. What does not hold there is not the
# defence's doing.


Facts = Sequence[dict[str, Fact]]


def doubt_of(caveat: str | None, facts: Facts, noise: float, control: Callable[[], Facts] | None) -> str | None:
    """Why the result of a closed form proves nothing of privacy; None where it does.

    caveat: why it is not exact here. noise: deviation of the noise that was stated. control: makes the facts of the
    upload without noise and in float32; None where the uploads themselves are such.
    """
    if caveat is not None:
        return f"it is not exact here ({caveat})"
    if wrong := [fact for fact in facts if fact.get("fits") is not True]:
        if wrong[0].get("verdict") and _as_expected(wrong[0]):  # the equations fit, and do not tell the image
            return str(wrong[0]["verdict"])
        return f"its equations do not fit for {len(wrong)} of {counted(len(facts), 'images')}{_residual(wrong[0])}"
    if unseen := max((int(_number(fact, "unseen")) for fact in facts), default=0):
        return f"its layer does not see {unseen} numbers of an image, and a better guess at them may come closer"
    if any(int(_number(fact, "hidden")) > 1 for fact in facts):
        return "the gradients do not say in which order the hidden patches stand, and another order may come closer"
    if control is not None and not all(fact.get("fits") is True and _is_unique(fact) for fact in control()):
        return (
            "its equations do not hold, or have more than one solution, on the same model without noise and in float32"
        )
    if noise == 0 and (loose := [fact for fact in facts if not _is_unique(fact)]):
        return f"its equations have more than one solution for {len(loose)} of {counted(len(facts), 'images')}"
    return None


def _is_unique(fact: dict[str, Fact]) -> bool:
    """Whether a linear system has as many directions as unknowns; where none was solved there is none to miss.

    sharp: of an attack that does not count them, whether rounding leaves its solution in one place.
    """
    if fact.get("sharp") is False:
        return False
    return "rank" not in fact or _number(fact, "rank") >= _number(fact, "unknowns")


def _as_expected(fact: dict[str, Fact]) -> bool:
    return "expected_residual" in fact and _number(fact, "residual") <= FIT * _number(fact, "expected_residual")


def _residual(fact: dict[str, Fact]) -> str:
    if "residual" not in fact or "expected_residual" not in fact:
        return ""
    found, expected = _number(fact, "residual"), _number(fact, "expected_residual")
    return f" (residual {found:.2g}, where noise and precision predict {expected:.2g})"


def _number(fact: dict[str, Fact], name: str) -> float:
    value: Any = fact.get(name)
    return float(value or 0)
