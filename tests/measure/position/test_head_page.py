"""The pages of position accuracy."""

from __future__ import annotations

import math
from typing import Any

import pytest

from situs.measure.position.head import GridCell, PositionCurve, PositionGrid
from situs.pages import make_page


def test_missing_cells_are_said_and_not_counted() -> None:
    reason = "mask_ratio=0.5: must be 0.75 on swin"
    cells = (
        GridCell(0.5, 0.25, None, None, None, reason),
        GridCell(0.75, 0.25, 4, 1, 0.2),
        GridCell(0.75, 0.5, 4, 2, 0.6, top5=0.9),
    )
    grid = PositionGrid((*cells[:1], GridCell(0.5, 0.5, None, None, None, reason), *cells[1:]), 10, 16, (0.75, 0.5))
    assert grid.mean == 0.4
    said = grid.summary()
    assert said.sentence.startswith(
        "The mean position accuracy over 2 of 4 cells is 40.00 %, 6.4 times chance (6.25 %)"
    )
    assert said.sentence.endswith("between 20.00 % (γ = 0.75, γ_pos = 0.25) and 60.00 % (γ = 0.75, γ_pos = 0.5).")
    page = make_page(grid)
    text = page.render()
    assert f"Some cells cannot be measured: {reason}." in text
    assert "The run was trained at γ = 0.75 and γ_pos = 0.5." in text
    assert said.sentence.partition(". ")[0] in text
    assert page.pictures["grid"].startswith(b"\x89PNG")
    assert [row[-2] for row in said.tables[0].rows] == [None, None, "20.00", "60.00"]
    assert [row[-1] for row in said.tables[0].rows] == [None, None, None, "90.00"]
    assert said.tables[0].header[-2:] == ["accuracy, %", "top-5, %"] and len(said.tables[0].header) == 6


def test_a_curve_speaks_of_the_share_nearest_to_the_training() -> None:
    told: dict[str, Any] = {"anchors": 0.1, "trained_anchors": 0.1, "top5": {0.0: 0.75, 0.5: 0.5}}
    found = PositionCurve({0.0: 0.25, 0.5: 0.125}, 10, 16, 0.4, **told)
    assert found.summary().sentence == (
        "At η = 0.5, the model predicts the position correctly for 12.50 % of all patches, 2.0 times chance (6.25 %). "
        "The training used η = 0.4."
    )
    rows = [{"ratio": 0.0, "accuracy": 0.25, "top5": 0.75}, {"ratio": 0.5, "accuracy": 0.125, "top5": 0.5}]
    assert found.numbers()["accuracy"] == rows
    assert found.summary().tables[0].rows == [["0", "25.00", "75.00"], ["0.5", "12.50", "50.00"]]
    text = make_page(found).render()
    said = "10 % of the patches keep their positions (hints), as in training. The accuracy also counts these patches."
    assert said in text and found.summary().notes == (said,)
    assert PositionCurve({0.0: 0.25}, 10, 16, 0.4).summary().notes == ()


def test_an_accuracy_of_zero_is_measured() -> None:
    cells = (GridCell(0.5, 0.25, 4, 1, 0.004), GridCell(0.5, 0.5, 4, 2, 0.0), GridCell(0.75, 0.5, 2, 1, 0.008))
    grid = PositionGrid(cells, 10, 16, (0.75, 0.5))
    assert grid.mean == pytest.approx(0.004)
    assert grid.summary().sentence.endswith("between 0.00 % (γ = 0.5, γ_pos = 0.5) and 0.80 % (γ = 0.75, γ_pos = 0.5).")
    assert grid.summary().tables[0].rows[1][-2] == "0.00"


def test_the_grid_is_drawn_row_by_row_up_to_the_next_ten_per_cent() -> None:
    def grid(*shares: float | None) -> Any:
        places = [(g, p) for g in (0.25, 0.75) for p in (0.5, 0.9)]
        cells = tuple(GridCell(*at, 4, 2, share) for at, share in zip(places, shares, strict=True))
        (figure,) = PositionGrid(cells, 10, 16, (0.75, 0.5)).figures()
        return figure

    figure = grid(0.1, 0.2, 0.405, None)
    ((values, _),), rows, columns = figure.values[0].values(), *figure.values[1:3]
    assert values[0] == pytest.approx([10.0, 20.0]) and values[1][0] == pytest.approx(40.5) and math.isnan(values[1][1])
    assert (rows, columns, figure.options["limits"]) == (["0.25", "0.75"], ["0.5", "0.9"], (0.0, 50.0))
    assert grid(0.01, 0.02, 0.0, None).options["limits"] == (0.0, 10.0)
    assert grid(0.4, 0.02, 0.0, 0.1).options["limits"] == (0.0, 40.0)


def test_the_first_screen_has_the_best_of_a_curve_and_the_mean_of_a_grid() -> None:
    found = PositionCurve({0.0: 0.25, 0.5: 0.5, 0.9: 0.125}, 10, 16, 0.6, top5={0.0: 0.5})
    assert found.summary().numbers == (("50.0 %", "position accuracy at η = 0.5 (chance: 6.2 %)"),)
    assert [row[2] for row in found.summary().tables[0].rows] == ["50.00", None, None]
    (curve,) = found.figures()
    assert curve.values[0] == {"this run": ([0.0, 0.5, 0.9], [25.0, 50.0, 12.5])}
    assert curve.options["level"] == ("chance, 1 / 16", 6.25) and "Trained at η = 0.6." in curve.caption
    numbers = PositionCurve({0.0: 0.25}, 10, 16, 0.6, 0.25, trained_anchors=0.5).numbers()
    assert (numbers["told"], numbers["told_in_training"], numbers["places"], numbers["count"]) == (0.25, 0.5, 16, 10)
    assert numbers["accuracy"] == [{"ratio": 0.0, "accuracy": 0.25, "top5": None}]
    cells = (GridCell(0.5, 0.25, 4, 1, 0.25), GridCell(0.5, 0.5, 4, 2, 0.5))
    said = PositionGrid(cells, 10, 16, (0.75, 0.5)).summary()
    assert said.numbers == (("37.5 %", "mean position accuracy over all cells (chance: 6.2 %)"),) and said.notes == ()
    assert "over the 2 cells is 37.50 %, 6.0 times chance (6.25 %)" in said.sentence
