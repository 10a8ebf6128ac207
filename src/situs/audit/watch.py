"""How an audit that may take long speaks and stops: lines of progress, a time limit, Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable

from situs.config import check_range


def _silent(_: str) -> None:
    """Says nothing."""


class Watch:
    """Held by one audit and asked by its attacks.

    The time limit is for the whole audit. Each attack's turn is an even share of what is left, so that a slow one
    does not eat the time of those behind it; what a quick one leaves, they have.
    """

    def __init__(
        self,
        say: Callable[[str], None] = _silent,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if seconds is not None:
            check_range("time_limit", seconds, 0, flag="--time-limit", low_open=True)
        self.say, self.seconds, self.interrupted = say, seconds, False
        self._clock = clock
        self._end = None if seconds is None else clock() + seconds
        self._begun, self._turn = clock(), self._end

    def begin(self, left: int) -> None:
        """Opens a turn: one of `left` that are still to come, itself among them."""
        if self._end is not None:
            now = self._begun = self._clock()
            self._turn = now + max(0.0, self._end - now) / left

    def over(self) -> bool:
        """Whether the turn is over; an attack asks this as often as it can."""
        return self.interrupted or (self._turn is not None and self._clock() >= self._turn)

    def progress(self) -> float:
        """The share of the turn's time that is gone; 0 without a time limit."""
        if self._turn is None:
            return 0.0
        return (self._clock() - self._begun) / max(1e-9, self._turn - self._begun)

    def spent(self) -> bool:
        """Whether the whole audit must stop."""
        return self.interrupted or (self._end is not None and self._clock() >= self._end)

    def interrupt(self) -> None:
        """Ctrl-C was pressed: whoever caught it keeps what it has and says so here."""
        self.interrupted = True

    @property
    def reason(self) -> str:
        """What made an attack or the audit stop, for a reader."""
        return "Ctrl-C" if self.interrupted else f"the time limit of {self.seconds or 0:g} s"
