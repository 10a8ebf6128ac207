"""What a text audit came to: a row for each defence, its sentence, its tables, and what a gate says of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from situs.audit.text.attack import NAME
from situs.audit.text.found import Read
from situs.errors import SitusError, counted, unknown_name, verb
from situs.findings import Fact, Status
from situs.gate import Judgement, Limit, Ruling, Worst
from situs.results import Cell, Result, Summary, Table, Tone, percent

SCHEMA = "situs-audit-texts/1"
"""The form of texts.json."""

METRICS = {
    "words": "the share of a sentence's tokens whose word is known to be in the batch, of the worst sentence",
    "tokens": "the share of a sentence's tokens that are known with their place in it, of the worst sentence",
    "sentences": "the share of the sentences that are known whole",
    "picked": "the share of the sentences that are known whole, or that one who has candidates with one word changed "
    "is sure of",
}
"""What a gate may limit; each rises with the leak."""


@dataclass(frozen=True)
class Row:
    """One defence. reads: the sentences that were attacked. facts: of each upload. reasons: why not all was found.

    partial: how far it came where it was stopped. seconds: for all its uploads; of a row that is the same attack on the
    same numbers as another, None.
    """

    defence: str
    status: Status = "not_run"
    reads: Sequence[Read] = ()
    facts: Sequence[Mapping[str, Fact]] = ()
    reasons: Sequence[str] = ()
    partial: str | None = None
    seconds: float | None = 0.0

    @property
    def tokens(self) -> int:
        return sum(read.tokens for read in self.reads)

    @property
    def whole(self) -> int:
        return sum(read.whole for read in self.reads)

    @property
    def picked(self) -> int:
        """Sentences that are known whole, or that one who has candidates is sure of."""
        return sum(read.whole or bool(read.picked) for read in self.reads)

    @property
    def shares(self) -> dict[str, float]:
        """Over all its tokens and sentences."""
        tokens = max(self.tokens, 1)
        return {
            "words": sum(sum(read.known) for read in self.reads) / tokens,
            "tokens": sum(read.right for read in self.reads) / tokens,
            "sentences": self.whole / max(len(self.reads), 1),
            "picked": self.picked / max(len(self.reads), 1),
        }


@dataclass(frozen=True)
class TextAudit(Result):
    """What gradients give away of sentences. about: what each defence is. names: of all sentences. shown: each word's
    id as the tokeniser writes it, empty where the sentences are not to be shown. stopped: by what, None where it is
    whole. notes: what is special about the model, by name.
    """

    file: ClassVar[str] = "texts"

    model: str
    rows: Sequence[Row]
    about: Mapping[str, str]
    names: Sequence[str]
    batch: int
    shown: Mapping[int, str]
    limit: Limit | None = field(default=None, kw_only=True)
    stopped: str | None = field(default=None, kw_only=True)
    notes: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    @property
    def private(self) -> bool:
        return bool(self.shown)

    def without_pictures(self) -> Self:
        """The same without the sentences: its page is then for everyone."""
        return replace(self, shown={})

    def judge(self, **limit: float) -> Ruling:
        """Whether no sentence came back beyond a limit on one metric, as `judge(tokens=0.2)`."""
        if len(limit) != 1:
            raise SitusError(field="limit", value=limit, allowed="one metric with its bound, as tokens=0.2")
        [(metric, bound)] = limit.items()
        return judge_texts(self, parse_text_limit(f"{metric}={bound}"))

    @property
    def ruling(self) -> Ruling | None:
        """What the gate says; None without one."""
        return None if self.limit is None else judge_texts(self, self.limit)

    @property
    def tone(self) -> Tone:
        """Bad where a word of the batch is known, whatever the gate allows; never good, for the attack is a search."""
        if any(any(row.shares.values()) for row in self.rows):
            return "bad"
        return "unsure" if self.ruling is None else self.ruling.tone

    def lines(self, defence: str) -> list[str]:
        """For the attack on a defence what it got, by the gate's metric."""
        metric = "tokens" if self.limit is None else self.limit.metric
        rows = [row for row in self.rows if row.defence == defence]
        return [
            f"{NAME}: {metric} {row.shares[metric]:.4g} over {counted(len(row.reads), 'sentences')}"
            if row.reads
            else f"{NAME}: not attacked: {'; '.join(row.reasons) or 'not run before the stop'}"
            for row in rows
        ]

    def summary(self) -> Summary:
        """The verdict and a row for each defence; below them what the gate says."""
        title = f"{self.model}, {counted(len(self.names), 'sentences')} in batches of {self.batch}"
        tables = [Table(title, HEADER, [cells(row) for row in self.rows])]
        if said := reasons(self):
            tables.append(Table("What was not found, and why", ("defence", "reason"), said))
        ruling = self.ruling
        return Summary(verdict(self), tuple(tables), () if ruling is None else (ruling.sentence,))

    def numbers(self) -> dict[str, Any]:
        """Every sentence's numbers; no words."""
        return {
            "schema": SCHEMA,
            "attack": NAME,
            "verdict": verdict(self),
            "batch": self.batch,
            "stopped": self.stopped,
            "gate": None if self.ruling is None else self.ruling.to_json(),
            "defences": [_numbers(row) for row in self.rows],
        }


