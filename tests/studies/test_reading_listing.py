"""The list of studies, and what is read of a study's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from situs.config import from_dict
from situs.studies import reading
from situs.studies.folder import StudyFolder
from situs.studies.form import Study
from situs.studies.plan import study_names
from situs.studies.reading import StudyList, list_studies, read_folder
from situs.studies.result import StudyResult

JOBS = {"a": {"verb": "pretrain"}, "b": {"verb": "evaluate accuracy", "after": "a"}}


def read(path: Path, figures: tuple[str, ...] = ("top1",), seeds: int = 2, scale: str = "paper", **more: Any) -> Any:
    """What a folder holds of a study with one row of these figures of the job b."""
    columns = [{"name": str(n), "unit": "", "figure": figure} for n, figure in enumerate(figures)]
    tables = [{"columns": columns, "rows": [{"name": "r", "job": "b"}]}]
    form = from_dict(Study, {"title": "t", "shows": "s", "jobs": JOBS, "tables": tables, **more})
    return StudyFolder(path, form, "mine", scale, seeds)


def ended(folder: StudyFolder, name: str, state: str, numbers: dict[str, Any] | None = None, **facts: Any) -> None:
    """The job `name` has ended so."""
    task = folder.tasks[name]
    task.folder.mkdir(parents=True, exist_ok=True)
    if numbers is not None:
        (task.folder / "accuracy.json").write_text(json.dumps(numbers))
    folder.write_state(task, state, **facts)


@pytest.mark.parametrize(
    ("seeds", "states", "values", "why"),
    [
        (2, ("done", "done"), [1.5, 1.5], ""),
        (2, ("done", "failed"), [1.5], "failed (seed 1)"),
        (2, ("done", ""), [1.5], "open (seed 1)"),
        (3, ("failed", "", "failed"), [], "failed (seed 0, 2); open (seed 1)"),
        (2, ("begun", ""), [], ""),  # nothing is wrong yet
        (1, ("failed",), [], "failed"),
        (1, ("",), [], ""),
    ],
)
def test_a_cell_says_which_seeds_it_lacks_and_why(
    seeds: int, states: tuple[str, ...], values: list[float], why: str, tmp_path: Path
) -> None:
    folder = read(tmp_path, seeds=seeds)
    for seed, state in enumerate(states):
        if state:
            ended(folder, f"b-{seed}", state, {"top1": 1.5})
    (((cell,),),) = read_folder(folder).rows
    assert ([*cell.values.values()], cell.why) == (values, why)


def test_what_is_no_number_is_said(tmp_path: Path) -> None:
    figures = ("top1", "rows[*].x", "name", "ema", "rows[0].x")
    folder = read(tmp_path, figures, seeds=1)
    ended(folder, "b-0", "done", {"top1": 2, "rows": [{"x": 1}, {"x": 2}], "name": "vit", "ema": True})
    ((cells,),) = read_folder(folder).rows
    whys = [
        "",
        "rows[*].x is a list of 2, not a number",
        "name is 'vit', not a number",
        "ema is True, not a number",
        "",
    ]
    assert [cell.why for cell in cells] == whys
    assert [cell.mean for cell in cells] == [2.0, None, None, None, 1.0]


def test_a_scale_leaves_cells_and_pictures_out(tmp_path: Path) -> None:
    scales = {"quick": [{"jobs": ["b"], "leave_out": True}]}
    folder = read(tmp_path, seeds=1, scale="quick", scales=scales, pictures=[{"job": "b"}])
    found = read_folder(folder)
    (((cell,),),) = found.rows
    assert (cell.values, cell.why, found.drawn) == ({}, "left out", ())


def test_pictures_are_those_of_the_first_seed_of_what_is_done(tmp_path: Path) -> None:
    pictures = [{"job": "b", "title": "Puzzles", "file": "*-puzzles"}, {"job": "b", "file": "x*"}, {"job": "a"}]
    folder = read(tmp_path, pictures=pictures)
    for name, state in (("a-0", "failed"), ("b-0", "done"), ("b-1", "done")):
        ended(folder, name, state, {"top1": 1.0})
        for file in ("2-puzzles.png", "1-puzzles.png", "x.png", "x.txt"):
            (folder.tasks[name].folder / file).touch()
    held = folder.tasks["b-0"].folder
    drawn = [("Puzzles", held / "1-puzzles.png"), ("Puzzles", held / "2-puzzles.png"), ("x", held / "x.png")]
    assert [*read_folder(folder).drawn] == drawn


def test_its_days_and_machines_are_told_once_each(tmp_path: Path) -> None:
    folder = read(tmp_path, seeds=3, paper="mp3", place="Table 1")
    paper = {"source": "Position Prediction as an Effective Pretraining Strategy, Table 1"}
    assert read_folder(folder).provenance.facts == paper
    machines = [{"device": "cpu", "torch": "2.9"}, {}, {"device": "H200", "torch": "2.8"}]
    for seed, machine in enumerate(machines):
        ended(folder, f"a-{seed}", "done", machine=machine, date="2026-01-05")
    assert read_folder(folder).provenance.facts == {
        **paper, "dates": "2026-01-05", "machines": "cpu, torch 2.9; H200, torch 2.8"
    }  # fmt: skip
    for seed, (machine, day) in enumerate(zip(machines[:1] * 3, ("07", "06", "01"), strict=True)):
        ended(folder, f"a-{seed}", "done", machine=machine, date=f"2026-02-{day}")
    assert read_folder(folder).provenance.facts == {
        **paper, "dates": "2026-02-01 to 2026-02-07", "machines": "cpu, torch 2.9"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("minutes", "shown"),
    [(3, "0.05"), (90, "1.5"), (594, "9.9"), (600, "10"), (660, "11"), (74_000, "1,233"), (None, None)],
)
def test_hours_have_two_digits_or_all_of_a_whole_number(minutes: float | None, shown: str | None) -> None:
    given = {} if minutes is None else {"quick": minutes, "paper": minutes}
    cost = {"minutes": given, "measured": ["paper"] if given else []}
    form = {"title": "t", "shows": "s", "jobs": JOBS, "pictures": [{"job": "a"}], "cost": cost, "scales": {"quick": []}}
    result = StudyResult("mine", from_dict(Study, form), "paper", 1, (), (), ())
    (row,) = StudyList({"mine": result}).table().rows
    assert list(row)[3:5] == [shown and f"~{shown}", shown]


@pytest.mark.parametrize(
    ("rows", "paper", "ours"),
    [
        ([{"paper": [80, 1], "ours": [81, 2]}], "2; top-1 80.0 %", "2; top-1 81.0 % (scale quick)"),
        ([{"paper": [80, ""]}, {"paper": [79.96, 1]}, {"paper": [9, ""], "unit": ""}], "4; top-1 80.0 %", None),
        ([{"paper": [80, ""], "unit": "%"}, {"paper": [85, "OOM"]}], "2; top-1 80.0 to 85.0 %", None),
        ([{"paper": ["", 1], "ours": ["", [2, 3]]}], "1", "1 (scale quick)"),
        ([{}], None, None),
    ],
)
def test_the_row_of_a_study_has_its_numbers_and_their_range(
    rows: list[dict[str, Any]], paper: str | None, ours: str | None
) -> None:
    columns = [{"name": "top-1"}, {"name": "loss", "unit": "", "digits": 2}]
    tables = [{"columns": columns, "rows": [{"name": str(n), **row} for n, row in enumerate(rows)]}]
    form = {"title": "t", "shows": "s", "jobs": JOBS, "tables": tables, "scales": {"quick": []}}
    study = from_dict(Study, {**form, "measured": {"date": "d", "machine": "m", "scale": "quick"}})
    cells = reading._filled(study, None)
    (row,) = StudyList({"mine": StudyResult("mine", study, "quick", 1, (), *cells)}).table().rows
    assert list(row)[5:7] == [paper, ours]


def test_every_study_has_a_row_with_hours_and_what_is_missing(listed: StudyList) -> None:
    table = listed.table()
    assert [row[0] for row in table.rows] == study_names()
    for row in table.rows:
        study = listed.studies[str(row[0])].study
        assert row[2] == (", ".join(study.data) or "none")
        assert (row[4] is None) == ("paper" not in study.cost.minutes)
        assert str(row[4] or "~").startswith("~") == ("paper" not in study.cost.measured)
        assert bool(row[7]) == bool(study.missing)
    assert listed.sentence().startswith(f"{len(table.rows)} tables and figures")


def test_of_one_paper_with_its_numbers() -> None:
    listed = list_studies("mjp")
    assert all(name.startswith("mjp-") for name in listed.studies)
    tables = {table.title.partition(":")[0]: table for table in listed.tables()}
    assert "80.5" in str(tables["mjp-table4"])


def test_the_range_is_that_of_the_first_column_or_figure_alone(listed: StudyList) -> None:
    rows = {str(row[0]): row for row in listed.table().rows}
    assert rows["st-figure7"][5] == "12; accuracy 85.6 to 90.2 %"
    assert rows["st-table6"][5] == "28; accuracy 88.8 to 91.9 %"
