"""`situs audit gradients --setting`: the settings of Table 5 for one model, files and page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from situs.cli.main import main

NAME = "test_vit"  # timm's own tiny model for tests: here 16 patches, 64 channels


def words(photographs: Path, out: Path, *more: str) -> list[str]:
    return ["audit", "gradients", NAME, "--images", str(photographs), "--img-size", "64", "--out", str(out), *more]


def test_table_verdict_and_files(photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One hidden patch of 16: nothing to search for, and nothing to order."""
    more = ("--setting", "a,c", "--defence", "mjp=0.1", "--count", "2", "--attack", "patchembed")
    assert main(words(photographs, tmp_path, *more)) == 0
    shown = capsys.readouterr().out
    assert "test_vit with MJP's step: MJP's privacy claim does not survive" in shown
    assert "1 of 16 patches hidden (γ = 0.1)" in shown
    told = json.loads((tmp_path / "settings.json").read_text())
    rows = {(r["model"], r["setting"], r["attacker"]): r for r in told["rows"]}
    assert len(rows) == 2 * 2 * 2  # one who knows MJP is always among the attackers
    known = rows["test_vit with MJP's step", "c", "adaptive-mjp, knows MJP"]
    static = rows["test_vit with MJP's step", "c", "patchembed, static"]
    assert known["exact"] == 2 and static["exact"] == 0
    page = (tmp_path / "settings.html").read_text()
    assert "What the paper reports" in page
    assert page.index("This page holds private images") < page.index("Threat model") and "<img" in page
    assert (tmp_path / "settings.html").stat().st_mode & 0o777 == 0o600
    assert told["schema"] == "situs-audit-settings/1"
    for name in ("made", "command", "situs", "torch", "weights_sha256"):
        assert told[name] in page
    assert str(photographs.parent) not in page + json.dumps(told)


def test_an_unknown_setting_is_refused(photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(photographs, tmp_path, "--setting", "d", "--count", "1")) != 0
    assert "a, b, c" in capsys.readouterr().err


def test_no_pictures_where_none_are_wanted(photographs: Path, tmp_path: Path) -> None:
    more = ("--setting", "a", "--defence", "mjp=0.1", "--count", "1", "--attack", "patchembed", "--no-pictures")
    assert main(words(photographs, tmp_path, *more)) == 0
    page = (tmp_path / "settings.html").read_text()
    assert "<img" not in page and "private images" not in page
    told = json.loads((tmp_path / "settings.json").read_text())
    assert [row["images"][0]["reidentified"] for row in told["rows"]] == [None] * 4
