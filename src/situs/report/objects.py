"""Objects beside one another: their masks in their classes' colours over the picture, their boxes around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from situs.report.canvas import INK, LABEL
from situs.report.masks import MaskRow, class_colours, mask_rows


class Outlined(NamedTuple):
    """Objects of one picture. boxes: [n, 4] left, top, right, bottom. classes: [n]. masks: [n, h, w] bool, in whose
    pixels the boxes are measured. scores: [n], written beside the boxes."""

    boxes: Any
    classes: Any
    masks: Any
    scores: Any = None


class ObjectRow(NamedTuple):
    """One row. name: left of it. picture: [C, H, W]. sides: height and width that boxes and masks are measured in.
    objects: by what stands over them."""

    name: str
    picture: Any
    sides: tuple[int, int]
    objects: Mapping[str, Outlined]


def class_map(found: Outlined, sides: tuple[int, int]) -> np.ndarray:
    """The class of each pixel, [h, w], −1 for none; of objects that overlap the smallest lies on top."""
    masks, whole = np.asarray(found.masks), np.full(sides, -1)
    for number in np.argsort(-masks.sum(axis=(1, 2)), kind="stable").tolist():
        whole[masks[number]] = int(found.classes[number])
    return whole


def object_rows(rows: Sequence[tuple[str, Any, tuple[int, int], Mapping[str, Any]]], classes: Sequence[str]) -> Figure:
    """A picture and its objects a row (see `ObjectRow`), and below the classes that are seen in any of them."""
    rows = [ObjectRow(*row) for row in rows]
    masked = [
        MaskRow(row.name, row.picture, {title: class_map(each, row.sides) for title, each in row.objects.items()})
        for row in rows
    ]
    figure, colours = mask_rows(masked, classes), class_colours(len(classes))
    columns = 1 + len(rows[0].objects)
    for number, row in enumerate(rows):
        axes = figure.axes[number * columns + 1 : (number + 1) * columns]
        for axis, found in zip(axes, row.objects.values(), strict=True):
            for each, (left, top, right, bottom) in enumerate(np.asarray(found.boxes).tolist()):
                colour = colours[int(found.classes[each])]
                # A pixel's centre is at a whole number there.
                place = (left - 0.5, top - 0.5)
                axis.add_patch(Rectangle(place, right - left, bottom - top, fill=False, edgecolor=colour, linewidth=1))
                if found.scores is not None:
                    said = f"{float(found.scores[each]):.2f}"
                    behind = {"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 0.5}
                    axis.text(*place, said, fontsize=LABEL - 2, color=INK, va="top", clip_on=True, bbox=behind)
    return figure
