"""The gate: from findings and a limit, whether a defence passes, is above the limit, or is inconclusive.

One rule for every scenario. `ABOVE`: a recovered sample is closer to its original than blind guesses by a margin, or
above the user's limit, or samples are re-identified more often than by chance; also in a stopped audit. `PASSED`: a
closed form solved all samples to the end and its certificates hold; under this defence no attack was stopped or left
out, and every value is a number; no sample is above, not even under harder conditions; and neither is the bound, which
knows the samples. `NOT_JUDGED` (inconclusive): everything else. Not attacked, stopped, refused, doubtful or too few
samples is never a pass, and a search that finds nothing proves nothing. The most exposed sample decides, not the mean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple
from xml.etree import ElementTree as ET

from situs.errors import SitusError, counted, unknown_name, verb
from situs.findings import HONEST, NO_REFERENCE, Exposure, Finding, Metric, ThreatModel
from situs.results import Cell, Result, Tone

Answer = Literal["above", "incomplete", "nothing_applied", "passed"]
"""The gate's answer. incomplete: something was stopped, is missing or proves nothing; nothing_applied: no attack
applies at all. Neither is a pass."""

PASSED, ABOVE, NOT_JUDGED = 0, 3, 4
"""The gate's answers as exit statuses."""

STATUS: dict[Answer, int] = {"above": ABOVE, "incomplete": NOT_JUDGED, "nothing_applied": NOT_JUDGED, "passed": PASSED}
"""The worst first: an audit's answer is the worst answer of its defences."""

OUTCOMES = {PASSED: "passed", NOT_JUDGED: "inconclusive", ABOVE: "above"}
"""Exit status -> the answer in words."""

TONES: dict[int, Tone] = {PASSED: "good", NOT_JUDGED: "unsure", ABOVE: "bad"}


def scope_of(threat: ThreatModel) -> str:
    """The conditions under which a verdict holds; part of every sentence with a verdict."""
    weights = "the weights tried here" if threat.unproved else "these weights"
    return f"for {threat.server}, {weights}, these labels and one step"


SCOPE = scope_of(HONEST)

NEAR, SHARE_OF_DB = 1.0, 0.05
"""A pass by less than this many dB is called close; for SSIM and ratios, which go to 1, the second number corresponds
to 1 dB."""


class Limit(NamedTuple):
    """A metric that rises with the leak, and the value it must not pass."""

    metric: str
    bound: float

    def __str__(self) -> str:
        return f"{self.metric}={self.bound:g}" if math.isfinite(self.bound) else "blind"


BLIND = Limit("blind", math.inf)
"""The gate without a user's limit: blind guesses set the limit."""


class Worst(NamedTuple):
    """The most exposed sample. limit: what its metric may reach; blind: the best blind guess at it."""

    attack: str
    image: str
    value: float
    metric: str = "psnr"
    limit: float | None = None
    blind: float | None = None

    def __str__(self) -> str:
        beside = [f"limit {self.limit:.4g}"] if self.limit is not None else []
        beside += [f"blind guess {self.blind:.4g}"] if self.blind is not None else []
        shown = f" ({', '.join(beside)})" if beside else ""
        return f"{self.image} has {self.metric} {self.value:.4g} by {self.attack}{shown}"


class Judgement(NamedTuple):
    """One defence. reason: why, without the defence's name and a full stop. worst: None if nothing was tried."""

    defence: str
    answer: Answer
    reason: str
    worst: Worst | None = None

    @property
    def status(self) -> int:
        return STATUS[self.answer]

    @property
    def outcome(self) -> str:
        return OUTCOMES[self.status]

    def to_json(self) -> dict[str, Any]:
        return {
            "defence": self.defence,
            "answer": self.answer,
            "said": self.reason,
            "worst": None if self.worst is None else self.worst._asdict(),
            "status": self.status,
            "outcome": self.outcome,
        }