HEADER = ("defence", "tokens", "words known", "tokens right", "whole sentences", "told from candidates", "seconds")


def cells(row: Row) -> list[Cell]:
    """A row of the table."""
    if not row.reads:
        return [row.defence, None, None, None, "not attacked", None, None]
    shares, counts = row.shares, [f"{number} of {len(row.reads)}" for number in (row.whole, row.picked)]
    seconds = None if row.seconds is None else f"{row.seconds:.1f}"
    return [row.defence, row.tokens, *(_found(shares[name]) for name in ("words", "tokens")), *counts, seconds]


def _found(share: float, none: str = "none found") -> str:
    """A share; of nothing, that nothing was found, for 0 % would read as if all were safe."""
    return percent(share) if share else none


def reasons(audit: TextAudit) -> list[tuple[str, str]]:
    """(defence, why not all was found), each once."""
    found = [(row.defence, said) for row in audit.rows for said in dict.fromkeys(row.reasons)]
    return found + [(row.defence, f"stopped after {row.partial}") for row in audit.rows if row.partial is not None]


def verdict(audit: TextAudit) -> str:
    """What a manager can read: what came back under each defence, and what that does not say."""
    said = [] if audit.stopped is None else [f"A partial result: stopped by {audit.stopped}."]
    for row in audit.rows:
        if not row.reads:
            said.append(f"{row.defence}: not attacked, which does not mean private.")
            continue
        shares = row.shares
        said.append(
            f"{row.defence}: {row.whole} of {counted(len(row.reads), 'sentences')} recovered word for word from one "
            f"step on {audit.batch}, {_found(shares['tokens'], 'none')} of the tokens in their place, "
            f"{_found(shares['words'], 'none')} of them known as words."
        )
        if row.picked > row.whole:
            more = f"{row.picked - row.whole} of the others"
            said.append(f"One who has candidates with one word changed is sure of {more}: this is not hidden.")
    if any(row.reads and row.whole < len(row.reads) for row in audit.rows):
        said.append("What was not recovered was not found by this attack; that is no proof that it is private.")
    return " ".join(said)


# --- the gate -------------------------------------------------------------------------------------------------------


def parse_text_limit(text: str) -> Limit:
    """ "tokens=0.2" as a limit."""
    name, _, number = text.partition("=")
    if name not in METRICS:
        raise unknown_name("metric of a gate for texts", name, METRICS, field="fail_above")
    try:
        bound = float(number)
    except ValueError:
        bound = math.nan
    if not 0 <= bound < 1:
        raise SitusError(field="fail_above", value=text, allowed="METRIC=SHARE, a share in [0, 1), as tokens=0.2")
    return Limit(name, bound)


def judge_texts(audit: TextAudit, limit: Limit) -> Ruling:
    """Every defence against the limit. It is a search: it can fail a gate, and what it does not find proves nothing."""
    return Ruling(limit, [_judge(audit, row, limit) for row in audit.rows])


def _judge(audit: TextAudit, row: Row, limit: Limit) -> Judgement:
    worst, shown = None, ""
    if row.reads:
        value, name = max(((_value(read, limit.metric), read.name) for read in row.reads), key=lambda one: one[0])
        if limit.metric in ("sentences", "picked"):
            value = row.shares[limit.metric]
        worst = Worst(NAME, name, value, limit.metric, limit.bound)
        shown = f"the worst, {name}, has {limit.metric} {value:.4g}"
        if value > limit.bound:
            return Judgement(row.defence, "above", f"{shown}, above {limit.bound:g}", worst)
    if row.status == "refused" or not (row.reads or row.partial or row.status == "not_run"):
        return Judgement(row.defence, "nothing_applied", "; ".join(row.reasons) or "nothing was attacked", worst)
    gaps = [f"{NAME} was stopped after {row.partial}"] if row.partial is not None else []
    if row.status == "not_run" or len(row.reads) < len(audit.names):
        told = verb(len(row.reads), "were")
        gaps.append(f"{len(row.reads)} of {counted(len(audit.names), 'sentences')} {told} attacked")
    if row.picked > row.whole:
        gaps.append(f"{counted(row.picked - row.whole, 'sentences')} not found can be told from candidates for sure")
    gaps += [*dict.fromkeys(row.reasons), f"what {NAME} does not find may still be there"]
    return Judgement(row.defence, "incomplete", "; ".join([*gaps, *([shown] if shown else [])]), worst)


def _value(read: Read, metric: str) -> float:
    values = {
        "words": sum(read.known) / read.tokens,
        "tokens": read.right / read.tokens,
        "sentences": float(read.whole),
        "picked": float(read.whole or bool(read.picked)),
    }
    return values[metric]


def _numbers(row: Row) -> dict[str, Any]:
    return {
        "defence": row.defence,
        "status": row.status,
        "tokens": row.tokens,
        "shares": row.shares,
        "whole": row.whole,
        "picked": row.picked,
        "reasons": list(dict.fromkeys(row.reasons)),
        "partial": row.partial,
        "seconds": row.seconds,
        "uploads": [dict(fact) for fact in row.facts],
        "sentences_read": [
            {
                "name": read.name,
                "tokens": read.tokens,
                "known": sum(read.known),
                "right": read.right,
                "whole": read.whole,
                "picked": read.picked,
            }
            for read in row.reads
        ],
    }
