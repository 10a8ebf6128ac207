"""Pictures of attention: the right panels with the right numbers, and nothing drawn that is empty."""

from __future__ import annotations

import numpy as np
import pytest

from situs.report.figures import HEADS_A_LINE, attention_over_images, png, relative_maps


@pytest.mark.parametrize("heads", [1, 8])
def test_each_head_has_its_map_with_its_own_scale(heads: int) -> None:
    chance = np.random.default_rng(0)
    maps = chance.random((2, heads, 3, 4)) * np.arange(1, heads + 1)[None, :, None, None]
    figure = attention_over_images(chance.random((2, 3, 6, 8)), maps)
    assert heads > 1 or png(figure).startswith(b"\x89PNG")
    drawn = [axis for axis in figure.axes if axis.images]
    assert len(drawn) == 2 * (heads + 2)
    across = min(heads, HEADS_A_LINE)
    by_place = {figure.axes.index(axis): axis for axis in drawn}
    lines = -(-heads // HEADS_A_LINE)
    for image in range(2):
        start = image * lines * (across + 2)
        np.testing.assert_allclose(by_place[start + 1].images[0].get_array(), maps[image].mean(axis=0))
        for head in range(heads):
            line, column = divmod(head, HEADS_A_LINE)
            axis = by_place[start + line * (across + 2) + 2 + column]
            np.testing.assert_allclose(axis.images[0].get_array(), maps[image, head])
            low, high = axis.images[0].get_clim()
            assert (low, high) == (0, pytest.approx(np.percentile(maps[image, head], 99)))


def test_the_names_of_many_heads_take_nothing_from_the_pictures_and_cover_none() -> None:
    chance = np.random.default_rng(0)
    figure = attention_over_images(chance.random((2, 3, 8, 8)), chance.random((2, HEADS_A_LINE + 2, 4, 4)))
    figure.canvas.draw()
    cell = figure.bbox.width / (HEADS_A_LINE + 2)
    pictures = [axis.get_window_extent() for axis in figure.axes if axis.images]
    assert min(picture.width for picture in pictures) > 0.9 * cell
    names = [axis.title.get_window_extent() for axis in figure.axes if axis.get_title()]
    assert len(names) == 2 + 2 * (HEADS_A_LINE + 2)  # image and mean once, the heads in every line
    assert not any(name.overlaps(picture) for name in names for picture in pictures)
    for name in names:
        assert figure.bbox.x0 <= name.x0 < name.x1 <= figure.bbox.x1 and name.y1 <= figure.bbox.y1


def test_relative_maps_stand_layer_by_head_with_their_entropy() -> None:
    relative = np.random.default_rng(0).random((2, 3, 5, 7))
    entropy = np.arange(6.0).reshape(2, 3)
    figure = relative_maps(relative, entropy)
    png(figure)
    assert len(figure.axes) == 6
    for index, axis in enumerate(figure.axes):
        layer, head = divmod(index, 3)
        np.testing.assert_allclose(axis.images[0].get_array(), relative[layer, head])
        assert axis.get_xlabel() == f"{entropy[layer, head]:.2f}"
        assert (axis.get_xticks().tolist(), axis.get_yticks().tolist()) == ([3.0], [2.0])  # the query itself
    assert [figure.axes[head].get_title() for head in range(3)] == ["head 1", "head 2", "head 3"]
    assert [figure.axes[3 * layer].get_ylabel() for layer in range(2)] == ["layer 1", "layer 2"]


def test_maps_of_frames_in_a_row_are_high_enough_to_be_seen() -> None:
    """1 × 195 at its true shape would be a line, and its axes would collapse, of which matplotlib warns."""
    figure = relative_maps(np.random.default_rng(0).random((4, 2, 1, 195)), np.ones((4, 2)))
    png(figure)
    assert all(axis.get_window_extent().height > 0.2 * axis.get_window_extent().width for axis in figure.axes)
