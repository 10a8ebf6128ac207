"""Tables: aligned text for programs, rich for people."""

from __future__ import annotations

import pytest

from situs.cli.tables import print_table
from situs.results import Table

ROWS = [("tokens", "yes", "a sequence"), ("rows", "no", "its [windows] depend on where a token stands")]


def test_terminal_gets_colours_and_every_cell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_table(Table("It can do", (), ROWS))
    shown = capsys.readouterr().out
    assert "\x1b[32myes" in shown
    assert "[windows]" in shown  # rich must not take a cell's brackets for markup
