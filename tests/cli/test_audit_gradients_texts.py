"""`situs audit texts FOLDER --data FILE`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_texts import write_folder

from situs.cli.main import main

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("gpt2"), "gpt2")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "lines.txt"
    file.write_text("w3 w7 w1 w9\nw4 w3 w8 w2\n")
    return file


def audit(*words: object) -> int:
    return main(["audit", "texts", *map(str, words)])


def test_texts_make_a_table_files_and_a_gate(
    folder: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, gate = tmp_path / "out", tmp_path / "gate.xml"
    asked = ("--data", texts, "--batch", 2, "--count", 2, "--out", out)
    assert audit(folder, *asked, "--fail-above", "tokens=0.2", "--junit", gate) == 3
    said = capsys.readouterr()
    assert "word gradient sent" in said.out and "2 of 2" in said.out and "The gate tokens=0.2 is not passed" in said.out
    written = json.loads((out / "texts.json").read_text())
    assert [row["whole"] for row in written["defences"]] == [2, 2] and written["gate"]["status"] == 3
    assert written["command"].startswith("situs audit texts gpt2")
    assert gate.read_text().count("<failure") == 2
    page = (out / "texts.html").read_text()
    assert "w7" in page and str(tmp_path) not in page + json.dumps(written)
    assert audit(folder, *asked, "--no-pictures") == 0
    assert "w7" not in (out / "texts.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--data: must be given"),
        (("--data", "TEXTS", "--attacks", "matching"), "has no such flag"),
        (("--data", "TEXTS", "--count", "9"), "has only 2 sentences, but count=9"),
        (("--data", "nowhere.txt"), "no such file or directory (--data)"),
    ],
)
def test_wrong_calls(
    words: tuple[str, ...], said: str, folder: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(texts) if word == "TEXTS" else word for word in words]
    assert audit(folder, *given, "--out", tmp_path / "out") == 2
    err = capsys.readouterr().err
    assert said in err and len(err.strip().splitlines()) == 1 and not (tmp_path / "out").exists()
