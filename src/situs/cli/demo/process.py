"""The demo's second process, which trains while the first one pretrains."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, Self

import torch

from situs.errors import SitusError

DONE, FAILED = "done", "the demo's second process failed: "


class SecondProcess:
    """Runs a function of a module in a second process, which ends with this `with` block and with this process."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._receiver, self._sender = context.Pipe(duplex=False)
        self.process = context.Process(target=_work, args=(function, arguments, self._sender), daemon=True)

    def __enter__(self) -> Self:
        self.process.start()
        self._sender.close()  # the process has its own copy: if it dies, `recv` sees the end of the pipe
        return self

    def wait(self) -> None:
        """Waits until the function returns; raises the sentence of its error."""
        try:
            message = self._receiver.recv()
        except EOFError:
            raise SitusError(f"{FAILED}see the lines above") from None
        if message != DONE:
            raise SitusError(message)

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self._receiver.close()


def _work(function: Callable[..., None], arguments: tuple[Any, ...], sender: Any) -> None:
    """The second process: calls the function and sends `DONE`, or the sentence of its error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to both processes, and the parent ends this one
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        function(*arguments)
        sender.send(DONE)
    except SitusError as error:
        sender.send(f"{FAILED}{error}")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
