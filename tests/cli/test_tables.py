"""Tables: aligned text for programs, rich for people."""

from __future__ import annotations

import re

import pytest

from situs.cli.tables import print_table, print_verdict
from situs.gate import Judgement, Limit, Ruling
from situs.results import Table, Tone

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


def test_on_a_narrow_terminal_nothing_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    rows = [["droppos-figure3", "Places in [pictures]", None], ["st-table2", "yes", "missing"]]
    table = Table("Studies", ["study", "what it shows", "missing"], rows)
    for width in (10, 30, 44, 60, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        print_table(table)
        shown = re.sub(r"\x1b\[\d*m", "", drawn := capsys.readouterr().out)
        assert "…" not in shown and all(len(line) <= width for line in shown.splitlines())
        assert width < 15 or "droppos-figure3" in shown
        assert "\x1b[33mmissing" in drawn or width < 44, "a cell's colour"
        assert drawn.count("\x1b[33m") <= 1, "and not the header's"
    monkeypatch.setenv("COLUMNS", "30")
    print_table(table)
    lines = [line.rstrip() for line in re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out).splitlines()]
    assert lines == [
        "Studies", "", "droppos-figure3", "  what it shows: Places in", "  [pictures]", "", "st-table2",
        "  what it shows: yes", "  missing: missing", "",
    ]  # fmt: skip


@pytest.mark.parametrize(("tone", "sign", "colour"), [("good", "✓", "32"), ("bad", "✗", "31"), ("unsure", "?", "33")])
def test_a_verdict_has_a_sign_and_a_colour_on_a_terminal(
    tone: Tone, sign: str, colour: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "The gate [psnr=20] is judged. " + " ".join(["As long as a sentence may be."] * 9)
    print_verdict(said, tone)
    assert capsys.readouterr().out == f"{said}\n"  # a pipe has the words alone
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_verdict(said, tone)
    assert capsys.readouterr().out == f"\x1b[{colour}m{sign} {said}\x1b[0m\n"
    monkeypatch.setenv("NO_COLOR", "1")
    print_verdict(said, tone)
    assert capsys.readouterr().out == f"{sign} {said}\n"
    print_verdict(said, None)
    assert capsys.readouterr().out == f"{said}\n"


def test_what_was_not_judged_is_never_good() -> None:
    answers = {"passed": "good", "above": "bad", "incomplete": "unsure", "nothing_applied": "unsure"}
    for answer, tone in answers.items():
        judged = [Judgement("none", "passed", ""), Judgement("noise", answer, "")]
        assert Ruling(Limit("psnr", 20.0), judged).tone == tone
    assert Ruling(Limit("psnr", 20.0), []).tone == "unsure"
