"""The gate of an audit: for each defence, whether what came back of any image is more than a blind guess has.

Four metrics are looked at together: PSNR up to gain, offset, flips, shifts and two levels, SSIM, the order of patches,
and how many images are found again among the others. Each is held against guesses that saw no gradient (`MARGINS`);
a limit on one metric, as psnr=20, is a further wish. The most exposed image decides, not the mean.

`PASSED`: there is noise in what is sent, a closed form ran on all images to the end, its equations hold and fit
(`doubt_of`), nothing was stopped, no image is above, not even under the labels with the largest gradient, and neither
is the oracle. `ABOVE`: some image is, also in a stopped audit. `NOT_JUDGED`: everything else. What was stopped, does
not apply or does not fit is no pass, and a search that finds nothing proves nothing. Without noise there is no pass:
equations that fit and have one solution then give the image, and if its picture differs from the reference, the
reference is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from situs.audit.attacks.base import Fact
from situs.audit.attacks.patchembed.equations import FIT
from situs.audit.cases import Outcome
from situs.audit.scores.metrics import BEST_PSNR, HIGHER_IS_CLOSER, LOWER_IS_CLOSER
from situs.audit.scores.scoring import Scores
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

OUTCOMES = {PASSED: "passed", NOT_JUDGED: "inconclusive", ABOVE: "above"}
"""The same in words."""

TONES: dict[int, Tone] = {PASSED: "good", NOT_JUDGED: "unsure", ABOVE: "bad"}


MARGINS = {"aligned_psnr": 3.0, "ssim": 0.15}
"""By how much an image may come back closer than the best blind guess at it: half the squared error, in dB; SSIM."""

WISHED = {"psnr": 1.0, "aligned_psnr": 1.0, "patch_psnr": 1.0}
"""What is above a wished limit must also be better than the best blind guess by this: a grey image is near any grey."""

NEAR, SHARE_OF_DB = 1.0, 0.05
"""A pass by less than so many dB is told as near; of SSIM and of shares, which go to 1, this much stands for a dB."""

CHANCE = 1e-3
"""Images are found again more often than by chance where chance alone finds so many with less than this probability."""

SCOPE = "for an honest server, these weights, these labels and one step"
"""What a verdict is about, in every sentence that gives one."""


class Limit(NamedTuple):
    """A metric that rises with the leak, and the value it must not pass."""

    metric: str
    bound: float

    def __str__(self) -> str:
        return f"{self.metric}={self.bound:g}" if math.isfinite(self.bound) else "blind"


BLIND = Limit("aligned_psnr", math.inf)
"""The gate without a further wish: what blind guesses get is the limit."""


class Worst(NamedTuple):
    """The most exposed image. limit: what its metric may reach, blind: what the best blind guess at it has."""

    attack: str
    image: str
    value: float
    metric: str = "psnr"
    limit: float | None = None
    blind: float | None = None

    def __str__(self) -> str:
        beside = [f"limit {self.limit:.4g}"] if self.limit is not None else []
        beside += [f"a blind guess {self.blind:.4g}"] if self.blind is not None else []
        shown = f" ({', '.join(beside)})" if beside else ""
        return f"{self.image} has {self.metric} {self.value:.4g} by {self.attack}{shown}"


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
    """What the gate says of each defence that was judged. limit: the further wish, or `BLIND`."""

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
        opened = {PASSED: "passed", ABOVE: "not passed", NOT_JUDGED: "inconclusive (not a pass)"}[self.status]
        reasons = "; ".join(f"{judged.defence}, {judged.outcome}: {judged.said}" for judged in self.judgements)
        return f"The gate {self.limit} is {opened}, {SCOPE}. {reasons or 'There was no defence to judge'}."

    def to_json(self) -> dict[str, Any]:
        return {
            "limit": str(self.limit),
            "scope": SCOPE,
            "margins": MARGINS,
            "status": self.status,
            "outcome": OUTCOMES[self.status],
            "answer": self.answer,
            "passed": self.passed,
            "defences": [judged.to_json() for judged in self.judgements],
        }


def parse_limit(text: str, asked: str = "fail_above") -> Limit:
    """ "psnr=20" or "blind" as a limit. asked: the field that holds it."""
    if text == str(BLIND):
        return BLIND
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
        raise SitusError(field=asked, value=text, allowed=f"METRIC=NUMBER, as psnr=20, or {BLIND}; metrics: {metrics}")
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


def judge(audit: Audit, limit: Limit = BLIND) -> Ruling:
    """Every defence of the audit: against blind guesses, and against a further limit where there is one."""
    return Ruling(limit, [_judge(audit, defence, limit) for defence in audit.about])


def _judge(audit: Audit, defence: str, limit: Limit) -> Judgement:
    pairs = [pair for pair in audit.pairs if pair.defence == defence]
    tried = [pair for pair in pairs if not pair.is_bound]
    above = [one for pair in tried for one in exposed(pair, audit.baselines, audit.names, limit)]
    scores = [one for pair in tried for one in _scored(pair, audit.baselines, audit.names, limit)]
    worst = max(above or scores, key=_excess, default=None)
    idle = _idle(audit, limit)
    if above:
        images = {one.image for one in above}
        reason = f"{len(images)} of {counted(len(audit.names), 'images')} above; the most exposed, {worst}"
        return Judgement(defence, "above", reason + idle, worst)
    shown = [] if worst is None else [f"the most exposed, {worst}{idle}"]
    proofs = [pair.attack for pair in pairs if _proves(pair, audit)]
    gaps = _gaps(audit, defence, pairs, limit) + ([] if proofs else _lacking(audit, pairs))
    gaps += [] if gaps else _unbounded(audit, pairs, limit)
    if gaps or not proofs:
        applied = any(each.status != "refused" for each in audit.outcomes if each.defence == defence)
        answer: Answer = "incomplete" if applied else "nothing_applied"
        return Judgement(defence, answer, "; ".join([*gaps, *shown]), worst)
    names = " and ".join(dict.fromkeys(proofs))
    reason = f"{names} solved all {counted(len(audit.names), 'images')} and the equations fit; {'; '.join(shown)}"
    return Judgement(defence, "passed", reason + _margin(worst), worst)


def _margin(worst: Worst | None) -> str:
    """A caution where the most exposed image stays below its limit by less than `NEAR`; else ""."""
    if worst is None or worst.limit is None:
        return ""
    near, unit, digits = (NEAR, " dB", 1) if worst.metric.endswith("psnr") else (NEAR * SHARE_OF_DB, "", 3)
    if (left := worst.limit - worst.value) >= near:
        return ""
    least = 10**-digits
    below = f"less than {least:g}" if left < least else f"only {left:.{digits}f}"
    return f"; that is {below}{unit} below the limit of {worst.limit:.4g}, and other images may come back above it"


def _idle(audit: Audit, limit: Limit) -> str:
    """That a wished limit decides nothing, where a blind guess at every image has more; else ""."""
    guesses = [_blind_at(audit.baselines, limit.metric, number) for number in range(len(audit.names))]
    least = min((-math.inf if guess is None else guess for guess in guesses), default=-math.inf)
    wish = WISHED.get(limit.metric, 0.0)
    if limit == BLIND or limit.metric == "reidentified" or least + wish <= limit.bound:
        return ""
    more = f" + {wish:g} dB" if wish else ""
    return (
        f"; the wish {limit} decides nothing: blind guesses have {least:.4g} or more, and their own{more} is the limit"
    )


# --- what is more than a blind guess has ----------------------------------------------------------------------------


Blind = Mapping[str, Scores]
"""Scores of guesses that saw no gradient, by name."""


def exposed(pair: Outcome, blind: Blind, names: Sequence[str], limit: Limit = BLIND) -> list[Worst]:
    """The images of a pair that are above: closer than any blind guess by a margin, or above a further limit."""
    above = [one for one in _scored(pair, blind, names, limit) if one.limit is not None and one.value > one.limit]
    return above if pair.is_bound else above + _found_again(pair, names)


def _excess(one: Worst) -> float:
    """By how much an image is above its limit, or below it, in units of the metric's margin."""
    limit = one.value if one.limit is None else one.limit
    return (one.value - limit) / (MARGINS.get(one.metric) or WISHED.get(one.metric) or 0.1)


