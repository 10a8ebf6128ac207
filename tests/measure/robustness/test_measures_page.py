"""What the page and the JSON say."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from situs.measure.accuracy import Accuracy
from situs.measure.corruptions import CORRUPTIONS
from situs.measure.robustness.measures import Anomalies, Natural, Robustness
from situs.pages import make_page as page
from situs.results import Provenance

MADE = Provenance({"seed": 0})


def found(
    names: tuple[str, ...] = tuple(CORRUPTIONS), severities: tuple[int, ...] = (1, 2, 3, 4, 5), count: int = 400
) -> Robustness:
    cells = {
        name: {severity: Accuracy(0.8 - 0.1 * severity, 0.9, count, 1.0, 0.5, 0.1, 12) for severity in severities}
        for name in names
    }
    pictures = torch.rand(len(names), 1 + len(severities), 3, 8, 8) if names else None
    clean = Accuracy(0.8, 0.9, 400, 0.7, 0.5, 0.1, 12)
    return Robustness("val", None, clean, cells, pictures, None, None, 1000, (), 224, provenance=MADE)


def test_the_words_hold_the_figures() -> None:
    result = replace(
        found(),
        natural=Natural("a", 0.125, 0.25, 80, 20, tuple([0.2] * 100)),
        anomalies=Anomalies("o", "val", 0.4, 50, 150, 20),
    )
    said = result.summary().sentence
    assert (
        "50.0 % of the corrupted images" in said and "raw mCE: 50.0 %" in said and "80.0 % of the clean images" in said
    )
    assert "12.5 % (AURRA: 25.0 %)" in said
    assert "o with an AUPR of 40.0 % (chance: 25.0 %)" in said
    rows = {row[0]: row[1:] for row in result.summary().tables[-1].rows}
    assert rows["mCE, raw"][0] == "50.0 %" and rows["mCE, AlexNet-normalised"][0] == "64.7 %"
    assert rows["ImageNet-A, AURRA"][0] == "25.0 %" and rows["ImageNet-O, AUPR"][0] == "40.0 %"


def test_what_hurts_most_and_least_is_named() -> None:
    result = found(("fog", "jpeg_compression"))
    cells: dict[str, Any] = dict(result.cells)
    cells["fog"] = {severity: Accuracy(0.1, 0.9, 400, 1.0, 0.5, 0.1, 12) for severity in (1, 2, 3, 4, 5)}
    said = replace(result, cells=cells).summary().sentence
    assert re.search(r"Fog .* most \(10\.0 % right\), JPEG compression least \(50\.0 %", said)


@pytest.mark.parametrize(
    ("change", "side", "reasons"),
    [
        ({"published": "imagenet-c"}, 224, "the mean is over 400 of ImageNet's 50,000 images"),
        ({"published": "imagenet-c", "cells": found(count=50_000).cells}, 224, None),
        ({}, 224, "Situs made the corrupted images, and frost is drawn instead of photographed"),
        (
            {"published": "c", "outputs": 10},
            224,
            "at 224 pixels, but the model has 10 classes",
        ),
        ({"published": "c"}, 32, "the model has 1,000 classes at 32"),
    ],
)
def test_a_figure_that_compares_with_no_published_one_says_so(change: Any, side: int, reasons: str | None) -> None:
    said = replace(found(), side=side, **change).caveat
    assert said is None if reasons is None else reasons in (said or "")
    assert "over 1 of ImageNet-C" in (found(("fog",)).caveat or "")


@pytest.mark.usefixtures("undrawn")
def test_without_all_severities_nothing_is_normalised() -> None:
    result = found(("fog", "snow"), (2, 4))
    _, header, rows, _ = result.summary().tables[0]
    assert header == ["top-1 at severity", "2", "4", "mean error"]
    assert rows == [["clean", None, None, "20.0"], ["fog", "60.0", "40.0", "50.0"], ["snow", "60.0", "40.0", "50.0"]]
    numbers = result.to_json()
    assert numbers["mce_raw"] == pytest.approx(0.5) and numbers["mce_alexnet_normalised"] is None
    assert "needs all five severities" in page(result).render()
    assert "severity" in page(result).pictures
    assert "severity" not in page(found(("fog", "snow"), (2,))).pictures  # one point makes no curve


def test_the_json_holds_every_cell_and_is_json() -> None:
    numbers = json.loads(json.dumps(found().to_json()))
    assert numbers["corruptions"]["fog"]["severities"]["3"] == asdict(found().cells["fog"][3])
    assert numbers["corruptions"]["fog"]["error"] == pytest.approx(0.5)
    assert numbers["corruptions"]["fog"]["alexnet_error"] == 0.819
    assert numbers["mce_alexnet_normalised"] == pytest.approx(sum(0.5 / c["alexnet_error"] for c in
                                                                  numbers["corruptions"].values()) / 15)  # fmt: skip
    assert "imagenet_a" not in numbers and numbers["clean"]["top1"] == 0.8


def test_the_page_has_its_pictures_and_says_what_they_are(outline: Any) -> None:
    result = replace(found(), natural=Natural("a", 0.125, 0.25, 80, 20, tuple([0.2] * 100)))
    drawn = page(result)
    assert set(drawn.pictures) == {"accuracy", "severity", "corruptions", "response"}
    assert all(picture.startswith(b"\x89PNG") for picture in drawn.pictures.values())
    text = drawn.render()
    assert outline(text) == [
        "First screen, 1 figure",
        "Numbers, 1 figure, 21 rows, 1 fold",
        "Examples of the corruptions, 1 figure",
        "Natural adversarial examples, 1 figure",
        "What the numbers mean, 1 text",
        "How this page was made, facts",
    ]
    for part in ("frost is drawn", "ImageNet-C (224 pixels), lengths as published", "± 4.9 points", "AURRA"):
        assert part in text
    files = replace(found(), published="imagenet-c", pictures=torch.rand(15, 5, 3, 8, 8))
    drawn = page(files)
    assert "The first image of each folder of imagenet-c" in drawn.render() and "frost is drawn" not in drawn.render()
    assert set(drawn.pictures) == {"accuracy", "severity", "corruptions"}


def test_anomalies_alone_make_a_page() -> None:
    alone = Robustness(
        None, None, None, {}, None, None, Anomalies("o", "val", 0.4, 50, 150, 20), 1000, ("1 skipped",), 224
    )
    drawn = page(alone)
    assert drawn.pictures == {} and "1 skipped" in drawn.render()
    assert alone.to_json()["imagenet_o"]["chance"] == 0.25


def graded(clean: float | None = 0.75, published: str | None = None) -> Robustness:
    """Corruptions of three kinds, no two cells alike; two of them are blurs."""
    names = ("glass_blur", "defocus_blur", "fog", "contrast")
    cells = {
        name: {level: Accuracy(0.6 - 0.1 * at - 0.01 * level, 0.9, 100, 1.0, 0.5, 0.1, 12) for level in (1, 4)}
        for at, name in enumerate(names)
    }
    first = None if clean is None else Accuracy(clean, 0.9, 100, 0.7, 0.5, 0.1, 12)
    pictures = torch.rand(4, 2 + (published is None), 3, 8, 8)
    return Robustness("val", published, first, cells, pictures, None, None, 8, (), 64, provenance=MADE)


@pytest.mark.parametrize("clean", [0.75, None])
@pytest.mark.parametrize("published", [None, "c"])
def test_what_the_figures_draw(clean: float | None, published: str | None) -> None:
    severity, accuracy, looks = graded(clean, published).figures()
    kinds, label, unit = severity.values
    start = [] if clean is None else [(0, 75.0)]
    for kind, low, high in (("blur", 54.0, 51.0), ("weather", 39.0, 36.0), ("digital", 29.0, 26.0)):
        x, y = kinds.pop(kind)
        assert (x, y) == (
            pytest.approx([*(at for at, _ in start), 1, 4]),
            pytest.approx([*(v for _, v in start), low, high]),
        )
    assert kinds == {} and unit == "top-1 accuracy, %" and ("(0: clean)" in label) == (clean is not None)
    ((values, _),), names, levels = accuracy.values[0].values(), *accuracy.values[1:3]
    assert names == ["glass blur", "defocus blur", "fog", "contrast"] and levels == ["1", "4"]
    assert [*map(list, values)] == [pytest.approx([59 - 10 * at, 56 - 10 * at]) for at in range(4)]
    assert accuracy.options["limits"] == (0, 100)
    assert "Chance is 12.5 %. With 100 images" in accuracy.caption and "at most ± 9.8 points" in accuracy.caption
    assert ("75.0 % on clean images" in accuracy.caption) == (clean is not None)
    rows, titles = looks.values
    assert titles == [*["clean"] * (published is None), "severity 1", "severity 4"]
    assert [(name, len(row)) for name, row in rows] == [(name, len(titles)) for name in names]


def test_the_response_curve_and_the_bars_of_anomalies() -> None:
    natural = Natural("a", 0.125, 0.25, 80, 20, tuple(0.01 * rate for rate in range(100, 0, -1)))
    (drawn,) = replace(graded(), cells={}, natural=natural, anomalies=Anomalies("o", "v", 0.4, 5, 15, 2)).figures()
    ((x, y),) = drawn.values[0].values()
    assert [*x] == [*range(1, 101)] and y == pytest.approx([*range(100, 0, -1)])
    (bars,) = replace(graded(), cells={}, anomalies=Anomalies("o", "v", 0.4, 5, 15, 2)).figures()
    assert bars.values == (pytest.approx({"AUPR of o": 40.0, "chance": 25.0}), "%")


def test_the_first_screen_has_four_measures_with_what_they_were_measured_on() -> None:
    natural, odd = Natural("a", 0.125, 0.25, 80, 20, (0.2,) * 100), Anomalies("o", "normal", 0.4, 1500, 4500, 20)
    whole = replace(found(), natural=natural, anomalies=odd)
    shown, rows = whole.summary().numbers, whole.summary().tables[-1].rows
    assert [label.partition(",")[0] for _, label in shown] == ["top-1", "mCE", "mCE", "ImageNet-A"]
    assert shown[0] == ("80.0 %", "top-1, clean, val, 400 images")
    assert list(rows[-1]) == [
        "ImageNet-O, AUPR",
        "40.0 %",
        "1,500 anomalous images and 4,500 normal images of normal; chance 25.0 %",
    ]
    assert list(rows[3])[2] == "a, 80 images; top-1 among its 20 classes"
    best = replace(found(count=50_000), published="c")
    assert best.summary().tables[-1].rows[2][2] == "comparable with published models"
    assert replace(best, outputs=999).caveat == (
        "AlexNet's errors are for ImageNet (1,000 classes) at 224 pixels, but the model has 999 classes at 224 pixels"
    )
    assert replace(found(count=49_999), published="c").caveat == "the mean is over 49,999 of ImageNet's 50,000 images"
    assert found(("fog",)).summary().sentence.count("reduces accuracy") == 0  # one corruption is not compared
