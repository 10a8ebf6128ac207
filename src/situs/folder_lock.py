"""One process at a time in a folder: a lock that the system releases when its holder dies."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from situs.errors import SitusError, reason_of

NAME = ".lock"
_handles: set[int] = set()


def _release() -> None:
    """Releases the locks in a forked process (a worker that decodes images), which may outlive the holder."""
    for handle in _handles:
        os.close(handle)
    _handles.clear()


os.register_at_fork(after_in_child=_release)


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Locks the folder; if another process has locked it, an error that names the process."""
    handle = _lock(folder / NAME)
    _handles.add(handle)
    try:
        yield
    finally:
        (folder / NAME).unlink(missing_ok=True)  # before the release, or it might be another process's by then
        _handles.discard(handle)
        os.close(handle)


@contextlib.contextmanager
def in_turn(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Locks a file of this name; gives whether it is locked by this process. wait: until another process releases it.
    On a disk without locks nobody waits."""
    with contextlib.ExitStack() as stack:
        locked = False
        with contextlib.suppress(OSError, ImportError):
            import fcntl

            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("ab"))
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        yield locked


def _lock(path: Path) -> int:
    import fcntl

    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise SitusError(f"{path.parent}: cannot be written to: {reason_of(error)}") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 200).decode(errors="replace").strip() or "another process"
            os.close(handle)
            raise SitusError(
                f"{path.parent}: {holder} is using this folder; wait for that process, or stop it first"
            ) from None
        except OSError:  # a disk without locks: better unlocked than no training
            pass
        if _is_at(handle, path):
            break
        os.close(handle)  # its holder deleted the file between our two calls
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return handle


def _is_at(handle: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.stat())
    return False
