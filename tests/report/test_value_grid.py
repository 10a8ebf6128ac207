"""A value grid shows every number in its cell, and a dash where there is none."""

from __future__ import annotations

import numpy as np

from situs.report.figures import png
from situs.report.value_grid import value_grid


def test_every_cell_holds_its_number() -> None:
    values = np.array([[1.0, 50.25, 99.0], [np.nan, 0.0, 100.0]])
    figure = value_grid(values, ["a", "b"], ["x", "y", "z"], "columns", "rows", "share, %", limits=(0, 100))
    axis = figure.axes[0]
    shown = {(round(text.get_position()[0]), round(text.get_position()[1])): text.get_text() for text in axis.texts}
    assert shown == {(0, 0): "1.0", (1, 0): "50.2", (2, 0): "99.0", (0, 1): "–", (1, 1): "0.0", (2, 1): "100.0"}
    assert [label.get_text() for label in axis.get_xticklabels()] == ["x", "y", "z"]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["a", "b"]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("columns", "rows")
    dark, light = axis.texts[0].get_color(), axis.texts[2].get_color()
    assert dark == "white"  # on the dark end of the scale
    assert light != "white"
    assert png(figure).startswith(b"\x89PNG")
