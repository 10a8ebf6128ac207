"""Ctrl-C, SIGTERM and SIGHUP as a wish that the loop grants between two steps."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any, Self


class Interrupt:
    """Turns the first Ctrl-C, SIGTERM or SIGHUP (the terminal is gone) into a wish; the second acts as it always did.

    A SIGHUP that is ignored stays so: under nohup a run goes on.
    """

    def __init__(self) -> None:
        self.asked = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGINT, signal.SIGTERM]
            if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                numbers.append(signal.SIGHUP)
            for number in numbers:
                self._old[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)
        self._old = {}

    def _ask(self, number: int, frame: object) -> None:
        del frame
        self.asked = True
        signal.signal(number, self._old[number])
