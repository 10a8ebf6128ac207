"""`situs audit finetuning`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from situs.cli.main import main

SHORT = ["--count", "12", "--test", "15", "--epochs", "2", "--batch", "6", "--looks", "2"]


def test_of_a_run(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "finetuning", "--from", str(trained.one), *SHORT, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    written = json.loads((tmp_path / "finetuning.json").read_text())
    ways = ["normal", "authorised", "unauthorised", "from scratch"]
    assert list(written["curves"]) == ways
    for way in ways:
        curve = written["curves"][way]
        assert curve["steps"] == [0, 2, 4]
        row = rf"{way} +{100 * curve['accuracy'][-1]:.2f} % +{curve['loss'][-1]:.4f}"
        assert re.search(row, printed)
    assert written["curves"]["normal"]["loss"] == pytest.approx(written["curves"]["authorised"]["loss"], rel=1e-4)
    assert "Normal and authorised ought to differ by rounding alone: their logits differ by at most" in printed
    assert "Eq. 6 fails with any key" in printed and "Eq. 6 holds with a key of the published code" in printed
    page = (tmp_path / "report.html").read_text()
    assert page.count("<img") == 2
    assert str(trained.data.parent) not in page + json.dumps(written)


def test_mistakes_are_one_sentence(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--data", "samples"], "(--from)"),
        (["--from", str(trained.one), "--epochs", "0"], "epochs=0"),
        (["--from", str(tmp_path)], "holds no run and no model"),
    ):
        assert main(["audit", "finetuning", *words]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith("situs: ")
        assert printed.count("\n") == 1
        assert said in printed
