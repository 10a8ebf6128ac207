"""Every scenario by name, and every attack as the table that docs/reference/attacks.md prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from situs.audit.engine import Images
from situs.audit.run import Card
from situs.audit.split.audit import Split
from situs.audit.split.text import Prompts
from situs.audit.text.audit import Texts
from situs.locks.attacks.audit import ATTACKS as LOCK
from situs.plugins import Plugins
from situs.results import Cell, Table


class Lock:
    """Weights whose channels a key permutes."""

    name: ClassVar[str] = "lock"

    @staticmethod
    def cards() -> Iterator[Card]:
        proves = "the fraction of the key that was recovered, if the auditor has the true key"
        for name, attack in LOCK.items():
            yield Card(name, "lock", attack.needs, proves, "ours", attack.about, "benchmarks/lock_attacks.py")


SCENARIOS: Plugins[type[Images | Texts | Split | Prompts | Lock]] = Plugins(
    {"images": Images, "texts": Texts, "split": Split, "prompts": Prompts, "lock": Lock},
    "situs.scenarios",
    ("name", "cards"),
)
"""Every scenario by name."""


def cards() -> list[Card]:
    """Every attack of every scenario."""
    return [card for scenario in SCENARIOS.values() for card in scenario.cards()]


def attacks_table() -> Table:
    """A row for each attack."""
    header = ("attack", "scenario", "threat model", "needs", "proves", "paper", "how ours differs", "measured by")
    rows: list[list[Cell]] = [[card.attack, card.scenario, card.threat.name, *card[2:-1]] for card in cards()]
    return Table("Attacks", header, rows)
