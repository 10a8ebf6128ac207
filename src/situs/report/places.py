"""Pictures of places: sheets of a grid's points in the plane and in space, and maps of how places relate.

As in `figures`: arrays in, a matplotlib `Figure` out, no pyplot, a place counts the grid (h, w) row by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from mpl_toolkits.mplot3d.art3d import Line3DCollection

from situs.errors import SitusError
from situs.report.figures import (
    BLACK,
    FAINT,
    INK,
    LABEL,
    PAGE_WIDTH,
    PALE,
    TICK,
    TITLE,
    blank,
    colour_bar,
    label,
    unframe,
)

DOTS = 400
"""Up to this many positions, each position is also a dot; with more positions, only lines are drawn."""
GAP = 0.16
"""Between two maps of a mosaic, as a share of a map's side."""


class Sheet(NamedTuple):
    """One panel of `sheets`: points [N, 2] or [N, 3] in the order of the grid's places, and what the axes are.

    colour: what the coloured lines run along and count. as_image: rows run downwards and both axes are in patches.
    """

    title: str
    points: Any
    labels: tuple[str, ...]
    colour: Literal["row", "column"] = "row"
    as_image: bool = False


def sheets(panels: Sequence[tuple[Any, ...]], grid: tuple[int, ...]) -> Figure:
    """A grid's positions with neighbours joined: coloured along each row (or column), pale across. panels: `Sheet`s."""
    side = min(4.2, PAGE_WIDTH / len(panels))
    figure = blank(side * len(panels), side + 0.55)
    for number, panel in enumerate((Sheet(*panel) for panel in panels), start=1):
        points = np.asarray(panel.points, dtype=np.float64)
        if points.shape not in {(grid[0] * grid[1], 2), (grid[0] * grid[1], 3)}:
            raise SitusError(f"{panel.title}: points of shape {points.shape} do not fit the grid {grid}")
        flat = points.shape[1] == 2
        axis: Any = figure.add_subplot(1, len(panels), number, projection=None if flat else "3d")
        (_flat_sheet if flat else _solid_sheet)(axis, panel, points, grid)
        axis.set_title(panel.title, fontsize=TITLE, color=INK, pad=6)
        _scale_below(figure, axis, panel.colour, grid[0] if panel.colour == "row" else grid[1])
    return figure


def _lines(points: np.ndarray, grid: tuple[int, ...], colour: str) -> tuple[list[Any], list[Any], np.ndarray]:
    """The coloured lines, those across, and the colours [count, 4]."""
    cloth = points.reshape(*grid, -1)
    along, across = (cloth, cloth.swapaxes(0, 1)) if colour == "row" else (cloth.swapaxes(0, 1), cloth)
    return list(along), list(across), _ramp()(np.linspace(0, 1, len(along)))


def _flat_sheet(axis: Axes, panel: Sheet, points: np.ndarray, grid: tuple[int, ...]) -> None:
    along, across, colours = _lines(points, grid, panel.colour)
    axis.add_collection(LineCollection(across, colors=PALE, linewidths=0.6))
    axis.add_collection(LineCollection(along, colors=list(colours), linewidths=1.3))
    if len(points) <= DOTS:
        axis.scatter(*points.T, s=9, color=INK, zorder=3)
    axis.autoscale_view()
    axis.margins(0.08)
    axis.set_aspect("equal", adjustable="datalim")
    if panel.as_image:
        axis.invert_yaxis()
    label(axis, "", panel.labels[0], panel.labels[1])
    axis.grid(color=FAINT, linewidth=0.6)
    axis.set_axisbelow(True)


def _solid_sheet(axis: Any, panel: Sheet, points: np.ndarray, grid: tuple[int, ...]) -> None:
    along, across, colours = _lines(points, grid, panel.colour)
    axis.add_collection3d(Line3DCollection(across, colors=PALE, linewidths=0.5))
    axis.add_collection3d(Line3DCollection(along, colors=list(colours), linewidths=1.2))
    if len(points) <= DOTS:
        axis.scatter(*points.T, s=6, color=INK, depthshade=False)
    low, high = points.min(axis=0), points.max(axis=0)
    pad = 0.03 * np.where(high > low, high - low, 1.0)
    axis.set(xlim=(low[0] - pad[0], high[0] + pad[0]), ylim=(low[1] - pad[1], high[1] + pad[1]))
    axis.set_zlim(low[2] - pad[2], high[2] + pad[2])
    axis.view_init(elev=24, azim=-58)
    axis.set_box_aspect((1, 1, 0.85), zoom=1.06)
    for direction, name in zip((axis.xaxis, axis.yaxis, axis.zaxis), panel.labels, strict=True):
        direction.set_label_text(name, fontsize=LABEL, color=INK)
        direction.set_ticklabels([])  # components have no unit, and the numbers would cover the sheet
        direction.labelpad = -8
        direction.set_pane_color((0.98, 0.98, 0.98, 1.0))


