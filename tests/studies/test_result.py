"""The cells of a table: three numbers, and why one is missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from situs.config import from_dict
from situs.errors import SitusError
from situs.studies.form import Study
from situs.studies.reading import read_study
from situs.studies.result import Cell, Drawn, Ended, StudyResult

ONE = {"verb": "pretrain"}


def result(tables: list[dict], **changes: object) -> StudyResult:
    import situs.studies.reading as module

    study = from_dict(Study, {"title": "t", "shows": "s", "jobs": {"a": ONE}, "tables": tables, **changes})
    rows, lines = module._filled(study, None)
    return StudyResult("mine", study, "paper", 1, (), rows, lines)


def test_three_numbers_as_they_are_read() -> None:
    assert Cell("a", 82.0, {0: 81.0, 1: 81.4}, 1).texts() == ("82.0", "81.2 ± 0.3", "-0.8")
    assert Cell("a", 82.0, {0: 81.24}, 2, 0.2).texts() == ("82.00 (± 0.2)", "81.24", "-0.76")
    assert Cell("a", "OOM", {}, 1, 0.0, "not finite").texts() == ("OOM", "not finite", "–")
    assert Cell("a", "", {0: 1.0}, 0).texts() == ("–", "1", "–")
    assert Cell("a", 5.0, {0: 7.0}, 1).to_json() == {
        "paper": 5.0, "ours": 7.0, "deviation": None, "difference": 2.0, "values": {"0": 7.0}
    }  # fmt: skip


def test_what_was_measured_before_is_shown_in_the_papers_unit() -> None:
    table = {
        "columns": [{"name": "top-1", "figure": "x", "reading": 0.3}],
        "rows": [{"name": "r", "paper": [82.0], "ours": [81.9], "job": "a"}, {"name": "s", "paper": [7.0]}],
    }
    found = result([table], measured={"date": "2026-11-16", "machine": "one H200"})
    assert found.rows[0][0][0].values == {0: 81.9}
    said = found.summary()
    assert said.sentence.startswith("Our numbers were measured at scale paper with 1 seed (2026-11-16, one H200).")
    assert "Of 1 number 1 agrees with the paper" in said.sentence
    assert said.tables[0].rows == [["r", "82.0 (± 0.3)", "81.9", "-0.1"], ["s", "7.0 (± 0.3)", None, None]]


def test_many_columns_are_one_cell_each_and_no_paper_leaves_ours_alone() -> None:
    columns = [{"name": str(n), "figure": "x", "unit": ""} for n in range(4)]
    wide = {"columns": columns, "rows": [{"name": "r", "paper": [1.0, 2.0, "", "OOM"], "unit": "s"}]}
    assert result([wide]).summary().tables[0].rows == [
        ["r, s", "1.0 | – | –", "2.0 | – | –", "– | – | –", "OOM | – | –"]
    ]
    alone = {"columns": columns[:2], "rows": [{"name": "r"}]}
    assert result([alone]).summary().tables[0].header == ["", "0", "1"]


def test_a_table_is_named_by_what_it_holds_where_it_has_no_title() -> None:
    few = [{"name": str(n)} for n in range(2)]
    paper, none = [{"name": "r", "paper": [1.0] * 2}], [{"name": "r"}]
    many = {"columns": [*few, {"name": "2"}, {"name": "3"}], "rows": [{"name": "r", "paper": [1.0] * 4}]}
    tables = [{"columns": few, "rows": paper}, {"columns": few, "rows": none}, many]
    titles = ["Paper, ours, difference", "Ours", "Paper | ours | difference"]
    assert [table.title for table in result(tables).summary().tables] == titles
    titled = [{**table, "title": "Loss"} for table in tables]
    assert [table.title for table in result(titled).summary().tables] == [
        "Loss", "Loss", "Loss (paper | ours | difference)"
    ]  # fmt: skip


def test_rows_with_units_of_their_own_tell_them() -> None:
    rows = [{"name": "top-1", "paper": [80.5]}, {"name": "Diff.Norm", "paper": [8.96], "unit": "", "digits": 2}]
    table = result([{"columns": [{"name": "0.03", "figure": "x"}], "rows": rows}]).summary().tables[0]
    assert table.header == ["", "0.03: paper", "ours", "difference"]
    assert [row[:2] for row in table.rows] == [["top-1, %", "80.5"], ["Diff.Norm", "8.96"]]


def test_what_is_missing_is_said() -> None:
    table = {"columns": [{"name": "AP", "figure": "x"}], "rows": [{"name": "r", "paper": [1.0]}]}
    told = [{"package": "dense", "why": "no detector yet", "columns": ["AP"]}]
    assert "Missing: AP needs dense: no detector yet." in result([table], missing=told).summary().notes


def test_a_study_by_its_name() -> None:
    found = read_study("mp3-table3")
    assert found.name == "mp3-table3" and found.summary().sentence
    small = read_study("mjp-table4").summary()
    assert "at scale quick" in small.sentence and any(
        "so the differences from the paper's numbers mean little" in note for note in small.notes
    )
    with pytest.raises(SitusError, match="unknown study 'nosuch'"):
        read_study("nosuch")


def test_pictures_for_their_owner_alone_make_the_page_so(tmp_path: Path) -> None:
    found = result([{"columns": [{"name": "c"}], "rows": [{"name": "r"}]}])
    open_, own = tmp_path / "a.png", tmp_path / "b.png"
    for file, mode in ((open_, 0o644), (own, 0o600)):
        file.write_bytes(b"")
        file.chmod(mode)
    assert not found.private and not replace(found, drawn=(("a", open_),)).private
    assert replace(found, drawn=(("a", open_), ("b", own))).private


def told(*cells: Cell, scale: str = "paper") -> str:
    """What is said of cells beside the paper's."""
    columns = [{"name": str(n), "figure": "x"} for n in range(len(cells))]
    found = result([{"columns": columns, "rows": [{"name": "r", "job": "a"}]}], scales={"quick": []})
    tasks = tuple(Ended(f"a-{seed}", "a", "done", 1.0) for seed in range(2))
    return replace(found, scale=scale, seeds=2, tasks=tasks, rows=(((cells),),)).summary().sentence


