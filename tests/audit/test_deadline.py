"""The clock: an even share for each turn, what is left goes on, Ctrl-C ends all."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
import torch

from situs.audit.deadline import FIRST, SECOND, Deadline, StoppedError, first_ctrl_c
from situs.errors import SitusError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_turns_share_what_is_left() -> None:
    clock = Clock()
    deadline = Deadline(seconds=12, clock=clock)
    deadline.begin(3)
    clock.now += 3.9
    assert not deadline.over()
    assert deadline.progress() == pytest.approx(3.9 / 4)
    clock.now += 0.2
    assert deadline.over()
    assert not deadline.spent()
    deadline.begin(2)  # 7.9 s left for two
    assert deadline.progress() == 0
    clock.now += 1  # a quick one
    deadline.begin(1)
    clock.now += 6.8
    assert not deadline.over()
    clock.now += 0.2
    assert deadline.over() and deadline.spent()
    deadline.begin(1)
    assert deadline.over()
    assert deadline.reason == "the time limit of 12 s"


def test_a_turn_may_have_a_limit_of_its_own() -> None:
    clock = Clock()
    free = Deadline(clock=clock)
    free.begin(1, 5.0)
    clock.now += 2.5
    assert free.progress() == 0.5 and not free.over()
    clock.now += 2.5
    assert free.over() and not free.spent() and free.taken == 5
    assert free.reason == "the limit of 5 s for a search"
    free.begin(1)
    clock.now += 1e6
    assert not free.over()
    held = Deadline(seconds=12, clock=clock)
    held.begin(1, 20.0)  # the audit's own limit comes first
    clock.now += 12
    assert held.over() and held.spent()


def test_the_time_begins_with_the_first_attack() -> None:
    now = [0.0]
    whole = Deadline(seconds=40, clock=lambda: now[0])
    first = Deadline(seconds=4, clock=lambda: now[0], whole=whole)
    now[0] = 1000.0  # until here a model was opened, and its images were read
    assert not first.spent()
    first.begin(1)
    now[0] = 1003.9
    assert not first.over() and first.taken == pytest.approx(3.9)
    now[0] = 1004.0
    assert first.over() and first.spent() and not whole.spent()
    now[0] = 1040.0
    assert whole.spent()  # the first part was one of it


def test_without_a_limit_only_ctrl_c_stops() -> None:
    deadline = Deadline()
    deadline.begin(2)
    assert not deadline.over() and not deadline.spent() and deadline.progress() == 0
    deadline.interrupt()
    assert deadline.over() and deadline.spent()
    assert deadline.reason == "Ctrl-C"


def test_no_time_at_all_is_a_mistake() -> None:
    with pytest.raises(SitusError, match="time_limit="):
        Deadline(seconds=0)


def test_the_second_ctrl_c_takes_nothing_away(capfd: pytest.CaptureFixture[str]) -> None:
    before, deadline = signal.getsignal(signal.SIGINT), Deadline()
    with first_ctrl_c(deadline):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert deadline.interrupted
        signal.raise_signal(signal.SIGINT)
        assert capfd.readouterr().err == SECOND.decode()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_search_that_keeps_what_it_has_is_not_broken_off(capfd: pytest.CaptureFixture[str]) -> None:
    deadline = Deadline()
    with first_ctrl_c(deadline):
        with first_ctrl_c(deadline, keeps=True):
            signal.raise_signal(signal.SIGINT)
            assert deadline.over()
        signal.raise_signal(signal.SIGINT)  # scores and files: counted on
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err.encode() == FIRST + SECOND


def test_ctrl_c_while_the_result_is_written_takes_nothing_away(capfd: pytest.CaptureFixture[str]) -> None:
    deadline = Deadline()
    with first_ctrl_c(deadline):
        deadline.closed = True
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert deadline.interrupted
        with pytest.raises(KeyboardInterrupt):  # who insists
            signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err.encode() == SECOND * 2


def test_a_search_that_ended_by_its_own_limit_is_not_laid_to_the_time_limit() -> None:
    now = [0.0]
    deadline = Deadline(seconds=600, clock=lambda: now[0])
    deadline.begin(2, most=3)
    now[0] = 4
    assert deadline.over() and deadline.reason == "the limit of 3 s for a search"
    now[0] = 600
    assert deadline.reason == "the time limit of 600 s"
    short = Deadline(seconds=4, clock=lambda: now[0])
    short.begin(2, most=3)  # its even share is less than its own limit
    now[0] = 603
    assert short.over() and short.reason == "the time limit of 4 s"


def test_what_is_cut_off_restores_the_state_of_torch() -> None:
    """Else the training loop that goes on after an audit has no gradients."""
    weight = torch.zeros(2, requires_grad=True)
    cut: Any = Deadline(seconds=60.0).enforced()

    def attack() -> None:
        weight.requires_grad_(False)
        try:
            with torch.no_grad():
                cut.end = time.monotonic() - 1
                torch.zeros(1)
        finally:
            torch.zeros(1)  # a clean-up that calls torch
            weight.requires_grad_(True)

    with pytest.raises(StoppedError), cut:
        attack()
    assert torch.is_grad_enabled() and weight.requires_grad
