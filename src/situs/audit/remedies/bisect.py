"""The weakest setting of a ladder that passes, found with few trials.

A ladder's rungs go from weak to strong, and a stronger one gives away no more: that is assumed while searching, and
what is named was tried, as was the rung below it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

Answer = Literal["above", "inconclusive", "passed"]
"""What a gate says of a rung. inconclusive: no attack applied, or none proved anything, which is no pass."""


class Found(NamedTuple):
    """first_kept: the weakest rung on which no image was above; None where every one has such. named: the weakest that
    passes; None where none does."""

    first_kept: int | None
    named: int | None


def climb(rungs: int, ask: Callable[[int], Answer], near: int | None = None) -> Found:
    """Both ends on a ladder of so many rungs. ask: what the gate says of a rung, which is asked once each. near: where
    to begin."""
    known: dict[int, Answer] = {}

    def answer(rung: int) -> Answer:
        if rung not in known:
            known[rung] = ask(rung)
        return known[rung]

    kept = _least(0, rungs - 1, lambda rung: answer(rung) != "above", near)
    if kept is None:
        return Found(None, None)
    named = _least(kept, rungs - 1, lambda rung: answer(rung) == "passed", kept if near is not None else None)
    if named is None:  # the strongest may be beyond what any attack applies to, and one between may pass
        named = min((rung for rung, said in known.items() if said == "passed" and rung >= kept), default=None)
    return Found(kept, named)


def _least(low: int, high: int, holds: Callable[[int], bool], near: int | None = None) -> int | None:
    """The least rung from `low` to `high` that holds, where all above it do; None where not even the highest does.

    near: by strides that double from there, else from both ends.
    """
    if near is not None:
        low, high = _bracket(low, high, holds, near)
    if not holds(high):
        return None
    if holds(low):
        return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _bracket(low: int, high: int, holds: Callable[[int], bool], near: int) -> tuple[int, int]:
    """A rung that does not hold and a higher one that does; twice the same end where that is not to be had."""
    here, stride, down = near, 1, holds(near)
    while here != (low if down else high):
        there = max(low, here - stride) if down else min(high, here + stride)
        if holds(there) != down:
            return (there, here) if down else (here, there)
        here, stride = there, 2 * stride
    return here, here
