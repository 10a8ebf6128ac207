"""The weakest setting of a ladder that passes, found with few trials.

A ladder's rungs go from weak to strong, and a stronger one gives away no more: that is assumed while searching, and
what is named was tried, as was the rung below it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

Answer = Literal["above", "not judged", "passed"]
"""What a gate says of a rung. not judged: no attack applied, or none proved anything, which is no pass."""


class Found(NamedTuple):
    """first_kept: the weakest rung on which no image was above; None where every one has such. named: the weakest that
    passes; None where none does."""

    first_kept: int | None
    named: int | None


def climb(rungs: int, ask: Callable[[int], Answer]) -> Found:
    """Both ends on a ladder of so many rungs. ask: what the gate says of a rung, which is asked once each."""
    known: dict[int, Answer] = {}

    def answer(rung: int) -> Answer:
        if rung not in known:
            known[rung] = ask(rung)
        return known[rung]

    kept = _least(0, rungs - 1, lambda rung: answer(rung) != "above")
    if kept is None:
        return Found(None, None)
    named = _least(kept, rungs - 1, lambda rung: answer(rung) == "passed")
    if named is None:  # the strongest may be beyond what any attack applies to, and one between may pass
        named = min((rung for rung, said in known.items() if said == "passed" and rung >= kept), default=None)
    return Found(kept, named)


def _least(low: int, high: int, holds: Callable[[int], bool]) -> int | None:
    """The least rung from `low` to `high` that holds, where all above it do; None where not even the highest does."""
    if not holds(high):
        return None
    if holds(low):
        return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
