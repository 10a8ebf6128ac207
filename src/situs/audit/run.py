"""The runner of audits: attackers take turns against what each defence sends, until all is done or the time is over.

A scenario says what is attacked: it plans findings, makes trials of them and a report of what came. All trials have
their first turn before any has its second, so that an audit that is stopped has compared them on the same samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple, Protocol, TypeVar

from situs.audit.deadline import Deadline
from situs.errors import counted, verb
from situs.findings import Finding, Metric, ThreatModel
from situs.gate import Report
from situs.progress import task

KEEP_EVERY = 5.0
"""Seconds, at least, between two looks at a report that is not whole yet."""

FINDS = "nothing: what it does not find may still be there"
"""What an attack proves that only searches."""

AnyReport = TypeVar("AnyReport", bound=Report)


class Card(NamedTuple):
    """An attack for a reader: what the attacker knows, what it proves, the paper it stands for, how ours differs."""

    attack: str
    scenario: str
    knows: str
    proves: str
    paper: str
    difference: str


class Trial(Protocol):
    """One attacker on what one defence sends. at, total: parts that are behind it, of all. ended: whether it has no
    further turn although parts are left."""

    at: int

    @property
    def total(self) -> int: ...

    @property
    def ended(self) -> bool: ...

    def turn(self, deadline: Deadline, left: int) -> Iterator[Finding]:
        """The next part, and what came of all until then. left: turns of this round that are still to come."""
        ...


class Scenario(Protocol[AnyReport]):
    """What is attacked, by whom and how it is scored. things: what its samples are called. metrics: by name."""

    name: ClassVar[str]
    threat: ClassVar[ThreatModel]
    metrics: ClassVar[Mapping[str, Metric]]

    @property
    def things(self) -> str: ...

    @staticmethod
    def cards() -> Iterable[Card]:
        """Its attacks."""
        ...

    def planned(self) -> Iterable[Finding]:
        """Every finding that is asked for, not run yet."""
        ...

    def trials(self) -> Iterable[Finding | Trial]:
        """Refusals, and trials of all else."""
        ...

    def report(self, findings: Mapping[Hashable, Finding], stopped: str | None) -> AnyReport:
        """What came of it until now, by `Finding.key`; stopped: by what, None where it is whole."""
        ...

    def bounds(self, report: AnyReport, deadline: Deadline) -> Iterable[Finding]:
        """What a pass needs beside the attacks; nothing where there is no gate."""
        ...


def run(
    scenario: Scenario[AnyReport],
    deadline: Deadline | None = None,
    keep: Callable[[AnyReport], object] | None = None,
) -> AnyReport:
    """Runs all of a scenario. When the deadline's time is over, or on Ctrl-C, what is there is the report, and says so.

    keep: is given it now and then while it grows, and at its end.
    """
    deadline = deadline or Deadline()
    findings = {finding.key: finding for finding in scenario.planned()}
    kept = time.monotonic()

    def so_far(reason: str) -> AnyReport:
        return scenario.report(findings, stopped_by([*findings.values()], deadline, reason))

    try:
        for finding in take_turns(scenario.trials(), deadline):
            findings[finding.key] = finding
            if keep is not None and finding.attacked and time.monotonic() - kept >= KEEP_EVERY:
                keep(so_far("the end of its process"))
                kept = time.monotonic()
        deadline.closed = True  # before anything else: a Ctrl-C from here on must find it so
    except KeyboardInterrupt:
        deadline.interrupt()
        deadline.closed = True
    report = so_far(deadline.reason)
    if keep is not None:
        keep(report)
    return report if deadline.spent() else _bounded(scenario, report, deadline, keep)


def _bounded(
    scenario: Scenario[AnyReport],
    report: AnyReport,
    deadline: Deadline,
    keep: Callable[[AnyReport], object] | None,
) -> AnyReport:
    """The report with what a pass needs beside the attacks."""
    deadline.closed = False
    more, stopped = dict[Hashable, Finding](), report.stopped
    try:
        for finding in scenario.bounds(report, deadline):
            more[finding.key] = finding
    except KeyboardInterrupt:  # a sample that is above stays so; without the whole bound nothing passes
        deadline.interrupt()
        stopped = stopped or "Ctrl-C, before the oracle had answered"
    deadline.closed = True
    if not more and stopped == report.stopped:
        return report
    report = replace(report, findings=[*report.findings, *more.values()], stopped=stopped)
    if keep is not None:
        keep(report)
    return report


def take_turns(parts: Iterable[Finding | Trial], deadline: Deadline) -> Iterator[Finding]:
    """Refusals, then what the trials come to, turn by turn: a later finding of a key takes the place of those before.

    It ends when the deadline is over, or on Ctrl-C; that is raised unless the attack could keep what it had found.
    """
    every: list[Trial] = []
    for part in parts:
        if isinstance(part, Finding):
            yield part
        else:
            every.append(part)
    with task("attacks", sum(trial.total for trial in every)) as shown:
        trials = every
        while trials:
            for number, trial in enumerate(trials):
                if deadline.spent():
                    return
                for finding in trial.turn(deadline, len(trials) - number):
                    shown.tell(sum(part.at for part in every))
                    yield finding
            trials = [trial for trial in trials if trial.at < trial.total and not trial.ended]


def stopped_by(findings: Sequence[Finding], deadline: Deadline, reason: str) -> str | None:
    """By what and how far it came; None where all that was asked for is there."""
    cut = any(finding.why("stopped") for finding in findings if deadline.spent() or finding.why("fallback") is None)
    if not (cut or deadline.interrupted or any(finding.status == "not_run" for finding in findings)):
        return None
    return f"{reason}, with {' '.join(finished(findings))}"


def finished(findings: Sequence[Finding]) -> tuple[str, str]:
    """How far an audit came: "2 of 5", and of what. What does not apply is no attack, and neither is a bound; what ran
    by itself is one."""
    attacks = [finding for finding in findings if not finding.bound]
    refused = sum(finding.status == "refused" for finding in attacks)
    done, every = sum(finding.status == "done" for finding in attacks), len(attacks) - refused
    others = f" ({refused} {verb(refused, 'do')} not apply)" if refused else ""
    return f"{done} of {every}", f"{counted(every, 'attacks').split()[1]} finished{others}"
