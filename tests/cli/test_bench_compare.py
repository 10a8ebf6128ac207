"""`situs bench compare`: two files in, a table out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from situs.bench.cases import StepCase, Timing
from situs.bench.clock import Times
from situs.bench.measure import StepRow
from situs.bench.step import StepTable
from situs.cli.main import main


def write(path: Path, *seconds: float, kind: str = "cuda") -> str:
    row = StepRow(StepCase(method="mp3", precision="bf16"), Times(seconds, 1.0), 10**9)
    machine = {"kind": kind, "device": "H200", "torch": "2.11"}
    path.write_text(json.dumps(StepTable((row,), {}, machine, Timing()).to_json()))
    return str(path)


def test_the_table_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = write(tmp_path / "old.json", 0.2, 0.21, 0.22), write(tmp_path / "new.json", 0.1, 0.11, 0.12)
    assert main(["bench", "--compare", f"{one},{two}", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "new against old, one case: 1 faster" in printed and "0.524" in printed
    assert json.loads((tmp_path / "out" / "comparison.json").read_text())["pairs"][0]["verdict"] == "faster"
    assert (tmp_path / "out" / "comparison.html").is_file()
    assert main(["bench", "--compare", f"{two},{one}", "--out", str(tmp_path / "out")]) == 0
    assert "comparison.html and .json exist and will be replaced" in capsys.readouterr().err


def test_mistakes_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "old.json", 0.2)
    for words, said in (
        ([one, write(tmp_path / "cpu.json", 0.1, kind="cpu")], "old was measured on cuda, but cpu on cpu"),
        ([one, str(tmp_path / "none.json")], "none.json: cannot be read"),
        ([one], "must be two files, BEFORE,AFTER (--compare)"),
    ):
        assert main(["bench", "--compare", ",".join(words)]) == 2
        printed = capsys.readouterr().err
        assert said in printed and printed.count("\n") == 1
