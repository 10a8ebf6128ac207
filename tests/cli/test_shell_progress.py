"""How far a verb is: one line on a terminal that leaves nothing behind, a plain line now and then elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from situs import progress
from situs.cli.shell import remark
from situs.progress import showing, task, tracked


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_a_line_only_where_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with showing():
        for number in tracked(range(100), "batches"):
            now = 0.5 * number
    lines = capsys.readouterr().err.splitlines()
    assert lines == [" 21 %  batches  0:37 left", " 81 %  batches  0:09 left"]
    with showing(), task("quick", 2) as own:
        own.tell(1)
    remark("a word")
    assert capsys.readouterr().err == "a word\n"


def test_a_terminal_has_one_line_which_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, out = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with showing(), task("attacks", 4) as own:
        own.tell(1, "april, batch 2")
        remark("tokens, batch 3")
        print("a result")
    shown = screen.getvalue()
    assert "attacks: tokens, batch 3" in shown and " 25 %" in shown and "left" in shown
    assert shown.rstrip().endswith("\x1b[2K") or shown.rstrip().endswith("\x1b[?25h\r\x1b[1A\x1b[2K")
    assert out.getvalue() == "a result\n"  # stdout may be a file
