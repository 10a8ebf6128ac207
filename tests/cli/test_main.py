"""The command line finds verbs, answers help at once, and turns a user's mistake into one line and status 2."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import situs
from situs.cli import main as cli
from situs.cli import retired
from situs.cli.data import FAILED
from situs.cli.main import main
from situs.cli.parser.flags import flags_of
from situs.cli.result import INTERRUPTED
from situs.gate import ABOVE, NOT_JUDGED

VERB = '''
"""A verb for tests."""
from dataclasses import dataclass
from pathlib import Path
from situs.errors import SitusError

@dataclass(frozen=True)
class Ends:
    """A verb for tests."""
    how: str = "well"
    """How it ends."""

    def run(self):
        if self.how == "mistake":
            raise SitusError("ratio=3: must be in [0, 1) (--ratio)")
        if self.how == "ctrl-c":
            raise KeyboardInterrupt
        if self.how == "bug":
            raise RuntimeError("a bug")
        if self.how.startswith("/"):
            (Path(self.how) / "config.json").read_text()
        if self.how == "one":
            return 1
        for i in range(100_000 if self.how == "long" else 1):
            print("line", i)
'''


@pytest.fixture
def verbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three verbs of our own: `ends`, and two in a group."""
    (tmp_path / "a_verb_for_tests.py").write_text(VERB)
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = ("a_verb_for_tests:Ends", "ends in some way")
    sections = {"First": {"ends": entry}, "Second": {"group one": entry, "group two": entry}}
    monkeypatch.setattr(cli, "SECTIONS", sections)
    monkeypatch.setattr(cli, "VERBS", {verb: e for section in sections.values() for verb, e in section.items()})
    monkeypatch.delenv("SITUS_DEBUG", raising=False)
    return tmp_path


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "situs", "--help"]
    subprocess.run(command, capture_output=True, check=True)  # the first run may have to compile
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds.append(time.perf_counter() - start)
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "situs" in imported
    assert imported & {"torch", "torchvision", "timm", "transformers", "numpy", "cyclopts", "rich"} == set()
    print(f"situs --help: {min(seconds):.3f} s")
    assert min(seconds) < 0.5
    assert done.stdout.startswith("usage: situs VERB")


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_overview_lists_every_verb_once(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    shown = capsys.readouterr().out
    for verb, (_, text) in cli.VERBS.items():
        assert len(re.findall(rf"^  {re.escape(verb)} +{re.escape(text)}$", shown, flags=re.MULTILINE)) == 1
    assert max(map(len, shown.splitlines())) <= 80
    assert len(shown.splitlines()) <= 60


def test_there_are_few_verbs() -> None:
    assert len(cli.VERBS) <= 38


@pytest.mark.parametrize("verb", sorted(retired.VERBS))
def test_a_verb_that_is_gone_is_told_with_what_stands_in_its_place(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verb not in cli.VERBS
    assert main([*verb.split(), "x"]) == 2
    assert capsys.readouterr().err == f"situs: situs {verb} was removed: {retired.VERBS[verb]}\n"
    if named := re.match("use situs (.*)", retired.VERBS[verb]):
        words = named[1].replace(",", "").split()
        assert cli.find_verb(words)[0] in cli.VERBS or any(each.startswith(f"{words[0]} ") for each in cli.VERBS)


@pytest.mark.parametrize(("verb", "flag"), [(verb, flag) for verb in retired.FLAGS for flag in retired.FLAGS[verb]])
def test_a_flag_that_is_gone_is_told_with_what_stands_in_its_place(
    verb: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    instead = retired.FLAGS[verb][flag]
    server = ["--server", "local"] if verb == "split train" else ["x"]
    assert main([*verb.split(), *server, flag, "y"]) == 2
    assert capsys.readouterr().err == f"situs: {flag} was removed: {instead} (see situs {verb} --help)\n"
    known = {each.name for name in cli.VERBS for each in flags_of(cli.verb_type(name), every=True)}
    assert flag not in {each.name for each in flags_of(cli.verb_type(verb), every=True)}
    assert all(each in known for each in re.findall(r"--[a-z-]+", instead))


@pytest.mark.parametrize("verb", sorted(cli.VERBS))
def test_every_verb_has_its_module_and_a_short_help(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*verb.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"Usage: situs {verb}" in shown
    assert len(shown.splitlines()) <= 60
    assert max(map(len, shown.splitlines())) <= 80
    for noise in ("{None", "default: None"):  # what a flag is that was not given is no reader's concern
        assert noise not in shown


@pytest.mark.parametrize("verb", ["info test_vit --verify", "audit lock x", "report x", "evaluate accuracy x"])
def test_a_folder_to_write_to_is_looked_at_before_the_work(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb.split(), "--out", "page.html"]) == 2
    assert capsys.readouterr().err == "situs: out='page.html': must be a folder (--out)\n"


@pytest.mark.parametrize("verb", ["info x", "lock x --key k --out y"])
def test_a_verb_that_computes_nothing_takes_no_device(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb.split(), "--device", "cpu"]) == 2
    assert "--device" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"situs {situs.__version__}\n"


@pytest.mark.usefixtures("verbs")
@pytest.mark.parametrize(
    ("line", "status", "err"),
    [
        ("ends", 0, ""),
        ("ends --how one", 1, ""),
        ("ends --how mistake", 2, "situs: ratio=3: must be in [0, 1) (--ratio)\n"),
        ("ends --how ctrl-c", 130, "situs: interrupted\n"),
        ("group two --how one", 1, ""),
        ("end", 2, "situs: unknown verb 'end'; did you mean 'ends'? (situs --help)\n"),
        ("xyzzy", 2, "situs: unknown verb 'xyzzy'; verbs: ends, group one, group two (situs --help)\n"),
        (
            "group tow",
            2,
            "situs: unknown verb 'group tow'; did you mean 'group two'? (situs --help)\n",
        ),
        ("gruop two", 2, "situs: unknown verb 'gruop'; did you mean 'group two'? (situs --help)\n"),
    ],
)
def test_status_and_complaint(line: str, status: int, err: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == status
    assert capsys.readouterr().err == err


@pytest.mark.usefixtures("verbs")
def test_an_unknown_verb_has_its_document_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["xyzzy", "--json"]) == 2
    told = capsys.readouterr()
    assert told.err == f"situs: {json.loads(told.out)['error']}\n" and "unknown verb 'xyzzy'" in told.err


@pytest.mark.usefixtures("verbs")
def test_wrong_flag_names_it_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ends", "--hwo", "well"]) == 2
    printed = capsys.readouterr()
    assert "--hwo" in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.usefixtures("verbs")
def test_a_group_lists_its_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["group", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "usage: situs group VERB" in shown
    assert "group one" in shown
    assert "group two" in shown
    assert "\n  ends" not in shown
    assert main(["group"]) == 2


@pytest.mark.usefixtures("verbs")
def test_a_bug_shows_itself() -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        main(["ends", "--how", "bug"])


def test_a_path_that_the_system_refuses_is_one_sentence(
    verbs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (verbs / "circle").symlink_to("circle")
    for flag, name, reason in (
        (("--how", ""), "x" * 300, "file name too long"),
        (("", "--how="), "circle", "too many levels of symbolic links"),
        (("--how", ""), "none", "no such file or directory"),
    ):
        assert main(["ends", *filter(None, flag[:1]), f"{flag[1]}{verbs / name}"]) == 2
        file = verbs / name / "config.json"
        assert capsys.readouterr().err == f"situs: {file}: cannot be used: {reason} (--how)\n"
    monkeypatch.setattr(Path, "read_text", lambda _: Path("/another/file").stat())
    with pytest.raises(FileNotFoundError):  # not of the arguments: a bug
        main(["ends", "--how", str(verbs)])


@pytest.mark.usefixtures("verbs")
def test_debug_lets_a_mistake_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITUS_DEBUG", "1")
    with pytest.raises(situs.SitusError, match="ratio=3"):
        main(["ends", "--how", "mistake"])


def test_a_reader_that_stops_is_no_error(verbs: Path) -> None:
    code = (
        "import sys; from situs.cli import main as m; "
        "m.VERBS['ends'] = ('a_verb_for_tests:Ends', ''); sys.exit(m.main(['ends', '--how', 'long']))"
    )
    environment = os.environ | {"PYTHONPATH": str(verbs)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"line 0\n"
        process.stdout.close()
        complaint = process.stderr.read()
    assert (process.returncode, complaint) == (141, b"")


def test_a_mistake_in_a_process_has_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-m", "situs", "nosuchverb"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"situs: unknown verb 'nosuchverb'; .*\n", done.stderr)


def test_the_page_of_exit_codes_tells_those_that_verbs_give() -> None:
    page = (Path(__file__).parents[2] / "docs/exit_codes.md").read_text()
    told = {int(row.split("|")[1]) for row in page.splitlines() if re.match(r"\| \d+ \|", row)}
    assert told == {0, 1, 2, ABOVE, NOT_JUDGED, INTERRUPTED, 141} and FAILED == ABOVE


def test_flags_of_a_topic_are_listed_and_explained_where_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "gradients", "--help"]) == 0
    short = capsys.readouterr().out
    assert "matching  --labels" in short and "--iterations INT" not in short
    assert main(["audit", "gradients", "--help", "matching"]) == 0
    told = capsys.readouterr().out
    assert "--iterations INT" in told and "--fail-above TEXT" not in told
    assert main(["audit", "gradients", "--help", "all"]) == 0
    assert {"--img-size", "--iterations", "--fail-above"} <= set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert main(["audit", "gradients", "--help", "presets"]) == 2
    assert "choose one of: advanced, all, matching, model" in capsys.readouterr().err


def test_data_that_is_nowhere_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    code = """
import sys
from situs.cli.main import _check_data, main
from situs.errors import SitusError
status = [main(words.split()) for words in (
    "pretrain --data nowhere --out run",
    "evaluate accuracy model --data=nowhere/a --json",
)]
print(status, "torch" in sys.modules)
for place in ("here", "samples", "s3://bucket/{0..9}.tar", "~"):
    _check_data("pretrain", ["--data", place])
_check_data("pretrain", ["--help", "--data", "nowhere"])
_check_data("study run", ["--data", "photos=nowhere"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "[2, 2] False", done.stderr
    said = ["situs: nowhere: no such folder or file (--data)", "situs: nowhere/a: no such folder or file (--data)"]
    assert done.stderr.splitlines() == said


def test_what_the_gpu_of_a_mac_cannot_compute_is_one_sentence(monkeypatch, capsys):
    def fail(_):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework has none.\nUse float32")

    monkeypatch.setattr("situs.cli.install.Doctor.run", fail)
    assert main(["doctor"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("situs: device=mps: torch cannot compute this on mps (Cannot convert a MPS Tensor")
    assert said.endswith("; use --device cpu\n") and said.count("\n") == 1


@pytest.mark.parametrize("verb", sorted(cli.VERBS))
def test_what_a_verb_was_asked_for_cannot_be_changed(verb: str) -> None:
    kind = cli.verb_type(verb)
    kinds = [each for each in kind.__mro__ if dataclasses.is_dataclass(each)]
    kinds += [type(field.default) for field in dataclasses.fields(kind) if dataclasses.is_dataclass(field.default)]
    assert kinds and all(each.__dataclass_params__.frozen for each in kinds)  # type: ignore[attr-defined]
