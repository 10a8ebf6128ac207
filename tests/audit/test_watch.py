"""The clock: an even share for each turn, what is left goes on, Ctrl-C ends all."""

from __future__ import annotations

import signal

import pytest

from situs.audit.watch import SECOND, Watch, first_ctrl_c
from situs.errors import SitusError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_turns_share_what_is_left() -> None:
    clock = Clock()
    watch = Watch(seconds=12, clock=clock)
    watch.begin(3)
    clock.now += 3.9
    assert not watch.over()
    assert watch.progress() == pytest.approx(3.9 / 4)
    clock.now += 0.2
    assert watch.over()
    assert not watch.spent()
    watch.begin(2)  # 7.9 s left for two
    assert watch.progress() == 0
    clock.now += 1  # a quick one
    watch.begin(1)
    clock.now += 6.8
    assert not watch.over()
    clock.now += 0.2
    assert watch.over() and watch.spent()
    watch.begin(1)
    assert watch.over()
    assert watch.reason == "the time limit of 12 s"


def test_a_turn_may_have_a_limit_of_its_own() -> None:
    clock = Clock()
    free = Watch(clock=clock)
    free.begin(1, 5.0)
    clock.now += 2.5
    assert free.progress() == 0.5 and not free.over()
    clock.now += 2.5
    assert free.over() and not free.spent()
    free.begin(1)
    clock.now += 1e6
    assert not free.over()
    held = Watch(seconds=12, clock=clock)
    held.begin(1, 20.0)  # the audit's own limit comes first
    clock.now += 12
    assert held.over() and held.spent()


def test_without_a_limit_only_ctrl_c_stops() -> None:
    watch = Watch()
    watch.begin(2)
    assert not watch.over() and not watch.spent() and watch.progress() == 0
    watch.interrupt()
    assert watch.over() and watch.spent()
    assert watch.reason == "Ctrl-C"


def test_no_time_at_all_is_a_mistake() -> None:
    with pytest.raises(SitusError, match="--time-limit"):
        Watch(seconds=0)


def test_the_second_ctrl_c_takes_nothing_away(capfd: pytest.CaptureFixture[str]) -> None:
    before, watch = signal.getsignal(signal.SIGINT), Watch()
    with first_ctrl_c(watch):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert watch.interrupted
        signal.raise_signal(signal.SIGINT)
        assert capfd.readouterr().err == SECOND.decode()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
