"""A job is told when whoever started it dies."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from situs.studies.child import end_with

PARENT = """
import os, signal, sys, time
from pathlib import Path
from situs.studies.child import end_with

folder, parent = Path(sys.argv[1]), os.getpid()
if os.fork():
    while not (folder / "ready").exists():
        time.sleep(0.01)
    os.kill(parent, signal.SIGKILL)
signal.signal(signal.SIGTERM, lambda *_: ((folder / "told").touch(), os._exit(0)))
end_with(parent)
(folder / "ready").touch()
time.sleep(20)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system tells nobody there")


def test_it_gets_a_signal_when_its_parent_is_killed(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", PARENT, str(tmp_path)], check=False, timeout=60).returncode == -9
    until = time.monotonic() + 10
    while not (tmp_path / "told").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert (tmp_path / "told").exists()


def test_it_does_not_begin_where_its_parent_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: type("", (), {"prctl": lambda *_: 0})())
    with pytest.raises(SystemExit):
        end_with(-1)
