from __future__ import annotations

import io
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image
from warm import warm

from situs.errors import SitusError
from situs.report import figures
from situs.report.masks import mask_rows
from situs.report.puzzles import Panel, panels
from situs.results import channels_drawn

CORNER = np.zeros((1, 8, 12), dtype=np.uint8)
CORNER[0, :4, :3] = 255  # the top left patch of a 2 × 4 grid


def drawn(figure: Figure) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(figures.png(figure))).convert("RGB")).astype(int)


def titles(figure: Figure) -> list[str]:
    return [axis.get_title() for axis in figure.axes]


def all_figures() -> dict[str, Figure]:
    rng = np.random.default_rng(0)
    return {
        "curves": figures.curves({"a": ([0, 1], [1.0, 2.0]), "b": ([0, 1], [2.0, 1.0])}, "epoch", "loss"),
        "value_grids": figures.value_grids(
            {name: (rng.random((2, 4)), "score") for name in ("one", "two")}, range(2), range(4), "column", "row"
        ),
        "bars": figures.bars({"a": 1e-15, "b": 0.0, "c": 0.7}, "error"),
        "image_rows": figures.image_rows([("one", [CORNER] * 2), ("two", [CORNER])], ["a", "b"]),
    }


def test_png_is_a_png_and_the_same_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "RESOLUTION", 50)  # a quarter of the page's, in a third of the time
    again = all_figures()
    for name, figure in all_figures().items():
        first = figures.png(figure)
        assert first.startswith(b"\x89PNG"), name
        assert first == figures.png(again[name]), name
        width, height = Image.open(io.BytesIO(first)).size
        assert width <= 912 / 2 and height > 25, f"{name} does not fit the page: {width}×{height}"


def test_names_may_hold_any_character(monkeypatch: pytest.MonkeyPatch) -> None:
    """No formula between dollars, no warning for a character without a glyph (warnings are errors)."""
    monkeypatch.setattr(figures, "RESOLUTION", 40)
    odd = "$a_$", "猫 and dog", "50 % \\ {x} ^ & <b>"
    pictures, numbers = np.zeros((3, 3, 8, 8)), np.eye(3)
    for figure in (
        figures.bars(dict.fromkeys(odd, 1.0), odd[0]),
        figures.curves({name: ([0, 1], [1.0, 2.0]) for name in odd}, "epoch", odd[0], title=odd[0]),
        figures.value_grids({odd[0]: (numbers, odd[0])}, odd, odd, odd[0], odd[0]),
        figures.image_rows([(odd[0], pictures)], odd),
    ):
        assert figures.png(figure).startswith(b"\x89PNG")


def test_every_axis_of_numbers_is_labelled() -> None:
    made = all_figures()
    assert all(axis.get_xlabel() and axis.get_ylabel() for axis in made["curves"].axes)
    (bar,) = made["bars"].axes
    assert bar.get_xlabel() == "error"
    assert [tick.get_text() for tick in bar.get_yticklabels()] == ["a", "b", "c"]
    first, second, *scales = made["value_grids"].axes
    assert (first.get_xlabel(), second.get_xlabel(), first.get_ylabel()) == ("column", "column", "row")
    assert [scale.get_ylabel() for scale in scales] == ["score", "score"]


def test_no_global_state() -> None:
    before = dict(mpl.rcParams)
    all_figures()
    assert dict(mpl.rcParams) == before
    code = "import sys, situs.report.figures, situs.report.places; print('matplotlib.pyplot' in sys.modules)"
    assert warm("-c", code) == (0, "False\n", "")


