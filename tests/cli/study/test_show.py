"""`situs study show` and `situs study list` print what files and folders hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from situs.cli.main import main


def test_the_list_and_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "list", "--paper", "mp3"]) == 0
    shown = capsys.readouterr().out
    assert "mp3-table3" in shown and "mjp-table4" not in shown and "~: estimated, not measured" in shown
    assert main(["study", "list", "--paper", "mjp", "--numbers"]) == 0
    assert "J: A + JP + UNK + DAL (NLN)" in capsys.readouterr().out


def test_a_study_by_name_and_no_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "show", "mp3-table3"]) == 0
    assert "MP3, 2,000 epochs, 2-D relative" in capsys.readouterr().out
    assert main(["study", "show", str(tmp_path)]) == 2
    assert "holds no study" in capsys.readouterr().err
