"""Colours of classes over pictures."""

from __future__ import annotations

import numpy as np
import torch

from situs.report.masks import class_colours, covered, mask_rows


def test_every_class_has_a_colour_of_its_own() -> None:
    colours = class_colours(150)
    assert colours.shape == (150, 3) and colours.min() >= 0 and colours.max() <= 1
    apart = np.abs(colours[:, None] - colours[None]).max(-1) + np.eye(150)
    assert apart.min() > 0.01
    assert np.array_equal(class_colours(4), colours[:4])


def test_a_class_is_laid_over_its_pixels_and_none_over_void() -> None:
    picture = torch.zeros(3, 4, 4)
    picture[0, :2] = 1.0
    mask = np.array([[0, -1], [1, 1]])
    colours = np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    made = covered(picture, mask, colours)
    assert made.shape == (3, 2, 2)
    assert np.allclose(made[:, 0, 0], [0.4, 0.6, 0.0]) and np.allclose(made[:, 0, 1], [1, 0, 0])
    assert np.allclose(made[:, 1], np.array([[0, 0], [0, 0], [0.6, 0.6]]))
    assert covered(picture[:1], mask, colours).shape == (3, 2, 2)


def test_a_row_has_its_picture_and_its_masks_and_classes_that_are_seen_are_named() -> None:
    mask = np.array([[0, 2], [-1, 2]])
    rows = [(name, torch.rand(3, 4, 4), {"truth": mask, "predicted": mask}) for name in ("10 %", "20 %")]
    figure = mask_rows(rows, ("sky", "tree", "road"))
    assert [axis.get_title() for axis in figure.axes] == ["image", "truth", "predicted", "", "", ""]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["sky", "road"]


def test_tall_pictures_make_a_tall_figure_up_to_a_limit() -> None:
    def height(*sides: int) -> float:
        return mask_rows([("", torch.rand(3, *sides), {"truth": np.zeros((2, 2), int)})], ("sky",)).get_figheight()

    assert height(10, 20) < height(10, 10) < height(12, 10) < height(13, 10) == height(14, 10) == height(30, 10)
