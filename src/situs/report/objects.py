"""Figures of objects: masks in the colours of their classes over the picture, with boxes."""

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
    objects: by their titles."""

    name: str
    picture: Any
    sides: tuple[int, int]
    objects: Mapping[str, Outlined]


def class_map(objects: Outlined, sides: tuple[int, int]) -> np.ndarray:
    """The class of each pixel, [h, w], −1 for none; where objects overlap the smallest is on top."""
    masks, whole = np.asarray(objects.masks), np.full(sides, -1)
    for number in np.argsort(-masks.sum(axis=(1, 2)), kind="stable").tolist():
        whole[masks[number]] = int(objects.classes[number])
    return whole


def object_rows(rows: Sequence[tuple[str, Any, tuple[int, int], Mapping[str, Any]]], classes: Sequence[str]) -> Figure:
    """One picture and its objects per row (see `ObjectRow`), and a legend of the classes that occur."""
    rows = [ObjectRow(*row) for row in rows]
    masked = [
        MaskRow(row.name, row.picture, {title: class_map(objects, row.sides) for title, objects in row.objects.items()})
        for row in rows
    ]
    figure, colours = mask_rows(masked, classes), class_colours(len(classes))
    columns = 1 + len(rows[0].objects)
    for number, row in enumerate(rows):
        axes = figure.axes[number * columns + 1 : (number + 1) * columns]
        for axis, objects in zip(axes, row.objects.values(), strict=True):
            for index, (left, top, right, bottom) in enumerate(np.asarray(objects.boxes).tolist()):
                colour = colours[int(objects.classes[index])]
                # A pixel's centre is at a whole number there.
                place = (left - 0.5, top - 0.5)
                axis.add_patch(Rectangle(place, right - left, bottom - top, fill=False, edgecolor=colour, linewidth=1))
                if objects.scores is not None:
                    score = f"{float(objects.scores[index]):.2f}"
                    behind = {"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 0.5}
                    axis.text(*place, score, fontsize=LABEL - 2, color=INK, va="top", clip_on=True, bbox=behind)
    return figure