@dataclass(frozen=True)
class Ruling:
    """The gate's judgement of each defence. limit: the user's, or `BLIND`. margins: by metric, by how much a sample may
    come closer than blind guesses."""

    limit: Limit
    judgements: Sequence[Judgement]
    margins: Mapping[str, float] | None = None
    threat: ThreatModel = HONEST

    @property
    def answer(self) -> Answer:
        """The worst answer of the defences; "incomplete" without one."""
        answers: list[Answer] = [judged.answer for judged in self.judgements] or ["incomplete"]
        return min(answers, key=list(STATUS).index)

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
        """Good only where all passed."""
        return TONES[self.status]

    @property
    def sentence(self) -> str:
        """The ruling and its reasons in one sentence."""
        opened = {PASSED: "passed", ABOVE: "not passed", NOT_JUDGED: "inconclusive (not a pass)"}[self.status]
        reasons = "; ".join(f"{judged.defence}, {judged.outcome}: {judged.reason}" for judged in self.judgements)
        return (
            f"The gate {self.limit} is {opened}, {scope_of(self.threat)}. {reasons or 'There was no defence to judge'}."
        )

    def table(self) -> tuple[list[str], list[list[Cell]]]:
        """A row for each defence: the outcome and its most exposed sample."""
        rows: list[list[Cell]] = []
        for judged in self.judgements:
            one, shown = judged.worst, [None] * 5
            if one is not None:
                limits = (None if value is None else f"{value:.4g}" for value in (one.limit, one.blind))
                shown = [one.image, f"{one.metric} {one.value:.4g}", *limits, one.attack]
            rows.append([judged.defence, judged.outcome, *shown])
        return ["defence", "gate", "most exposed", "has", "limit", "a blind guess", "by"], rows

    def to_json(self) -> dict[str, Any]:
        return {
            "limit": str(self.limit),
            "threat": self.threat.name,
            "scope": scope_of(self.threat),
            "margins": dict(self.margins or {}),
            "status": self.status,
            "outcome": OUTCOMES[self.status],
            "answer": self.answer,
            "passed": self.passed,
            "defences": [judged.to_json() for judged in self.judgements],
        }


def parse_limit(text: str, metrics: Mapping[str, Metric], asked: str = "fail_above") -> Limit:
    """ "psnr=20" or "blind" as a limit. metrics: those of the scenario. asked: the field that holds it."""
    rising = {name: metric for name, metric in metrics.items() if metric.rises}
    blind = f", or {BLIND}" if any(metric.margin is not None for metric in rising.values()) else ""
    if text == str(BLIND) and blind:
        return BLIND
    name, _, number = text.partition("=")
    if name in metrics and name not in rising:
        raise SitusError(
            f"{asked}={text}: a gate sets an upper limit, so it cannot limit {name}: a low {name} means a good copy of "
            f"the private data; choose one of: {', '.join(sorted(rising))}",
            field=asked,
        )
    if name not in rising and not number:
        allowed = f"METRIC=NUMBER, such as {next(iter(rising))}=20{blind}; metrics: {', '.join(sorted(rising))}"
        raise SitusError(field=asked, value=text, allowed=allowed)
    if name not in rising:
        raise unknown_name("metric of a gate", name, rising, field=asked)
    try:
        bound = float(number)
    except ValueError:
        bound = math.nan
    if not math.isfinite(bound):
        raise SitusError(field=asked, value=text, allowed=f"METRIC=NUMBER, such as {name}={rising[name].most / 10:g}")
    if bound >= rising[name].most:
        raise SitusError(
            f"{asked}={text}: {name} is never above {rising[name].most:g}, so this gate would pass even a perfect "
            "copy of the private data; give a lower number",
            field=asked,
        )
    return Limit(name, bound)


# --- the rule -------------------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """One sample of a finding beside its limit, None if it has none."""

    finding: Finding
    exposure: Exposure
    limit: float | None

    @property
    def above(self) -> bool:
        return self.exposure.above or (self.limit is not None and self.exposure.value > self.limit)

    @property
    def excess(self) -> float:
        """By how much the sample exceeds its limit, in units of the metric's scale; negative below it."""
        value = self.exposure.value
        return (value - (value if self.limit is None else self.limit)) / self.exposure.metric.scale

    @property
    def worst(self) -> Worst:
        one, attack = self.exposure, self.finding.attack
        by = f"{one.among} by {attack}" if one.among else attack
        return Worst(by, one.sample, one.value, one.metric.name, self.limit, one.blind)


def hold(finding: Finding, limit: Limit = BLIND) -> list[Held]:
    """Every sample of a finding under every metric that has a limit."""
    rows = []
    for one in finding.exposures:
        wished = one.metric.name == limit.metric
        if not (wished or one.above or one.metric.margin is not None) or not math.isfinite(one.value):
            continue
        bounds = [] if one.limit is None else [one.limit]
        if wished and not one.above:
            blind = -math.inf if one.blind is None else one.blind + one.metric.wish
            bounds.append(max(limit.bound, blind))
        rows.append(Held(finding, one, None if one.above else min(bounds, default=None)))
    return rows


