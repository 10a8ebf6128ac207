"""`situs audit split` on tiny runs."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from situs.audit.split.attackers import attack
from situs.audit.split.audit import DEFENCES
from situs.cli.main import main

QUICK = ["--split", "train", "--count", "4", "--public", "20", "--attacks", "order,linkage,labels"]


def test_a_classifier(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(trained.one), *QUICK, "--defences", "none,noise=0.5", "--permute", "rows", "--out", str(tmp_path)]
    assert main(["audit", "split", *words]) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-4:] == [
        f"situs: {each}" for each in ("none", "rows", "noise=0.5", "noise=0.5 + rows")
    ]
    numbers = json.loads((tmp_path / "split-audit.json").read_text())
    assert (numbers["samples"], numbers["public_images"]) == (4, 20)
    assert [each["setting"] for each in numbers["settings"]] == ["none", "rows", "noise=0.5", "noise=0.5 + rows"]
    assert numbers["settings"][1]["attacks"][2]["labels"] == 1
    assert numbers["verdict"] in printed.out
    assert (
        numbers["settings"][0]["knn"] is not None
        and "Attacks that were not selected (they may still succeed)" in printed.out
    )
    page = (tmp_path / "split-audit.html").read_text()
    assert "Threat model" in page and "This page shows private images" in page
    assert all((tmp_path / f"split-audit{end}").stat().st_mode & 0o077 == 0 for end in (".html", "-pictures.png"))
    assert main(["audit", "split", *words, "--no-pictures"]) == 0
    assert "This page shows private images" not in (tmp_path / "split-audit.html").read_text()


def test_ctrl_c_leaves_a_page_of_what_was_finished(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def pressed(name: str, scene: Any) -> Any:
        calls.append(name)
        if len(calls) == 5:
            signal.raise_signal(signal.SIGINT)
        return attack(name, scene)

    monkeypatch.setattr("situs.audit.split.audit.attack", pressed)
    words = [str(trained.one), *QUICK, "--defences", "none", "--out", str(tmp_path)]
    assert main(["audit", "split", *words]) == 130
    said = "A partial result: stopped by Ctrl-C, with 4 of 12 attacks finished."
    assert said in capsys.readouterr().out
    assert said in (tmp_path / "split-audit.html").read_text()
    numbers = json.loads((tmp_path / "split-audit.json").read_text())
    assert numbers["partial"]
    assert [each["setting"] for each in numbers["settings"]] == ["none", "columns"]
    assert [each["status"] for each in numbers["settings"][1]["attacks"]] == ["done", "not_run", "not_run"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--attacks", "thief"], "unknown attack 'thief'"),
        (["--defences", "fog"], "fog"),
        (["--permute", "tiles"], "must be rows or columns (--permute)"),
        (["--time-limit", "0"], "time_limit=0.0: must be > 0 (--time-limit)"),
        (["--public", "24"], "24 images, but at least 26 are needed: 24"),
    ],
)
def test_mistakes_are_said(trained: Any, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "split", str(trained.one), "--split", "train", *words]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1


def test_a_run_without_positions_has_no_places_to_find(trained: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "split", str(trained.mp3)]) == 2
    assert "was trained without positions" in capsys.readouterr().err


def told(monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    """What the audit of texts is asked for by these flags."""
    asked: dict[str, Any] = {}

    def audited(model: Any, texts: Any, **options: Any) -> Any:
        asked.update(options, model=model, texts=texts)
        return SimpleNamespace(without_pictures=lambda: "bare")

    monkeypatch.setattr("situs.cli.audit.audit_prompts", audited)
    monkeypatch.setattr("situs.cli.audit.present", lambda result, out: asked.update(shown=result == "bare", out=out))
    assert main(["audit", "split", "gpt2", "--data", "texts.txt", *words]) == 0
    return asked


def test_images_have_the_defaults_of_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the flags do not give is left to `audit_split`, and what they give is what it gets."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr("situs.cli.audit.open_from", lambda args: "model")
    monkeypatch.setattr("situs.cli.audit.present", lambda result, out: None)
    monkeypatch.setattr("situs.audit.split.audit.audit_split", lambda model, **options: asked.update(options))
    assert main(["audit", "split", "gpt2"]) == 0
    assert not asked.keys() & {"count", "public", "defences", "permute", "base", "time_limit"}
    assert main(["audit", "split", "gpt2", "--count", "64", "--permute", "rows", "--defences", "none"]) == 0
    assert (asked["count"], asked["permute"], asked["defences"]) == (64, ("rows",), ("none",))


def test_texts_have_defaults_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = told(monkeypatch)
    assert (asked["model"], asked["texts"]) == ("gpt2", "texts.txt")
    assert not asked.keys() & {"defences", "permute", "count", "public", "device", "base"}
    usual = ["--count", "64", "--public", "300", "--permute", "rows,columns"]  # the values that images have by default
    asked = told(monkeypatch, *usual, "--defences", ",".join(DEFENCES))
    assert (asked["count"], asked["public"], asked["permute"]) == (64, 300, ("rows", "columns"))
    assert asked["defences"] == DEFENCES
    given = ["--defences", "noise=1", "--permute", "columns", "--count", "5", "--device", "cpu", "--seed", "3"]
    asked = told(monkeypatch, *given, "--depth", "0,half", "--out", str(tmp_path / "new"))
    assert (asked["defences"], asked["permute"], asked["count"]) == (("noise=1",), ("columns",), 5)
    assert (asked["device"], asked["seed"], asked["depth"]) == ("cpu", 3, ("0", "half"))
    assert asked["out"] == tmp_path / "new" and asked["facts"]["command"].startswith("situs audit split gpt2")
    assert told(monkeypatch, "--no-pictures")["shown"] and not told(monkeypatch, "--pictures")["shown"]
