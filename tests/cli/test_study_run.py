"""`situs study run`; the jobs themselves are stood for by tests/studies/fake.py."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from situs.cli.main import main
from situs.cli.study import _paths, check_study
from situs.errors import SitusError
from situs.studies import run as running
from situs.studies.folder import StudyFolder
from situs.studies.plan import load_study
from situs.studies.words import words_of

ROOT = Path(__file__).resolve().parents[2]
STUDY = (ROOT / "examples" / "study.toml").read_text()


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(running, "COMMAND", (sys.executable, str(ROOT / "tests" / "studies" / "fake.py")))
    monkeypatch.setattr(running, "PAUSE", 0.01)
    file = tmp_path / "mine.toml"
    text = STUDY.replace('{ name = "loss", figure = "loss", unit = "", digits = 3 },', "").replace("val_top1", "loss")
    file.write_text(text.replace("change.train.epochs = 3", "change.train.max_steps = 2"))
    return file


def test_the_table_the_page_and_the_numbers(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["study", "run", str(study), "--data", "images=samples", "--out", str(tmp_path / "out"), "--at-once", "2"]
    assert main(command) == 0
    shown = capsys.readouterr()
    written = json.loads((tmp_path / "out" / "study.json").read_text())
    cell = written["tables"][0]["after MP3"]["top-1"]
    assert f"{cell['ours']:.1f} ± {cell['deviation']:.1f}" in shown.out
    assert "10 of 10 jobs are done" in shown.out
    assert "tuned-1: situs finetune --validate-every 1 --data samples --seed 1 --from" in shown.err
    page = (tmp_path / "out" / "study.html").read_text()
    assert "MP3 before a short supervised training" in page and str(tmp_path) not in page + json.dumps(written)
    assert main(["study", "show", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == written
    assert main(["study", "show", str(tmp_path / "out"), "--ours"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        f"after MP3: ours = [[{cell['values']['0']:.1f}, {cell['values']['1']:.1f}]]"
    )


def test_what_is_left_or_diverged_is_the_status(study: Path, tmp_path: Path) -> None:
    study.write_text(study.read_text().replace("lr = 1e-3", "lr = 1e6").replace("max_steps = 2", "max_steps = 4"))
    assert main(["study", "run", str(study), "--data", "samples", "--out", str(tmp_path / "out")]) == 1
    assert "was not finite" in (tmp_path / "out" / "study.html").read_text()


def test_what_was_not_asked_for_is_not_the_status(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study.write_text(study.read_text().replace("lr = 1e-3", "lr = 1e6").replace("max_steps = 2", "max_steps = 4"))
    command = ["study", "run", str(study), "--data", "samples", "--out", str(tmp_path / "out"), "--only"]
    assert main([*command, "mp3"]) == 0
    assert "2 of 10 jobs are done" in (tmp_path / "out" / "study.html").read_text()
    assert main([*command, "tuned"]) == 1  # which is not finite
    capsys.readouterr()
    assert main([*command, "tuned", "--dry-run"]) == 0
    assert "tuned-0: the loss was not finite; the job is not run again" in capsys.readouterr().out
    for seeds in ("0", "-1"):
        assert main([*command, "tuned", "--dry-run", "--seeds", seeds]) == 2
        assert f"seeds={seeds}: must be >= 1 (--seeds)" in capsys.readouterr().err


def test_a_path_that_is_there_may_hold_commas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a, b,c", "d", "a", "one,comma"):
        (tmp_path / name).mkdir()
    for text, paths in (
        ("", {}),
        ("a, b,c", "a, b,c"),
        ("x=a, b,c", {"x": "a, b,c"}),
        ("x=a, b,c, y=d", {"x": "a, b,c", "y": "d"}),
        ("x=one,comma", {"x": "one,comma"}),
        ("y=d,x=one,comma,z=a", {"y": "d", "x": "one,comma", "z": "a"}),
        ("x=d,y=a, b,c", {"x": "d", "y": "a, b,c"}),
        ("x=d, y=a,", {"x": "d", "y": "a"}),
    ):
        assert _paths(text) == paths
    command = ["study", "run", "mjp-table4", "--out", "out", "--only", "D", "--dry-run", "--data"]
    assert main([*command, "images=a, b,c"]) == 0
    assert f"--data '{tmp_path / 'a, b,c'}'" in capsys.readouterr().out


def test_mistakes_are_one_sentence(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "out")]
    study.write_text(study.read_text().replace("options.validate_every", "options.validate_evry"))
    for words, said in (
        (["nosuch", *out], "unknown study 'nosuch'"),
        ([str(study), *out], "jobs.tuned.options: "),
        (["mjp-table4", *out], "mjp-table4 needs data: images: ImageNet-1K"),
        (["mjp-table4", *out, "--scale", "huge"], "unknown scale 'huge'; choose one of: paper, quick"),
        (["mjp-table4", *out, "--at-once", "0"], "at_once=0: must be >= 1 (--at-once)"),
        (["mjp-table4", *out, "--data", "a=b,c"], "data='c': must be NAME=PATH (--data)"),
    ):
        assert main(["study", "run", *words]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith("situs: ") and printed.count("\n") == 1 and said in printed, printed
    assert not (tmp_path / "out").exists()


def test_a_value_that_a_flag_does_not_take_is_seen_before_anything_runs(study: Path) -> None:
    study.write_text(re.sub(r"(options\.validate_every) = \S+", r'\1 = "often"', study.read_text()))
    with pytest.raises(SitusError, match=r"^mine: jobs\.tuned\.options: validate_every='often': must be an integer"):
        check_study(load_study(study, configs=False), "mine", "paper")


def test_a_dry_run_says_which_jobs_lack_their_data(study: Path, tmp_path: Path, capsys) -> None:
    other = '[jobs.other]\nverb = "pretrain"\ndata = "more"\n\n[[tables]]'
    text = study.read_text().replace("[[tables]]", other, 1)
    study.write_text(text.replace("[jobs.mp3]", 'more = "many"\n\n[jobs.mp3]', 1))
    command = ["study", "run", str(study), "--seeds", "1", "--out", str(tmp_path / "out"), "--dry-run", "--data"]
    assert main([*command, "images=samples"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "other-0: skipped: give the path of its data (more)" in lines
    assert sum(": situs " in line for line in lines) == len(lines) - 1
    assert not (tmp_path / "out").exists()


def test_the_commands_of_a_paper_are_those_of_the_command_line() -> None:
    """tests/studies/test_listing_papers.py holds those of all studies to it, each kind of command once."""
    study = load_study("mp3-table6", configs=False)
    for scale in study.scale_names():
        check_study(study, "mp3-table6", scale)


def test_an_option_that_a_verb_does_not_take_names_job_and_file(study: Path) -> None:
    study.write_text(study.read_text() + '[jobs.x]\nverb = "evaluate knn"\nafter = "mp3"\noptions.neighbours = 3\n')
    with pytest.raises(SitusError, match=r"mine\.toml: jobs\.x\.options: .*--neighbours"):
        check_study(load_study(study), study, "paper")


def test_keys_locks_and_exports_are_jobs_too(study: Path) -> None:
    jobs = {
        "key": ("keygen", ""),
        "small": ("export", "mp3"),
        "locked": ("lock", "small"),
        "thief": ("audit lock", "locked"),
    }
    text = "".join(f'[jobs.{n}]\nverb = "{v}"\n' + (f'after = "{a}"\n' if a else "") for n, (v, a) in jobs.items())
    study.write_text(study.read_text() + text.replace('after = "small"\n', 'after = "small"\noptions.key = "{key}"\n'))
    check_study(load_study(study), study, "paper")
    folder = StudyFolder(Path("out"), load_study(study), "mine", "paper", 1)
    place = "out/jobs"
    words = ["lock", f"{place}/small-0", "--key", f"{place}/key-0", "--out", f"{place}/locked-0"]
    assert words_of(folder, folder.tasks["locked-0"], {"images": "samples"}) == words
    assert words_of(folder, folder.tasks["key-0"], {})[1:] == ["--out", f"{place}/key-0"]


def test_a_training_without_a_server_is_told_so_again_when_it_goes_on(study: Path, tmp_path: Path) -> None:
    text = '[jobs.x]\nverb = "split train"\npreset = "samples-mp3"\nchange.method = { name = "supervised" }\n'
    study.write_text(study.read_text() + text + 'options = { server = "local", permute = ["rows"] }\n')
    check_study(load_study(study), study, "paper")
    folder = StudyFolder(tmp_path / "out", load_study(study), "mine", "paper", 1)
    task, data = folder.tasks["x-0"], {"images": "samples"}
    begins = words_of(folder, task, data)
    assert begins[:6] == ["split", "train", "--server", "local", "--permute", "rows"]
    (task.folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    goes_on = ["split", "train", "--resume", str(task.folder), "--server", "local", "--data", "samples"]
    assert words_of(folder, task, data) == goes_on


def test_a_value_that_an_option_cannot_have_is_refused_before_anything_runs(study: Path, tmp_path: Path) -> None:
    study.write_text(study.read_text() + '[jobs.x]\nverb = "evaluate knn"\nafter = "mp3"\noptions.count = "many"\n')
    with pytest.raises(SitusError, match=r"jobs.x.options: count='many': must be an integer"):
        check_study(load_study(study), study, "paper")


def test_a_number_that_is_not_found_is_said_and_is_the_status(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = study.read_text()
    for figure, said in (
        ("loss", "there is no loss"),
        ("log.loss[*].value", "there is no log"),
        ("top1.x", "there is no x"),
    ):
        study.write_text(text.replace('figure = "top1"', f'figure = "{figure}"'))  # the jobs are run once
        assert main(["study", "run", str(study), "--data", "samples", "--out", str(tmp_path / "out")]) == 1
        printed = capsys.readouterr().out
        assert said in printed and "2 numbers of finished jobs were not found: after MP3, top-1; from" in printed


def test_a_list_is_no_number_and_a_number_no_list(study: Path, tmp_path: Path) -> None:
    text = study.read_text().replace('job = "top1-tuned"', 'job = "tuned", figure = "log.loss[*].value"')
    study.write_text(text.replace('figure = "log.loss[*].value", over', 'figure = "loss", over'))
    assert main(["study", "run", str(study), "--data", "samples", "--out", str(tmp_path / "out")]) == 1
    written = json.loads((tmp_path / "out" / "study.json").read_text())
    cell, point = written["tables"][0]["after MP3"]["top-1"], written["curves"][0]["after MP3"][0]
    assert cell["ours"] is None and "log.loss[*].value is a list of 2, not a number" in cell["why"]
    assert point["ours"] is None and "not a list of numbers" in point["why"]
