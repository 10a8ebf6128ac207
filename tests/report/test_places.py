"""Pictures of places: what is drawn is what was given, labelled, and fits the page."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from mpl_toolkits.mplot3d.art3d import Line3DCollection
from PIL import Image

from situs.errors import SitusError
from situs.report import figures, places
from situs.report.figures import png

GRID = (3, 4)
FLAT = np.stack([np.tile(np.arange(4.0), 3), np.repeat(np.arange(3.0), 4)], axis=-1)
SOLID = np.column_stack([FLAT, FLAT.sum(axis=1)])


def sheets() -> Figure:
    return places.sheets(
        [
            places.Sheet("rows", FLAT, ("x", "y"), "row"),
            places.Sheet("columns", FLAT, ("x", "y"), "column", as_image=True),
            places.Sheet("space", SOLID, ("x", "y", "z"), "column"),
        ],
        GRID,
    )


def mosaics(limits: tuple[float, float] | None = None, grid: tuple[int, int] = GRID) -> Figure:
    h, w = grid
    maps = np.arange(2.0 * 2 * h * w).reshape(2, 2, h, w)
    rows, columns = [0, h - 1], [0, w - 1]
    return places.mosaics({"one": maps, "two": -maps}, rows, columns, "alike", limits=limits)


def lines() -> Figure:
    series = {"a": (range(3), [1.0, 2.0, 3.0]), "b": (range(3), [3.0, 2.0, 1.0])}
    return figures.curves(series, "after", "error", x_names=["embed", "1", "norm"], level=("blind", 2.5))


def test_the_same_twice_and_fits_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("situs.report.figures.RESOLUTION", 50)  # a quarter of the page's, in a third of the time
    for make in (sheets, mosaics, lines):
        first = png(make())
        assert first == png(make()), make.__name__
        width, height = Image.open(io.BytesIO(first)).size
        assert 100 < width <= 912 / 2, make.__name__
        assert 75 < height < 912 / 2, make.__name__


def segments(axis: Any, kind: type[Any]) -> list[list[Any]]:
    found = [each for each in axis.collections if isinstance(each, kind)]
    read = (lambda each: each._segments3d) if kind is Line3DCollection else (lambda each: each.get_segments())
    return [[np.asarray(line).tolist() for line in read(each)] for each in found]


def test_neighbours_are_joined_along_what_bears_colour() -> None:
    rows, columns, space = sheets().axes[::2]
    pale, coloured = segments(rows, LineCollection)
    assert coloured == FLAT.reshape(3, 4, 2).tolist()
    assert pale == FLAT.reshape(3, 4, 2).swapaxes(0, 1).tolist()
    pale, coloured = segments(columns, LineCollection)
    assert coloured == FLAT.reshape(3, 4, 2).swapaxes(0, 1).tolist()
    assert pale == FLAT.reshape(3, 4, 2).tolist()
    pale, coloured = segments(space, Line3DCollection)
    assert coloured == SOLID.reshape(3, 4, 3).swapaxes(0, 1).tolist()


def test_sheets_are_labelled_and_upright() -> None:
    (rows, columns, space), bars = sheets().axes[::2], sheets().axes[1::2]
    assert [axis.get_title() for axis in (rows, columns, space)] == ["rows", "columns", "space"]
    assert (rows.get_xlabel(), rows.get_ylabel(), space.get_zlabel()) == ("x", "y", "z")
    assert not rows.yaxis_inverted()
    assert columns.yaxis_inverted()  # row 0 of an image is at the top
    assert [bar.get_xlabel() for bar in bars] == ["row (0: top)", "column (0: left)", "column (0: left)"]
    assert [bar.get_xticks().tolist() for bar in bars] == [[0, 2], [0, 3], [0, 3]]


def test_colours_grow_with_the_row_and_stay_dark_enough_for_white_paper() -> None:
    axis = sheets().axes[0]
    coloured = [each for each in axis.collections if isinstance(each, LineCollection)][1]
    light = np.asarray(coloured.get_colors())[:, :3] @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(light) > 0).all()  # told apart without any colour
    assert light.max() < 0.8


def test_many_places_are_lines_without_dots() -> None:
    grid = (21, 20)
    points = np.random.default_rng(0).normal(size=(420, 2))
    kinds = [
        type(each).__name__ for each in places.sheets([places.Sheet("t", points, ("x", "y"))], grid).axes[0].collections
    ]
    assert kinds == ["LineCollection", "LineCollection"]
    assert "PathCollection" in [type(each).__name__ for each in sheets().axes[0].collections]


def test_points_that_are_not_the_grid_s_are_refused() -> None:
    with pytest.raises(SitusError, match=r"t: points of shape \(11, 2\) do not fit the grid \(3, 4\)"):
        places.sheets([places.Sheet("t", FLAT[:11], ("x", "y"))], GRID)


def test_mosaic_shows_each_map_where_its_place_is_and_rings_it() -> None:
    one = mosaics(limits=(-1, 1)).axes[0]
    maps = np.arange(48.0).reshape(2, 2, 3, 4)
    assert len(one.images) == 4
    for number, image in enumerate(one.images):
        r, c = divmod(number, 2)
        assert np.array_equal(np.asarray(image.get_array()), maps[r, c])
        left, right, bottom, top = image.get_extent()
        assert (right - left, bottom - top) == pytest.approx((4, 3))
        ring = np.asarray(one.collections[1].get_offsets())[number]
        assert ring.tolist() == pytest.approx([left + (0, 3)[c] + 0.5, top + (0, 2)[r] + 0.5])
    ends = np.array([image.get_extent() for image in one.images])  # nothing is cut, and little left empty
    for limits, drawn in ((one.get_xlim(), ends[:, :2]), (one.get_ylim(), ends[:, 2:])):
        assert 0 < drawn.min() - min(limits) < 1 and 0 < max(limits) - drawn.max() < 1
    assert [tick.get_text() for tick in one.get_xticklabels()] == ["0", "3"]
    assert [tick.get_text() for tick in one.get_yticklabels()] == ["0", "2"]


def test_mosaics_share_a_given_scale_or_have_their_own() -> None:
    *_, bar = shared = mosaics(limits=(-1, 1)).axes
    assert len(shared) == 3
    assert bar.get_ylabel() == "alike"
    assert {image.get_clim() for axis in shared[:2] for image in axis.images} == {(-1.0, 1.0)}
    one, two, *bars = mosaics().axes
    assert len(bars) == 2
    # From the least to the most of all places but the ringed: 0 and 47 are ringed themselves.
    assert {image.get_clim() for image in one.images} == {(1.0, 46.0)}
    assert {image.get_clim() for image in two.images} == {(-46.0, -1.0)}


@pytest.mark.thin(3)
@pytest.mark.parametrize("grid", [(1, 6), (6, 1), (1, 2)])
def test_mosaics_of_narrow_grids_are_drawn(grid: tuple[int, int]) -> None:
    width, height = Image.open(io.BytesIO(png(mosaics(grid=grid)))).size
    assert 300 < width <= 2 * 912
    assert 300 < height <= 2 * 912


def test_lines_have_names_below_and_a_level_that_is_named() -> None:
    (axis,) = lines().axes
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["embed", "1", "norm"]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("after", "error")
    legend = axis.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["blind", "a", "b"]
    level, first, second = axis.get_lines()
    assert set(np.asarray(level.get_ydata())) == {2.5}
    assert first.get_color() != second.get_color()
    assert first.get_linestyle() != second.get_linestyle()


def test_of_a_single_place_its_own_value_is_the_range() -> None:
    """Where a map has no other place, nothing is left to leave out."""
    figure = places.mosaics({"one": np.full((1, 1, 1, 1), 3.0)}, [0], [0], "alike")
    (image,) = figure.axes[0].get_images()
    low, high = image.get_clim()
    assert low < 3.0 < high  # matplotlib widens an empty range
    maps = np.array([[[[9.0, 1.0], [2.0, 4.0]]]])
    (image,) = places.mosaics({"one": maps}, [0], [0], "alike").axes[0].get_images()
    assert image.get_clim() == (1.0, 4.0)
