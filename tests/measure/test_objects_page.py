"""What a detector's page shows of few classes and of many."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from situs.measure.objects import Answers, ApScores, Detections, DrawnObjects, ShownObjects


def detections(count: int, worst: int = 1, **fields: Any) -> Detections:
    """Class n has n + 2 objects; one is taken for the class before, one is missed; class 0 has no object at all."""
    table = torch.zeros(count + 1, count + 1, dtype=torch.int64)
    for n in range(1, count):
        table[n, n], table[n, n - 1], table[n, count] = n, 1, 1
    table[count, 0] = 5
    aps = [math.nan, *(1 / (n + 1) for n in range(1, count))]
    boxes, masks = (ApScores(ap, 0.5, 0.125, math.nan, 0.25, 0.75, [ap * 0.5 for ap in aps]) for ap in (0.25, 0.375))
    drawn = DrawnObjects(torch.zeros(3, 4), torch.tensor([0, 1, 1]), torch.zeros(3, 2, 2).bool())
    one = drawn._replace(classes=torch.tensor([0]))
    shown = [ShownObjects(f"i{n}", 0.125 * n, torch.rand(3, 4, 6), (2, 3), drawn, one) for n in range(worst)]
    return Detections(boxes, masks, Answers(table), [f"c{n}" for n in range(count)], 9, shown, **fields)


def test_the_sentence_the_rows_and_the_first_screen() -> None:
    said = detections(3, saved="found.json").summary()
    assert (
        said.sentence
        == "model reaches an AP of 25.00 for boxes and of 37.50 for masks on 7 objects of 3 classes in 9 images."
    )
    assert [list(row) for row in said.tables[0].rows] == [
        ["boxes", "25.00", "50.00", "12.50", None, "25.00", "75.00"],
        ["masks", "37.50", "50.00", "12.50", None, "25.00", "75.00"],
    ]
    right, objects, found = 3, 7, 10
    assert said.notes[0].startswith(f"F1 is {200 * right / (objects + found):.1f} %")
    assert said.notes[1:] == ("The detections are in found.json.",)
    assert said.numbers == (("25.0", "AP of boxes"), ("37.5", "AP of masks"))
    assert len(detections(3).summary().notes) == 1
    numbers = detections(3).numbers()
    assert (numbers["objects"], numbers["count"], numbers["worst"]) == (7, 9, [{"name": "i0", "f1": 0.0}])
    assert numbers["classes"][1] == {
        "class": "c1",
        "objects": 3,
        "boxes": 0.25,
        "masks": 0.25,
        "missed": 1,
        "taken_for": "c0",
    }
    assert numbers["classes"][0]["boxes"] is None and numbers["classes"][0]["taken_for"] is None


@pytest.mark.parametrize("count", [3, 12, 13, 41, 42])
def test_few_classes_are_drawn_and_of_many_the_weakest_are_listed(count: int) -> None:
    found = detections(count)
    figures = {figure.name: figure for figure in found.figures()}
    many, crossed = count > 41, count <= 12  # forty classes have objects
    assert [*figures] == ["worst"] + ["classes-boxes", "classes-masks"] * (not many) + ["confusion"] * crossed
    if not many:
        expected = {f"c{n}": 50 / (n + 1) for n in range(1, count)}
        for what in ("boxes", "masks"):
            assert figures[f"classes-{what}"].values == (pytest.approx(expected), "AP")
    if crossed:
        ((shares, _),), rows, columns = figures["confusion"].values[0].values(), *figures["confusion"].values[1:3]
        assert rows == columns == [*found.classes, "none"]
        assert float(shares[1, 1]) == pytest.approx(100 / 3) and float(shares[count, 0]) == 100.0
        assert figures["confusion"].options["limits"] == (0, 100)
    tables = {table.title: table for table in found.details()}
    weakest, pairs = "The 20 classes with the lowest AP of boxes", "The most confused pairs"
    assert [*tables] == ["The worst images first"] + [weakest] * many + [pairs] * (not crossed)
    assert [list(row) for row in tables["The worst images first"].rows] == [["i0", "0.0", 3, 1]]
    if many:
        assert [row[0] for row in tables[weakest].rows] == [f"c{n}" for n in range(count - 1, count - 21, -1)]
        n = count - 1
        assert list(tables[weakest].rows[0]) == [f"c{n}", n + 2, *[f"{50 / (n + 1):.2f}"] * 2, 1, f"c{n - 1}"]
    if not crossed:
        assert list(tables[pairs].rows[0]) == ["none", "c0", 5] and len(tables[pairs].rows) == 20
    assert "worst" not in {figure.name for figure in detections(count, 0).figures()}
    assert "The worst images first" not in {table.title for table in detections(count, 0).details()}
