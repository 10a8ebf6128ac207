"""The base of all figures: colours, sizes, an empty figure, labels, a colour bar.

No pyplot and no global state, so figures can be made in several threads. The colours are Okabe and Ito's, which remain
distinct with any common colour blindness.
"""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, BLACK = PALETTE = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#000000",
)
DASHES = ("-", "--", "-.", ":")
INK = "#1d2329"
FAINT = "#d5dade"
PALE = "#b9c0c6"
TITLE, LABEL, TICK = 10, 9, 8
PAGE_WIDTH = 9.0  # inches


def blank(width: float, height: float) -> Figure:
    """A figure without axes, in inches."""
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.1), facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def canvas(rows: int, columns: int, width: float, height: float, *, tight: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, row by row. tight: less space between many small panels."""
    figure = blank(width, height)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    if tight:
        figure.set_layout_engine(ConstrainedLayoutEngine(h_pad=0.03, w_pad=0.03))
    return figure, axes


def label(axis: Axes, title: str, x_label: str, y_label: str) -> None:
    """Sets title and labels, and removes the frame's top and right."""
    if title:
        axis.set_title(title, fontsize=TITLE, color=INK, pad=8)
    axis.set_xlabel(x_label, fontsize=LABEL, color=INK)
    axis.set_ylabel(y_label, fontsize=LABEL, color=INK)
    axis.tick_params(labelsize=TICK, colors=INK)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def unframe(axis: Axes) -> None:
    """Removes the frame."""
    for spine in axis.spines.values():
        spine.set_visible(False)


def name_row(axis: Axes, name: str) -> None:
    """Writes a row's name to the left of its first axes."""
    axis.text(-0.08, 0.5, name, transform=axis.transAxes, ha="right", va="center", fontsize=LABEL, color=INK)


def colour_bar(figure: Figure, drawn: Any, axes: Axes | list[Axes], text: str, **place: Any) -> None:
    """Adds a colour bar beside axes. place: matplotlib's options for its position."""
    bar = figure.colorbar(drawn, ax=axes, **(place or {"shrink": 0.85, "pad": 0.02}))
    bar.set_label(text, fontsize=LABEL, color=INK)
    bar.ax.tick_params(labelsize=TICK)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
