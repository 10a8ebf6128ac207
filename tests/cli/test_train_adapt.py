"""`situs adapt` in a shell: the plan, the table, the files, the mistakes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from situs.cli.main import main
from situs.measure.adapt import run as runs


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "UPDATES", 3)
    monkeypatch.setattr(runs, "EPOCHS", 0)


def test_data_without_splits_sets_a_part_aside(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = shutil.copytree(trained.data / "train", tmp_path / "data")
    (data / "dark" / "broken.png").write_bytes(b"no image")
    words = ["adapt", str(trained.one), "--data", str(data), "--device", "cpu", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    text, left_out = capsys.readouterr()
    assert "could not be read" in left_out and "broken.png" in left_out
    assert "plan: all layers, 3 updates on 5 folds" in text and "20 % of the samples were held out" in text
    tested = re.search(r"recognises .* % of (\d+) images of 3 classes", text)
    labelled = re.search(r"(\d+) labelled images", text)
    assert tested and labelled and int(tested[1]) + int(labelled[1]) == 24
    assert (tmp_path / "out" / "adapt.html").is_file() and (tmp_path / "out" / "export" / "model.safetensors").is_file()
    assert main(words) == 2 and "already contains a run" in capsys.readouterr().err


def test_mistakes_name_the_flags(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["adapt", str(trained.one), "--data", "samples", "--out", str(tmp_path / "out")]
    assert main([*words, "--minutes", "-1"]) == 2 and "minutes=-1.0: must be > 0 (--minutes)" in capsys.readouterr().err
    assert main([*words, "--unlabelled", "samples"]) == 2 and "--method" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
