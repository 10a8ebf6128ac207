"""One process at a time in a folder: a lock that the system takes back when its holder dies."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from situs.errors import SitusError

NAME = ".lock"
_held: set[int] = set()


def _let_go() -> None:
    """In a process that the holder forked (a worker that decodes images): it may outlive it, and must not hold on."""
    for handle in _held:
        os.close(handle)
    _held.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_let_go)


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Holds the folder; where another process does, an error that names it."""
    handle = _take(folder / NAME)
    _held.add(handle)
    try:
        yield
    finally:
        (folder / NAME).unlink(missing_ok=True)  # before it is let go, or it might be another's by then
        _held.discard(handle)
        os.close(handle)


@contextlib.contextmanager
def in_turn(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Holds a file of this name, and tells whether it does; where another process does, waits for it if asked to.
    Where nothing can be locked nobody waits."""
    with contextlib.ExitStack() as stack:
        mine = False
        with contextlib.suppress(OSError, ImportError):
            import fcntl

            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("ab"))
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = True
        yield mine


def _take(path: Path) -> int:
    import fcntl

    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise SitusError(f"{path.parent}: cannot be written to: {(error.strerror or str(error)).lower()}") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 200).decode(errors="replace").strip() or "another process"
            os.close(handle)
            raise SitusError(f"{path.parent}: {holder} is at work there; wait for it, or stop it first") from None
        except OSError:  # a disk that knows no locks: better unlocked than no training
            pass
        if _is_at(handle, path):
            break
        os.close(handle)  # its holder took the file away between our two calls
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return handle


def _is_at(handle: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.stat())
    return False
