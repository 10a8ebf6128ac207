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
    page = (tmp_path / "finetuning.html").read_text()
    assert page.count("<img") == 2
    assert str(trained.data.parent) not in page + json.dumps(written)


def test_of_a_locked_folder_with_its_key(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key, locked, opened = (str(tmp_path / name) for name in ("owner.key", "locked", "opened"))
    assert main(["export", str(trained.one), "--out", opened]) == 0
    assert main(["keygen", "--out", key]) == 0
    assert main(["lock", opened, "--key", key, "--out", locked]) == 0
    lacking, second = str(tmp_path / "lacking"), str(tmp_path / "second")
    apart = ["--withhold", "embedding", "--withheld", second]
    assert main(["lock", opened, "--key", key, "--out", lacking, *apart]) == 0
    asked = ["--data", str(trained.data), *SHORT[:4], "--epochs", "1", "--batch", "6", "--looks", "1"]
    found = []
    for source in ([opened], [locked, "--key", key], [lacking, "--key", key, "--withheld", second]):
        out = tmp_path / f"out{len(found)}"
        assert main(["audit", "finetuning", "--from", *source, *asked, "--out", str(out)]) == 0
        found.append(json.loads((out / "finetuning.json").read_text()))
    one, two, three = ({way: (own["loss"], own["accuracy"]) for way, own in each["curves"].items()} for each in found)
    assert one == two == three  # the very model
    capsys.readouterr()
    for words, said in (
        ([locked, *asked], "is locked, and without its key its blocks are scrambled (--key)"),
        ([opened, *asked, "--key", key], "is not locked, and opens without a key (--key)"),
        ([locked, *asked, "--key", key, "--withheld", opened], "nothing was withheld from"),
        ([lacking, *asked, "--key", key], "give the owner's second file too (--withheld)"),
    ):
        assert main(["audit", "finetuning", "--from", *words]) == 2
        assert said in capsys.readouterr().err


def test_mistakes_are_one_sentence(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--data", "samples"], "(--from)"),
        (["--withheld", str(tmp_path / "second")], "what opens a locked folder is given, and no folder: name it"),
        (["--from", str(trained.one), "--epochs", "0"], "epochs=0"),
        (["--from", str(tmp_path)], "holds no run and no model"),
    ):
        assert main(["audit", "finetuning", *words]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith("situs: ")
        assert printed.count("\n") == 1
        assert said in printed
