"""The result of a search for defences: for each the setting that it names, what was tried, and its cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from situs.audit.sweep.ladder import Cost, with_old_keys
from situs.errors import counted
from situs.gate import Limit
from situs.results import Cell, Result, Summary, Table

Answer = Literal["above", "inconclusive", "passed"]
"""What a gate says of a setting. inconclusive (not a pass): no attack applied, or none proved anything."""


@dataclass(frozen=True)
class Trial:
    """One setting against the attackers. worst: of the most exposed image, by `metric`; None where nothing was tried.
    by: the attack. reason: the gate's. unseen: whether the search had not seen these images."""

    setting: str
    answer: Answer
    worst: float | None
    by: str
    reason: str
    images: int
    unseen: bool = False
    metric: str = ""

    @property
    def exposed(self) -> str:
        """ "psnr 14.2" of the most exposed image."""
        return "not attacked" if self.worst is None else f"{self.metric} {self.worst:.3g}".strip()

    @property
    def cell(self) -> str:
        value = "" if self.worst is None else f", {self.exposed} by {self.by}"
        return f"{self.answer}{value}"


@dataclass(frozen=True)
class Remedy:
    """One defence. named: its weakest setting that passed, also on images that the search had not seen; None where
    there is none, and `reason` says why. seen, unseen: the gate's answers to it; weaker, weaker_unseen: to the next
    weaker one. cut: whether the search was stopped before its end. untried_from: the strongest setting tried on unseen
    images, where these ran out before the settings did."""

    defence: str
    named: str | None
    reason: str
    seen: Trial | None = None
    unseen: Trial | None = None
    weaker: Trial | None = None
    weaker_unseen: Trial | None = None
    cost: Cost | None = None
    tried: Sequence[Trial] = ()
    cut: bool = False
    untried_from: str | None = None


@dataclass(frozen=True)
class Remedies(Result):
    """The search for every defence. searched, held_out: how many images the search saw, and how many it did not."""

    file: ClassVar[str] = "defences"

    model: str
    limit: Limit
    remedies: Sequence[Remedy]
    searched: int
    held_out: int
    attacks: Sequence[str]
    stopped: str | None = field(default=None, kw_only=True)
    notes: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    @property
    def with_setting(self) -> list[Remedy]:
        """Those that name a setting."""
        return [remedy for remedy in self.remedies if remedy.named is not None]

    def summary(self) -> Summary:
        """The table of settings, and the sentence."""
        title = f"{self.model}: weakest settings under which {', '.join(self.attacks)} stay at {self.limit} or below"
        tables = [Table(title, *remedy_table(self))] if self.remedies else []
        if self.with_setting:
            tables.append(Table("What they cost", *cost_table(self)))
        notes = (
            [] if self.stopped is None or not self.with_setting else [f"Stopped by {self.stopped}."]
        )  # else said first
        return Summary(verdict(self), tuple(tables), (*notes, *([UNTUNED] if self.with_setting else [])))

    def numbers(self) -> dict[str, Any]:
        """Every trial."""
        return {
            "schema": "situs-audit-defences/1",
            "model": self.model,
            "limit": str(self.limit),
            "attacks": list(self.attacks),
            "searched": self.searched,
            "held_out": self.held_out,
            "stopped": self.stopped,
            "verdict": verdict(self),
            "accuracy": UNTUNED,
            "defences": [asdict(remedy, dict_factory=with_old_keys) for remedy in self.remedies],
            "notes": dict(self.notes),
        }


UNTUNED = (
    "The cost in accuracy was not measured: the cosine with the gradient is that of one step. Train under a setting to "
    "measure it."
)


def exposures_by_metric(search: Remedies) -> dict[str, dict[str, tuple[float, bool]]]:
    """metric -> setting -> (the most exposed image, whether the setting is named), the most exposed setting first.

    Of each defence the setting that it names, else the last that was tried; by the metric in which its most exposed
    image is nearest to a limit or farthest above one.
    """
    values: dict[str, dict[str, tuple[float, bool]]] = {}
    for remedy in search.remedies:
        trial = remedy.unseen or remedy.seen or (remedy.tried[-1] if remedy.tried else None)
        if trial is not None and trial.worst is not None:
            setting = remedy.named or f"{remedy.defence}, {trial.setting}"
            values.setdefault(trial.metric, {})[setting] = trial.worst, remedy.named is not None
    return {metric: dict(sorted(bars.items(), key=lambda bar: -bar[1][0])) for metric, bars in values.items()}


def remedy_table(search: Remedies) -> tuple[list[str], list[list[Cell]]]:
    """A row for each defence: what keeps the limit."""
    rows: list[list[Cell]] = []
    for remedy in search.remedies:
        trials = (remedy.unseen, remedy.weaker, remedy.weaker_unseen)
        rows.append(
            [remedy.defence, remedy.named, *(None if trial is None else trial.cell for trial in trials), remedy.reason]
        )
    header = ["defence", "weakest that passes", "on unseen images", "next weaker", "the same on unseen images"]
    return [*header, "remark"], rows


def cost_table(search: Remedies) -> tuple[list[str], list[list[Cell]]]:
    """A row for each setting that was found."""
    rows: list[list[Cell]] = []
    for remedy in search.with_setting:
        cost = remedy.cost
        paid = [None] * 3 if cost is None else [f"{cost.cosine:.3f}", f"{100 * cost.share:.3g} %", cost.promise]
        rows.append([remedy.named, *paid])
    return ["setting", "cosine with the gradient", "sent", "promise"], rows


def verdict(search: Remedies) -> str:
    """What a reader needs first."""
    if not search.with_setting:
        if search.stopped is not None:
            return f"Stopped by {search.stopped} before a setting was found: no defence was judged."
        return (
            f"No setting that was tried passes the gate {search.limit} against informed attackers. A setting to "
            "which no attack applies is inconclusive (not a pass)."
        )
    named = "; ".join(str(remedy.named) for remedy in search.with_setting)
    counts = {
        search.held_out if remedy.unseen is None else remedy.unseen.images for remedy in search.with_setting
    }  # whole batches
    unseen = f"{counted(min(counts), 'images')}{' or more' * (len(counts) > 1)}"
    others = [remedy.defence for remedy in search.remedies if remedy.named is None and not remedy.cut]
    left = f" None was found for {', '.join(others)}." if others else ""
    return (
        f"These settings pass the gate {search.limit}: {named}. Each passed on {unseen} that the search had not "
        f"seen, against {', '.join(search.attacks)}; another attack may do better.{left}"
    )
