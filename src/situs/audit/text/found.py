"""What one who sees an upload can say of the sentences behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from situs.audit.attacks.base import Fact
from situs.audit.text.victim import Sentence

UNNAMED = -1
"""A token of a sentence whose word the attacker cannot name."""


@dataclass(frozen=True)
class Found:
    """words: those that are in the batch, wherever they stand. sentences: put together, each held against the gradients
    of the second block; of a batch of one at least its words at places that no other word passes at or whose rows match
    the place's, `UNNAMED` between them. facts: ranks and counts. reason: why nothing, or not all, was found; partial:
    how far the attack came where it was stopped. placed: words with their places, in whichever sentence of the batch.
    """

    words: frozenset[int] = frozenset()
    sentences: tuple[Sentence, ...] = ()
    facts: Mapping[str, Fact] = field(default_factory=dict)
    reason: str | None = None
    partial: str | None = None
    placed: frozenset[tuple[int, int]] = frozenset()
