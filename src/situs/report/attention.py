"""Figures of attention: over images, and over relative offsets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from situs.report.canvas import INK, PAGE_WIDTH, TICK, TITLE, canvas, unframe
from situs.report.figures import draw_image

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
