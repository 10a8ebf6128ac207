"""The demo's second process: what trains beside the pretraining."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

import torch

from situs.errors import SitusError

DONE, FAILED = "done", "the demo's second process failed: "


class Aside:
    """A process that does one thing and says lines; it ends with this block however it is left, and with this process.

    does: a function of a module, of `given` and of what takes its lines.
    """

    def __init__(self, does: Callable[..., None], *given: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._told, self._tells = context.Pipe(duplex=False)
        self.process = context.Process(target=_do, args=(does, given, self._tells), daemon=True)

    def __enter__(self) -> Self:
        self.process.start()
        self._tells.close()  # the process has its own end: where it fails, the line ends
        return self

    def wait(self) -> None:
        """Until it is done."""
        with suppress(EOFError):
            while (line := self._told.recv()) != DONE:
                if line.startswith(FAILED):
                    raise SitusError(line)
            return
        raise SitusError(f"{FAILED}what it said stands above")

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self._told.close()


def _do(does: Callable[..., None], given: tuple[Any, ...], tells: Any) -> None:
    """What the process does; what it cannot do it says in one sentence."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C goes to both, and the parent ends this one
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        does(*given, tells.send)
        tells.send(DONE)
    except SitusError as error:
        tells.send(f"{FAILED}{error}")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