def exposed(finding: Finding, limit: Limit = BLIND) -> list[Held]:
    """The samples of a finding that are above: closer than any blind guess by a margin, or above the user's limit."""
    return [one for one in hold(finding, limit) if one.above and not (finding.bound and one.exposure.above)]


def judge(
    findings: Sequence[Finding],
    limit: Limit = BLIND,
    *,
    things: str = "images",
    defences: Iterable[str] = (),
    threat: ThreatModel = HONEST,
    hardest: bool = True,
) -> Ruling:
    """Judges every defence against blind guesses, and against the user's limit if there is one.

    defences: all that are to be judged; those without a finding were not attacked. hardest: whether a pass also needs
    the bound under harder conditions, which the owner may meet another time.
    """
    named = dict.fromkeys([*defences, *(finding.defence for finding in findings)])
    idle = _idle([one for finding in findings for one in finding.exposures], limit)
    margins = {
        one.metric.name: one.metric.margin
        for finding in findings
        for one in finding.exposures
        if one.metric.margin is not None
    }
    rows = [
        _judge(name, [f for f in findings if f.defence == name], limit, things, idle, hardest, threat.unproved)
        for name in named
    ]
    return Ruling(limit, rows, margins, threat)


def _judge(
    defence: str,
    findings: Sequence[Finding],
    limit: Limit,
    things: str,
    idle: str,
    hardest: bool,
    unproved: str,
) -> Judgement:
    """unproved: why nothing passes, of the threat model."""
    attacks = [finding for finding in findings if not finding.bound]
    above = [one for finding in attacks for one in exposed(finding, limit)]
    rows = [one for finding in attacks for one in hold(finding, limit) if not one.exposure.above]
    most = max(above or rows, key=lambda one: one.excess, default=None)
    worst = None if most is None else most.worst
    count = max((finding.asked for finding in findings), default=0)
    if above:
        samples = {one.exposure.sample for one in above}
        many = f"{len(samples)} of {counted(count, things)}"
        reason = f"{many} {verb(len(samples), 'exceed')} what the gate allows; most exposed: {worst}"
        return Judgement(defence, "above", reason + idle, worst)
    shown = [] if worst is None else [f"most exposed: {worst}{idle}"]
    proofs = [finding.attack for finding in findings if finding.proof]
    gaps = _gaps(findings, limit, things) + ([] if proofs else _lacking(findings, things))
    gaps += [unproved] if unproved else []
    gaps += [] if gaps else _few(findings) or _unbounded(findings, limit, things, hardest)
    if gaps or not proofs:
        applied = any(finding.status != "refused" for finding in findings)
        answer: Answer = "incomplete" if applied else "nothing_applied"
        return Judgement(defence, answer, "; ".join([*gaps, *shown]), worst)
    names = " and ".join(dict.fromkeys(proofs))
    reason = f"{names} solved the equations of all {counted(count, things)}, and the equations fit; {'; '.join(shown)}"
    return Judgement(defence, "passed", reason + _margin(most, things), worst)


def _gaps(findings: Sequence[Finding], limit: Limit, things: str) -> list[str]:
    """What was asked for and is missing; any of it prevents a pass."""
    gaps = [
        f"{finding.attack} was not run, because the audit was stopped first"
        for finding in findings
        if finding.status == "not_run"
    ]
    gaps += [
        f"{finding.attack} was stopped {f'after {why}' if (why := finding.why('stopped')) else 'before its end'}"
        for finding in findings
        if finding.status == "stopped" or finding.why("stopped")
    ]
    gaps += [remark.text for finding in findings for remark in finding.remarks if remark.kind == "gap"]
    for finding in (finding for finding in findings if finding.attacked):
        metrics = {one.metric.name for one in finding.exposures}
        if limit != BLIND and limit.metric not in metrics and NO_REFERENCE not in gaps:
            gaps.append(f"{limit.metric} is not defined for so few {things} or such small {things}")
        for one in finding.exposures:
            if not math.isfinite(one.value) and (one.metric.margin is not None or one.metric.name == limit.metric):
                gaps.append(f"{finding.attack} has {_one(things)} whose {one.metric.name} is not a number")
    return list(dict.fromkeys(gaps))


