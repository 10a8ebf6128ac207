"""The list of studies."""

from __future__ import annotations

from situs.studies.plan import study_names
from situs.studies.reading import StudyList, list_studies


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
