"""Ctrl-C and SIGTERM as a wish that the loop grants between two steps."""

from __future__ import annotations

import signal
import threading
from typing import Any, Self


class Interrupt:
    """Turns the first Ctrl-C or SIGTERM into a wish to stop; the second acts as it always did."""

    def __init__(self) -> None:
        self.asked = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
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