NO_CLOSED_FORM = "no closed form (an attack that solves equations)"


def _lacking(findings: Sequence[Finding], things: str) -> list[str]:
    """Why none of the findings proves anything."""
    tried = [finding for finding in findings if finding.attacked and not finding.bound]
    closed = [finding for finding in tried if finding.closed]
    reasons = []
    for finding in closed:
        if (doubt := finding.why("doubt") or finding.caveat) is not None:
            reasons.append(f"{finding.attack} proves nothing: {doubt}")
        elif finding.count < finding.asked:
            reasons.append(f"{finding.attack} attacked only {finding.count} of {counted(finding.asked, things)}")
        elif not finding.proof and not finding.hardest and finding.status == "done":
            reasons.append(
                f"{finding.attack} proves nothing: for some {things}, its equations leave open whether an attacker can "
                "recover more"
            )
    if not closed:
        refusals = [finding for finding in findings if finding.why("refused") and (finding.closed or not tried)]
        reasons_given = "; ".join(f"{finding.attack}: {finding.why('refused')}" for finding in refusals)
        reasons.append(f"no closed form applies ({reasons_given})" if refusals else f"{NO_CLOSED_FORM} was run")
        searched = " and ".join(finding.attack for finding in tried)
        reasons += [f"another attack may find more than {searched}"] if searched else []
        reasons += [doubt for finding in tried if (doubt := finding.why("doubt"))]
    return reasons or [f"{NO_CLOSED_FORM} finished under the conditions of the gate"]


def awaits_bound(findings: Sequence[Finding], limit: Limit) -> bool:
    """Whether nothing but a bound keeps the findings of one defence from passing."""
    above, proved = any(exposed(finding, limit) for finding in findings), any(finding.proof for finding in findings)
    return proved and not (above or _gaps(findings, limit, "images") or _few(findings))


def _few(findings: Sequence[Finding]) -> list[str]:
    """That there are too few samples."""
    return [remark.text for finding in findings for remark in finding.remarks if remark.kind == "few"][:1]


def _unbounded(findings: Sequence[Finding], limit: Limit, things: str, hardest: bool) -> list[str]:
    """What else prevents a pass where no attack is above: missing blind guesses, and the bound."""
    bounds = [finding for finding in findings if finding.bound and finding.status == "done" and finding.samples]
    for finding in [*(finding for finding in findings if finding.proof), *bounds]:
        exposures = [one for one in finding.exposures if one.metric.margin is not None]
        guessed = all(one.limit is not None and math.isfinite(one.limit) for one in exposures)
        if not guessed or not {*finding.samples} <= {one.sample for one in exposures}:
            return [f"for some {things} that {finding.attack} attacked, no blind guess was measured"]
    over = [one for finding in bounds for one in exposed(finding, limit)]
    if over:
        worst = max(over, key=lambda one: one.excess).worst
        return [
            f"no attack is above the limit, but the oracle (a bound) is: {worst}. An unknown attack may be above it too"
        ]
    if not bounds:
        reason = "a pass needs the oracle (a bound that is computed with the true samples), which did not run"
        return [f"{reason}: repeat the audit with a gate (fail_above) to run the oracle"]
    if not ({False, True} if hardest else {False}) <= {finding.hardest for finding in bounds}:
        return [
            (
                "a pass needs the oracle twice: once with the true labels, and once with the least likely labels. At "
                "least one of these two runs is missing"
            )
        ]
    return []


def _margin(most: Held | None, things: str) -> str:
    """A caution where the most exposed sample stays below its limit by less than `NEAR`; otherwise ""."""
    if most is None or most.limit is None:
        return ""
    metric, left = most.exposure.metric, most.limit - most.exposure.value
    near, unit, digits = (NEAR, " dB", 1) if metric.unit == "dB" else (NEAR * SHARE_OF_DB, "", 3)
    if left >= near:
        return ""
    least = 10**-digits
    below = f"less than {least:g}" if left < least else f"only {left:.{digits}f}"
    return f"; this value is {below}{unit} below the limit of {most.limit:.4g}, and other {things} may exceed the limit"