def test_only_whole_cells_at_the_papers_scale_are_held_to_it() -> None:
    whole, lost = Cell("a", 5.0, {0: 5.0, 1: 5.0}, 1), Cell("a", 7.0, {0: 7.0}, 1, why="not finite (seed 1)")
    assert "Of 1 number 1 agrees with the paper" in told(whole, lost)
    assert "agree" not in told(lost) and "agree" not in told(whole, scale="quick")


@pytest.mark.parametrize(
    ("paper", "ours", "digits", "reading", "agrees"),
    [
        (5.0, 5.05, 1, 0.0, True),  # half of the last digit
        (5.0, 5.06, 1, 0.0, False),
        (5.0, 4.94, 1, 0.0, False),
        (5.0, 5.3, 1, 0.5, True),
        (5.0, 5.6, 1, 0.5, False),
        (5.0, 5.05, 1, 0.01, True),  # read more exactly than it is printed
        (5.0, 5.004, 2, 0.0, True),
        (5.0, 5.4, 0, 0.0, True),
    ],
)
def test_a_number_agrees_up_to_its_last_digit_or_the_reading(
    paper: float, ours: float, digits: int, reading: float, agrees: bool
) -> None:
    said = told(Cell("a", paper, {0: ours}, digits, reading))
    assert f"Of 1 number {int(agrees)} agree{'s' * agrees} with the paper" in said
    assert said.endswith(f"the largest difference (r, 0) is {abs(ours - paper):.{digits}f}.")


def test_the_largest_difference_is_named_whatever_its_sign() -> None:
    said = told(*(Cell("a", 5.0, {0: ours}, 1) for ours in (5.2, 4.0, 5.9)))
    assert "Of 3 numbers 0 agree" in said and said.endswith("(r, 1) is 1.0.")


def ran(*states: str, **changes: object) -> StudyResult:
    """A study of one cell whose jobs ended so; each took a minute and a half."""
    found = result([{"columns": [{"name": "c", "figure": "x"}], "rows": [{"name": "r", "job": "a"}]}], **changes)
    tasks = tuple(Ended(f"a-{n}", "a", state, 90.0, f"why {n}" * (state != "done")) for n, state in enumerate(states))
    return replace(found, tasks=tasks, seeds=len(states))


