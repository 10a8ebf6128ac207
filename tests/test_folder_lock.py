from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from situs.errors import SitusError
from situs.folder_lock import NAME, lock_folder

HOLDER = """
import os, sys, time, pathlib
from situs.folder_lock import lock_folder
with lock_folder(pathlib.Path(sys.argv[1])):
    if len(sys.argv) > 2 and os.fork() == 0:  # who has been forked says so: by then it has let go
        print("held", flush=True)
        time.sleep(5)
        os._exit(0)
    if len(sys.argv) == 2:
        print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_holder_is_told_of_the_first(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("process 1234567890 on a-machine-with-a-long-name-that-crashed")
    with lock_folder(tmp_path):
        said = (
            f"process {os.getpid()} on {socket.gethostname()} is using this folder; wait for that process, or stop "
            "it first"
        )
        with pytest.raises(SitusError, match=said), lock_folder(tmp_path):
            pass
        assert (tmp_path / NAME).exists()  # the one who was refused has not taken it away
        with pytest.raises(SitusError, match=said), lock_folder(tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []
    with lock_folder(tmp_path):
        pass


def test_an_error_lets_go(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="a bug"), lock_folder(tmp_path):
        raise RuntimeError("a bug")
    with lock_folder(tmp_path):
        pass


@pytest.mark.parametrize("fork", [[], ["fork"]], ids=["alone", "worker outlives it"])
def test_a_killed_holder_holds_no_more(tmp_path: Path, fork: list[str]) -> None:
    """Processes forked by the holder share its file: they must let go of it, and not of the holder's lock."""
    command = [sys.executable, "-c", HOLDER, tmp_path, *fork]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(SitusError, match=f"process {process.pid} on "), lock_folder(tmp_path):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (tmp_path / NAME).exists()  # nobody tidied up
        with lock_folder(tmp_path):
            pass


def test_a_lock_that_was_taken_away_meanwhile_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened before its holder deleted it: the second try makes a new file, which a third process would find."""
    import fcntl

    real, tries = fcntl.flock, []

    def late(handle: int, how: int) -> None:
        if not tries:
            (tmp_path / NAME).unlink()
        tries.append(handle)
        real(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with lock_folder(tmp_path):
        assert len(tries) == 2
        assert (tmp_path / NAME).exists()


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    said = "none: cannot be written to: no such file or directory"
    with pytest.raises(SitusError, match=said), lock_folder(tmp_path / "none"):
        pass
