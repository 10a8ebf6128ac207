"""Processes of their own that need not import torch, torchvision and timm again: four to six seconds each.

`Warm("-m", "situs", …)` is what `subprocess.Popen([sys.executable, "-m", "situs", …])` would be: a process with its own
number, arguments, variables and streams, which can be killed. It is forked by a server (this file as a script) that has
imported them, and nothing of Situs; one server serves all workers of a pytest, and ends with it.
"""

from __future__ import annotations

import array
import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, Self

PYTEST = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
"""The process that all workers end with."""

READY = ("timm", "torch._dynamo", "torch.distributed.fsdp", "torchvision.transforms.v2", "safetensors.torch")
PLACE = Path(min(tempfile.gettempdir(), "/tmp", key=len)) / f"situs-tests-{os.getuid()}-{PYTEST}"
"""Where the server listens; such a path may not be long."""


class Warm:
    """A python process with the words that `python` would be given; its streams are text."""

    returncode: int | None = None

    def __init__(self, *words: object, session: bool = False, env: dict[str, str] | None = None) -> None:
        asked = {"words": [str(word) for word in words], "session": session}
        asked |= {"env": dict(os.environ if env is None else env), "cwd": str(Path.cwd())}
        self._line = _connected()
        ends = [os.pipe() for _ in range(2)]
        self.stdout, self.stderr = (os.fdopen(reads, encoding="utf-8") for reads, _ in ends)
        given = [writes for _, writes in ends]
        self._line.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", given))])
        for writes in given:
            os.close(writes)
        self._line.sendall(json.dumps(asked).encode() + b"\n")
        self._told = self._line.makefile("r")
        self.pid = int(self._told.readline())

    def poll(self) -> int | None:
        """Its status once it has ended."""
        if self.returncode is None and select.select([self._line], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float = 300) -> int:
        """Its status, as `Popen` gives it."""
        if self.returncode is None:
            if not select.select([self._line], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            self.returncode = int(self._told.readline())
            self._told.close()
            self._line.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends it; a process that has ended hears nothing."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """All that it still prints and complains of, and its end."""
        with ThreadPoolExecutor(2) as readers:
            read = [readers.submit(stream.read) for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except BaseException:
                self.kill()
                raise
            said = read[0].result(), read[1].result()
        self.stdout.close()
        self.stderr.close()
        return said

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.stderr.close()
        self.wait()


def warm(*words: object, timeout: float = 300, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """The status of such a process, what it printed and what it complained of."""
    with Warm(*words, env=env) as process:
        printed, complaints = process.communicate(timeout)
        return process.wait(), printed, complaints


def _connected() -> socket.socket:
    """A line to the server, which the first who asks starts, and the next if it was killed."""
    PLACE.mkdir(mode=0o700, exist_ok=True)
    with (PLACE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (line := _line()) is not None:
            return line
        (PLACE / "line").unlink(missing_ok=True)
        words, root = [sys.executable, __file__, str(PLACE), str(PYTEST)], Path(__file__).parent.parent
        with (PLACE / "log").open("wb") as log:
            server = subprocess.Popen(words, cwd=root, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        while (line := _line()) is None:
            assert server.poll() is None, (PLACE / "log").read_text()
            time.sleep(0.02)
        server.returncode = 0  # it ends after us
        return line


def _line() -> socket.socket | None:
    line = socket.socket(socket.AF_UNIX)
    if line.connect_ex(str(PLACE / "line")) == 0:
        return line
    line.close()
    return None


# --- the server ---------------------------------------------------------------------------------------------


def _serve(place: Path, pytest: int) -> dict[str, Any]:
    """Forks a process for each line that comes; only such a process comes back from here, with what it is to do."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place / "line"))
    listener.listen(64)
    for name in READY:
        import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lines: dict[int, socket.socket] = {}
    while _alive(pytest):
        if select.select([listener], [], [], 0.02 if lines else 1)[0]:
            line, _ = listener.accept()
            _, fds, _, _ = socket.recv_fds(line, 1, 2)
            asked = json.loads(line.makefile("r").readline())
            child = os.fork()
            if child == 0:
                for each in (listener, line, *lines.values()):
                    each.close()
                return asked | {"fds": fds}
            for fd in fds:
                os.close(fd)
            line.sendall(f"{child}\n".encode())
            lines[child] = line
        for child in list(lines):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                line = lines.pop(child)
                line.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                line.close()
    for each in place.iterdir():
        each.unlink()
    place.rmdir()
    raise SystemExit


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True


def _become(asked: dict[str, Any]) -> list[str]:
    """Makes this process the one that was asked for; gives its words."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if asked["session"]:
        os.setsid()
    for fd, stream in zip(asked["fds"], (1, 2), strict=True):
        os.dup2(fd, stream)
        os.close(fd)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    return asked["words"]


if __name__ == "__main__":
    first, *rest = _become(_serve(Path(sys.argv[1]), int(sys.argv[2])))
    if first == "-m":
        sys.argv, sys.path[0] = rest, ""
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = [first, *rest], str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")
