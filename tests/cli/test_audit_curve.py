"""`situs audit sweep`: files, flags that have no part, and mistakes in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from situs.cli.main import main


def test_files_of_a_curve(photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "curve"
    words = ["audit", "sweep", "test_vit", "--data", str(photographs), "--img-size", "32", "--out", str(out)]
    more = ["--count", "1", "--over", "precision", "--attacks", "patchembed", "--defences", "none"]
    assert main([*words, *more]) == 0
    assert "precision, none: all images were recovered exactly at fp32" in capsys.readouterr().out
    told = json.loads((out / "curve.json").read_text())
    assert told["schema"] == "situs-audit-curve/1" and len(told["lines"]) == 1
    assert "Where attacks stop" in (out / "curve.html").read_text()
    assert (out / "curve-precision-psnr.png").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "data: give the images to attack (--data)"),
        (["--data", "x", "--over", "fog"], "--over"),
        (["--data", "lines.txt", "--attacks", "tokens"], "attacks: has no effect for curves of sentences"),
        (["--data", "lines.txt", "--weights", "random"], "weights: has no effect for curves of sentences"),
        (["--data", "lines.txt"], "test_vit: takes images, not texts"),  # and not what is drawn by default
        (["--data", "x", "--find", "psnr=20", "--defences", "noise"], "defences: has no effect with --find"),
        (["--data", "x", "--find", "beauty=3"], "(--find)"),
        (
            ["--data", "x", "--over", "noise", "--private-epochs", "3"],
            "private_epochs: has no effect for curves; leave it out (--private-epochs)",
        ),
    ],
)
def test_mistakes(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("lines.txt").write_text("w3 w7\n")
    Path("x").mkdir()
    assert main(["audit", "sweep", "test_vit", *words, "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