def excesses(pair: Outcome, blind: Blind) -> list[tuple[int, float]]:
    """(number of an image, by how much it is above a limit that blind guesses set, in margins), for every metric."""
    numbers = [str(number) for number in range(max(pair.numbers, default=pair.count - 1) + 1)]
    scored = _scored(pair, blind, numbers, BLIND)
    return [(int(one.image), _excess(one)) for one in scored if one.limit is not None]


def _scored(pair: Outcome, blind: Blind, names: Sequence[str], limit: Limit) -> list[Worst]:
    """Every image of a pair under every metric that has a limit."""
    scored = []
    for metric in dict.fromkeys([*MARGINS, "order_accuracy", limit.metric]):
        if metric == "reidentified" and pair.count and pair.scores.get(metric):
            share = sum(pair.scores[metric] or ()) / pair.count  # one image is found again or not
            scored.append(Worst(pair.attack, "a share of them", share, metric, limit.bound))
            continue
        for place, value in enumerate(pair.scores.get(metric) or ()):
            if not math.isfinite(value):
                continue
            number = pair.numbers[place] if pair.numbers else place
            guess = _blind_at(blind, metric, number)
            bounds = [] if guess is None else _bounds(metric, guess, pair)
            if metric == limit.metric:
                bounds.append(max(limit.bound, -math.inf if guess is None else guess + WISHED.get(metric, 0.0)))
            scored.append(Worst(pair.attack, names[number], value, metric, min(bounds, default=None), guess))
    return scored


