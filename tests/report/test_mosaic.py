"""The table of images."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from situs.errors import SitusError
from situs.report.figures import png
from situs.report.mosaic import mosaic


def test_every_image_stands_in_its_row_and_column() -> None:
    values = torch.linspace(0.1, 0.9, 6).view(3, 2, 1, 1, 1).expand(3, 2, 1, 10, 20)
    figure = mosaic(values, ["a", "bb", "ccc"], ["1", "2"])
    (axis,) = figure.axes
    assert [text.get_text() for text in axis.get_xticklabels()] == ["1", "2"]
    assert [text.get_text() for text in axis.get_yticklabels()] == ["a", "bb", "ccc"]
    drawn = np.asarray(Image.open(io.BytesIO(png(figure))).convert("L"), dtype=float) / 255
    for row in range(3):
        for column in range(2):
            # A tick marks the middle of its image.
            x, y = axis.transData.transform((axis.get_xticks()[column], axis.get_yticks()[row]))
            scale = 200 / figure.dpi
            found = drawn[int(drawn.shape[0] - y * scale), int(x * scale)]
            assert found == pytest.approx(float(values[row, column, 0, 0, 0]), abs=0.01)


def test_colour_and_many_images() -> None:
    images = torch.rand(15, 6, 3, 28, 28)
    figure = mosaic(images, [f"row {number}" for number in range(15)], [str(number) for number in range(6)])
    assert len(figure.axes[0].images) == 90
    assert figure.get_figwidth() <= 9.01


def test_names_must_fit() -> None:
    for images in (torch.rand(2, 2, 1, 4, 4), torch.rand(1, 3, 1, 4, 4), torch.rand(0, 2, 1, 4, 4)):
        with pytest.raises(SitusError, match="mosaic"):
            mosaic(images, ["a"], ["1", "2"])
