"""Progress, time limit and Ctrl-C of an audit that may take long."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from situs.limits import check_value

FIRST = b"stopping: the results so far are kept\n"
"""The answer to a first Ctrl-C where a search itself keeps its result."""

SECOND = b"already stopping: the results so far are being written (Ctrl-C once more discards them)\n"
"""The answer to a second Ctrl-C."""


GRACE = 5.0
"""Seconds after the time limit in which an attack may return what it has; then its next call of torch raises."""


class StoppedError(Exception):
    """The time ended, or Ctrl-C was pressed, during a computation whose partial result is of no use."""


class Deadline:
    """The time of one audit, which its attacks ask for.

    The time limit is for the whole audit, and begins with the first question, which is the first attack's: opening a
    model takes none of it. An attack that does not ask is cut off (`enforced`). Each attack's turn is an even share of
    the remaining time, so that a slow one does not use up the time of later ones; what a quick one does not need, they
    have. whole: the deadline of which this is the first part: it begins with this one. closed: the search is over and
    its result is being written: a Ctrl-C does not discard it any more.
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
        _ = self._cut
        return self._clock() + (math.inf if self.seconds is None else self.seconds)

    @cached_property
    def _cut(self) -> float:
        """When even a computation that asks nothing ends, on the real clock."""
        return time.monotonic() + (math.inf if self.seconds is None else self.seconds + GRACE)

    def enforced(self) -> AbstractContextManager[Any]:
        """Within, every call of torch raises `StoppedError` once the time limit has passed by more than `GRACE`.

        A decomposition of a large matrix or an attack of your own may compute for minutes between two questions.
        """
        return nullcontext() if self.seconds is None else _CutOff(self._cut)

    def begin(self, left: int, most: float | None = None) -> None:
        """Begins a turn, one of `left` that are still to come, this one included. most: seconds it may take."""
        end, now = self._end, self._clock()
        self._begun, share = now, max(0.0, end - now) / left
        self._turn = now + (share if most is None else min(share, most))
        if most is not None and most < share:
            self._most = max(self._most, most)

    def over(self) -> bool:
        """Whether the turn is over; attacks ask often."""
        return self.interrupted or min(self._turn, self._end) <= self._clock()

    def progress(self) -> float:
        """The share of the turn's time that has passed; 0 without a time limit."""
        return self.taken / max(1e-9, min(self._turn, self._end) - self._begun)

    @property
    def taken(self) -> float:
        """Seconds since the turn began."""
        return self._clock() - self._begun

    def spent(self) -> bool:
        """Whether the whole audit must stop."""
        return self.interrupted or self._end <= self._clock()

    def interrupt(self) -> None:
        """Marks that Ctrl-C was pressed; whoever caught it keeps its result."""
        self.interrupted = True

    @property
    def reason(self) -> str:
        """Why an attack or the audit stopped, for a reader."""
        if self.interrupted:
            return "Ctrl-C"
        if self.seconds is None or (self._most and not self.spent()):
            return f"the limit of {self._most:g} s for a search"
        return f"the time limit of {self.seconds:g} s"


_RESTORING = (torch._C._set_grad_enabled, torch.set_grad_enabled, torch.Tensor.requires_grad_)
"""Calls that end a context: cut off there, a process would be left without gradients."""


class _CutOff(TorchFunctionMode):
    """Raises `StoppedError` at the first call of torch after `end`, in seconds of the monotonic clock, and then once in
    `GRACE` seconds: what is cut off restores its state by torch too."""

    def __init__(self, end: float) -> None:
        super().__init__()
        self.end = end

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.monotonic() > self.end and func not in _RESTORING:
            self.end = time.monotonic() + GRACE
            raise StoppedError
        return func(*args, **(kwargs or {}))


@contextmanager
def first_ctrl_c(deadline: Deadline, keeps: bool = False) -> Iterator[None]:
    """Handles Ctrl-C within: the first ends the search, the second is only answered, the third raises.

    A second press is mostly impatience: it would hit the scoring or the writing of the result, and discard hours of
    search. Once the deadline is closed, the first is only answered as well. keeps: the search within asks `over` often
    and keeps its result, so that the first raises nothing.
    """
    if threading.current_thread() is not threading.main_thread():  # other threads get no signals
        yield
        return

    def answer(_: int, __: FrameType | None) -> None:
        deadline.pressed += 1
        deadline.interrupt()
        if deadline.pressed > 2 or not (deadline.pressed == 2 or deadline.closed or keeps):
            raise KeyboardInterrupt
        os.write(2, FIRST if keeps and deadline.pressed == 1 else SECOND)  # print may be the one that is interrupted

    before = signal.signal(signal.SIGINT, answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
