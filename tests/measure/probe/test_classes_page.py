"""What the pages of the probes say of one model and of two."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from situs.measure.probe.classes import (
    ClassProbe,
    ClassProbes,
    PositionProbe,
    PositionProbes,
    SegmentProbe,
    SegmentProbes,
)
from situs.measure.probe.linear import Fitted, Linear, Score, Tried
from situs.results import Provenance


def fitted(decay: float = 0.1) -> Fitted:
    weight = torch.zeros(2, 3)
    return Fitted(Linear(weight, weight[:, 0], weight[0], weight[0]), decay, (Tried(decay, 0.5, 1.0),))


def score(table: list[list[int]], loss: float = 0.5) -> Score:
    answers = torch.tensor(table)
    return Score(float(answers.diagonal().sum() / answers.sum()), loss, int(answers.sum()), answers)


ONE, TWO = [[6, 2], [1, 3]], [[8, 0], [3, 1]]
MADE = {"a": Provenance({"data": "val"}), "b": Provenance({"data": "val"})}


def made(names: str, kind: Any, fields: Any, **more: Any) -> Any:
    tables = {"a": ONE, "b": TWO}
    probes = {name: kind(score(tables[name]), fitted(), 20, *fields[name]) for name in names}
    return probes, {name: MADE[name] for name in names}


@pytest.mark.parametrize(("pool", "words"), [("mean", "the mean of the patches"), ("cls", "the CLS token")])
def test_classes_of_two_models_stand_side_by_side(pool: str, words: str) -> None:
    fields = {"a": [pool], "b": [pool]}
    found = ClassProbes(*made("ab", ClassProbe, fields), classes=("x", "y"))
    said = found.summary()
    assert said.sentence.startswith(f"With a, a linear classifier on {words} recognises 75.00 % of 12 images. A model")
    assert said.sentence.endswith(" With b the top-1 is 75.00 %.")
    assert [list(row) for row in said.tables[0].rows] == [
        ["a", pool, "75.00", "75.00", "66.67", 0.5, 12, 20, "0.1"],
        ["b", pool, "75.00", "62.50", "66.67", 0.5, 12, 20, "0.1"],
    ]
    assert said.numbers[0][0] == "75.00 %" and said.numbers[1] == ("75.00 %", "balanced accuracy")
    classes, confusion = found.figures()
    assert classes.values[0] == {"x": 75.0, "y": 75.0} and classes.caption.endswith("recognised, in a.")
    ((shares, _),) = confusion.values[0].values()
    assert shares.tolist() == [[75.0, 25.0], [25.0, 75.0]]
    assert found.details()[0].title == "Class by class"
    alone = ClassProbes(*made("a", ClassProbe, fields), classes=("x", "y"))
    assert "With b" not in alone.summary().sentence and len(alone.summary().tables[0].rows) == 1


def test_places_of_two_models_stand_side_by_side() -> None:
    fields = {"a": [1.5, 2.0, "zeros"], "b": [0.75, 2.0, "a vector"]}
    found = PositionProbes(*made("ab", PositionProbe, fields), grid=(1, 2))
    said = found.summary()
    assert said.sentence == (
        "A linear classifier predicts the right position for 75.00 % of the patches that lost their position (chance "
        "50.00 %), with a mean error of 1.50 patches. For b, the share of right predictions is 75.00 %, and the mean "
        "error is 0.75 patches."
    )
    assert [list(row) for row in said.tables[0].rows] == [
        ["a", "75.00", 1.5, 2.0, 12, 20],
        ["b", "75.00", 0.75, 2.0, 12, 20],
    ]
    assert said.notes[1] == "In b, a patch that lost its position gets a vector." and len(said.notes) == 2
    assert said.numbers == (("75.00 %", "positions predicted correctly"),)
    bars, places = found.figures()
    assert bars.values[0] == {"a": 75.0, "b": 75.0, "chance, 1 / 2": 50.0}
    maps = {name: shares.tolist() for name, (shares, _) in places.values[0].items()}
    assert maps == {"a": [[75.0, 75.0]], "b": [[100.0, 25.0]]} and places.options["limits"] == (0.0, 100.0)
    assert [[*each] for each in places.values[1:3]] == [[0], [0, 1]]
    assert found.numbers()["ratio"] == 0.75
    alone = PositionProbes(*made("a", PositionProbe, fields), grid=(1, 2))
    assert "With" not in alone.summary().sentence
    never = {"a": PositionProbe(score([[0, 2], [3, 0]]), fitted(), 20, 1.0, 1.0, "zeros")}
    assert PositionProbes(never, {"a": MADE["a"]}, grid=(1, 2)).figures()[1].options["limits"] == (0.0, 1.0)
    empty = {"a": PositionProbe(score([[0, 0], [1, 3]]), fitted(), 20, 1.0, 1.0, "zeros")}  # a place nobody lost
    ((shares, _),) = PositionProbes(empty, {"a": MADE["a"]}, grid=(1, 2)).figures()[1].values[0].values()
    assert shares.tolist() == [[0.0, 75.0]]


def test_masks_of_two_models_stand_side_by_side() -> None:
    found = SegmentProbes(*made("ab", SegmentProbe, {"a": [], "b": []}), classes=("x", "y"))
    one, two = 100 * (6 / 9 + 3 / 6) / 2, 100 * (8 / 11 + 1 / 4) / 2
    said = found.summary()
    assert said.sentence == (
        f"A linear layer on the patch features of a reaches an mIoU of {one:.2f} % on 12 images of 2 classes. "
        f"With b the mIoU is {two:.2f} %."
    )
    assert [list(row) for row in said.tables[0].rows] == [
        ["a", f"{one:.2f}", "75.00", 0.5, 12, 20, "0.1"], ["b", f"{two:.2f}", "75.00", 0.5, 12, 20, "0.1"],
    ]  # fmt: skip
    assert said.numbers == ((f"{one:.2f} %", "mIoU, a"),)
    assert [figure.name for figure in found.figures()] == ["classes", "confusion", "classes-2"]
    assert found.figures()[2].values[0] == pytest.approx({"x": 800 / 11, "y": 25.0})
    assert found.numbers()["models"]["b"]["classes"][0]["pixels"] == 8
