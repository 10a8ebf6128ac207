"""Images pixel by pixel, as a small PNG that a browser enlarges without blur."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from situs.report.figures import as_picture

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
