"""`situs data check`: the table, the page, and the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from figures import write_coco
from masked import write_ade

from situs.cli.main import main


def test_the_status_says_what_was_found(photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data", "check", str(photographs), "--workers", "0"]
    assert main(words) == 0
    assert "3 images: no issues found." in capsys.readouterr().out
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
    assert main([*words, "--out", str(tmp_path)]) == 0
    assert "check.html and .json exist and will be replaced" in capsys.readouterr().err


def test_an_unknown_kind_is_told_before_the_work(photographs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", str(photographs), "--fail-on", "blurred"]) == 2
    assert "unknown kind of issue 'blurred'" in capsys.readouterr().err


def test_masks_and_objects_are_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ade = write_ade(tmp_path / "ade", {"training": 3, "validation": 1})
    words = ["data", "check", str(ade), "--workers", "0"]  # ADE20K's list tells that classes count from 1
    assert main(words) == 0
    (ade / "annotations" / "training" / "ADE_00000001.png").unlink()
    assert main(words) == 3
    assert "1 unusable annotation" in capsys.readouterr().out
    coco = write_coco(tmp_path / "coco", {"train": 2, "val": 1})
    assert main(["data", "check", str(coco), "--workers", "0"]) == 0
    file = coco / "annotations" / "instances_train2017.json"
    file.write_text(file.read_text()[:-9])
    assert main(["data", "check", str(coco), "--workers", "0"]) == 2
    assert "instances_train2017.json: is not valid JSON" in capsys.readouterr().err
