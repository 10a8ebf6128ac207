"""The server of the demo's split learning, in a process of its own: it serves, and keeps what it was sent first."""

from __future__ import annotations

import multiprocessing
import os
import signal
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
from situs.train.run import RunConfig

SEEN = "seen.safetensors"
"""In the server's folder: the first features that came."""

STARTS_IN = 120.0
"""Seconds that the server may take to start."""

LISTENING, FAILED = "listening on ", "the demo's server could not start: "


class Server:
    """The process, which ends with this block however it is left, and with this process if that is killed."""

    def __init__(self, config: RunConfig, out: Path, certs: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._told, self._tells = context.Pipe(duplex=False)
        given = (to_dict(config), str(out), str(certs), self._tells)
        self.process = context.Process(target=serve, args=given, daemon=True)

    def __enter__(self) -> Self:
        self.process.start()
        self._tells.close()  # the process has its own end: where it fails, the line ends
        try:
            self.address = self._address()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _address(self) -> str:
        with suppress(EOFError):
            while self._told.poll(STARTS_IN):
                line = self._told.recv()
                if line.startswith(LISTENING):
                    return line.removeprefix(LISTENING).split()[0]
                if line.startswith(FAILED):
                    raise SitusError(line)
        raise SitusError(f"{FAILED}it was not there within {STARTS_IN:.0f} s, or what it said stands above")

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self._told.close()


def serve(config: dict[str, Any], out: str, certs: str, tells: Any) -> None:
    """What the process does; what it cannot do it says in one sentence."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C goes to both, and the parent ends this one
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None
    try:
        credentials = read_credentials(certs, "server")
        server = keeping(make_server(from_dict(RunConfig, config), out, device="cpu"))
        run_server(server, "127.0.0.1:0", credentials, say=tells.send, stopped=lambda: os.getppid() != parent.pid)
    except SitusError as error:
        tells.send(f"{FAILED}{error}")


def keeping(server: Blocks) -> Blocks:
    """The same server, which keeps the first features that come."""
    answer = server.answer

    def kept(owner: str, message: Message) -> Message:
        if message.kind == "forward" and not (server.out / SEEN).exists():
            save_file({"z": message.tensors["z"].contiguous()}, server.out / SEEN)
        return answer(owner, message)

    server.answer = kept
    return server
