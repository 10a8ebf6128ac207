"""Many small images as one picture: a table whose cells are images, on one pair of axes, which is fast.

Separate axes for each image, laid out by constraints, take seconds for a hundred of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from situs.errors import SitusError
from situs.report.canvas import INK, LABEL, PAGE_WIDTH, canvas, unframe
from situs.report.figures import as_picture

_GAP = 0.06  # between neighbours, of a cell


def mosaic(images: Any, rows: Sequence[str], columns: Sequence[str]) -> Figure:
    """images: [len(rows), len(columns), C, H, W], C = 1 or 3, uint8 or floats in [0, 1]; all of one size."""
    if len(images) != len(rows) or not rows or any(len(row) != len(columns) for row in images) or not columns:
        raise SitusError(f"mosaic: {len(rows)} rows of {len(columns)} images are named and others were given")
    names = 0.085 * max(map(len, rows)) + 0.35
    cell = min(1.6, (PAGE_WIDTH - names) / len(columns))
    height, width = images[0][0].shape[-2:]
    tall = height / width
    figure, (axis,) = canvas(1, 1, cell * len(columns) + names, cell * tall * len(rows) + 0.45)
    for y, row in enumerate(images):
        for x, image in enumerate(row):
            at = (x, x + 1 - _GAP, (y + 1 - _GAP) * tall, y * tall)
            axis.imshow(as_picture(image), extent=at, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axis.set(xlim=(0, len(columns) - _GAP), ylim=((len(rows) - _GAP) * tall, 0), aspect="equal")
    middle = (1 - _GAP) / 2
    axis.set_xticks([x + middle for x in range(len(columns))], list(columns))
    axis.set_yticks([(y + middle) * tall for y in range(len(rows))], list(rows))
    axis.xaxis.tick_top()
    axis.tick_params(length=0, labelsize=LABEL, labelcolor=INK)
    unframe(axis)
    return figure
