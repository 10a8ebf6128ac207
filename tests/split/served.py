"""A server on a real socket in a thread of this process, and a proxy that hurts what goes through it."""

from __future__ import annotations

import contextlib
import queue
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from situs.backbones import BackboneConfig
from situs.data.config import DataConfig
from situs.methods.supervised import SupervisedConfig
from situs.split.server import Server
from situs.split.serving import make_server
from situs.split.transport.certificates import Credentials
from situs.split.transport.serve import Service, run_server
from situs.train.config import TrainConfig
from situs.train.optim import OptimConfig
from situs.train.run import RunConfig

SMALL = {"depth": 2, "embed_dim": 16, "num_heads": 2}
CONFIG = RunConfig(
    method=SupervisedConfig(),
    backbone=BackboneConfig("vit_tiny_patch16_224", patch_size=7, drop_path=0.1, num_classes=10, model_args=SMALL),
    data=DataConfig(path="samples", img_size=28, channels=1, batch=4, count=64),
    optim=OptimConfig(lr=1e-3, clip=0.5, ema=0.9),
    train=TrainConfig(epochs=None, max_steps=10, precision="fp32", save_every=2, log_every=3),
)


def steps(count: int, config: RunConfig = CONFIG, **fields: Any) -> RunConfig:
    return replace(config, train=replace(config.train, max_steps=count, **fields))


class Serving:
    """A server that listens; `kill` drops it without a word, as a crash would, `start` brings it back from its disk."""

    def __init__(
        self, out: Path, credentials: Credentials | None = None, config: RunConfig = CONFIG, **options: Any
    ) -> None:
        self.out, self.credentials, self.config, self.options = out, credentials, config, options
        self.deny = options.pop("deny", None)
        self.port, self.service = options.pop("port", 0), None
        self.start()

    def start(self) -> None:
        self.server: Server = make_server(self.config, self.out, **self.options)
        ready, self.stop, self.failed = threading.Event(), threading.Event(), []

        def say(line: str) -> None:
            self.port = int(line.split(":")[1].split(maxsplit=1)[0])
            ready.set()

        def run() -> None:
            try:
                listen = f"127.0.0.1:{self.port}"
                self.service = run_server(
                    self.server, listen, self.credentials, deny=self.deny, say=say, stopped=self.stop.is_set
                )
            except Exception as error:  # noqa: BLE001  (told to the test)
                self.failed.append(error)
                ready.set()

        self.thread = threading.Thread(target=run)
        self.thread.start()
        assert ready.wait(30)
        if self.failed:
            raise self.failed[0]

    def close(self) -> Service | None:
        self.stop.set()
        self.thread.join(30)
        return self.service

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@contextlib.contextmanager
def serving(*args: Any, **options: Any) -> Iterator[Serving]:
    made = Serving(*args, **options)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def on_a_socket(server: Server) -> Iterator[str]:
    """A server that was made otherwise, listening; gives its address."""
    told: queue.Queue[str] = queue.Queue()
    stop = threading.Event()
    thread = threading.Thread(
        target=run_server, args=(server, "127.0.0.1:0", None), kwargs={"say": told.put, "stopped": stop.is_set}
    )
    thread.start()
    try:
        yield told.get(timeout=30).split()[2]
    finally:
        stop.set()
        thread.join(30)


class Proxy:
    """A TCP proxy in front of a server: cuts connections in mid-message and slows the link down, as it is told."""

    def __init__(self, serving: Serving, seed: int) -> None:
        self.serving, self.random = serving, random.Random(seed)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.cut_after: int | None = None
        self.slow, self.cuts, self.open = 0.0, 0, True
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while self.open:
            try:
                near, _ = self.listener.accept()
                far = socket.create_connection(("127.0.0.1", self.serving.port), 5)
            except OSError:
                continue
            for each in (near, far):  # else a short message waits for the last one's receipt, 40 ms
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.pairs.append((near, far))
            for a, b in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(a, b), daemon=True).start()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := near.recv(4096):
                if self.slow:
                    time.sleep(self.slow)
                if self.cut_after is not None:
                    self.cut_after -= len(data)
                    if self.cut_after <= 0:
                        self.cut_after, self.cuts = None, self.cuts + 1
                        far.sendall(data[: self.random.randrange(len(data))])
                        break
                far.sendall(data)
        for each in (near, far):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        self.open = False
        self.listener.close()
        for pair in self.pairs:
            for each in pair:
                each.close()