def test_progress_counts_the_jobs_by_their_ends() -> None:
    found = ran("done", "taken", "not finite", "failed", "failed", "open")
    assert found.summary().sentence == (
        "1 of 6 jobs is done (1 taken, 1 not finite, 2 failed), in 9:00, at scale paper with 6 seeds."
    )
    assert found.summary().numbers == (("2 of 6", "jobs done"),) and (found.done, found.tone) == (2, "unsure")
    assert found.summary().notes == ("a-2 was not finite: why 2.", "a-3 failed: why 3.", "a-4 failed: why 4.")
    whole = ran("done", "done")
    assert whole.summary().sentence == "2 of 2 jobs are done, in 3:00, at scale paper with 2 seeds."
    assert whole.tone is None and whole.summary().notes == ()
    (jobs,) = found.figures()
    assert jobs.values == ({"jobs done": 2, "jobs in all": 6}, "jobs")
    (table,) = found.details()
    assert [list(row) for row in table.rows][:3] == [
        ["a-0", "done", "1:30", None], ["a-1", "taken", "1:30", "why 1"], ["a-2", "not finite", "1:30", "why 2"],
    ]  # fmt: skip
    assert replace(found, tasks=()).details() == []
    assert replace(found, tasks=()).summary().sentence == "Our numbers have not been measured."
    measured = {"date": "2026-11-16", "machine": "one H200", "note": "no EMA"}
    assert replace(ran("done", measured=measured), tasks=()).summary().notes == ("On our numbers: no EMA.",)
    now = ran("done", measured=measured).summary()
    assert now.notes == () and now.sentence == "1 of 1 job is done, in 1:30, at scale paper with 1 seed."


def test_a_page_names_the_paper_and_a_study_of_ones_own_none() -> None:
    table = {"columns": [{"name": "c"}], "rows": [{"name": "r"}]}
    ours = (
        "Our number is the mean over the seeds ± the standard deviation. The difference is our number minus the paper's"
    )
    own, of_paper = (result([table], **more).meaning for more in ({}, {"paper": "mp3", "place": "Table 3"}))
    paper = "Position Prediction as an Effective Pretraining Strategy, Table 3. "
    assert of_paper == f"{paper}{own}" and own.endswith(f"\n\n{ours} number.") and own.startswith("s")


def test_a_row_without_a_unit_of_its_own_has_that_of_the_first_column() -> None:
    columns = [{"name": "a", "unit": "ms"}, {"name": "b", "unit": "s"}]
    table = result([{"columns": columns, "rows": [{"name": "r"}, {"name": "t", "unit": "h"}]}]).summary().tables[0]
    assert [row[0] for row in table.rows] == ["r, ms", "t, h"]
    assert [table.title for table in curved(title="Fig").summary().tables] == ["Fig"]
    assert [table.title for table in curved().summary().tables] == ["loss"]


def test_jobs_that_read_different_data_are_named() -> None:
    found = ran("done", "done", "failed", "done", data={"images": "ImageNet"})
    marks = [{"images": "x"}, {"images": "x"}, {"images": "y"}, {"images": "x"}]
    tasks = [task._replace(data=mark) for task, mark in zip(found.tasks, marks, strict=True)]
    assert not any("same data for" in note for note in replace(found, tasks=tuple(tasks)).summary().notes)
    tasks[3] = tasks[3]._replace(data={"images": "z"})
    notes = replace(found, tasks=tuple(tasks)).summary().notes
    assert any("same data for images: a-0, a-3." in note for note in notes)


@pytest.mark.parametrize(("lost", "listed"), [(0, 0), (1, 1), (4, 4), (5, 4)])
def test_four_cells_without_a_number_are_listed(lost: int, listed: int) -> None:
    columns = [{"name": f"c{n}", "figure": "x"} for n in range(6)]
    found = result([{"columns": columns, "rows": [{"name": "r", "job": "a"}]}])
    cells = tuple(Cell("a", 1.0, {}, 1, why="no x" * (n < lost)) for n in range(6))
    found = replace(found, tasks=(Ended("a-0", "a", "done"),), rows=((cells,),))
    notes = [note for note in found.summary().notes if "were not found" in note or "was not found" in note]
    assert len(notes) == bool(lost) and len(found.unread) == lost
    if lost:
        assert notes[0].endswith(f": {'; '.join(f'r, c{n}' for n in range(listed))}.")
        assert notes[0].startswith("1 number of finished jobs was" if lost == 1 else f"{lost} numbers of finished jobs")
    assert replace(found, tasks=(Ended("a-0", "a", "open"),)).unread == []  # it may still come


