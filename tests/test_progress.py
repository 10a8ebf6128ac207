"""Who loops tells how far it is, and who wants to hears it: shares of tasks within tasks, and the time that is left."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from itertools import zip_longest

import pytest

from situs import progress
from situs.progress import (
    Task,
    clock,
    in_words,
    latest,
    listening,
    note,
    notes_to,
    seconds_left,
    share,
    showing,
    shown,
    silent,
    task,
    took,
    tracked,
)


class Ear:
    def __init__(self) -> None:
        self.heard: list[tuple[str, float | None]] = []

    def __call__(self, tasks) -> None:
        self.heard.append((in_words(tasks), share(tasks)))


def test_without_a_listener_nothing_changes() -> None:
    with task("work", 3) as own:
        own.tell(1, "now")
    latest("unheard")
    assert [*tracked("abc", "letters")] == ["a", "b", "c"]


def test_loops_within_loops_are_one_share() -> None:
    ear = Ear()
    with listening(ear):
        for _ in tracked(range(2), "outer"):
            for number in tracked(iter("abcd"), "inner", 4):
                latest(number)
    shares = [done for _, done in ear.heard if done is not None]
    assert shares == sorted(shares) and set(shares) == {eighth / 8 for eighth in range(8)}
    assert ("outer › inner: c", 2 / 8) in ear.heard
    assert ear.heard[-1] == ("", None)  # all is over


def test_a_loop_that_is_left_early_is_over() -> None:
    ear = Ear()
    with listening(ear):
        for _ in tracked(range(9), "left"):
            break
        with pytest.raises(RuntimeError, match="within"), task("fails", 2):
            raise RuntimeError("within")
        pairs = zip_longest(tracked(range(3), "one"), tracked(range(2), "two"))
        assert len([*pairs]) == 3
    assert ear.heard[-1] == ("", None)


def test_a_listener_is_not_heard_beyond_its_end_nor_where_a_line_is_there_already() -> None:
    ear = Ear()
    with listening(ear), listening(None), task("muted", 1):
        pass
    with task("later", 1):
        pass
    assert ear.heard == []


def test_the_time_left_follows_from_what_this_time_has_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    left: list[float | None] = []
    with (
        listening(lambda tasks: left.append(seconds_left(tasks))),
        task("jobs", 10, done=6) as jobs,
    ):  # 6 on another day
        now = 130.0
        jobs.tell(7)
        with task("unmeasured"), task("steps", 10) as steps:
            steps.tell(5)
    told = [each for each in left if each is not None]
    assert told[0] == pytest.approx(90.0)  # 30 s for one of four
    assert min(told) == pytest.approx(30 / 0.375 * 0.625)


def test_steps_done_before_count_as_done_and_the_first_steps_stay_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    ear = Ear()
    with listening(ear), task("training", 420, done=300) as training:  # resumed at step 300
        training.tell(305)
        training.restart()
        training.tell(360)
        now = 111.0
        left = seconds_left([training])
    assert ear.heard[0][1] == pytest.approx(300 / 420) and ear.heard[-2][1] == pytest.approx(360 / 420)
    assert left == pytest.approx(11 / 55 * 60)


def test_took_is_never_nothing() -> None:
    assert [took(s) for s in (0.0, 0.04, 0.1, 12.34)] == ["less than 0.1 s", "less than 0.1 s", "0.1 s", "12.3 s"]


def test_clock() -> None:
    assert [clock(s) for s in (0, 61.9, 3600, 90061)] == ["0:00", "1:01", "1:00:00", "25:01:01"]


def test_a_long_function_of_python_shows_itself_unless_somebody_hears(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, ear = 0.0, Ear()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)

    def work() -> str:
        nonlocal now
        with shown():
            for _ in tracked(range(4), "attacks"):
                now += 20.0
        return capsys.readouterr().err

    assert work().startswith(" 25 %  attacks")
    with listening(None):
        assert work() == ""
    with listening(ear):
        assert work() == "" and ("attacks", 0.25) in ear.heard


def test_a_task_of_one_step_or_none_is_whole_at_its_end() -> None:
    assert [share([Task("one", 1, done)]) for done in (0, 0.5, 1, 2)] == [0.0, 0.5, 1.0, 1.0]
    assert share([Task("none", 0)]) == 0.0 and share([Task("unknown")]) is None and share([]) is None
    heard: list[tuple[float, int | None, str]] = []
    work = Task("work", notify=lambda: heard.append((work.done, work.total, work.now)))
    work.count(2, 5, "now")
    work.tell(3)
    work.tell(now="later")
    assert heard == [(2, 5, "now"), (3, 5, "now"), (3, 5, "later")]


def test_a_note_goes_to_who_listens_last_and_to_the_first_rank_otherwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outer, inner = list[str](), list[str]()
    with notes_to(outer.append):
        with notes_to(inner.append):
            note("a")
        note("b")
        with notes_to(silent):
            note("c")
    assert (outer, inner, capsys.readouterr().out) == (["b"], ["a"], "")
    note("d")
    monkeypatch.setenv("RANK", "1")
    note("e")
    monkeypatch.setenv("RANK", "0")
    note("f")
    assert capsys.readouterr().out == "d\nf\n"


class Closed(io.StringIO):
    def __init__(self, error: type[OSError]) -> None:
        super().__init__()
        self.error = error

    def flush(self) -> None:
        raise self.error


def test_a_closed_terminal_ends_nothing_and_a_closed_pipe_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Closed(OSError))
    note("unseen")
    monkeypatch.setattr(sys, "stdout", Closed(BrokenPipeError))
    with pytest.raises(BrokenPipeError):
        note("unread")
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    monkeypatch.setattr(sys, "stderr", Closed(OSError))
    with showing(), task("work", 2) as work:
        now = 60.0
        work.tell(1)


def lines_at(times: list[float], capsys: pytest.CaptureFixture[str], clock_at: Callable[[float], None]) -> list[float]:
    """The times of these at which a task that tells something is shown."""
    seen = []
    clock_at(0.0)
    with showing(), task("work") as work:
        for now in times:
            clock_at(now)
            work.tell(now=str(now))
            if said := capsys.readouterr().err:
                assert said == f"work: {now}\n"
                seen.append(now)
    return seen


def test_plain_lines_come_after_ten_seconds_and_then_every_thirty(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: times[-1])
    asked = [9.9, 10.0, 11.0, 39.9, 40.0, 41.0, 75.0, 100.0, 104.9, 105.0]
    assert lines_at(asked, capsys, times.append) == [10.0, 40.0, 75.0, 105.0]
    monkeypatch.setenv("RANK", "1")
    assert lines_at(asked, capsys, times.append) == []
