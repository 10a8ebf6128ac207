"""The demo's second process: what trains beside the pretraining, and the server of split learning.

The server keeps what it was sent first.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file

from situs.config import from_dict, to_dict
from situs.errors import SitusError
from situs.split.message import Message
from situs.split.server import Server as Blocks
from situs.split.serving import make_server
from situs.split.transport.certificates import read_credentials
from situs.split.transport.serve import run_server
from situs.train.assemble import RunConfig

SEEN = "seen.safetensors"
"""In the server's folder: the first features that came."""

STARTS_IN = 120.0
"""Seconds that the server may take to start."""

LISTENING, DONE, FAILED = "listening on ", "done", "the demo's second process failed: "


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

    def wait(self, until: str, within: float | None = None) -> str:
        """What follows the first line that begins with `until`."""
        with suppress(EOFError):
            while self._told.poll(within):
                line = self._told.recv()
                if line.startswith(until):
                    return line.removeprefix(until)
                if line.startswith(FAILED):
                    raise SitusError(line)
        took = "" if within is None else f"it was not there within {within:.0f} s, or "
        raise SitusError(f"{FAILED}{took}what it said stands above")

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


class Server(Aside):
    """The server of split learning, which is there when the block begins."""

    def __init__(self, config: RunConfig, out: Path, certs: Path) -> None:
        super().__init__(serve, to_dict(config), str(out), str(certs))

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.address = self._address()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _address(self) -> str:
        return self.wait(LISTENING, STARTS_IN).split()[0]


def serve(config: dict[str, Any], out: str, certs: str, say: Callable[[str], None]) -> None:
    """What the server's process does."""
    credentials = read_credentials(certs, "server")
    server = keeping(make_server(from_dict(RunConfig, config), out, device="cpu"))
    run_server(server, "127.0.0.1:0", credentials, say=say)


def keeping(server: Blocks) -> Blocks:
    """The same server, which keeps the first features that come."""
    answer = server.answer

    def kept(owner: str, message: Message) -> Message:
        if message.kind == "forward" and not (server.out / SEEN).exists():
            save_file({"z": message.tensors["z"].contiguous()}, server.out / SEEN)
        return answer(owner, message)

    server.answer = kept
    return server
