from __future__ import annotations

import numpy as np

from situs.report.figures import GREEN
from situs.report.puzzles import Order, Strip, orders, strips


def test_strips_share_one_axis_of_places_and_grow_upwards() -> None:
    values = np.linspace(0, 1, 12).reshape(3, 4)
    empty, marked = np.array([False, True]), np.array([True, False])
    figure = strips([Strip("a", values), Strip("b", values, "said", empty, marked)], "places")
    first, second = figure.axes
    assert first.images[0].origin == "lower" and first.images[0].get_extent() == [0, 4, 0, 1]
    assert second.images[0].get_extent() == [0, 2, 0, 1]  # two places of two columns each
    hatched, bars = second.collections
    assert hatched.get_hatch() and bars.get_facecolor()[0][:3].tolist() == [
        int(GREEN[at : at + 2], 16) / 255 for at in (1, 3, 5)
    ]
    assert bars.get_paths()[0].vertices[:, 1].max() < 0 < 1 == hatched.get_paths()[0].vertices[:, 1].max()
    assert (first.get_ylabel(), second.get_title(loc="left"), second.get_xlabel()) == ("a", "said", "places")


def test_orders_are_points_over_the_diagonal() -> None:
    figure = orders([Order("one", [0, 3], [1, 3]), Order("two", [2], [0])], 4, "true", "found")
    one, two = figure.axes
    assert one.collections[0].get_offsets().tolist() == [[0, 1], [3, 3]]
    assert two.collections[0].get_offsets().tolist() == [[2, 0]]
    assert one.get_lines()[0].get_xydata().tolist() == [[0, 0], [3, 3]]
