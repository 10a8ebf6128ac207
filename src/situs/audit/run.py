"""The runner of audits: attacks take turns against what each defence sends, until all are done or the time is over.

A scenario says what is attacked: it plans findings, gives the trials, and makes a report of the findings so far. All
trials have their first turn before any has its second, so that a stopped audit has compared them on the same samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple, Protocol, TypeVar

from situs.audit.deadline import Deadline
from situs.errors import counted, verb
from situs.findings import HONEST, Finding, ThreatModel
from situs.gate import Report
from situs.progress import task

KEEP_EVERY = 5.0
"""Least seconds between two calls of `keep` with an unfinished report."""

FINDS = "nothing: a failed attack may have missed the data"
"""What a search proves."""

AnyReport = TypeVar("AnyReport", bound=Report)
Report_co = TypeVar("Report_co", bound=Report, covariant=True)


class Card(NamedTuple):
    """An attack for a reader: what it needs, what it proves, the paper that it implements, how ours differs, and the
    benchmark or study that measures it, and the threat model."""

    attack: str
    scenario: str
    needs: str
    proves: str
    paper: str
    difference: str
    measured: str = ""
    threat: ThreatModel = HONEST


class Trial(Protocol):
    """One attack on what one defence sends. at, total: how many parts of it are done, of how many. ended: whether it
    has no further turn although parts are left."""

    at: int

    @property
    def total(self) -> int: ...

    @property
    def ended(self) -> bool: ...

    def turn(self, deadline: Deadline, left: int) -> Iterator[Finding]:
        """Attacks the next part and gives the findings so far. left: turns still to come in this round."""
        ...


class Scenario(Protocol[Report_co]):
    """What is attacked, by whom and how it is scored."""

    name: ClassVar[str]

    @staticmethod
    def cards() -> Iterable[Card]:
        """A card for each of its attacks."""
        ...

    def planned(self) -> Iterable[Finding]:
        """A finding with the status not_run for every attack that was asked for."""
        ...

    def trials(self) -> Iterable[Finding | Trial]:
        """Findings of attacks that do not apply, and trials of all others."""
        ...

    def report(self, findings: Mapping[Hashable, Finding], stopped: str | None) -> Report_co:
        """The report of findings by `Finding.key`. stopped: what stopped the audit, None where it is whole."""
        ...


def run(
    scenario: Scenario[AnyReport],
    deadline: Deadline | None = None,
    keep: Callable[[AnyReport], object] | None = None,
    enough: Callable[[Finding], bool] = lambda _: False,
    later: int = 0,
    bounds: Callable[[AnyReport, Deadline], Iterable[Finding]] | None = None,
) -> AnyReport:
    """Runs a scenario. When the deadline's time is over, or on Ctrl-C, the report holds what is done, and says so.

    keep: called with the report now and then while it grows, and at its end. enough, later: see `take_turns`. bounds:
    gives those that a pass needs beside the attacks.
    """
    deadline = deadline or Deadline()
    findings = {finding.key: finding for finding in scenario.planned()}
    kept = time.monotonic()

    def so_far(reason: str) -> AnyReport:
        return scenario.report(findings, stopped_by([*findings.values()], deadline, reason))

    try:
        for finding in take_turns(scenario.trials(), deadline, enough, later):
            findings[finding.key] = finding
            if keep is not None and finding.attacked and time.monotonic() - kept >= KEEP_EVERY:
                keep(so_far("the end of the audit's process"))
                kept = time.monotonic()
        deadline.closed = True  # before anything else: a Ctrl-C from here on must find it so
    except KeyboardInterrupt:
        deadline.interrupt()
        deadline.closed = True
    report = so_far(deadline.reason)
    if keep is not None:
        keep(report)
    return report if bounds is None or deadline.spent() else _bounded(bounds, report, deadline, keep)


def _bounded(
    bounds: Callable[[AnyReport, Deadline], Iterable[Finding]],
    report: AnyReport,
    deadline: Deadline,
    keep: Callable[[AnyReport], object] | None,
) -> AnyReport:
    """The report with the bounds that a pass needs beside the attacks."""
    deadline.closed = False
    more, stopped = dict[Hashable, Finding](), report.stopped
    try:
        for finding in bounds(report, deadline):
            more[finding.key] = finding
    except KeyboardInterrupt:  # a sample that is above stays so; without the whole bound nothing passes
        deadline.interrupt()
        stopped = stopped or "Ctrl-C, before the oracle had finished"
    deadline.closed = True
    if not more and stopped == report.stopped:
        return report
    report = replace(report, findings=[*report.findings, *more.values()], stopped=stopped)
    if keep is not None:
        keep(report)
    return report


def take_turns(
    parts: Iterable[Finding | Trial],
    deadline: Deadline,
    enough: Callable[[Finding], bool] = lambda _: False,
    later: int = 0,
) -> Iterator[Finding]:
    """Refusals, then the trials' findings, turn by turn: a later finding of a key replaces the earlier ones.

    It ends when the deadline is over, or after a turn of which a finding is enough. later: turns of what follows. A
    Ctrl-C is raised unless the attack could return what it had.
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
                over = False
                for finding in trial.turn(deadline, len(trials) - number + later):
                    shown.tell(sum(part.at for part in every))
                    over = over or enough(finding)
                    yield finding
                if over:
                    return
            trials = [trial for trial in trials if trial.at < trial.total and not trial.ended]


def stopped_by(findings: Sequence[Finding], deadline: Deadline, reason: str) -> str | None:
    """What stopped an audit, and how many attacks were finished; None where all were."""
    cut = any(finding.why("stopped") for finding in findings if deadline.spent() or finding.why("fallback") is None)
    if not (cut or deadline.interrupted or any(finding.status == "not_run" for finding in findings)):
        return None
    return f"{reason}, with {' '.join(finished(findings))}"


def finished(findings: Sequence[Finding]) -> tuple[str, str]:
    """("2 of 5", "attacks finished"). Attacks that do not apply and bounds are not counted; fallbacks are."""
    attacks = [finding for finding in findings if not finding.bound]
    refused = sum(finding.status == "refused" for finding in attacks)
    done, every = sum(finding.status == "done" for finding in attacks), len(attacks) - refused
    others = f" ({refused} {verb(refused, 'do')} not apply)" if refused else ""
    return f"{done} of {every}", f"{counted(every, 'attacks').split()[1]} finished{others}"
