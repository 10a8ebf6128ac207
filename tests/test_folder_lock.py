from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from situs.errors import SitusError
from situs.folder_lock import NAME, in_turn, lock_folder

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


def test_the_words_of_a_holder_replace_those_of_one_before(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("x" * 300)
    with lock_folder(tmp_path):
        assert (tmp_path / NAME).read_text() == f"process {os.getpid()} on {socket.gethostname()}"
        (tmp_path / NAME).write_text(" ")
        with pytest.raises(SitusError, match="another process is using this folder"), lock_folder(tmp_path):
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
    before = open_files()
    with lock_folder(tmp_path):
        assert len(tries) == 2
        assert (tmp_path / NAME).exists()
        assert len(open_files()) == len(before) + 1
        with pytest.raises(SitusError, match="is using this folder"), lock_folder(tmp_path):
            pass
    assert open_files() == before


def open_files() -> set[str]:
    """The numbers of this process's open files, without the one that lists them."""
    return {file.name for file in Path("/proc/self/fd").iterdir() if file.exists()}


@pytest.mark.parametrize("wait", [True, False])
def test_who_comes_in_turn_makes_the_folder_and_lets_go_at_the_end(tmp_path: Path, wait: bool) -> None:
    file = tmp_path / "deep" / "er" / "lock"
    for _ in range(2):
        with in_turn(file, wait=wait) as mine:
            assert mine and file.is_file()
            with in_turn(file, wait=False) as also:
                assert not also
    with pytest.raises(RuntimeError, match="a bug"), in_turn(file, wait=wait):
        raise RuntimeError("a bug")
    with in_turn(file, wait=wait) as mine:
        assert mine


def test_on_a_disk_without_locks_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with lock_folder(tmp_path), lock_folder(tmp_path), in_turn(tmp_path / "x") as mine:
        assert not mine


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    said = "none: cannot be written to: no such file or directory"
    with pytest.raises(SitusError, match=said), lock_folder(tmp_path / "none"):
        pass
