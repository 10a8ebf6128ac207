"""The demo's second process: its mistakes are one sentence, and it never outlives the demo."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from warm import Warm

from situs.cli.demo.process import SecondProcess
from situs.errors import SitusError


def fails() -> None:
    raise SitusError("certs/ca.pem: cannot be read")


@pytest.mark.slow
def test_what_it_cannot_do_is_one_sentence() -> None:
    with (
        pytest.raises(SitusError, match=r"second process failed: certs/ca\.pem: cannot be read"),
        SecondProcess(fails) as second,
    ):
        second.wait()
    assert not second.process.is_alive()


STARTED = """
import multiprocessing, os, signal, sys, time
from situs.cli.demo.process import SecondProcess

def lasts():
    time.sleep(60)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which tests in the background inherit as ignored
    real = multiprocessing.get_context  # a fork starts at once
    multiprocessing.get_context = lambda _: real("fork")
    try:
        with SecondProcess(lasts) as second:
            print(os.getpid(), second.process.pid, flush=True)
            second.wait()
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_it_is_not_left_behind(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C goes to every process of a terminal, and a killed demo says goodbye to nobody."""
    script = tmp_path / "started.py"
    script.write_text(STARTED)
    demo = Warm(script, session=True)
    parent, second = map(int, demo.stdout.readline().split())
    assert parent == demo.pid and Path(f"/proc/{second}").exists()
    if number == signal.SIGINT:
        os.killpg(parent, number)
    else:
        os.kill(parent, number)
    demo.communicate(timeout=60)
    assert demo.returncode == (130 if number == signal.SIGINT else -number)
    ends = time.monotonic() + 20
    while running(second) and time.monotonic() < ends:
        time.sleep(0.1)
    assert not running(second)


def running(process: int) -> bool:
    """Whether it runs; a dead one that nobody has asked after does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
