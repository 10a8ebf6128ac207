"""A study's folder: which tasks it has, which are chosen, what it takes for a study, and what each state means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from situs.config import from_dict
from situs.errors import SitusError
from situs.studies.folder import SETTINGS, STUDY, StudyFolder, fingerprint, toml_of
from situs.studies.form import Study

FILE: dict[str, Any] = {
    "title": "t",
    "shows": "s",
    "seeds": 2,
    "data": {"images": "any"},
    "jobs": {
        "pre": {"verb": "pretrain"},
        "tuned": {"verb": "finetune", "after": "pre"},
        "top1": {"verb": "evaluate accuracy", "after": "tuned"},
        "probe": {"verb": "evaluate probe", "after": "pre"},
    },
    "tables": [{"columns": [{"name": "c", "figure": "x"}], "rows": [{"name": "r", "job": "top1"}]}],
}


def folder(path: Path, seeds: int = 2, **changes: Any) -> StudyFolder:
    return StudyFolder(path, from_dict(Study, {**FILE, **changes}), "mine", "paper", seeds)


def test_every_job_is_a_task_for_each_seed_and_needs_that_of_its_own(tmp_path: Path) -> None:
    found = folder(tmp_path, 3)
    assert [*found.tasks] == [f"{job}-{seed}" for job in FILE["jobs"] for seed in (0, 1, 2)]
    assert found.tasks["top1-2"].needs == {"tuned": "tuned-2"} and found.tasks["pre-1"].needs == {}
    assert found.tasks["tuned-1"].folder == tmp_path / "jobs" / "tuned-1" and found.tasks["tuned-1"].seed == 1
    assert found.tasks["tuned-1"].file("log") == tmp_path / "jobs" / "tuned-1.log"
    jobs = {**FILE["jobs"], "key": {"verb": "keygen"}, "pre": {"verb": "pretrain", "options": {"x": "{key}"}}}
    once = folder(tmp_path, 3, jobs=jobs)
    if once.jobs["key"].once:  # one for all seeds
        assert [name for name in once.tasks if name.startswith("key")] == ["key-0"]
        assert once.tasks["pre-2"].needs["key"] == "key-0"


@pytest.mark.parametrize(
    ("only", "options", "names"),
    [
        ((), {}, ["pre-0", "pre-1", "tuned-0", "tuned-1", "top1-0", "top1-1", "probe-0", "probe-1"]),
        ((), {"seeds": 1}, ["pre-0", "tuned-0", "top1-0", "probe-0"]),
        (("top1-1",), {}, ["pre-1", "tuned-1", "top1-1"]),  # and what it needs, and what that needs
        (("top1-1",), {"needed": False}, ["top1-1"]),
        (("t*",), {"needed": False}, ["tuned-0", "tuned-1", "top1-0", "top1-1"]),
        (("probe", "top1-0"), {"seeds": 1}, ["pre-0", "tuned-0", "top1-0", "probe-0"]),
    ],
)
def test_what_is_chosen_by_patterns_and_seeds(
    only: tuple[str, ...], options: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    assert [*folder(tmp_path).chosen(only, **options)] == names


def test_a_pattern_of_no_job_is_refused(tmp_path: Path) -> None:
    for only, more in ((("nosuch",), {}), (("pre", "x*"), {}), (("pre-1",), {"seeds": 1})):
        with pytest.raises(SitusError, match="unknown job") as error:
            folder(tmp_path).chosen(only, **more)
        assert error.value.field == "only"


@pytest.mark.parametrize("gone", [SETTINGS, STUDY])
def test_a_folder_without_one_of_its_two_files_holds_no_study(gone: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('title = "t"\nshows = "s"\n[jobs.pre]\nverb = "pretrain"\n[[tables]]\ncolumns = [{ name = "c" }]\n'
                    'rows = [{ name = "r" }]\n')  # fmt: skip
    study = from_dict(Study, FILE)
    made = StudyFolder.create(tmp_path / "out", study, file, "paper", 3)
    assert made.seeds == 3 and (tmp_path / "out" / "jobs").is_dir()
    opened = StudyFolder.open(tmp_path / "out")
    assert (opened.name, opened.scale, opened.seeds, [*opened.jobs]) == ("mine", "paper", 3, ["pre"])
    (tmp_path / "out" / gone).unlink()
    with pytest.raises(SitusError, match="out: holds no study"):
        StudyFolder.open(tmp_path / "out")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"scale": "paper"}, "lacks seeds, study"),
        ({"study": "mine", "seeds": 0}, "seeds must be an integer >= 1, not 0"),
        ({"study": "mine", "seeds": True}, "seeds must be an integer >= 1, not True"),
        ({"study": "mine", "seeds": "2"}, "seeds must be an integer >= 1, not '2'"),
        ({"study": "mine", "seeds": 1}, ""),
    ],
)
def test_settings_that_cannot_be_are_one_sentence(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / SETTINGS).write_text(json.dumps(settings))
    (tmp_path / STUDY).write_text('title = "t"\nshows = "s"\n[jobs.pre]\nverb = "pretrain"\n[[tables]]\n'
                                  'columns = [{ name = "c" }]\nrows = [{ name = "r" }]\n')  # fmt: skip
    if said:
        with pytest.raises(SitusError, match=said):
            StudyFolder.open(tmp_path)
    else:
        assert StudyFolder.open(tmp_path).scale == "paper"


def test_more_seeds_are_added_to_a_folder_and_never_taken_away(tmp_path: Path) -> None:
    study, file, out = from_dict(Study, FILE), tmp_path / "mine.toml", tmp_path / "out"
    file.write_text("")
    assert StudyFolder.begun(out, study, file, "paper", None).seeds == 2  # the study's own
    assert not out.exists()  # and nothing is written
    for asked, seeds in ((1, 1), (4, 4), (2, 4), (None, 4)):
        assert StudyFolder.create(out, study, file, "paper", asked).seeds == seeds
    with pytest.raises(SitusError, match="out: was started with scale 'paper', not 'quick'"):
        StudyFolder.begun(out, study, file, "quick", None)
    with pytest.raises(SitusError, match="out: was started with study 'mine', not 'other'"):
        StudyFolder.begun(out, study, tmp_path / "other.toml", "paper", None)
    with pytest.raises(SitusError, match="seeds=0"):
        StudyFolder.begun(out, study, file, "paper", 0)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / ".lock").touch()
    assert StudyFolder.begun(tmp_path / "full", study, file, "paper", None).seeds == 2
    (tmp_path / "full" / "precious").touch()
    for path in (tmp_path / "full", file):
        with pytest.raises(SitusError, match="must be empty or the folder of a study"):
            StudyFolder.begun(path, study, file, "paper", None)


@pytest.mark.parametrize(
    ("state", "done", "here"),
    [("done", True, True), ("taken", True, True), ("not finite", False, False), ("failed", False, False),
     ("begun", False, False), ("", False, False)],
)  # fmt: skip
def test_what_ended_well_gives_other_jobs_a_model(state: str, done: bool, here: bool, tmp_path: Path) -> None:
    found = folder(tmp_path)
    for name, made in (("pre-0", "config.json"), ("top1-0", "top1.json")):
        task = found.tasks[name]
        task.folder.mkdir(parents=True)
        if state:
            found.write_state(task, state, seconds=3.0)
        again = folder(tmp_path)
        assert (again.ended(task), again.done(task)) == (state, done)
        assert again.model_here(task) == (here and name == "top1-0")  # a training that was packed has no model here
        (task.folder / made).touch()
        assert again.model_here(task) == here
    assert folder(tmp_path).ended(found.tasks["pre-1"]) == ""


def test_a_state_that_is_none_is_refused_with_its_file(tmp_path: Path) -> None:
    for written in ({"state": "sleeping", "recipe": {}}, {"state": "done"}, {"state": "done", "recipe": []}):
        found = folder(tmp_path)
        task = found.tasks["pre-0"]
        task.folder.parent.mkdir(exist_ok=True)
        task.file("json").write_text(json.dumps(written))
        with pytest.raises(SitusError, match=r"pre-0\.json: does not contain the state of a job"):
            found.ended(task)


def test_a_training_is_begun_where_it_has_a_checkpoint(tmp_path: Path) -> None:
    found = folder(tmp_path)
    for name, begun in (("pre-0", True), ("top1-0", False)):  # a measurement is not resumed
        task = found.tasks[name]
        assert not task.begun
        (task.folder / "checkpoints" / "step-00000001").mkdir(parents=True)
        assert task.begun == begun


def test_what_changes_of_a_job_is_told_with_what_depends_on_it(tmp_path: Path) -> None:
    before = folder(tmp_path)
    for name in ("pre-0", "tuned-0"):
        before.tasks[name].folder.mkdir(parents=True)
        before.write_state(before.tasks[name], "done")
    folder(tmp_path).check_recipes()
    jobs = {**FILE["jobs"], "pre": {"verb": "pretrain", "change": {"optim": {"lr": 0.5}}}}
    with pytest.raises(SitusError, match=r"job pre-0 was run with change.*; choose another folder") as error:
        folder(tmp_path, jobs=jobs).check_recipes()
    assert str(error.value).endswith("delete jobs/NAME and jobs/NAME.json for every NAME of pre-0, tuned-0")
    jobs = {**FILE["jobs"], "tuned": {"verb": "finetune", "after": "pre", "preset": "x"}}
    with pytest.raises(SitusError, match=r"delete jobs/tuned-0 and jobs/tuned-0\.json$"):
        folder(tmp_path, jobs=jobs).check_recipes()


def test_a_recipe_that_is_none_is_refused_with_its_file(tmp_path: Path) -> None:
    found = folder(tmp_path)
    task = found.tasks["pre-0"]
    task.folder.mkdir(parents=True)
    for recipe in ({"verb": "dance"}, {"verb": "pretrain", "options": ["x"]}):
        task.file("json").write_text(json.dumps({"state": "done", "recipe": recipe}))
        with pytest.raises(SitusError, match=r"pre-0\.json: does not describe a job \(") as error:
            folder(tmp_path).check_recipes()
        assert error.value.field == "out"
    task.file("json").write_text(json.dumps({"state": "done", "recipe": {}}))  # of a version that wrote none
    folder(tmp_path).check_recipes()


def test_a_study_that_cannot_be_run_yet_says_why(tmp_path: Path) -> None:
    missing = [{"package": "dense", "why": "no detector yet"}, {"package": "text", "why": "no", "rows": ["r"]}]
    study = from_dict(Study, {**FILE, "missing": missing})
    with pytest.raises(SitusError, match=r"^mine: cannot be run yet; it needs dense: no detector yet$") as error:
        StudyFolder.begun(tmp_path / "out", study, tmp_path / "mine.toml", "paper", None)
    assert error.value.field == "study" and not (tmp_path / "out").exists()


def test_tables_are_written_a_line_a_value() -> None:
    assert toml_of({"a": {"b": 1, "c": "ä"}, "d": [1, 2]}) == 'a.b = 1\na.c = "ä"\nd = [1, 2]\n'
    with pytest.raises(SitusError, match=r"change\.a\.b: must not be a list of TOML tables"):
        toml_of({"a": {"b": [{"c": 1}]}})


def test_of_a_folder_only_files_of_an_ending_count_and_an_address_is_its_text(tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_bytes(b"1")
    first = fingerprint(tmp_path, ".pt")
    (tmp_path / "notes.txt").write_bytes(b"2")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.pt").write_bytes(b"3")
    assert fingerprint(tmp_path, ".pt") == first != fingerprint(tmp_path)
    assert fingerprint("https://a/x") == fingerprint("https://a/x") != fingerprint("https://a/y")
