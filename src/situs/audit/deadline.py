"""How an audit that may take long speaks and stops: lines of progress, a time limit, Ctrl-C."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from types import FrameType

from situs.limits import check_value

FIRST = b"stopping: what was found is kept\n"
"""What the first is told where a search keeps what it has by itself."""

SECOND = b"already stopping: what was found is being written (Ctrl-C once more gives it up)\n"
"""What a second Ctrl-C is told."""


class StoppedError(Exception):
    """The time was over, or Ctrl-C was pressed, while something was made of which a part is of no use."""


class Deadline:
    """Held by one audit and asked by its attacks.

    The time limit is for the whole audit, and begins with the first question, which is the first attack's: opening a
    model takes none of it. Each attack's turn is an even share of what is left, so that a slow one
    does not eat the time of those behind it; what a quick one leaves, they have. whole: another of which this is the
    first part: it begins with this one. closed: the search is over and its result is being written: a Ctrl-C from there
    on takes nothing of it away.
    """

    def __init__(
        self,
        say: Callable[[str], None] = lambda _: None,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        whole: Deadline | None = None,
    ) -> None:
        if seconds is not None:
            check_value("time_limit", seconds, "> 0")
        self.say, self.seconds, self.interrupted, self.closed, self.pressed = say, seconds, False, False, 0
        self._clock, self._whole = clock, whole
        self._begun, self._turn, self._most = clock(), math.inf, 0.0

    @cached_property
    def _end(self) -> float:
        _ = self._whole and self._whole._end
        return self._clock() + (math.inf if self.seconds is None else self.seconds)

    def begin(self, left: int, most: float | None = None) -> None:
        """Opens a turn: one of `left` that are still to come, itself among them. most: seconds it may take at most."""
        end, now = self._end, self._clock()
        self._begun, share = now, max(0.0, end - now) / left
        self._turn = now + (share if most is None else min(share, most))
        if most is not None and most < share:
            self._most = max(self._most, most)

    def over(self) -> bool:
        """Whether the turn is over; an attack asks this as often as it can."""
        return self.interrupted or min(self._turn, self._end) <= self._clock()

    def progress(self) -> float:
        """The share of the turn's time that is gone; 0 without a time limit."""
        return self.taken / max(1e-9, min(self._turn, self._end) - self._begun)

    @property
    def taken(self) -> float:
        """Seconds since the turn began."""
        return self._clock() - self._begun

    def spent(self) -> bool:
        """Whether the whole audit must stop."""
        return self.interrupted or self._end <= self._clock()

    def interrupt(self) -> None:
        """Ctrl-C was pressed: whoever caught it keeps what it has and says so here."""
        self.interrupted = True

    @property
    def reason(self) -> str:
        """What made an attack or the audit stop, for a reader."""
        if self.interrupted:
            return "Ctrl-C"
        if self.seconds is None or (self._most and not self.spent()):
            return f"the {self._most:g} s that a search may take"
        return f"the time limit of {self.seconds:g} s"


@contextmanager
def first_ctrl_c(deadline: Deadline, keeps: bool = False) -> Iterator[None]:
    """Ctrl-C within: the first ends the search, the second is answered, the third gives up.

    Whoever presses twice in impatience means the first: the second would else hit the scoring or the writing of what
    the first has kept, and take hours of search away. Once the deadline is closed, the first is answered as well.
    keeps: within, a search asks `over` often and keeps what it has, so that the first raises nothing.
    """
    if threading.current_thread() is not threading.main_thread():  # signals are not for others
        yield
        return

    def answer(_: int, __: FrameType | None) -> None:
        deadline.pressed += 1
        deadline.interrupt()
        if deadline.pressed > 2 or not (deadline.pressed == 2 or deadline.closed or keeps):
            raise KeyboardInterrupt
        os.write(2, FIRST if keeps and deadline.pressed == 1 else SECOND)  # not print: one may be interrupted

    before = signal.signal(signal.SIGINT, answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
