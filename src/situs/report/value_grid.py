"""A small matrix as a picture: every cell coloured by its value and holding it in print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from situs.report.canvas import FAINT, INK, LABEL, canvas, colour_bar, label, unframe


def value_grid(
    values: Any,
    rows: Sequence[str],
    columns: Sequence[str],
    x_label: str,
    y_label: str,
    value_label: str,
    *,
    limits: tuple[float, float],
    digits: str = ".1f",
    cell_height: float = 0.62,
) -> Figure:
    """values: [len(rows), len(columns)]; NaN leaves a cell grey with a dash. limits: ends of the colour scale.

    cell_height: in inches; a cell is 0.95 wide.
    """
    array = np.asarray(values, dtype=np.float64)
    height, width = array.shape
    figure, (axis,) = canvas(1, 1, 2.2 + 0.95 * width, 1.1 + cell_height * height)
    drawn = axis.imshow(np.ma.masked_invalid(array), cmap="cividis", vmin=limits[0], vmax=limits[1], aspect="auto")
    axis.set_facecolor(FAINT)
    axis.set_xticks(np.arange(width + 1) - 0.5, minor=True)
    axis.set_yticks(np.arange(height + 1) - 0.5, minor=True)
    axis.grid(which="minor", color="white", linewidth=1.5)
    middle = sum(limits) / 2
    for (row, column), value in np.ndenumerate(array):
        text = "–" if np.isnan(value) else format(value, digits)
        colour = INK if np.isnan(value) or value > middle else "white"
        axis.text(column, row, text, ha="center", va="center", fontsize=LABEL + 1, color=colour)
    label(axis, "", x_label, y_label)
    axis.set_xticks(range(width), list(columns))
    axis.set_yticks(range(height), list(rows))
    axis.tick_params(which="both", length=0)
    unframe(axis)
    colour_bar(figure, drawn, axis, value_label, pad=0.03)
    return figure