def curved(paper: bool = True, **fields: object) -> StudyResult:
    """A figure of two lines: one of three points, of which the paper's second and our third are missing; and a list."""
    line = {
        "name": "l",
        "at": [1.0, 2.0, 4.0],
        "job": "a",
        "figure": "f",
        **({"paper": [3.0, "", 5.0]} if paper else {}),
    }
    told = {
        "x": "epochs",
        "y": "loss",
        "unit": "",
        "lines": [line, {"name": "m", "job": "a", "figure": "g[*]", "over": "h[*]"}],
        **fields,
    }
    found = result([], curves=[told])
    cells = [Cell("a", paper_ if paper else "", values, 1) for paper_, values in (
        (3.0, {0: 2.0, 1: 3.0}), ("", {0: 4.0}), (5.0, {}))]  # fmt: skip
    points = tuple(zip((1.0, 2.0, 4.0), cells, strict=True))
    return replace(found, lines=((Drawn("l", points), Drawn("m", ((7.0, Cell("a", "", {0: 9.0}, 1)),))),))


@pytest.mark.parametrize("paper", [True, False])
def test_what_a_figure_draws_and_its_table_holds(paper: bool) -> None:
    found = curved(paper, title="Figure", scale="log", reading=0.5)
    (drawn,) = found.figures()
    series = {"l, ours": ([1.0, 2.0], [2.5, 4.0]), "m, ours": ([7.0], [9.0])}
    series = {"l, paper": ([1.0, 4.0], [3.0, 5.0]), **series}
    assert drawn.values == (series if paper else {"l": ([1.0, 2.0], [2.5, 4.0]), "m": ([7.0], [9.0])}, "epochs", "loss")
    assert drawn.options == {"title": "Figure", "x_scale": "log"} and drawn.name == "curves"
    assert drawn.caption == "Loss over epochs. The paper's numbers were read from the paper's figure (± 0.5)."
    (table,) = found.summary().tables
    rows = [["l", "1", "3.0", "2.5 ± 0.7", "-0.5"], ["l", "2", "–", "4.0", "–"], ["l", "4", "5.0", "–", "–"]]
    assert [list(row) for row in table.rows] == (rows if paper else [[*row[:2], row[3]] for row in rows])
    assert list(table.header) == ["line", "epochs", *(["loss: paper", "ours", "difference"] if paper else ["loss"])]
    assert [*found.ours()] == ['l: ours = [[2.0, 3.0], 4.0, ""]']
    assert [where for where, _ in found.cells()] == [f"l at epochs {x}" for x in (1, 2, 4)] + ["m at epochs 7"]
    two = replace(found, study=replace(found.study, curves=found.study.curves * 2), lines=found.lines * 2)
    assert [figure.name for figure in two.figures()] == ["curves", "curves1"]
    bare = replace(found, lines=((Drawn("l", ()), Drawn("m", ())),))
    assert [figure.draw for figure in bare.figures()] == ["bars"] and bare.summary().tables == ()


def test_a_cell_that_lacks_a_number_lacks_its_difference_and_says_why() -> None:
    assert Cell("a", 5.0, {}, 1, why="failed").to_json() == {
        "paper": 5.0, "ours": None, "deviation": None, "difference": None, "values": {}, "why": "failed",
    }  # fmt: skip
    assert Cell("a", "", {1: 2.0, 2: 4.0}, 1, 0.5).to_json() == {
        "paper": None, "ours": 3.0, "deviation": pytest.approx(2**0.5), "difference": None,
        "values": {"1": 2.0, "2": 4.0}, "reading": 0.5,
    }  # fmt: skip
    assert Cell("a", 5.0, {0: 4.0, 1: 6.5}, 0, why="one failed").texts() == ("5", "5 ± 1.8; one failed", "+0")


def test_earlier_numbers_by_seed_are_shown_as_their_mean_and_deviation_and_printed_in_the_same_form() -> None:
    shown = read_study("cifar100-mjp")
    assert shown.study.tables[0].rows[0].ours[0] == (73.81, 73.81, 74.31)
    cell = shown.rows[0][0][0]
    assert cell.values == {0: 73.81, 1: 73.81, 2: 74.31} and cell.texts()[1] == "74.0 ± 0.3"
    assert any(line.startswith("A: ViT-S: ours = [[73.8, 73.8, 74.3], [89.8, ") for line in shown.ours())
    single = read_study("cifar100").rows[0][0][0]
    assert list(single.values) == [0] and single.deviation is None
