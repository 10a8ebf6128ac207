"""Figures of puzzles whose pieces are in a row: strips over the page's width, and one order against another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from situs.report.canvas import BLUE, FAINT, GREEN, INK, LABEL, PAGE_WIDTH, PALE, TICK, canvas, label

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
        _draw(axis, row)
    if x_label:
        axes[-1].tick_params(bottom=True, labelbottom=True, labelsize=TICK, colors=INK)
        axes[-1].set_xlabel(x_label, fontsize=LABEL, color=INK)
    return figure


def _draw(axis: Axes, row: Strip) -> None:
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


def orders(panels: Sequence[Order], count: int, x_label: str, y_label: str, across: int = 3) -> Figure:
    """Guessed over true positions of pieces, a panel each: the diagonal is the true order of `count` positions."""
    across = min(across, len(panels))
    side = PAGE_WIDTH / max(across, 3)
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