def _idle(exposures: Sequence[Exposure], limit: Limit) -> str:
    """That a wished limit has no effect, where a blind guess at every sample reaches more; otherwise ""."""
    wished = [one for one in exposures if one.metric.name == limit.metric and not one.above]
    least = min((-math.inf if one.blind is None else one.blind for one in wished), default=-math.inf)
    wish = wished[0].metric.wish if wished else 0.0
    if limit == BLIND or least + wish <= limit.bound:
        return ""
    more = f" + {wish:g} dB" if wish else ""
    return (
        f"; your limit {limit} has no effect, because blind guesses already reach {least:.4g} or more. "
        f"Instead, the limit is the blind guess{more}"
    )


def _one(things: str) -> str:
    """ "images" as "an image"."""
    one = things.removesuffix("s")
    return f"{'an' if one[0] in 'aeiou' else 'a'} {one}"


@dataclass(frozen=True)
class Report(Result):
    """The result of any audit, with its findings. about: label of a defence -> what it does. limit: the gate's limit,
    None without a gate. stopped: what stopped the audit and how far it came, None if the audit is complete. notes: name
    -> text for the page."""

    metrics: ClassVar[Mapping[str, Metric]]
    """Metrics that a gate may limit."""

    findings: Sequence[Finding]
    about: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    limit: Limit | None = field(default=None, kw_only=True)
    threat: ThreatModel = field(default=HONEST, kw_only=True)
    stopped: str | None = field(default=None, kw_only=True)
    notes: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    def judge(self, **limit: float) -> Ruling:
        """The gate's ruling on every defence, with a limit on one metric, as `judge(psnr=20)`, or without."""
        if len(limit) > 1:
            raise SitusError(field="limit", value=limit, allowed="one metric with its bound, such as psnr=20")
        wishes = [parse_limit(f"{metric}={bound}", self.metrics) for metric, bound in limit.items()]
        return self._judged(*wishes)

    def _judged(self, limit: Limit = BLIND) -> Ruling:
        things = self.provenance.things
        return judge(self.findings, limit, things=things, defences=self.about, threat=self.threat)

    @property
    def ruling(self) -> Ruling | None:
        """The gate's ruling; None without a gate."""
        return None if self.limit is None else self._judged(self.limit)

    @property
    def undone(self) -> list[tuple[str, str]]:
        """(attack, defence) pairs that were never started."""
        return [(finding.attack, finding.defence) for finding in self.findings if finding.status == "not_run"]


# --- the gate as JUnit ----------------------------------------------------------------------------------------------
# A test for each defence. Above the limit is a failure; inconclusive is an error and never skipped, because CI systems
# count what was skipped as no harm.


_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
TAGS = {ABOVE: "failure", NOT_JUDGED: "error"}
"""The text of a test that did not pass."""


def junit(name: str, ruling: Ruling, facts: Mapping[str, Any], lines: Callable[[str], Sequence[str]]) -> bytes:
    """The file. name: of the suite. facts: properties of the audit; `made` is its time. lines: for a defence, what each
    attack on it recovered."""
    counts = {tag: sum(TAGS.get(judged.status) == tag for judged in ruling.judgements) for tag in TAGS.values()}
    total = {
        "tests": str(len(ruling.judgements)),
        "failures": str(counts["failure"]),
        "errors": str(counts["error"]),
        "skipped": "0",
    }
    root = ET.Element("testsuites", total)
    suite = ET.SubElement(root, "testsuite", {"name": _text(name), **total})
    if time := facts.get("made"):
        suite.set("timestamp", str(time).split("+")[0])
    properties = ET.SubElement(suite, "properties")
    for key, value in {"limit": ruling.limit, "threat": ruling.threat.name, **facts}.items():
        if value is not None:
            ET.SubElement(properties, "property", {"name": _text(key), "value": _text(value)})
    for judged in ruling.judgements:
        called = {"classname": _text(name), "name": _text(f"{ruling.limit} under {judged.defence}")}
        case = ET.SubElement(suite, "testcase", called)
        if judged.status in TAGS:
            reason = {"message": _text(judged.reason), "type": judged.outcome}
            ET.SubElement(case, TAGS[judged.status], reason).text = _text(judged.reason)
        ET.SubElement(case, "system-out").text = _text("\n".join(lines(judged.defence)))
    ET.indent(root)
    return ET.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n"


def _text(value: object) -> str:
    """What XML 1.0 can hold of a text."""
    return _NO_XML.sub("�", str(value))
