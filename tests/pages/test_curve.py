"""The page of curves: what its lines, its shaded areas and its first sentence show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from situs.audit.sweep.curve import IMAGES, Curves, Line, Point
from situs.pages import make_page
from situs.report import figures

WORDS = {"tokens": "ratio of words", "sentences": "ratio of sentences"}


def point(strength: str, ends: tuple[float, float] | None = (1.0, 2.0), **values: float) -> Point:
    return Point(strength, f"noise={strength}", "tokens", values, ends)


def image(strength: str, psnr: float, exact: float = 0.0, patches: float = 0.0, worst: float = 9.0) -> Point:
    return point(strength, (psnr - 1, psnr + 2), psnr=psnr, worst=worst, exact=exact, patches=patches)


def drawn(curves: Curves, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    """The page, and what each figure was drawn with."""
    calls: list[Any] = []
    draw = figures.curves
    monkeypatch.setattr(figures, "curves", lambda *given, **more: calls.append((given, more)) or draw(*given, **more))
    return make_page(curves), calls


def test_a_line_has_the_points_with_a_score_and_the_first_score_its_interval(
    monkeypatch: pytest.MonkeyPatch, undrawn: None
) -> None:
    gap = Point("0.5", "noise=0.5", "", {}, reason="does not apply")
    own = [image("0", 50.0, 1.0, 1.0), gap, image("2", 12.0, 0.0, 0.25)]
    bare = [image("0", 30.0), replace(image("0.5", 20.0, 0.0, 0.5), ends=None), image("2", 10.0)]
    lines = [Line("noise", "none", "σ", own), Line("noise", "clip", "σ", bare), Line("clip", "none", "norm", own[:1])]
    page, calls = drawn(Curves("m", lines, IMAGES, 2), monkeypatch)
    (psnr, patches, *_), names = calls, [given[1:3] for given, _ in calls]
    assert psnr[0][0] == {"none": ([0, 2], [50.0, 12.0]), "clip": ([0, 1, 2], [30.0, 20.0, 10.0])}
    assert patches[0][0] == {"none": ([0, 2], [1.0, 0.25]), "clip": ([0, 1, 2], [0.0, 0.5, 0.0])}
    assert psnr[1]["bands"] == {"none": ([49.0, 11.0], [52.0, 14.0])}  # a line that lacks an interval has no area
    assert patches[1]["bands"] == {}
    assert (psnr[1]["y_limits"], patches[1]["y_limits"]) == (None, (0.0, 1.0))
    assert psnr[1]["x_names"] == ["0", "0.5", "2"]
    assert names == [(axis, IMAGES[metric]) for axis in ("σ", "norm") for metric in ("psnr", "patches")]
    assert set(page.pictures) == {f"{curve}-{metric}" for curve in ("noise", "clip") for metric in ("psnr", "patches")}
    text = page.render()
    assert text.count("The shaded area is the 95 % interval of the mean over the images.") == 2 * 2  # and beside each
    first = text.index("Where attacks stop</h2>")
    assert text.index(f"{IMAGES['psnr']} for each σ.") < first < text.index(f"{IMAGES['patches']} for each σ.")
    assert "by strength: 2 images" in text


@pytest.mark.parametrize(
    ("values", "leaks"),
    [
        ({"psnr": 9.0, "worst": 19.99, "exact": 0.0, "patches": 0.0}, False),
        ({"psnr": 9.0, "worst": 20.0, "exact": 0.0, "patches": 0.0}, True),
        ({"psnr": 9.0, "worst": 9.0, "exact": 0.0, "patches": 0.01}, True),
        ({"psnr": 9.0, "worst": 9.0, "exact": 0.01, "patches": 0.0}, True),
        ({"tokens": 0.0, "sentences": 0.0, "words": 0.0}, False),
        ({"tokens": 0.01, "sentences": 0.0, "words": 0.0}, True),
        ({"tokens": 0.0, "sentences": 0.0, "words": 0.5}, True),
        ({"tokens": 0.0, "sentences": 0.0, "words": 0.0, "picked": 0.5}, True),
    ],
)
def test_one_patch_one_word_or_a_recognisable_image_is_a_leak(
    values: Mapping[str, float], leaks: bool, undrawn: None
) -> None:
    metrics = IMAGES if "psnr" in values else WORDS
    page = make_page(Curves("m", [Line("noise", "none", "σ", [point("1", None, **values)])], metrics, 1))
    assert ((page.tone, page.mark) == ("bad", "Not private at one strength or more")) == leaks
    assert ((page.tone, page.mark) == ("unsure", "Not proved private")) != leaks


def test_the_first_sentence_counts_the_strengths_that_were_attacked(undrawn: None) -> None:
    points = [image("0", 60.0, 1.0), image("1", 30.0, 0.5), image("2", 9.0), Point("3", "noise=3", "", {})]
    lines = [Line("noise", "none", "σ", points), Line("noise", "clip", "σ", points[2:])]
    page = make_page(Curves("m", lines, IMAGES, 2))
    assert page.lead.startswith("Images were recovered completely at 2 of 4 attacked strengths.")
    assert page.numbers[0] == ("2 of 4", "attacked strengths of the defences at which images were recovered completely")
    stopped = make_page(Curves("m", lines, IMAGES, 2, stopped="the time is over"))
    assert "recovered completely at" not in stopped.lead
    words = make_page(Curves("m", [Line("noise", "none", "σ", [point("0", sentences=1.0, tokens=1.0)])], WORDS, 1))
    assert words.lead.startswith("Sentences were recovered completely at 1 of 1 attacked strength.")
    assert set(words.pictures) == {"noise-tokens", "noise-sentences"} and "Threat model" not in words.render()


def test_every_point_stands_in_the_table(undrawn: None) -> None:
    lines = [Line("noise", "none", "σ", [image("0", 50.0, 1.0, 1.0), image("2", 12.0)])]
    text = make_page(Curves("m", lines, IMAGES, 2)).render()
    table = text[text.index("Every point</h2>") :].split("</table>")[0]
    assert table.count("<tr>") == 1 + 2 and "50" in table and "12" in table
