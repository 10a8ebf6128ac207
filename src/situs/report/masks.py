"""Figures of masks and of objects: every class in its colour over the picture, objects with boxes, and a legend."""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from situs.report.figures import INK, LABEL, PAGE_WIDTH, PALETTE, as_picture, canvas, draw_image, name_row

_COVER = 0.6  # opacity of a class's colour
_NAMED = 24


def class_colours(count: int) -> np.ndarray:
    """A colour for each class, [count, 3]: first those safe for colour blindness, then distant hues."""
    first = [to_rgb(colour) for colour in PALETTE[:-1]]
    more = [
        colorsys.hsv_to_rgb(number * 0.618034 % 1.0, 0.5 + 0.4 * (number % 2), 0.95 - 0.15 * (number % 3))
        for number in range(count - len(first))
    ]
    return np.array([*first, *more][:count])


def covered(picture: Any, mask: Any, colours: np.ndarray) -> np.ndarray:
    """The picture at the mask's size, tinted by its classes, [3, h, w]; unchanged if there is none."""
    mask, shown = np.asarray(mask), as_picture(picture)
    shown = shown if shown.ndim == 3 else np.repeat(shown[..., None], 3, axis=2)
    rows, columns = (
        ((np.arange(want) + 0.5) * have / want).astype(int)
        for want, have in zip(mask.shape, shown.shape[:2], strict=True)
    )
    shown = shown[rows[:, None], columns]
    mixed = shown * (1 - _COVER) + colours[np.maximum(mask, 0)] * _COVER
    return np.where((mask >= 0)[..., None], mixed, shown).transpose(2, 0, 1)


def mask_rows(rows: Sequence[tuple[str, Any, Mapping[str, Any]]], classes: Sequence[str]) -> Figure:
    """One picture and its masks per row, and a legend of the classes that occur.

    rows: its name, the picture [C, H, W], and the masks by their titles, [h, w], below 0 for no class.
    """
    colours, titles = class_colours(len(classes)), ["image", *rows[0][2]]
    tall = float(np.mean([picture.shape[1] / picture.shape[2] for _, picture, _ in rows]))
    cell = min(2.2, (PAGE_WIDTH - 1.2) / len(titles))
    figure, axes = canvas(len(rows), len(titles), cell * len(titles) + 1.2, cell * min(tall, 1.3) * len(rows) + 0.9)
    occurring: set[int] = set()
    for number, (name, image, masks) in enumerate(rows):
        row_axes = axes[number * len(titles) : (number + 1) * len(titles)]
        drawn = [image, *(covered(image, mask, colours) for mask in masks.values())]
        for axis, picture, title in zip(row_axes, drawn, titles, strict=True):
            axis.set_axis_off()
            draw_image(axis, picture, title if number == 0 else "")
        name_row(row_axes[0], name)
        occurring |= {int(c) for mask in masks.values() for c in np.unique(np.asarray(mask)) if c >= 0}
    marks = [Patch(color=colours[number], label=classes[number]) for number in sorted(occurring)[:_NAMED]]
    figure.legend(
        handles=marks, loc="outside lower center", ncols=min(6, len(marks)), frameon=False, fontsize=LABEL,
        labelcolor=INK,
    )  # fmt: skip
    return figure


def class_map(objects: Any, sides: tuple[int, int]) -> np.ndarray:
    """The class of each pixel, [h, w], −1 for none; where objects overlap the smallest is on top.

    objects: see `object_rows`.
    """
    masks, whole = np.asarray(objects.masks), np.full(sides, -1)
    for number in np.argsort(-masks.sum(axis=(1, 2)), kind="stable").tolist():
        whole[masks[number]] = int(objects.classes[number])
    return whole


def object_rows(rows: Sequence[tuple[str, Any, tuple[int, int], Mapping[str, Any]]], classes: Sequence[str]) -> Figure:
    """One picture and its objects per row, and a legend of the classes that occur.

    rows: its name, the picture [C, H, W], height and width in which boxes and masks are measured, and the objects by
    their titles: their boxes [n, 4] (left, top, right, bottom), classes [n], masks [n, h, w], and scores [n] or None.
    """
    masked = [
        (name, picture, {title: class_map(objects, sides) for title, objects in by_title.items()})
        for name, picture, sides, by_title in rows
    ]
    figure, colours = mask_rows(masked, classes), class_colours(len(classes))
    columns = 1 + len(rows[0][3])
    for number, (*_, by_title) in enumerate(rows):
        axes = figure.axes[number * columns + 1 : (number + 1) * columns]
        for axis, objects in zip(axes, by_title.values(), strict=True):
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
