"""The result of a text audit: a finding for each defence, the verdict, tables and JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self

from situs.audit.text.recovered import Read
from situs.errors import counted, verb
from situs.findings import Exposure, Fact, Finding, Metric, Remark, Status
from situs.gate import Report
from situs.results import Cell, Summary, Table, Tone, percent

NAME = "sentences"
"""The attack of an honest server."""

SCHEMA = "situs-audit-texts/2"
"""The form of texts.json."""

MEANING = {
    "words": "the fraction of a sentence's tokens whose word was recovered, for the most exposed sentence",
    "tokens": "the fraction of a sentence's tokens that were recovered at their position, for the most exposed "
    "sentence",
    "sentences": "the fraction of sentences that were recovered completely",
    "picked": "the fraction of sentences that were recovered completely, or that an attacker can pick from "
    "several versions that differ in one word",
}
METRICS = {name: Metric(name) for name in MEANING}
"""What a gate may limit; each rises with the leak."""


@dataclass(frozen=True)
class TextFinding(Finding):
    """The finding of the attack on one defence. reads: the attacked sentences. facts: of each upload. seconds: for all
    uploads; None where the same attack on the same numbers was run for another defence."""

    reads: Sequence[Read] = field(default=(), kw_only=True)
    seconds: float | None = field(default=0.0, kw_only=True)

    @property
    def tokens(self) -> int:
        return sum(read.tokens for read in self.reads)

    @property
    def whole(self) -> int:
        return sum(read.whole for read in self.reads)

    @property
    def picked(self) -> int:
        """Sentences that are known whole, or picked among candidates."""
        return sum(read.scores["picked"] > 0 for read in self.reads)

    @property
    def shares(self) -> dict[str, float]:
        """Over all its tokens and sentences."""
        tokens, count = max(self.tokens, 1), max(len(self.reads), 1)
        return {
            "words": sum(sum(read.known) for read in self.reads) / tokens,
            "tokens": sum(read.right for read in self.reads) / tokens,
            "sentences": self.whole / count,
            "picked": self.picked / count,
        }

    @property
    def reasons(self) -> list[str]:
        """Why nothing, or not all, was found."""
        return list(dict.fromkeys(remark.text for remark in self.remarks if remark.kind in ("refused", "gap")))


def finding_of(
    defence: str,
    asked: int,
    status: Status = "not_run",
    reads: Sequence[Read] = (),
    remarks: Sequence[Remark] = (),
    facts: Sequence[Mapping[str, Fact]] = (),
    seconds: float | None = 0.0,
    attack: str = NAME,
) -> TextFinding:
    """The finding of the attack on a defence, as a gate reads it. asked: how many sentences there are.

    The attack is a search: it can fail a gate, and what it does not find proves nothing.
    """
    finding = TextFinding(
        attack, defence, status, asked=asked, remarks=remarks, facts=facts, reads=reads, seconds=seconds
    )
    if not reads:
        return finding
    scores = {name: [read.scores[name] for read in reads] for name in METRICS}
    samples, exposures = [read.name for read in reads], list[Exposure]()
    for name, values in scores.items():
        if name in ("words", "tokens"):
            exposures += [Exposure(sample, METRICS[name], value) for sample, value in zip(samples, values, strict=True)]
        else:  # of which a gate limits the share
            most = samples[values.index(max(values))]
            exposures.append(Exposure(most, METRICS[name], finding.shares[name]))
    if (more := finding.picked - finding.whole) > 0:
        reason = (
            f"{counted(more, 'sentences')} {verb(more, 'were')} not recovered, but an attacker can distinguish "
            f"{'it' if more == 1 else 'them'} from versions in which one word differs"
        )
        remarks = [*remarks, Remark("doubt", reason)]
    return replace(finding, samples=samples, scores=scores, exposures=exposures, remarks=remarks)


@dataclass(frozen=True)
class TextAudit(Report):
    """What gradients give away of sentences. names: of all sentences. shown: each word's id as the tokeniser writes it,
    empty where the sentences are not to be shown."""

    file: ClassVar[str] = "texts"
    metrics: ClassVar[Mapping[str, Metric]] = METRICS

    findings: Sequence[TextFinding]
    model: str
    names: Sequence[str]
    batch: int
    shown: Mapping[int, str] = field(default_factory=dict, kw_only=True)

    @property
    def private(self) -> bool:
        return bool(self.shown)

    def without_pictures(self) -> Self:
        """The same without the sentences: its page is then for everyone."""
        return replace(self, shown={})

    @property
    def tone(self) -> Tone:
        """Bad where a word of the batch is known, whatever the gate allows; never good, for the attack is a search."""
        if any(any(finding.shares.values()) for finding in self.findings):
            return "bad"
        return "unsure" if self.ruling is None else self.ruling.tone

    def lines(self, defence: str) -> list[str]:
        """For the attack on a defence what it got, by the gate's metric."""
        metric = "tokens" if self.limit is None else self.limit.metric
        return [
            f"{finding.attack}: {metric} {finding.shares[metric]:.4g} over {counted(finding.count, 'sentences')}"
            if finding.attacked
            else f"{finding.attack}: not attacked: {'; '.join(finding.reasons) or 'the audit was stopped first'}"
            for finding in self.findings
            if finding.defence == defence
        ]

    def summary(self) -> Summary:
        """The verdict and a row for each defence; below them what the gate says."""
        title = f"{self.model}, {counted(len(self.names), 'sentences')} in batches of {self.batch}"
        tables = [Table(title, HEADER, [cells(finding) for finding in self.findings])]
        if rows := reasons(self):
            tables.append(Table("Not recovered, and why", ("defence", "reason"), rows))
        ruling = self.ruling
        return Summary(verdict(self), tuple(tables), () if ruling is None else (ruling.sentence,))

    def numbers(self) -> dict[str, Any]:
        """Every sentence's numbers; no words."""
        return {
            "schema": SCHEMA,
            "attack": self.findings[0].attack if self.findings else NAME,
            "threat": self.threat.name,
            "verdict": verdict(self),
            "batch": self.batch,
            "stopped": self.stopped,
            "gate": None if self.ruling is None else self.ruling.to_json(),
            "defences": [numbers_of(finding) for finding in self.findings],
        }