def _bounds(metric: str, guess: float, pair: Outcome) -> list[float]:
    """The limit that a blind guess sets: none for a metric that is no part of the gate by itself."""
    if metric == "order_accuracy":  # four deviations of as many throws of a coin as there are patches
        return [guess + 2 / math.sqrt(max(1, pair.case.patches))]
    return [guess + MARGINS[metric]] if metric in MARGINS else []


def _blind_at(blind: Blind, metric: str, number: int) -> float | None:
    """The best blind guess at one image."""
    values = [scores[metric] for scores in blind.values() if scores.get(metric) is not None]
    return max((each[number] for each in values if each is not None and number < len(each)), default=None)


def _found_again(pair: Outcome, names: Sequence[str]) -> list[Worst]:
    """The images that are found again among the others, where those are more than chance finds."""
    again = pair.scores.get("reidentified")
    if not again:
        return []
    chance = min(1.0, pair.case.batch / len(names))
    if _tail(round(sum(again)), len(again), chance) >= CHANCE:
        return []
    at = [pair.numbers[place] if pair.numbers else place for place, value in enumerate(again) if value > 0]
    shown = f"{len(at)} of {len(again)} by {pair.attack}"
    return [Worst(shown, names[number], 1.0, "reidentified", None, chance) for number in at]


def _tail(successes: int, trials: int, chance: float) -> float:
    """The probability of so many successes or more."""
    from scipy.special import bdtrc

    return 1.0 if successes <= 0 or chance >= 1 else float(bdtrc(successes - 1, trials, chance))


def too_few(count: int, batch: int) -> bool:
    """Whether chance may find every one of so many images again, so that nothing can pass."""
    return _tail(count, count, min(1.0, batch / count)) >= CHANCE


def _unbounded(audit: Audit, pairs: Sequence[Outcome], limit: Limit) -> list[str]:
    """What else keeps a gate from being passed where no attack is above: too few images, and the bound."""
    count = len(audit.names)
    if too_few(count, audit.step.batch):
        return [f"{counted(count, 'images')} are too few to tell finding them again from chance: give more"]
    if not audit.baselines or any(s.get("aligned_psnr") is None for s in audit.baselines.values()):
        return ["no blind guess was measured to hold it against"]
    bounds = [pair for pair in pairs if pair.is_bound]
    over = [one for pair in bounds for one in exposed(pair, audit.baselines, audit.names, limit)]
    if over:
        worst = max(over, key=_excess)
        return [f"no attack is above, but the oracle is: an attacker who knew where to look could have more: {worst}"]
    if not bounds:
        return ["the oracle, which a pass needs, was not asked: an audit asks it where it has a gate (fail_above)"]
    if {pair.case.hardest for pair in bounds} != {False, True}:
        return ["the oracle, which a pass needs, was not asked under both the own and the least likely labels"]
    return []


def _proves(pair: Outcome, audit: Audit) -> bool:
    """Whether a pair alone could pass a gate: a closed form, all images, to the end, without a doubt."""
    whole = pair.reason is None and pair.partial is None and pair.count == len(audit.names)
    return pair.closed and whole and pair.doubt is None and not pair.case.hardest


def _gaps(audit: Audit, defence: str, pairs: Sequence[Outcome], limit: Limit) -> list[str]:
    """What was begun or asked for and is not there; any of it keeps a gate from being passed."""
    gaps = [f"{attack} was not run before the stop" for attack, other in audit.undone if other == defence]
    gaps += [f"{pair.attack} was stopped after {pair.partial}" for pair in pairs if pair.partial is not None]
    for pair in pairs:
        if broken := sum(fact.get("broken") is True for fact in pair.facts):
            gaps.append(f"{pair.attack} gave back NaN for {broken} of {counted(len(pair.facts), 'images')}")
        for metric in dict.fromkeys([*MARGINS, limit.metric]):
            values = pair.scores.get(metric)
            if pair.reason is None and values is None:
                gaps.append(f"{metric} is not defined for images so few or so small")
            elif not all(math.isfinite(value) for value in values or ()):
                gaps.append(f"{pair.attack} has an image whose {metric} is no number")
    return list(dict.fromkeys(gaps))


def _lacking(audit: Audit, pairs: Sequence[Outcome]) -> list[str]:
    """Why none of the pairs proves anything."""
    tried = [pair for pair in pairs if pair.reason is None and not pair.is_bound]
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

NO_NOISE = (
    "there is no noise in what is sent, and its equations fit and have one solution: what its layer was fed is known. "
    "A picture unlike the reference means that the reference is another one (augmentation, mixing, a factor between "
    "gradients)"
)
"""Why a solution without noise is never a pass."""


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
    return NO_NOISE if noise == 0 else None


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
