"""Objects are drawn where they are, in the colour of their class."""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.patches import Rectangle

from situs.measure.objects import DrawnObjects
from situs.report.masks import class_colours, class_map, object_rows

MASKS = torch.zeros(2, 4, 6, dtype=torch.bool)
MASKS[0, :3, :4] = True
MASKS[1, 1:3, 1:3] = True
FOUND = DrawnObjects(
    torch.tensor([[0.0, 0, 4, 3], [1, 1, 3, 3]]), torch.tensor([2, 0]), MASKS, torch.tensor([0.9, 0.8])
)


def test_the_smaller_object_lies_on_top() -> None:
    drawn = class_map(FOUND, (4, 6))
    assert drawn[1:3, 1:3].tolist() == [[0, 0], [0, 0]] and drawn[0].tolist() == [2, 2, 2, 2, -1, -1]
    flipped = FOUND._replace(classes=FOUND.classes.flip(0), masks=MASKS.flip(0))
    assert np.array_equal(class_map(flipped, (4, 6)), drawn)
    none = DrawnObjects(torch.zeros(0, 4), torch.zeros(0), MASKS[:0])
    assert (class_map(none, (4, 6)) == -1).all()


def test_boxes_and_scores_stand_at_the_pixels_edges() -> None:
    row = ("a", torch.rand(3, 8, 12), (4, 6), {"truth": FOUND._replace(scores=None), "found": FOUND})
    figure, colours = object_rows([row], ("x", "y", "z")), class_colours(3)
    picture, truth, found = figure.axes[:3]
    assert not picture.patches and not truth.texts
    first, second = (patch for patch in found.patches if isinstance(patch, Rectangle))
    assert (first.get_bbox().extents == (-0.5, -0.5, 3.5, 2.5)).all()
    assert np.allclose(second.get_edgecolor()[:3], colours[0])
    assert [text.get_text() for text in found.texts] == ["0.90", "0.80"]