def test_image_stands_upright() -> None:
    pixels = drawn(figures.image_rows([("", [CORNER])]))
    black = np.argwhere((pixels == 0).all(axis=-1))
    (top, left), (bottom, right) = black.min(axis=0), black.max(axis=0)
    inside = pixels[top : bottom + 1, left : right + 1]
    h, w = inside.shape[:2]
    assert inside[h // 4, w // 8].min() == 255  # the white corner
    assert inside[3 * h // 4, w // 8].max() == inside[h // 4, 7 * w // 8].max() == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_colour_and_tensors(dtype: torch.dtype) -> None:
    image = torch.zeros(3, 8, 8, dtype=dtype)
    image[1] = 255 if dtype == torch.uint8 else 1.0
    pixels = drawn(figures.image_rows([("", [image])]))
    assert pixels[pixels.shape[0] // 2, pixels.shape[1] // 2].tolist() == [0, 255, 0]


def test_names_and_titles_stand_at_their_images_and_a_row_may_have_fewer() -> None:
    (axis,) = figures.image_rows([("up", [CORNER] * 3), ("down", [CORNER] * 2)], list("abc")).axes
    assert [text.get_text() for text in axis.get_xticklabels()] == ["a", "b", "c"]
    assert [text.get_text() for text in axis.get_yticklabels()] == ["up", "down"]
    assert len(axis.images) == 5
    (crowded,) = figures.image_rows([("up", [CORNER] * 2)], list("abcdefgh")).axes  # more names than pictures
    assert [text.get_text() for text in crowded.get_xticklabels()] == ["a", "b"] and crowded.get_xlim()[1] < 2
    (other,) = figures.image_rows([("", np.eye(8)[None, None].repeat(5, 1))]).axes  # five channels
    assert np.array_equal(other.images[0].get_array(), np.eye(8))


@given(hnp.arrays(bool, st.tuples(st.integers(1, 6), st.integers(1, 6))))
def test_outline_against_a_slow_reference(mask: np.ndarray) -> None:
    h, w = mask.shape

    def masked(row: int, column: int) -> bool:
        return 0 <= row < h and 0 <= column < w and bool(mask[row, column])

    expected = set()
    for row in range(h + 1):
        for column in range(w + 1):
            if column < w and masked(row, column) != masked(row - 1, column):
                expected.add(((column, row), (column + 1, row)))
            if row < h and masked(row, column) != masked(row, column - 1):
                expected.add(((column, row), (column, row + 1)))
    segments = figures.outline(mask)
    assert len(segments) == len(expected)
    assert {(tuple(a), tuple(b)) for a, b in segments.tolist()} == expected


def test_bars_end_at_their_numbers_which_stand_inside_the_picture() -> None:
    values = {"least": 1e-3, "a long name of a bar": 0.5, "most": 1234.5}
    figure = figures.bars(values, "error", digits=".4f")
    figure.canvas.draw()
    (axis,) = figure.axes
    assert [bar.get_width() for bar in axis.patches] == list(values.values())
    assert [text.get_text() for text in axis.texts] == ["0.0010", "0.5000", "1234.5000"]
    tops = [bar.get_window_extent().y0 for bar in axis.patches]
    assert tops == sorted(tops, reverse=True)  # the first on top
    for bar, text in zip(axis.patches, axis.texts, strict=True):
        box = text.get_window_extent()
        assert bar.get_window_extent().x1 <= box.x0 and box.x1 <= figure.bbox.x1


@pytest.mark.parametrize("count", [1, 3, 20])
def test_however_many_bars_there_are_their_names_and_numbers_stand_apart(count: int) -> None:
    figure = figures.bars({f"bar {number}": 1.0 + number for number in range(count)}, "error")
    figure.canvas.draw()
    (axis,) = figure.axes
    for texts in (axis.texts, axis.get_yticklabels()):
        boxes = sorted((text.get_window_extent() for text in texts), key=lambda box: box.y0)
        assert len(boxes) == count
        assert all(low.y1 < high.y0 for low, high in pairwise(boxes))


def test_bars_of_nothing_begin_at_0() -> None:
    (axis,) = figures.bars({"a": 0.0, "b": 0.0}, "AP").axes
    assert axis.get_xlim() == (0, 1)


def test_curves_differ_in_colour_and_dash() -> None:
    series = {str(i): ([0, 1], [i, i]) for i in range(7)}
    (axis,) = figures.curves(series, "x", "y").axes
    looks = {(line.get_color(), line.get_linestyle()) for line in axis.lines}
    assert len(looks) == 7
    dashes = [line.get_linestyle() for line in axis.lines]
    assert all(one != two for one, two in pairwise(dashes))  # told apart in grey too
    assert [line.get_color() for line in axis.lines] == list(figures.PALETTE)
    legend = axis.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == list(series)


def test_names_of_lines_stand_where_no_line_is() -> None:
    series = {f"a way {i} at a rate of 0.0003": ([0, 1], [i, 6 - i]) for i in range(7)}  # no corner is free
    figure = figures.curves(series, "x", "y", title="Loss")
    figure.canvas.draw()
    (axis,) = figure.axes
    legend = axis.get_legend()
    assert legend is not None
    place = legend.get_window_extent()
    assert place.x0 >= axis.get_window_extent().x1
    assert place.x1 <= figure.bbox.x1 and place.y0 >= 0 and place.y1 <= figure.bbox.y1  # whole


def test_an_axis_of_shares_ends_where_shares_end() -> None:
    (axis,) = figures.curves({"all": ([0, 1], [100, 100])}, "x", "y", y_limits=(0, 100)).axes
    assert axis.get_ylim() == (0, 100)
    assert not axis.lines[0].get_clip_on()  # the mark at 100 is whole


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: figures.as_picture(np.zeros((8, 8))), r"shape \(8, 8\).*\[C, H, W\]"),
        (lambda: figures.as_picture(np.zeros((0, 8, 8))), r"shape \(0, 8, 8\)"),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(call: object, message: str) -> None:
    with pytest.raises(SitusError, match=message):
        call()  # pyright: ignore[reportCallIssue]


def test_images_of_any_number_of_channels_are_drawn_and_that_is_said():
    image = np.random.default_rng(0).random((6, 4, 5))
    for channels in (4, 6):
        assert np.array_equal(figures.as_picture(image[:channels]), image[:3].transpose(1, 2, 0))
        assert channels_drawn(channels) == (
            f"The images have {channels} channels and are drawn with the first three as red, green and blue."
        )
    assert np.allclose(figures.as_picture(image[:2]), image[:2].mean(0))
    assert "2 channels and are drawn as the mean of both" in channels_drawn(2)
    assert (channels_drawn(1), channels_drawn(3)) == ("", "")


def test_every_image_stands_in_its_row_and_column() -> None:
    values = torch.linspace(0.1, 0.9, 6).view(3, 2, 1, 1, 1).expand(3, 2, 1, 10, 20)
    figure = figures.image_rows(list(zip(("a", "bb", "ccc"), values, strict=True)), ["1", "2"])
    (axis,) = figure.axes
    assert [text.get_text() for text in axis.get_xticklabels()] == ["1", "2"]
    assert [text.get_text() for text in axis.get_yticklabels()] == ["a", "bb", "ccc"]
    drawn = np.asarray(Image.open(io.BytesIO(figures.png(figure))).convert("L"), dtype=float) / 255
    for row in range(3):
        for column in range(2):
            # A tick marks the middle of its image.
            x, y = axis.transData.transform((axis.get_xticks()[column], axis.get_yticks()[row]))
            scale = 200 / figure.dpi
            found = drawn[int(drawn.shape[0] - y * scale), int(x * scale)]
            assert found == pytest.approx(float(values[row, column, 0, 0, 0]), abs=0.01)


def test_colour_and_many_images() -> None:
    images = torch.rand(15, 6, 3, 28, 28)
    figure = figures.image_rows([(f"row {number}", row) for number, row in enumerate(images)], list("012345"))
    assert len(figure.axes[0].images) == 90
    assert figure.get_figwidth() <= 9.01


def test_a_run_looks_the_same_in_every_panel() -> None:
    metrics = {
        "loss": {"a": ([1, 2], [3.0, 2.0]), "b": ([1, 2], [4.0, 3.0])},
        "top1": {"b": ([2], [0.5])},
        "rate": {"a": ([1, 2], [0.1, 0.2]), "b": ([1, 2], [0.1, 0.3])},
    }
    figure = figures.curve_panels(metrics, "epoch")
    figures.png(figure)
    shown = [axis for axis in figure.axes if axis.get_visible()]
    assert [axis.get_ylabel() for axis in shown] == ["loss", "top1", "rate"]
    assert {axis.get_xlabel() for axis in shown} == {"epoch"}
    looks = [[(line.get_color(), line.get_linestyle()) for line in axis.lines] for axis in shown]
    assert looks[0] == looks[2]
    assert looks[1] == [looks[0][1]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
    assert shown[1].lines[0].get_ydata().tolist() == [0.5]


def test_one_run_needs_no_legend() -> None:
    assert not figures.curve_panels({"loss": {"a": ([1], [2.0])}}, "step").legends


def test_an_axis_does_not_blow_up_a_difference_that_is_none() -> None:
    near, far = {"a": ([0.9999, 1.0], [20.0, 90.0])}, {"a": ([0.4, 1.0], [20.0, 90.0])}
    left, right = figures.curve_panels({"psnr": near}, "utility", x_least=0.1).axes[0].get_xlim()
    assert right - left == pytest.approx(0.1) and left < 0.91 and right > 1.0
    left, right = figures.curve_panels({"psnr": far}, "utility", x_least=0.1).axes[0].get_xlim()
    assert right - left > 0.6


def test_every_cell_holds_its_number() -> None:
    values = np.array([[1.0, 50.25, 99.0], [np.nan, 0.0, 100.0]])
    figure = figures.value_grids(
        {"": (values, "share, %")}, ["a", "b"], ["x", "y", "z"], "columns", "rows", limits=(0, 100)
    )
    axis = figure.axes[0]
    shown = {(round(text.get_position()[0]), round(text.get_position()[1])): text.get_text() for text in axis.texts}
    assert shown == {(0, 0): "1.0", (1, 0): "50.2", (2, 0): "99.0", (0, 1): "–", (1, 1): "0.0", (2, 1): "100.0"}
    assert [label.get_text() for label in axis.get_xticklabels()] == ["x", "y", "z"]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["a", "b"]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("columns", "rows")
    dark, light = axis.texts[0].get_color(), axis.texts[2].get_color()
    assert dark == "white"  # on the dark end of the scale
    assert light != "white"
    assert figures.png(figure).startswith(b"\x89PNG")


def test_cells_too_narrow_for_numbers_are_colours_alone() -> None:
    """DINOv2's 37 × 37 positions, of two models: numbers would cover one another, and cells would be slits."""
    values = np.arange(37 * 37.0).reshape(37, 37)
    panels = dict.fromkeys(("before", "after"), (values, "right, %"))
    figure = figures.value_grids(panels, range(37), range(37), "column", "row", cell=(0.4, 0.3))
    figure.draw_without_rendering()
    for axis in figure.axes[:2]:
        assert not axis.texts
        ticks = [label.get_text() for label in axis.get_xticklabels()]
        assert ticks == [str(4 * number) for number in range(10)]
        box = axis.get_window_extent()
        assert 0.7 < box.width / box.height < 1.4
    (strip,) = (figures.value_grids({"a": (values[:1], "")}, range(1), range(37), "x", "y", cell=(0.4, 0.3)),)
    assert len(strip.axes[0].texts) == 37


def test_tables_write_every_number_in_its_cell() -> None:
    values = np.arange(6.0).reshape(3, 2) / 10
    panels = {"Entropy": (values, "nats"), "Even": (np.ones((3, 2)), "patches")}
    figure = figures.value_grids(panels, range(1, 4), range(1, 3), "head", "layer", digits=".2f")
    figures.png(figure)
    axis = next(axis for axis in figure.axes if axis.get_title() == "Entropy")
    assert [text.get_text() for text in axis.texts] == [f"{value:.2f}" for value in values.flat]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["1", "2", "3"]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("head", "layer")
    assert {axis.get_ylabel() for axis in figure.axes} >= {"nats", "patches"}


def test_rows_of_wide_pictures_are_as_high_as_they_are() -> None:
    """Spectrograms of 40 by 98 stand close to one another, and are drawn wider than squares are."""
    square, wide = (figures.image_rows([("", np.zeros((2, 1, 40, width)))] * 2) for width in (40, 98))
    (across, high), (more, less) = square.get_size_inches(), wide.get_size_inches()
    assert more > 1.4 * across and less < high
    assert less / more == pytest.approx(40 / 98, abs=0.15)


LINE = ([0, 1], [1.0, 2.0])
IMAGE = np.zeros((3, 8, 12))
MASK = np.array([[0, 1], [1, -1]])
LAYOUTS: dict[str, tuple[Callable[[], Figure], float]] = {
    "a line": (lambda: figures.curves({"a": LINE}, "x", "y", title="t"), 6.4),
    "lines": (lambda: figures.curves({"a": LINE, "b": LINE}, "x", "y"), 7.2),
    "named steps": (lambda: figures.curves({"a": LINE}, "x", "y", x_names=["one", "two"]), 7.2),
    "a level": (lambda: figures.curves({"a": LINE}, "x", "y", level=("blind", 1.5)), 7.2),
    "a panel": (lambda: figures.curve_panels({"loss": {"a": LINE}}, "x"), 6.4),
    "three panels": (lambda: figures.curve_panels({name: {"a": LINE, "b": LINE} for name in "xyz"}, "x"), 9.0),
    "bars": (lambda: figures.bars({"a": 0.1, "b": 1.0}, "error"), 6.8),
    "a table": (lambda: figures.value_grids({"t": (np.eye(4), "s")}, range(4), range(4), "x", "y"), 6.0),
    "tables": (lambda: figures.value_grids(dict.fromkeys("ab", (np.eye(9), "s")), range(9), range(9), "x", "y"), 9.0),
    "images": (lambda: figures.image_rows([("one", [IMAGE] * 9)], list("abcdefghi")), 9.0),
    "a few masks": (lambda: mask_rows([("x", IMAGE, dict.fromkeys("ab", MASK))], ("sky", "tree")), 7.8),
    "many masks": (lambda: mask_rows([("x", IMAGE, dict.fromkeys("abcdefg", MASK))], ("sky", "tree")), 9.0),
    "attention": (lambda: figures.attention_over_images(np.zeros((1, 3, 8, 8)), np.ones((1, 2, 4, 4))), 9.0),
    "few heads": (lambda: figures.relative_maps(np.ones((2, 3, 5, 5)), np.ones((2, 3))), 3.9),
    "many heads": (lambda: figures.relative_maps(np.ones((1, 16, 5, 5)), np.ones((1, 16))), 9.0),
    "few puzzles": (lambda: panels([[Panel(IMAGE, "a")] * 3], (2, 3)), 4.5),
    "named puzzles": (lambda: panels([[Panel(IMAGE, "a")] * 3], (2, 3), ["row"]), 5.35),
    "many puzzles": (lambda: panels([[Panel(IMAGE, "a")] * 9], (2, 3), ["row"]), 9.0),
}  # fmt: skip
"""Each kind of figure, and its width in inches: as many as its panels need, up to those of the page."""


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_figure_is_as_wide_as_its_panels_need_and_its_letters_have_the_page_s_sizes(kind: str) -> None:
    make, width = LAYOUTS[kind]
    figure = make()
    assert figure.get_figwidth() == pytest.approx(width) and width <= figures.PAGE_WIDTH
    assert 0.5 < figure.get_figheight() < 9.0
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text() and text.get_visible()]
    placed = [text for text in texts if text.get_text() in LETTERS]
    assert placed and {text.get_fontsize() for text in placed} <= {6, 7, *(figures.TICK, figures.LABEL, figures.TITLE)}


LETTERS = {
    *"abcdefghitxyz",
    "loss",
    "error",
    "one",
    "blind",
    "row",
    "sky",
    "tree",
    "head 1",
    "layer 1",
    "mean",
    "input",
}


def test_small_panels_stand_as_close_as_they_are_high() -> None:
    """Their heights follow from the images: twice as many rows are twice as high, but for the names."""
    rows = [figures.image_rows([("a", [IMAGE])] * count).get_figheight() for count in (1, 2, 3)]
    masks = [mask_rows([("x", IMAGE, {"a": MASK})] * count, ("sky", "tree")).get_figheight() for count in (1, 2, 3)]
    puzzles = [panels([[Panel(IMAGE)] * 2] * count, (2, 3)).get_figheight() for count in (1, 2, 3)]
    for (one, two, three), cell in ((rows, 1.6 / math.sqrt(2 / 3)), (masks, 2.2), (puzzles, 1.5)):
        assert two - one == pytest.approx(three - two) == pytest.approx(cell * 8 / 12, abs=0.03)
    titled = panels([[Panel(IMAGE, "a")] * 2] * 3, (2, 3)).get_figheight()
    assert titled - puzzles[2] == pytest.approx(3 * 0.19)


def test_a_picture_that_was_drawn_before_is_its_file(tmp_path: Path) -> None:
    (tmp_path / "drawn.png").write_bytes(b"\x89PNG and more")
    assert figures.picture(tmp_path / "drawn.png") == b"\x89PNG and more"
