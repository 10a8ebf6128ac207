"""`situs evaluate position --kind all` on tiny runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from situs.cli.main import main


def test_a_classifier(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(trained.one), "--ratios", "0.5", "--out", str(tmp_path)]
    assert main(["evaluate", "position", "--kind", "all", *words]) == 0
    printed = capsys.readouterr().out.rstrip().splitlines()
    assert printed[-2].startswith("`one` encodes its 2 × 2 positions by a vector")
    assert printed[-1].startswith(str(tmp_path / "positions-audit.html"))
    numbers = json.loads((tmp_path / "positions-audit.json").read_text())
    assert (numbers["images_fitted_on"], numbers["images_read"]) == (8, 7)
    assert [(row["ratio"], row["told"]) for row in numbers["shuffled"]] == [(0.5, True), (0.5, False)]
    assert all(0 <= row["consistency"] <= 1 for row in numbers["shuffled"])  # it has a classifier
    assert numbers["row_law"]["status"] == "holds"
    assert max(numbers["row_law"]["errors"].values()) < 1e-10  # in float64
    page = (tmp_path / "positions-audit.html").read_text()
    assert "<dd>fp32</dd>" in page  # how it was made
    assert "answers that stay" in page
    assert str(tmp_path) not in page
    assert {path.name for path in tmp_path.glob("*.png")} == {
        f"positions-audit-{name}.png" for name in ("error", "named", "vectors", "spectrum")
    }


def test_mp3_is_audited_without_positions(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["evaluate", "position", "--kind", "all", str(trained.mp3), "--no-equivariance", "--out", str(tmp_path)])
        == 0
    )
    assert "`mp3` uses no positions: it was trained without them." in capsys.readouterr().out
    numbers = json.loads((tmp_path / "positions-audit.json").read_text())
    assert list(numbers["readings"]) == ["as it is"]
    assert numbers["row_law"] is None
    assert all(row["diff_norm"] < 1e-4 * row["clean_norm"] for row in numbers["shuffled"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--count", "1"], "(--count, --data)"),
        (["--ratios"], "ratios"),
        (["--ratios", "1.5"], "ratios=1.5: must be in [0, 1] (--ratios)"),
    ],
)
def test_mistakes_are_said(trained: Any, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "position", "--kind", "all", str(trained.one), "--no-equivariance", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_convolution_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["evaluate", "position", "--kind", "all", "test_resnet", "--weights", "random", "--data", "samples"]) == 2
    )
    assert "has no tokens" in capsys.readouterr().err
