"""`situs demo --examples` copies what the tutorials name, whole or not at all."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from situs.cli.main import main


def test_it_copies_every_example_and_says_what_each_does(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--examples", "examples"]) == 0
    shown = capsys.readouterr().out
    tracked = subprocess.run(["git", "ls-files", "examples"], cwd=root, capture_output=True, text=True, check=False)
    copied = {path.as_posix() for path in Path("examples").rglob("*") if path.is_file()}
    assert {*tracked.stdout.split()} <= copied
    assert not any("__pycache__" in path for path in copied)
    for path in copied:
        assert (tmp_path / path).read_bytes() == (root / path).read_bytes()
    assert "python examples/audit_my_model.py" in shown
    assert "What does one training step of my model reveal?" in shown


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("precious")
    assert main(["demo", "--examples", str(tmp_path / "mine")]) == 2
    assert "exists; give a new folder (--examples)" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "notes.txt"]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["demo", "--examples", str(tmp_path / "file" / "below")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert main(["demo", "--examples", str(tmp_path / "new" / "place"), "--json"]) == 0
    assert f"{tmp_path / 'new' / 'place' / 'study.toml'}" in json.loads(capsys.readouterr().out)
