"""How an audit that may take long speaks and stops: lines of progress, a time limit, Ctrl-C."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from situs.limits import check_value

SECOND = b"already stopping: what was found is being written (Ctrl-C once more gives it up)\n"
"""What a second Ctrl-C is told."""


class Deadline:
    """Held by one audit and asked by its attacks.

    The time limit is for the whole audit. Each attack's turn is an even share of what is left, so that a slow one
    does not eat the time of those behind it; what a quick one leaves, they have. closed: the search is over and its
    result is being written: a Ctrl-C from there on takes nothing of it away.
    """

    def __init__(
        self,
        say: Callable[[str], None] = lambda _: None,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if seconds is not None:
            check_value("time_limit", seconds, "> 0")
        self.say, self.seconds, self.interrupted, self.closed = say, seconds, False, False
        self._clock = clock
        self._end = clock() + (math.inf if seconds is None else seconds)
        self._begun, self._turn, self._most = clock(), self._end, 0.0

    def begin(self, left: int, most: float | None = None) -> None:
        """Opens a turn: one of `left` that are still to come, itself among them. most: seconds it may take at most."""
        now = self._begun = self._clock()
        share = max(0.0, self._end - now) / left
        self._turn = now + (share if most is None else min(share, most))
        if most is not None and most < share:
            self._most = max(self._most, most)

    def over(self) -> bool:
        """Whether the turn is over; an attack asks this as often as it can."""
        return self.interrupted or self._clock() >= self._turn

    def progress(self) -> float:
        """The share of the turn's time that is gone; 0 without a time limit."""
        return self.taken / max(1e-9, self._turn - self._begun)

    @property
    def taken(self) -> float:
        """Seconds since the turn began."""
        return self._clock() - self._begun

    def spent(self) -> bool:
        """Whether the whole audit must stop."""
        return self.interrupted or self._clock() >= self._end

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
def first_ctrl_c(deadline: Deadline) -> Iterator[None]:
    """Ctrl-C within: the first ends the search, the second is answered, the third gives up.

    Whoever presses twice in impatience means the first: the second would else hit the scoring or the writing of what
    the first has kept, and take hours of search away. Once the deadline is closed, the first is answered as well.
    """
    if threading.current_thread() is not threading.main_thread():  # signals are not for others
        yield
        return
    pressed = 0

    def answer(_: int, __: FrameType | None) -> None:
        nonlocal pressed
        pressed += 1
        deadline.interrupt()
        if pressed > 2 or not (pressed == 2 or deadline.closed):
            raise KeyboardInterrupt
        os.write(2, SECOND)  # not print: it may be a print that was interrupted

    before = signal.signal(signal.SIGINT, answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
