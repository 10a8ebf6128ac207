"""Figures of results: arrays in, a matplotlib `Figure` out; `png(figure)` gives the bytes for a page.

Lines differ in dash as well as in colour. Images are [C, H, W] with C = 1 or 3, uint8 or floats in [0, 1], arrays or
CPU tensors. Positions count the grid (h, w) row by row.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from situs.errors import SitusError
from situs.report.canvas import (
    BLUE,
    DASHES,
    FAINT,
    INK,
    LABEL,
    ORANGE,
    PAGE_WIDTH,
    PALE,
    PALETTE,
    canvas,
    colour_bar,
    label,
    name_row,
    unframe,
)

GAP = 0.06  # between cells of a mosaic, as a share of a cell
_LEVEL = 6  # most columns with horizontal long names
RESOLUTION = 200  # pixels per inch; the page shows an inch as 100 of its pixels


def png(figure: Figure) -> bytes:
    """The figure as a PNG file; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=RESOLUTION, metadata={"Software": None})
    return buffer.getvalue()


def image_grid(
    images: Any,
    titles: Sequence[str] = (),
    *,
    columns: int = 8,
    row_titles: Sequence[str] = (),
    masks: Any = None,
    grid: tuple[int, ...] | None = None,
) -> Figure:
    """Images side by side, row by row.

    images: [n, C, H, W]. titles: above each image; if there are `columns` of them, above the first row only.
    row_titles: left of each row. masks: [n, N] bool on `grid`; masked patches are tinted and outlined.
    """
    count = len(images)
    if count == 0:
        raise SitusError("image_grid: no images to draw")
    columns = min(columns, count)
    rows = -(-count // columns)
    shape = max(0.25, min(1.0, images[0].shape[-2] / images[0].shape[-1]))  # wide ones are as high as their squares
    cell = min(1.6 / math.sqrt(shape), (PAGE_WIDTH - 0.9 * bool(row_titles)) / columns)
    head = 0.3 * (rows if len(titles) > columns else bool(titles))
    high = (cell * shape + 0.2 * (shape < 1)) * rows + head
    figure, axes = canvas(rows, columns, cell * columns + 0.9 * bool(row_titles), high)
    for index, axis in enumerate(axes):
        axis.set_axis_off()
        if index >= count:
            continue
        draw_image(axis, images[index], titles[index] if index < len(titles) else "")
        if masks is not None:
            _draw_mask(axis, images[index].shape[-2:], _on_grid(masks[index], grid))
        if row_titles and index % columns == 0:
            name_row(axis, row_titles[index // columns])
    return figure


def mosaic(images: Any, rows: Sequence[str], columns: Sequence[str]) -> Figure:
    """A table whose cells are images, on one pair of axes: a hundred axes would take seconds to lay out.

    images: [len(rows), len(columns), C, H, W], C = 1 or 3, uint8 or floats in [0, 1]; all of one size.
    """
    if len(images) != len(rows) or not rows or any(len(row) != len(columns) for row in images) or not columns:
        raise SitusError(f"mosaic: the images do not fit {len(rows)} row names and {len(columns)} column names")
    names = 0.085 * max(map(len, rows)) + 0.35
    cell = min(1.6, (PAGE_WIDTH - names) / len(columns))
    height, width = images[0][0].shape[-2:]
    tall = height / width
    figure, (axis,) = canvas(1, 1, cell * len(columns) + names, cell * tall * len(rows) + 0.45)
    for y, row in enumerate(images):
        for x, image in enumerate(row):
            at = (x, x + 1 - GAP, (y + 1 - GAP) * tall, y * tall)
            axis.imshow(as_picture(image), extent=at, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axis.set(xlim=(0, len(columns) - GAP), ylim=((len(rows) - GAP) * tall, 0), aspect="equal")
    middle = (1 - GAP) / 2
    axis.set_xticks([x + middle for x in range(len(columns))], list(columns))
    axis.set_yticks([(y + middle) * tall for y in range(len(rows))], list(rows))
    axis.xaxis.tick_top()
    axis.tick_params(length=0, labelsize=LABEL, labelcolor=INK)
    unframe(axis)
    return figure


def as_picture(image: Any) -> np.ndarray:
    """[C, H, W] -> floats in [0, 1], [H, W] or [H, W, 3]; the mean of two channels, the first three of more."""
    array = np.asarray(image)
    if array.ndim != 3 or not array.shape[0]:
        raise SitusError(f"an image to draw has shape {array.shape}: must be [C, H, W]")
    array = array.mean(axis=0, keepdims=True).astype(array.dtype) if array.shape[0] == 2 else array[:3]
    array = array / 255.0 if array.dtype == np.uint8 else array.astype(np.float64).clip(0.0, 1.0)
    return array[0] if array.shape[0] == 1 else array.transpose(1, 2, 0)


def draw_image(axis: Axes, image: Any, title: str = "") -> None:
    """Draws an image on axes, one unit per pixel."""
    picture = as_picture(image)
    height, width = picture.shape[:2]
    # The extent puts patch borders on whole numbers; imshow's own puts them between pixels, on halves.
    axis.imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="nearest", extent=(0, width, height, 0))
    if title:
        axis.set_title(title, fontsize=LABEL, color=INK, pad=4)


def _on_grid(mask: Any, grid: tuple[int, ...] | None) -> np.ndarray:
    mask = np.asarray(mask, dtype=bool)
    if grid is None or mask.size != grid[0] * grid[1]:
        raise SitusError(f"a mask of {mask.size} positions does not fill the grid {grid}")
    return mask.reshape(grid)


def _draw_mask(axis: Axes, size: Sequence[int], mask: np.ndarray) -> None:
    (height, width), (h, w) = size, mask.shape
    tint = np.zeros((h, w, 4))
    tint[mask] = (0.902, 0.624, 0.0, 0.22)  # ORANGE, seen through
    axis.imshow(tint, extent=(0, width, height, 0), interpolation="nearest")
    segments = outline(mask) * np.array([width / w, height / h])
    axis.add_collection(LineCollection(list(segments), colors=ORANGE, linewidths=1.4, clip_on=False, capstyle="round"))


def outline(mask: np.ndarray) -> np.ndarray:
    """The borders of a mask [h, w]: segments [S, 2, 2] of (x, y) between masked cells and all others."""
    padded = np.pad(mask, 1)
    y, x = np.nonzero(padded[1:, 1:-1] != padded[:-1, 1:-1])
    flat = np.stack([np.stack([x, y], -1), np.stack([x + 1, y], -1)], 1)
    y, x = np.nonzero(padded[1:-1, 1:] != padded[1:-1, :-1])
    upright = np.stack([np.stack([x, y], -1), np.stack([x, y + 1], -1)], 1)
    return np.concatenate([flat, upright])


def curves(
    series: Mapping[str, tuple[Any, Any]],
    x_label: str,
    y_label: str,
    *,
    title: str = "",
    y_limits: tuple[float, float] | None = None,
    x_names: Sequence[str] = (),
    level: tuple[str, float] | None = None,
    bands: Mapping[str, tuple[Any, Any]] = MappingProxyType({}),
) -> Figure:
    """Lines by name, each (x, y), with its own colour and dash; the legend is beside the axes.

    y_limits: ends of the axis, as for shares; a marker at one is drawn whole. x_names: names of the steps 0, 1, ….
    level: a pale horizontal line for comparison. bands: lower and upper ends of a shaded band around the line of that
    name.
    """
    named = len(series) > 1 or level is not None
    figure, (axis,) = canvas(1, 1, 7.2 if named or x_names else 6.4, 3.6)
    if level is not None:
        axis.axhline(level[1], color=PALE, linewidth=2.6, label=level[0], zorder=1)
    for index, (name, (x, y)) in enumerate(series.items()):
        line = _draw_line(axis, x, y, index, name)
        line.set_clip_on(y_limits is None)
        if name in bands:
            axis.fill_between(x, *bands[name], color=line.get_color(), alpha=0.15, linewidth=0)
    if y_limits is not None:
        axis.set_ylim(*y_limits)
    if x_names:
        axis.set_xticks(range(len(x_names)), list(x_names))
    label(axis, title, x_label, y_label)
    axis.grid(color=FAINT, linewidth=0.6)
    if named:
        axis.legend(frameon=False, fontsize=LABEL, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def curve_panels(
    metrics: Mapping[str, Mapping[str, tuple[Any, Any]]],
    x_label: str,
    y_limits: tuple[float, float] | None = None,
    x_least: float = 0.0,
    marks: Mapping[str, Mapping[str, tuple[float, float]]] = MappingProxyType({}),
) -> Figure:
    """One panel per metric, one line per run, with the same colour and dash in all panels; two panels per row.

    metrics: label -> run -> (x, y); a run that did not log a metric is missing there. y_limits: see `curves`.
    x_least: smallest range of the x axis, so that no difference looks larger than it is. marks: label -> run -> a
    point of the line that gets a ring.
    """
    across = min(2, len(metrics))
    rows = -(-len(metrics) // across)
    runs = list(dict.fromkeys(run for lines in metrics.values() for run in lines))
    legend = 0.3 * -(-len(runs) // 4) if len(runs) > 1 else 0.0
    figure, axes = canvas(rows, across, PAGE_WIDTH if across == 2 else 6.4, 2.5 * rows + legend)
    handles: dict[str, Any] = {}
    for axis, (name, lines) in zip(axes, metrics.items(), strict=False):
        for run, (x, y) in lines.items():
            handles[run] = _draw_line(axis, x, y, runs.index(run))
            handles[run].set_clip_on(y_limits is None)
            if run in marks.get(name, {}):
                axis.plot(*marks[name][run], "o", fillstyle="none", color=INK, markersize=10, zorder=3)
        if y_limits is not None:
            axis.set_ylim(*y_limits)
        left, right = axis.get_xlim()
        if right - left < x_least:
            axis.set_xlim(right - x_least, right)
        label(axis, "", x_label, name)
        axis.grid(color=FAINT, linewidth=0.6)
    for axis in axes[len(metrics) :]:
        axis.set_visible(False)
    if len(runs) > 1:
        named = [(handles[run], run) for run in runs]
        figure.legend(*zip(*named, strict=True), loc="outside upper left", ncols=4, frameon=False, fontsize=LABEL)
    return figure


def _draw_line(axis: Axes, x: Any, y: Any, index: int, name: str = "") -> Any:
    """Draws line number `index` with its colour and dash, and markers if its points are few."""
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    (line,) = axis.plot(x, y, label=name, linewidth=1.8, marker="o" if len(x) <= 20 else None, markersize=4)
    line.set(color=PALETTE[index % len(PALETTE)], linestyle=DASHES[index % len(DASHES)])
    return line


def heatmaps(
    panels: Mapping[str, Any],
    x_label: str,
    y_label: str,
    value_label: str,
    *,
    limits: tuple[float, float] | None = None,
    diverging: bool = False,
) -> Figure:
    """Matrices [h, w] by title on one colour scale, with its bar. diverging: 0 is the middle of the scale."""
    arrays = {title: np.asarray(values, dtype=np.float64) for title, values in panels.items()}
    low, high = limits or (min(a.min() for a in arrays.values()), max(a.max() for a in arrays.values()))
    if diverging:
        high = max(abs(low), abs(high))
        low = -high
    side = min(3.0, (PAGE_WIDTH - 1.0) / len(arrays))
    figure, axes = canvas(1, len(arrays), side * len(arrays) + 1.0, side + 0.5)
    drawn = None
    for axis, (title, values) in zip(axes, arrays.items(), strict=True):
        cmap = "PuOr" if diverging else "cividis"
        drawn = axis.imshow(values, cmap=cmap, vmin=low, vmax=high, interpolation="nearest")
        label(axis, title, x_label, y_label if axis is axes[0] else "")
        unframe(axis)
    colour_bar(figure, drawn, axes, value_label)
    return figure


def bars(values: Mapping[str, float], x_label: str, *, log: bool = False, digits: str = ".3g") -> Figure:
    """Horizontal bars by name with their numbers, the first on top. log: a logarithmic axis."""
    figure, (axis,) = canvas(1, 1, 6.8, 0.75 + 0.42 * len(values))
    numbers = np.array(list(values.values()), dtype=np.float64)
    places = np.arange(len(values))
    drawn = axis.barh(places, numbers, color=BLUE, height=0.6)
    axis.bar_label(drawn, [format(value, digits) for value in numbers], padding=4, fontsize=LABEL, color=INK)
    axis.set_yticks(places, list(values))
    axis.invert_yaxis()
    if log:
        axis.set_xscale("log")
        positive = numbers[numbers > 0]
        if positive.size:
            axis.set_xlim(positive.min() / 10, positive.max() * 10)
    elif numbers.any():
        axis.margins(x=0.15)
    else:
        axis.set_xlim(0, 1)
    label(axis, "", x_label, "")
    axis.tick_params(axis="y", labelsize=LABEL, length=0)
    axis.grid(axis="x", color=FAINT, linewidth=0.6)
    axis.set_axisbelow(True)
    return figure


def value_grids(
    panels: Mapping[str, tuple[Any, str]],
    rows: Sequence[Any],
    columns: Sequence[Any],
    x_label: str,
    y_label: str,
    *,
    limits: tuple[float, float] | None = None,
    digits: str = ".1f",
    cell: tuple[float, float] = (0.95, 0.62),
) -> Figure:
    """Small matrices side by side, every cell coloured by its value and labelled with it.

    panels: title -> (values [len(rows), len(columns)], label of the colour scale); a NaN cell is grey with a dash.
    limits: ends of the colour scale; None: each panel's own. cell: largest width and height in inches.
    """
    beside = 2.2 if len(panels) == 1 else 1.4  # for the names of the rows and the colour bar
    cell_width = min(cell[0], (PAGE_WIDTH / len(panels) - beside) / len(columns))
    size = LABEL + 1 if cell_width > 0.6 else 7 if cell_width > 0.33 else 5.5
    width = len(panels) * max(3.0, beside + cell_width * len(columns))
    figure, axes = canvas(1, len(panels), width, 1.1 + cell[1] * len(rows))
    for axis, (title, (values, value_label)) in zip(axes, panels.items(), strict=True):
        array = np.asarray(values, dtype=np.float64)
        low, high = limits or (float(np.nanmin(array)), float(np.nanmax(array)))
        drawn = axis.imshow(np.ma.masked_invalid(array), cmap="cividis", vmin=low, vmax=high, aspect="auto")
        axis.set_facecolor(FAINT)
        for (row, column), value in np.ndenumerate(array):
            text = "–" if np.isnan(value) else format(value, digits)
            colour = INK if np.isnan(value) or value > (low + high) / 2 else "white"  # cividis ends in yellow
            axis.text(column, row, text, ha="center", va="center", fontsize=size, color=colour)
        label(axis, title, x_label, y_label if axis is axes[0] else "")
        shown, most = list(map(str, columns)), 12 if len(columns) <= _LEVEL else 24
        shown = [name if len(name) <= most else f"{name[: most - 1]}…" for name in shown]
        axis.set_xticks(range(len(columns)), shown)
        if len(columns) > _LEVEL and max(map(len, shown)) > 3:
            axis.tick_params(axis="x", rotation=90)
        axis.set_yticks(range(len(rows)), list(map(str, rows)))
        axis.tick_params(length=0)
        unframe(axis)
        colour_bar(figure, drawn, axis, value_label, pad=0.03)
    return figure
