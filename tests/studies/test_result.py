"""The cells of a table: three numbers, and why one is missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from situs.config import from_dict
from situs.errors import SitusError
from situs.studies.form import Study
from situs.studies.reading import read_study
from situs.studies.result import Cell, Ended, StudyResult

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
