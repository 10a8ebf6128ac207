"""--quiet and --json of every verb: errors alone, or one document on stdout and nothing else there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from situs.cli.main import VERBS, main
from situs.cli.shell import answer, as_document, has_flag, next_line, run_with_output

CHEAP = {
    "info test_vit": "model",
    "doctor": "section",
    "study show --paper mp3": "rows",
    "study show mp3-table3": "paper",
    "keygen --out {tmp}/owner.key": "id",
    "data check {data} --workers 0": "found",
    "data pack {data} --workers 0 --out {tmp}/packed": "shards",
    "export {one} --out {tmp}/exported": "lines",
    "features {one} --device cpu --out {tmp}/features.npz": "shape",
    "evaluate accuracy {one} --device cpu --out {tmp}": "top1",
    "report {one} --out {tmp}": "runs",
    "completion fish": "lines",
    "split certs --out {tmp}/certs": "lines",
}
"""Command -> a key of its document."""


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_answers_a_mistake_with_one_document(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb.split(), "--json", "--quiet", "--no-such-flag"]) == 2
    printed = capsys.readouterr()
    said = json.loads(printed.out)["error"]
    assert said.startswith(f"--no-such-flag: situs {verb} has no such flag") or ": must be given" in said
    assert printed.err == f"situs: {said}\n"


@pytest.mark.parametrize("line", CHEAP)
def test_one_document_and_nothing_else_on_stdout(
    line: str, trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if line.startswith("completion"):
        monkeypatch.setattr("situs.cli.install.VERBS", {"doctor": VERBS["doctor"]})
    places = {"tmp": tmp_path, "data": trained.data, "one": trained.one}
    assert main([*line.format(**places).split(), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    first = document[0] if isinstance(document, list) else document
    assert CHEAP[line] in first


def test_quiet_says_nothing_and_does_its_work(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", "accuracy", str(trained.one), "--device", "cpu", "--out", str(tmp_path)]
    assert main([*words, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    quiet = (tmp_path / "accuracy.json").read_bytes()
    assert main([*words, "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads(quiet)
    assert str(tmp_path / "accuracy.html") in printed.err


def test_what_a_verb_prints_is_told_on_stderr_and_what_it_answers_is_the_document(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work() -> int:
        print("on the way")
        answer({"path": Path("x"), "bound": float("inf")}, "for people")
        assert as_document()
        return 3

    assert run_with_output(["--json"], work) == 3
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"path": "x", "bound": None}
    assert printed.err == "on the way\n"
    assert run_with_output(["--json"], lambda: print("one\ntwo") or 1) == 1
    assert json.loads(capsys.readouterr().out) == {"status": 1, "lines": ["one", "two"]}
    assert not as_document()


def test_an_interruption_is_a_document_too_and_a_bug_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    def stopped() -> int:
        raise KeyboardInterrupt

    def bug() -> int:
        raise RuntimeError("a bug")

    with pytest.raises(KeyboardInterrupt):
        run_with_output(["--json"], stopped)
    assert json.loads(capsys.readouterr().out) == {"error": "interrupted"}
    with pytest.raises(RuntimeError):
        run_with_output(["--json", "--quiet"], bug)
    assert capsys.readouterr() == ("", "") and sys.stdout is not None


@pytest.mark.parametrize(
    ("word", "given"),
    [("--json", True), ("--json=true", True), ("--json=yes", True), ("--json=1", True), ("--json=false", False),
     ("--json=0", False), ("json", False), ("--json-lines", False), ("--quiet", False)],
)  # fmt: skip
def test_a_flag_is_seen_in_all_its_spellings(word: str, given: bool) -> None:
    assert has_flag(["evaluate", word, "x"], "json") == given


def test_the_next_commands_run_in_a_shell() -> None:
    commands = (["export", Path("runs/a b"), "--out", "x"], ["info", "y"])
    assert next_line(*commands) == "next: situs export 'runs/a b' --out x, or situs info y"
