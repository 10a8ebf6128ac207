"""`situs data check`: the table, the page, and the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from situs.cli.main import main


def test_the_status_says_what_was_found(photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data", "check", str(photographs), "--workers", "0"]
    assert main(words) == 0
    assert "3 images: nothing odd." in capsys.readouterr().out
    torn, twice = photographs / "torn.png", photographs / "twice.png"
    try:
        twice.write_bytes((photographs / "0.png").read_bytes())
        assert main(words) == 0
        assert main([*words, "--fail-on", "broken,duplicate"]) == 3
        torn.write_bytes(twice.read_bytes()[:90])
        assert main([*words, "--fail-on", "none"]) == 0
        assert main([*words, "--out", str(tmp_path)]) == 3
    finally:
        torn.unlink(missing_ok=True)
        twice.unlink()
    shown = capsys.readouterr().out
    assert "5 images: 1 broken, 1 duplicate." in shown and "twice.png (as 0.png)" in shown
    numbers = json.loads((tmp_path / "check.json").read_text())
    assert numbers["counts"]["broken"] == 1 and numbers["found"]["broken"][0]["name"] == "torn.png"
    assert "torn.png" in (tmp_path / "check.html").read_text()


def test_an_unknown_kind_is_told_before_the_work(photographs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", str(photographs), "--fail-on", "blurred"]) == 2
    assert "unknown kind of finding 'blurred'" in capsys.readouterr().err