HEADER = ("defence", "tokens", "words known", "tokens right", "whole sentences", "picked among candidates", "seconds")


def cells(finding: TextFinding) -> list[Cell]:
    """A row of the table."""
    if not finding.attacked:
        return [finding.defence, None, None, None, "not attacked", None, None]
    counts = [f"{number} of {finding.count}" for number in (finding.whole, finding.picked)]
    shares = [_share(finding.shares[name]) for name in ("words", "tokens")]
    return [
        finding.defence,
        finding.tokens,
        *shares,
        *counts,
        None if finding.seconds is None else f"{finding.seconds:.1f}",
    ]


def _share(share: float, none: str = "none found") -> str:
    """A share; "none found" in place of 0 %, which would read as if all were safe."""
    return percent(share) if share else none


def reasons(audit: TextAudit) -> list[tuple[str, str]]:
    """(defence, why not all was found), each once."""
    rows = [(finding.defence, reason) for finding in audit.findings for reason in finding.reasons]
    stops = [(finding.defence, finding.why("stopped")) for finding in audit.findings]
    return rows + [(defence, f"stopped after {reason}") for defence, reason in stops if reason is not None]


def verdict(audit: TextAudit) -> str:
    """What came back under each defence, and what that does not prove, for a reader who is no expert."""
    unread = "This attack did not recover the remaining words of the sentences, but another attack may recover them."
    return verdict_of(audit, partial(_recovered, audit), unread)


def verdict_of(audit: TextAudit, sentence: Callable[[TextFinding], str], unread: str) -> str:
    """The assumption, a sentence for each finding, and `unread` if a text was not read whole."""
    sentences = [audit.threat.assumed]
    sentences += [] if audit.stopped is None else [f"A partial result: stopped by {audit.stopped}."]
    for finding in audit.findings:
        refused = f"{finding.defence}: not attacked, so nothing is known about privacy."
        sentences.append(sentence(finding) if finding.attacked else refused)
        stopped = finding.why("stopped") if finding.attacked else None
        sentences += [] if stopped is None else [f"This attack was stopped after {stopped}."]
    sentences += [unread] * any(finding.whole < finding.count for finding in audit.findings)
    return " ".join(sentences)


def _recovered(audit: TextAudit, finding: TextFinding) -> str:
    shares = finding.shares
    recovered = (
        f"{finding.defence}: {finding.whole} of {counted(finding.count, 'sentences')} {verb(finding.count, 'were')} "
        f"recovered word for word from one step on a batch of {audit.batch}. The attack recovered "
        f"{_share(shares['tokens'], 'none')} of the tokens at their position, and "
        f"{_share(shares['words'], 'none')} of the tokens if positions are ignored."
    )
    if finding.picked <= finding.whole:
        return recovered
    picked = finding.picked - finding.whole
    return (
        f"{recovered} An attacker can identify {counted(picked, 'more sentences')}: among versions of such a sentence "
        "that differ in one word, the attacker picks the right version. Identified sentences are not private either."
    )


def numbers_of(finding: TextFinding) -> dict[str, Any]:
    """A finding as JSON holds it: numbers, no words."""
    return {
        **finding.to_json(),
        "tokens": finding.tokens,
        "shares": finding.shares,
        "whole": finding.whole,
        "picked": finding.picked,
        "seconds": finding.seconds,
        "uploads": [dict(fact) for fact in finding.facts],
        "sentences_read": [
            {
                "name": read.name,
                "tokens": read.tokens,
                "known": sum(read.known),
                "right": read.right,
                "whole": read.whole,
                "picked": read.picked,
            }
            for read in finding.reads
        ],
    }
