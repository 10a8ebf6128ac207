"""`situs report` on real tiny runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from situs.cli.main import main


def test_runs_side_by_side(outline: Any, trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(trained.one), str(trained.two), str(trained.mp3), "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].split() == ["run", "method", "progress", "time", "last", "loss"]
    assert [line.split()[:2] for line in printed[2:5]] == [["one", "supervised"], ["two", "supervised"], ["mp3", "mp3"]]
    assert printed[-1] == str(tmp_path / "runs.html")
    *shown, settings = outline((tmp_path / "runs.html").read_text())
    assert settings.startswith("Settings, ") and shown == [
        "First screen, 1 figure",
        "Numbers, 1 note, 3 rows",
        "Final numbers, 4 rows",
        "Best numbers, 1 row",
        "Machine and speed, 9 rows",
        "Configs, 7 rows",
    ]
    numbers = json.loads((tmp_path / "runs.json").read_text())
    assert [run["finished"] for run in numbers["runs"]] == [True] * 3
    assert numbers["config_differences"]["train.seed"] == [0, 1, 0]
    assert numbers["runs"][0]["speed"]["device"].startswith("cpu (")
    assert numbers["runs"][0]["speed"]["precision"] == "fp32"
    assert (tmp_path / "runs-curves.png").read_bytes().startswith(b"\x89PNG")
    assert main(["report", str(trained.two), "--out", str(tmp_path)]) == 0  # which leaves the page of the three
    assert json.loads((tmp_path / "runs.json").read_text()) == numbers
    assert (tmp_path / "two" / "runs.html").is_file()


@pytest.mark.parametrize("words", [["{folder}"], []])
def test_what_is_no_run_is_one_sentence(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled = [word.format(folder=tmp_path) for word in words]
    assert main(["report", *filled, "--out", str(tmp_path / "x")]) == 2
    assert "RUN" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
