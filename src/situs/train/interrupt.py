"""Ctrl-C, SIGTERM and SIGHUP as a request to stop, which the loop follows between two steps."""

from __future__ import annotations

import signal
import threading
from typing import Any, Self


class Interrupt:
    """Turns the first Ctrl-C, SIGTERM or SIGHUP (a closed terminal) into a request to stop; the second acts as usual.

    An ignored SIGHUP stays ignored: under nohup a run goes on.
    """

    def __init__(self) -> None:
        self.requested = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGINT, signal.SIGTERM]
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                numbers.append(signal.SIGHUP)
            for number in numbers:
                self._old[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)
        self._old = {}

    def _request(self, number: int, frame: object) -> None:
        del frame
        self.requested = True
        signal.signal(number, self._old[number])
