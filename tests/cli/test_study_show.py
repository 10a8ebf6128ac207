"""`situs study show` and `situs study show` print what files and folders hold."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from situs import files
from situs.cli.main import main
from situs.studies.folder import StudyFolder
from situs.studies.plan import load_study, study_file


def test_the_list_and_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "show", "--paper", "mp3"]) == 0
    shown = capsys.readouterr().out
    assert "mp3-table3" in shown and "mjp-table4" not in shown and "(~ marks an estimate)" in shown
    assert main(["study", "show", "--paper", "mjp", "--numbers"]) == 0
    assert "J: A + JP + UNK + DAL (NLN)" in capsys.readouterr().out


def test_the_list_as_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "show", "--paper", "droppos", "--numbers", "--json"]) == 0
    first, *others = json.loads(capsys.readouterr().out)
    assert first["title"] == "Studies" and first["rows"][0][:2] == ["study", "what it shows"]
    names = [row[0] for row in first["rows"][1:]]
    assert names and all(name.startswith("droppos-") for name in names)
    assert others and {table["title"].partition(":")[0] for table in others} <= {*names}


@pytest.mark.parametrize("flags", [["--numbers"], ["--paper", "mp3"]])
def test_one_study_is_no_list(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "show", "mp3-table3", *flags]) == 2
    assert capsys.readouterr().err.startswith("situs: mp3-table3: is one study; --paper and --numbers apply only to ")


def test_a_study_by_name_and_no_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "show", "mp3-table3"]) == 0
    assert "MP3, 2,000 epochs, 2-D relative" in capsys.readouterr().out
    assert main(["study", "show", str(tmp_path)]) == 2
    assert "holds no study" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_shown_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    StudyFolder.create(tmp_path, load_study("lock"), study_file("lock"), "quick", 1)
    assert main(["study", "show", str(tmp_path)]) == 0
    before, page = capsys.readouterr().out, tmp_path / "study.html"
    assert before.endswith(f"{page}\n")

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(files, "write_bytes", refused)
    assert main(["study", "show", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert shown.out == before.removesuffix(f"{page}\n")
    why = f"{tmp_path / 'study.json'}: could not be written: read-only file system"
    assert shown.err.strip() == f"situs: the page was not updated: {why}"
