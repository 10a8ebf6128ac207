"""Figures of puzzles: images with some positions outlined, hidden, wrong or empty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from situs.report.figures import FAINT, GREEN, PAGE_WIDTH, RED, canvas, draw_image, name_row, outline

_SIDE = 0.85  # inches left of a grid, for the names of its rows
_STRIP = 0.8  # inches, the height of a strip


@dataclass(frozen=True)
class Panel:
    """One picture: image [C, H, W] in [0, 1] and positions to mark, each [N] bool on the grid or None.

    outlined: with a green line. empty: light and hatched. hidden: black and hatched, unlike a dark patch. wrong: white
    with a red edge.
    """

    image: Any
    title: str = ""
    outlined: Any = None
    empty: Any = None
    hidden: Any = None
    wrong: Any = None


def panels(rows: Sequence[Sequence[Panel | None]], grid: tuple[int, ...], names: Sequence[str] = ()) -> Figure:
    """Rows of panels, all of one grid (h, w); None leaves a gap. names: left of each row.

    Positions in a row, such as the frames of a spectrogram, are strips below one another.
    """
    if in_a_row(grid):
        return _strips(rows, grid, names)
    across = max(len(row) for row in rows)
    image = next(panel for panel in rows[0] if panel is not None).image
    ratio = image.shape[-2] / image.shape[-1]
    cell = min(1.5, (PAGE_WIDTH - _SIDE * bool(names)) / across)
    heads = sum(0.19 for row in rows if any(panel is not None and panel.title for panel in row))
    width = cell * across + _SIDE * bool(names)
    figure, axes = canvas(len(rows), across, width, (cell * ratio - 0.02) * len(rows) + heads, tight=True)
    for axis in axes:
        axis.set_axis_off()
    for number, row in enumerate(rows):
        for column, panel in enumerate(row):
            if panel is not None:
                _draw(axes[number * across + column], panel, grid)
        if names:
            name_row(axes[number * across], names[number])
    return figure


def outlined(images: Sequence[Any], titles: Sequence[str], masks: Sequence[Any], grid: tuple[int, ...]) -> Figure:
    """Images [C, H, W] side by side, the positions of each mask [N] bool outlined."""
    row = [Panel(image, title, mask) for image, title, mask in zip(images, titles, masks, strict=True)]
    return panels([row], grid)


def in_a_row(grid: tuple[int, ...]) -> bool:
    """Whether the positions form a sequence."""
    return len(grid) == 1 or 1 in grid


def _strips(rows: Sequence[Sequence[Panel | None]], grid: tuple[int, ...], names: Sequence[str]) -> Figure:
    """Each panel on a line: time runs from left to right, frequency from the bottom up. What the first row says above a
    column, such as its η, stands beside the other panels of that column."""
    above = {column: panel.title.partition(":")[0] for column, panel in enumerate(rows[0]) if panel}
    lines: list[tuple[str, Panel]] = []
    for number, row in enumerate(rows):
        for column, panel in enumerate(row):
            beside = (names[number] if names else "", above.get(column, "") if number else "")
            lines += [] if panel is None else [("\n".join(filter(None, beside)), panel)]
    heads = sum(0.2 for _, panel in lines if panel.title)
    figure, axes = canvas(len(lines), 1, PAGE_WIDTH, _STRIP * len(lines) + heads, tight=True)
    for axis, (name, panel) in zip(axes, lines, strict=True):
        picture = np.asarray(panel.image).mean(axis=0)
        upright = picture if grid[0] == 1 else picture.T
        _draw(axis, replace(panel, image=upright[None, ::-1]), (1, max(grid)))
        axis.set_axis_off()
        axis.set_aspect("auto")
        name_row(axis, name)
    return figure


def _draw(axis: Axes, panel: Panel, grid: tuple[int, ...]) -> None:
    height, width = panel.image.shape[-2:]
    step = np.array([width / grid[1], height / grid[0]])
    draw_image(axis, panel.image, panel.title)
    for places, face, edge, stroke in (
        (panel.empty, "#f4f6f7", None, FAINT),
        (panel.hidden, "black", None, "#6b767e"),
        (panel.wrong, "white", RED, None),
    ):
        if places is not None:
            index = np.flatnonzero(np.asarray(places))
            corners = np.stack([index % grid[1], index // grid[1]], axis=-1) * step  # top left, (x, y)
            _mark(axis, corners, step, face, edge, stroke)
    if panel.outlined is not None:
        lines = outline(np.asarray(panel.outlined, dtype=bool).reshape(grid)) * step
        axis.add_collection(LineCollection(list(lines), colors=GREEN, linewidths=1.3, clip_on=False, capstyle="round"))


def _mark(axis: Axes, corners: np.ndarray, step: np.ndarray, face: str, edge: str | None, stroke: str | None) -> None:
    """Patches of one colour, with an edge or with two strokes across each."""
    width, height = step
    for x, y in corners:
        axis.add_patch(Rectangle((x, y), width, height, facecolor=face, edgecolor=edge, linewidth=0.6 * bool(edge)))
    if stroke is not None:
        ends = np.array([[[0.0, 0.5], [0.5, 0.0]], [[0.5, 1.0], [1.0, 0.5]]]) * step  # so that neighbours' strokes meet
        lines = (corners[:, None, None] + ends).reshape(-1, 2, 2)
        axis.add_collection(LineCollection(list(lines), colors=stroke, linewidths=0.7))
