"""Figures of puzzles: images with some positions outlined, hidden, wrong or empty; pieces in a row as strips over the
page's width, and one order against another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from situs.report.figures import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    LABEL,
    PAGE_WIDTH,
    PALE,
    RED,
    TICK,
    canvas,
    draw_image,
    label,
    name_row,
    outline,
)

_SIDE = 0.85  # inches left of a grid, for the names of its rows


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
    """Rows of panels, all of one grid (h, w); None leaves a gap. names: left of each row."""
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
            _mark(axis, _corners(places, grid) * step, step, face, edge, stroke)
    if panel.outlined is not None:
        lines = outline(np.asarray(panel.outlined, dtype=bool).reshape(grid)) * step
        axis.add_collection(LineCollection(list(lines), colors=GREEN, linewidths=1.3, clip_on=False, capstyle="round"))


def _corners(places: Any, grid: tuple[int, ...]) -> np.ndarray:
    """The top left corners (x, y) of positions, in patches, [n, 2]."""
    index = np.flatnonzero(np.asarray(places))
    return np.stack([index % grid[1], index // grid[1]], axis=-1)


def _mark(axis: Axes, corners: np.ndarray, step: np.ndarray, face: str, edge: str | None, stroke: str | None) -> None:
    """Patches of one colour, with an edge or with two strokes across each."""
    width, height = step
    for x, y in corners:
        axis.add_patch(Rectangle((x, y), width, height, facecolor=face, edgecolor=edge, linewidth=0.6 * bool(edge)))
    if stroke is not None:
        ends = np.array([[[0.0, 0.5], [0.5, 0.0]], [[0.5, 1.0], [1.0, 0.5]]]) * step  # so that neighbours' strokes meet
        lines = (corners[:, None, None] + ends).reshape(-1, 2, 2)
        axis.add_collection(LineCollection(list(lines), colors=stroke, linewidths=0.7))


_HIGH = 0.8  # inches of a strip


class Strip(NamedTuple):
    """values: [H, W] in [0, 1], row 0 at the bottom, W a multiple of the positions. title: above it, on the left.

    empty: [N] bool, positions without a piece. marked: [N] bool, a green bar below them.
    """

    name: str
    values: Any
    title: str = ""
    empty: Any = None
    marked: Any = None


class Order(NamedTuple):
    """true, guessed: [K] positions of the same pieces."""

    title: str
    true: Any
    guessed: Any


def strips(rows: Sequence[Strip], x_label: str = "") -> Figure:
    """Strips below one another, on one axis of positions. x_label: below the last."""
    titles = sum(0.2 for row in rows if row.title)
    figure, axes = canvas(len(rows), 1, PAGE_WIDTH, _HIGH * len(rows) + titles + 0.4, tight=True)
    engine: Any = figure.get_layout_engine()
    engine.set(h_pad=0.05)  # for the bars below
    for axis, row in zip(axes, rows, strict=True):
        _draw_strip(axis, row)
    if x_label:
        axes[-1].tick_params(bottom=True, labelbottom=True, labelsize=TICK, colors=INK)
        axes[-1].set_xlabel(x_label, fontsize=LABEL, color=INK)
    return figure


def _draw_strip(axis: Axes, row: Strip) -> None:
    values = np.asarray(row.values)
    count = values.shape[1] if row.empty is None else len(np.asarray(row.empty))
    drawn = {"cmap": "magma", "vmin": 0, "vmax": 1, "interpolation": "nearest", "aspect": "auto", "origin": "lower"}
    axis.imshow(values, extent=(0, count, 0, 1), **drawn)
    for places, low, high, face, hatch in ((row.empty, 0, 1, "#f4f6f7", "////"), (row.marked, -0.1, -0.04, GREEN, "")):
        if places is not None:
            boxes = [Rectangle((at, low), 1, high - low) for at in np.flatnonzero(np.asarray(places)).tolist()]
            edge = FAINT if hatch else face
            axis.add_collection(
                PatchCollection(boxes, facecolor=face, edgecolor=edge, linewidth=0, hatch=hatch, clip_on=False)
            )
    axis.set_xlim(0, count)
    axis.set_ylim(0, 1)
    axis.tick_params(left=False, labelleft=False, bottom=False, labelbottom=False)
    for spine in axis.spines.values():
        spine.set_visible(False)
    axis.set_ylabel(row.name, fontsize=LABEL, color=INK, rotation=0, ha="right", va="center")
    if row.title:
        axis.set_title(row.title, fontsize=LABEL, color=INK, loc="left", pad=4)


def orders(panels: Sequence[Order], count: int, x_label: str, y_label: str) -> Figure:
    """Guessed over true positions of pieces, a panel each: the diagonal is the true order of `count` positions."""
    across, side = min(3, len(panels)), PAGE_WIDTH / 3
    down = math.ceil(len(panels) / across)
    figure, axes = canvas(down, across, side * across, 0.95 * side * down)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for axis, order in zip(axes, panels, strict=False):
        axis.plot([0, count - 1], [0, count - 1], color=PALE, linewidth=1)
        axis.scatter(np.asarray(order.true), np.asarray(order.guessed), s=9, color=BLUE, linewidths=0)
        axis.set(xlim=(-1, count), ylim=(-1, count), aspect="equal")
        label(axis, order.title, x_label, y_label)
    return figure
