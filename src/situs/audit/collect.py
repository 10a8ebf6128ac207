"""What every audit of gradients comes to, and the one loop that collects it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

from torch import Tensor

from situs.audit.cases import Case, Outcome, TestSet
from situs.audit.deadline import Deadline
from situs.audit.defences import Step
from situs.audit.engine import run
from situs.audit.scores.scoring import Lpips
from situs.errors import counted, verb
from situs.results import Result, Tone

KEEP_EVERY = 5.0
"""Seconds, at least, between two looks at a result that is not whole yet."""


@dataclass(frozen=True)
class Leak(Result):
    """What came of an audit's cases. names: of all images; images: the first originals, [m, C, H, W] in [0, 1].

    stopped: by what and how far it came, None where it is whole. notes: what is special about the model, by name.
    """

    outcomes: Sequence[Outcome]
    names: Sequence[str]
    images: Tensor
    stopped: str | None = field(default=None, kw_only=True)
    notes: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    @property
    def pairs(self) -> list[Outcome]:
        """What was begun, or refused."""
        return [outcome for outcome in self.outcomes if outcome.status != "not_run"]

    @property
    def attacked(self) -> list[Outcome]:
        """What was attacked; a bound is told the images, and is no attack."""
        return [outcome for outcome in self.outcomes if outcome.attacked and not outcome.is_bound]

    @property
    def tone(self) -> Tone:
        """Bad where an image came back whole; what did not is proved by nothing here."""
        return "bad" if any(pair.exact for pair in self.attacked) else "unsure"

    @property
    def private(self) -> bool:
        return any(outcome.pictures is not None for outcome in self.outcomes)

    def without_pictures(self) -> Self:
        """The same without the images and what was recovered of them: its page is then for everyone."""
        return replace(self, outcomes=[replace(each, pictures=None) for each in self.outcomes], images=self.images[:0])


Found = TypeVar("Found", bound=Leak)


def collect(
    cases: Sequence[Case],
    test: TestSet,
    make: Callable[[list[Outcome], str | None], Found],
    *,
    step: Step,
    deadline: Deadline,
    lpips: Lpips | None = None,
    keep: Callable[[Found], None] | None = None,
) -> Found:
    """Runs the cases. make: what came of them, and by what it was stopped -> the result.

    When the deadline's time is over, or on Ctrl-C, what is there is the result. keep: is given it now and then while it
    grows, and at its end.
    """
    found = {case: Outcome(case, "not_run") for case in cases if not case.by_itself}
    told = time.monotonic()

    def so_far(reason: str) -> Found:
        outcomes = [found[case] for case in cases if case in found]
        return make(outcomes, _stopped(outcomes, deadline, reason))

    try:
        for outcome in run(cases, test, step, deadline, lpips):
            found[outcome.case] = outcome
            if keep is not None and outcome.attacked and time.monotonic() - told >= KEEP_EVERY:
                keep(so_far("the end of its process"))
                told = time.monotonic()
        deadline.closed = True  # before anything else: a Ctrl-C from here on must find it so
    except KeyboardInterrupt:
        deadline.interrupt()
        deadline.closed = True
    whole = so_far(deadline.reason)
    if keep is not None:
        keep(whole)
    return whole


def _stopped(outcomes: Sequence[Outcome], deadline: Deadline, reason: str) -> str | None:
    """By what and how far it came; None where all that was asked for is there."""
    cut = any(each.partial for each in outcomes if deadline.spent() or not each.case.by_itself)
    if not (cut or deadline.interrupted or any(each.status == "not_run" for each in outcomes)):
        return None
    return f"{reason}, with {' '.join(finished(outcomes))}"


def finished(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """How far an audit came: "2 of 5", and of what. What does not apply is no attack, and neither is a bound; what ran
    by itself is one."""
    outcomes = [each for each in outcomes if not each.is_bound]
    refused = sum(each.status == "refused" for each in outcomes)
    done, every = sum(each.status == "done" for each in outcomes), len(outcomes) - refused
    others = f" ({refused} {verb(refused, 'do')} not apply)" if refused else ""
    return f"{done} of {every}", f"{counted(every, 'attacks').split()[1]} finished{others}"
