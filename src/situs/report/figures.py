"""Figures of results: arrays in, a matplotlib `Figure` out; `png(figure)` gives the bytes for a page.

No pyplot and no global state, so figures can be made in several threads. The colours are Okabe and Ito's, which remain
distinct with any common colour blindness; lines differ in dash as well. Images are [C, H, W] with C = 1 or 3, uint8 or
floats in [0, 1], arrays or CPU tensors. Positions count the grid (h, w) row by row.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from PIL import Image

from situs.errors import SitusError

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


GAP = 0.06  # between images in rows, as a share of an image
_LEVEL = 6  # most columns with horizontal long names
RESOLUTION = 200  # pixels per inch; the page shows an inch as 100 of its pixels


def png(figure: Figure) -> bytes:
    """The figure as a PNG file; the same figure gives the same bytes.

    A character that the font lacks is drawn as a box, without a warning: the tables of the page have the name. Dollars
    in the name of a class are no formula.
    """
    buffer = io.BytesIO()
    for text in figure.findobj(Text):
        if isinstance(text, Text) and "$" in text.get_text() and "\\math" not in text.get_text():
            text.set_parse_math(False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure.savefig(buffer, format="png", dpi=RESOLUTION, metadata={"Software": None})
    return buffer.getvalue()


def picture(file: Path) -> bytes:
    """A picture that was drawn before."""
    return file.read_bytes()


def image_rows(rows: Sequence[tuple[str, Any]], titles: Sequence[str] = ()) -> Figure:
    """Named rows of images of one size, [n, C, H, W]; a row may have fewer. titles: above the images.

    Of other than 1 or 3 channels, the first is drawn. All are on one pair of axes: a hundred axes would take seconds to
    lay out.
    """
    columns, (height, width) = max(len(images) for _, images in rows), rows[0][1][0].shape[-2:]
    names = 0.085 * max(len(line) for name, _ in rows for line in name.split("\n")) + 0.35
    tall = height / width
    cell = min(1.6 / math.sqrt(max(0.25, min(1.0, tall))), (PAGE_WIDTH - names) / columns)
    figure, (axis,) = canvas(1, 1, cell * columns + names, cell * tall * len(rows) + 0.45)
    for y, (_, images) in enumerate(rows):
        for x, image in enumerate(images):
            shown = as_picture(image if image.shape[0] in (1, 3) else image[:1])
            at = (x, x + 1 - GAP, (y + 1 - GAP) * tall, y * tall)
            axis.imshow(shown, extent=at, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axis.set(xlim=(0, columns - GAP), ylim=((len(rows) - GAP) * tall, 0), aspect="equal")
    middle = (1 - GAP) / 2
    axis.set_xticks([x + middle for x in range(len(titles[:columns]))], list(titles[:columns]))
    axis.set_yticks([(y + middle) * tall for y in range(len(rows))], [name for name, _ in rows])
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
    x_scale: Literal["linear", "log"] = "linear",
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
    axis.set_xscale(x_scale)  # which puts new ticks
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


def bars(values: Mapping[str, float], x_label: str, *, digits: str = ".3g") -> Figure:
    """Horizontal bars by name with their numbers, the first on top."""
    figure, (axis,) = canvas(1, 1, 6.8, 0.75 + 0.42 * len(values))
    numbers = np.array(list(values.values()), dtype=np.float64)
    places = np.arange(len(values))
    drawn = axis.barh(places, numbers, color=BLUE, height=0.6)
    axis.bar_label(drawn, [format(value, digits) for value in numbers], padding=4, fontsize=LABEL, color=INK)
    axis.set_yticks(places, list(values))
    axis.invert_yaxis()
    if numbers.any():
        axis.margins(x=0.15)
    else:
        axis.set_xlim(0, 1)
    label(axis, "", x_label, "")
    axis.tick_params(axis="y", labelsize=LABEL, length=0)
    axis.grid(axis="x", color=FAINT, linewidth=0.6)
    axis.set_axisbelow(True)
    return figure


_NUMBER = 0.15  # inches, the width of the smallest number in a cell


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
    """Small matrices side by side, every cell coloured by its value, and labelled with it where the number fits.

    panels: title -> (values [len(rows), len(columns)], label of the colour scale); a NaN cell is grey with a dash.
    limits: ends of the colour scale; None: each panel's own. cell: largest width and height in inches.
    """
    beside = 2.2 if len(panels) == 1 else 1.4  # for the names of the rows and the colour bar
    cell_width = min(cell[0], (PAGE_WIDTH / len(panels) - beside) / len(columns))
    size = LABEL + 1 if cell_width > 0.6 else 7 if cell_width > 0.33 else 5.5
    each = max(3.0, beside + cell_width * len(columns))
    wide = (each - beside) / len(columns)
    height, step = cell[1], 1
    if wide < _NUMBER:
        height, step = max(wide, height / len(rows)), math.ceil(2 * _NUMBER / wide)
    figure, axes = canvas(1, len(panels), len(panels) * each, 1.1 + height * len(rows))
    for axis, (title, (values, value_label)) in zip(axes, panels.items(), strict=True):
        array = np.asarray(values, dtype=np.float64)
        low, high = limits or (float(np.nanmin(array)), float(np.nanmax(array)))
        drawn = axis.imshow(np.ma.masked_invalid(array), cmap="cividis", vmin=low, vmax=high, aspect="auto")
        axis.set_facecolor(FAINT)
        for (row, column), value in np.ndenumerate(array if wide >= _NUMBER else np.empty((0, 0))):
            text = "–" if np.isnan(value) else format(value, digits)
            colour = INK if np.isnan(value) or value > (low + high) / 2 else "white"  # cividis ends in yellow
            axis.text(column, row, text, ha="center", va="center", fontsize=size, color=colour)
        label(axis, title, x_label, y_label if axis is axes[0] else "")
        shown, most = list(map(str, columns)), 12 if len(columns) <= _LEVEL else 24
        shown = [name if len(name) <= most else f"{name[: most - 1]}…" for name in shown]
        axis.set_xticks(range(0, len(columns), step), shown[::step])
        if len(columns) > _LEVEL and max(map(len, shown)) > 3:
            axis.tick_params(axis="x", rotation=90)
        axis.set_yticks(range(0, len(rows), step), list(map(str, rows))[::step])
        axis.tick_params(length=0)
        unframe(axis)
        colour_bar(figure, drawn, axis, value_label, pad=0.03)
    return figure


WIDEST = 1600
"""Largest width in pixels of an enlarged picture."""


def pixel_rows(rows: Sequence[Any], *, grid: tuple[int, int] | None = None, gap: int = 2) -> bytes:
    """Rows of images [C, H, W] of one size, side by side on white, as the bytes of a PNG file.

    Every pixel of an image becomes a square of pixels, rounded to 255 levels. grid: cuts each image into its patches,
    with a gap between them. gap: between images, in their pixels.
    """
    drawn = [[_bytes(image) for image in row] for row in rows]
    drawn = drawn if grid is None else [[_apart(image, grid) for image in row] for row in drawn]
    height, width, channels = drawn[0][0].shape
    across, down = max(map(len, drawn)), len(drawn)
    whole = np.full((down * (height + gap) - gap, across * (width + gap) - gap, channels), 255, np.uint8)
    for y, row in enumerate(drawn):
        for x, image in enumerate(row):
            top, left = y * (height + gap), x * (width + gap)
            whole[top : top + height, left : left + width] = image
    zoom = max(1, min(8, WIDEST // whole.shape[1]))
    png = io.BytesIO()
    Image.fromarray(whole.repeat(zoom, 0).repeat(zoom, 1).squeeze()).save(png, "png")
    return png.getvalue()


def _bytes(image: Any) -> np.ndarray:
    picture = (255 * as_picture(image)).round().astype(np.uint8)
    return picture if picture.ndim == 3 else picture[:, :, None]


def _apart(image: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """An image with a white line of a pixel between its patches."""
    for axis, count in enumerate(grid):
        side = image.shape[axis] // count
        image = np.insert(image, [side * place for place in range(1, count)], 255, axis=axis)
    return image


HEADS_A_LINE = 6
"""Heads per line; more go on in the next line."""

_FLATTEST = 0.4  # height to width of a map; those of frames in a row, 1 × 195, are drawn higher than they are
_SIDE = 0.6  # inches left of a grid, for the names of its rows


def attention_over_images(images: Any, maps: Any) -> Figure:
    """Each image, the mean of its heads, and the heads.

    images: [n, C, H, W] floats in [0, 1]; maps: [n, H, h, w], not negative. Every map has its own colour scale, from 0
    to its 99th percentile: single tokens with much attention would hide the rest.
    """
    maps = np.asarray(maps, dtype=np.float64)
    heads = maps.shape[1]
    across = min(heads, HEADS_A_LINE)
    lines = -(-heads // HEADS_A_LINE)
    cell = PAGE_WIDTH / (across + 2)
    ratio = images.shape[-2] / images.shape[-1]
    rows = len(maps) * lines
    heading = 0.22 * (rows if lines > 1 else 1)
    figure, axes = canvas(rows, across + 2, PAGE_WIDTH, cell * ratio * rows + heading, tight=True)
    for axis in axes:
        axis.set_axis_off()
    for index, (image, heads_of_image) in enumerate(zip(images, maps, strict=True)):
        place = index * lines * (across + 2)
        draw_image(axes[place], image, "input" if index == 0 else "")
        _draw_map(axes[place + 1], heads_of_image.mean(axis=0), image.shape[-2:], "mean" if index == 0 else "")
        for head, values in enumerate(heads_of_image):
            line, column = divmod(head, HEADS_A_LINE)
            axis = axes[place + line * (across + 2) + 2 + column]
            _draw_map(axis, values, image.shape[-2:], f"head {head + 1}" if index == 0 or lines > 1 else "")
    return figure


def relative_maps(relative: Any, entropy: Any) -> Figure:
    """Mean attention by offset for every layer and head, with the head's entropy below it.

    relative: [L, H, 2h-1, 2w-1]; entropy: [L, H] in nats. The query is in the middle, at the ticks. Each panel's colour
    scale is the square root of the weight, from 0 to its largest, so that small weights around a peak are visible.
    """
    relative, entropy = np.asarray(relative, dtype=np.float64), np.asarray(entropy)
    layers, heads, height, width = relative.shape
    cell, shape = min(1.1, (PAGE_WIDTH - _SIDE) / heads), height / width
    tall = cell * max(shape, _FLATTEST) + 0.1
    figure, axes = canvas(layers, heads, cell * heads + _SIDE, tall * layers + 0.2, tight=True)
    for axis, values, nats in zip(axes, relative.reshape(-1, height, width), entropy.flat, strict=True):
        scale = PowerNorm(0.5, vmin=0, vmax=max(values.max(), 1e-12))
        axis.imshow(
            values, cmap="cividis", norm=scale, interpolation="nearest", aspect="equal" if shape > _FLATTEST else "auto"
        )
        axis.set_xticks([(width - 1) / 2], [""])
        axis.set_yticks([(height - 1) / 2], [""])
        axis.tick_params(length=2, width=0.6, color=INK, top=True, right=True, pad=0)
        axis.set_xlabel(f"{nats:.2f}", fontsize=TICK if cell > 0.7 else 6, color=INK, labelpad=1.5)
        unframe(axis)
    for head in range(heads):
        axes[head].set_title(f"head {head + 1}", fontsize=TICK, color=INK, pad=3)
    for layer in range(layers):
        axes[layer * heads].set_ylabel(f"layer {layer + 1}", fontsize=TICK, color=INK, rotation=0, ha="right")
    return figure


def _draw_map(axis: Axes, values: np.ndarray, size: Sequence[int], title: str) -> None:
    height, width = size
    top = max(float(np.percentile(values, 99)), 1e-12)
    axis.imshow(values, cmap="inferno", vmin=0, vmax=top, interpolation="nearest", extent=(0, width, height, 0))
    if title:
        axis.set_title(title, fontsize=TITLE - 1, color=INK, pad=4)