def _ramp() -> Colormap:
    """viridis without its brightest end, which is invisible on white."""
    return LinearSegmentedColormap.from_list("ramp", mpl.colormaps["viridis"](np.linspace(0.0, 0.88, 64)))


def _scale_below(figure: Figure, axis: Axes, name: str, count: int) -> None:
    mappable = ScalarMappable(Normalize(0, max(count - 1, 1)), _ramp())
    bar = figure.colorbar(mappable, ax=axis, location="bottom", shrink=0.55, aspect=28, pad=0.02, fraction=0.05)
    bar.set_label(f"{name} (0: {'top' if name == 'row' else 'left'})", fontsize=TICK, color=INK)
    bar.set_ticks([0, count - 1] if count > 1 else [0])
    bar.ax.tick_params(labelsize=TICK, length=2)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]


def mosaics(
    panels: Mapping[str, Any],
    rows: Sequence[int],
    columns: Sequence[int],
    value_label: str,
    *,
    limits: tuple[float, float] | None = None,
) -> Figure:
    """A map over the whole grid for each of some positions, arranged like the positions.

    panels: title -> [r, c, h, w], the map of position (rows[r], columns[c]), which a ring marks in it. limits: of one
    diverging scale for all; None: each panel's own, from its smallest to its largest value at positions other than the
    ringed one.
    """
    arrays = {title: np.asarray(values, dtype=np.float64) for title, values in panels.items()}
    h, w = next(iter(arrays.values())).shape[2:]
    shape = (len(rows) * h) / (len(columns) * w)
    side = max(1.4, min(5.2, PAGE_WIDTH / len(arrays) - 0.95, 7.0 / shape))
    bar = 0.8 * (len(arrays) if limits is None else 1)
    figure = blank(side * len(arrays) + bar + 0.3, max(side * shape, 1.4) + 0.5)
    axes = figure.subplots(1, len(arrays), squeeze=False)[0]
    drawn = []
    for axis, (title, maps) in zip(axes, arrays.items(), strict=True):
        low, high = limits or _range_of_others(maps, rows, columns)
        drawn.append(_mosaic(axis, maps, rows, columns, Normalize(low, high), "PuOr_r" if limits else "cividis"))
        label(axis, "", "column of the ringed position", "row of the ringed position" if axis is axes[0] else "")
        axis.set_title(title, fontsize=TITLE, color=INK, pad=6)
    if limits is None:
        for axis, image in zip(axes, drawn, strict=True):
            colour_bar(figure, image, [axis], value_label)
    else:
        colour_bar(figure, drawn[-1], list(axes), value_label)
    return figure


def _range_of_others(maps: np.ndarray, rows: Sequence[int], columns: Sequence[int]) -> tuple[float, float]:
    """The smallest and largest value of the maps at positions other than their own, which may be trivial."""
    others = maps.copy()
    for r, row in enumerate(rows):
        for c, column in enumerate(columns):
            others[r, c, row, column] = np.nan
    if np.isnan(others).all():
        return float(maps.min()), float(maps.max())
    return float(np.nanmin(others)), float(np.nanmax(others))


def _mosaic(
    axis: Axes, maps: np.ndarray, rows: Sequence[int], columns: Sequence[int], norm: Normalize, colours: str
) -> Any:
    h, w = maps.shape[2:]
    step_y, step_x = h * (1 + GAP), w * (1 + GAP)
    drawn, rings = None, []
    for r, row in enumerate(rows):
        for c, column in enumerate(columns):
            x, y = c * step_x, r * step_y
            extent = (x, x + w, y + h, y)
            drawn = axis.imshow(maps[r, c], cmap=colours, norm=norm, interpolation="nearest", extent=extent)
            rings.append((x + column + 0.5, y + row + 0.5))
    for colour, width in (("white", 2.0), (BLACK, 0.9)):  # seen on either end of a scale
        axis.scatter(*zip(*rings, strict=True), s=18, facecolors="none", edgecolors=colour, linewidths=width)
    axis.set(xlim=(-0.5, len(columns) * step_x - w * GAP + 0.5), ylim=(len(rows) * step_y - h * GAP + 0.5, -0.5))
    axis.set_xticks([c * step_x + w / 2 for c in range(len(columns))], [str(column) for column in columns])
    axis.set_yticks([r * step_y + h / 2 for r in range(len(rows))], [str(row) for row in rows])
    axis.tick_params(length=0)
    unframe(axis)
    return drawn
