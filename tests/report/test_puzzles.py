"""Marks stand on the places they are for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from matplotlib.colors import to_rgb

from situs.report.figures import GREEN, RED, png
from situs.report.puzzles import Panel, outlined, panels

GRID = (2, 3)


def places(*chosen: int) -> np.ndarray:
    return np.isin(np.arange(6), chosen)


def test_marks_cover_their_patches_and_no_others() -> None:
    image = np.full((3, 8, 12), 0.5)
    panel = Panel(image, "title", outlined=places(0, 1), empty=places(2), hidden=places(3), wrong=places(5))
    figure = panels([[panel, Panel(image)]], GRID, ["row"])
    png(figure)
    axis = figure.axes[0]
    assert axis.get_title() == "title"
    found = {(*patch.get_xy(), patch.get_width(), patch.get_height()): patch for patch in axis.patches}
    assert set(found) == {(8, 0, 4, 4), (0, 4, 4, 4), (8, 4, 4, 4)}
    assert found[0, 4, 4, 4].get_facecolor()[:3] == (0, 0, 0)
    assert found[8, 4, 4, 4].get_facecolor()[:3] == (1, 1, 1)
    assert found[8, 4, 4, 4].get_edgecolor()[:3] == to_rgb(RED)
    strokes = [
        np.array(lines.get_segments()) for lines in axis.collections if tuple(lines.get_color()[0][:3]) != to_rgb(GREEN)
    ]
    for lines, (left, top) in zip(strokes, ((8, 0), (0, 4)), strict=True):  # across the empty patch and the hidden one
        assert len(lines) == 2 and np.array_equal(lines.min((0, 1)), (left, top))
        assert np.array_equal(lines.max((0, 1)), (left + 4, top + 4))
    (outline,) = [lines for lines in axis.collections if tuple(lines.get_color()[0][:3]) == to_rgb(GREEN)]
    segments = np.array(outline.get_segments())
    assert len(segments) == 6  # around two cells side by side, the line between them left out
    assert segments[..., 0].max() == 8
    assert not outline.get_clip_on()  # along the border of the image it is as wide as elsewhere
    assert segments[..., 1].max() == 4
    assert not figure.axes[1].patches


def test_every_panel_stands_in_its_row_and_column_and_gaps_are_left_blank() -> None:
    image = np.zeros((1, 4, 6))
    rows = [[Panel(image, "a"), Panel(image, "b"), Panel(image, "c")], [None, Panel(image, "e"), Panel(image, "f")]]
    figure = panels(rows, GRID, ["first", "second"])
    png(figure)
    assert [bool(axis.images) for axis in figure.axes] == [True, True, True, False, True, True]
    assert [axis.get_title() for axis in figure.axes] == ["a", "b", "c", "", "e", "f"]
    assert [[text.get_text() for text in axis.texts] for axis in figure.axes] == [["first"], [], [], ["second"], [], []]
    assert not any(axis.axison for axis in figure.axes)


def test_positions_in_a_row_are_strips_with_time_to_the_right_and_frequency_upwards() -> None:
    clip = np.arange(12).reshape(1, 3, 4) / 12  # three bands, four frames
    marks = np.array([False, True, False, False])
    rows = [[Panel(clip, "a", empty=marks), None], [Panel(clip, outlined=marks)]]
    for grid, image in (((1, 4), clip), ((4, 1), clip.transpose(0, 2, 1))):
        turned = [[panel and replace(panel, image=image) for panel in row] for row in rows]
        figure = panels(turned, grid, ["one", "two"])
        png(figure)
        first, second = figure.axes
        assert np.allclose(first.images[0].get_array(), clip[0, ::-1])
        assert first.get_title() == "a" and [axis.texts[0].get_text() for axis in figure.axes] == ["one", "two\na"]
        (empty,) = first.patches
        assert (*empty.get_xy(), empty.get_width(), empty.get_height()) == (1, 0, 1, 3)
        segments = np.array(second.collections[0].get_segments())
        assert (segments[..., 0].min(), segments[..., 0].max()) == (1, 2)


def test_strips_name_the_setting_of_their_column() -> None:
    clip = np.zeros((1, 2, 6), dtype=np.float32)
    rows = [[Panel(clip, "image"), Panel(clip, "η = 0: 2 %")], [None, Panel(clip)], [Panel(clip), Panel(clip, "1 %")]]
    figure = panels(rows, (1, 6), ["context", "input", "more"])
    beside = [axis.texts[0].get_text() for axis in figure.axes]
    assert beside == ["context", "context", "input\nη = 0", "more\nimage", "more\nη = 0"]
    assert [axis.get_title() for axis in figure.axes] == ["image", "η = 0: 2 %", "", "", "1 %"]


def test_masks_of_a_row_of_images_are_outlined() -> None:
    figure = outlined([np.zeros((3, 8, 12))] * 2, ["a", "b"], [places(0), places(4, 5)], GRID)
    assert [axis.get_title() for axis in figure.axes] == ["a", "b"]
    assert [len(axis.collections[0].get_segments()) for axis in figure.axes] == [4, 6]
