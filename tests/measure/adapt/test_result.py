"""What is said of an adaptation: every number by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from situs.measure.accuracy import Accuracy
from situs.measure.adapt.result import Adapted
from situs.measure.adapt.ways import Origin, Tried
from situs.results import finite

START = "class means (frozen start)"
LABELS = torch.tensor([0] * 8 + [1] * 2)


def tried(way: str, right: str, origin: str = "", **more: int) -> Tried:
    hits = torch.tensor([torch.nan if letter == "-" else float(letter) for letter in right], dtype=torch.double)
    return Tried(way, Origin(origin, ""), hits, **more)  # pyright: ignore[reportArgumentType]


def test_the_table_and_the_sentence() -> None:
    means, probe = tried("class means", "1111000010"), tried("linear probe", "1111111100")
    layers = tried("all layers", "11--------", "mp3", updates=3, total=8)
    test, start = Accuracy(0.75, 1.0, 40, 0.5, 0.7, 0.5, 2), Accuracy(0.5, 1.0, 40, 0.5, 0.5, 0.5, 2)
    found = Adapted(
        Path("runs/x"), (means, probe, layers), probe, LABELS, ("a", "b"), test, start, torch.eye(2), ("Mind this.",)
    )
    summary = found.summary()
    rows = [list(row) for row in summary.tables[0].rows]
    # class a: 4 of 8 more, class b: 1 of 2 fewer
    error = ((4 * (1 / 16) ** 2) + (1 / 4) ** 2) ** 0.5
    assert rows[0] == ["class means", 10, "50.0", "50.0", f"+0.0 ± {100 * error:.1f}", None, False]
    assert rows[1] == ["linear probe", 10, "80.0", "50.0", None, None, True]
    assert rows[2] == ["all layers after mp3", 2, "100.0", "100.0", "+0.0 ± 0.0", "3 of 8", False]
    assert (
        summary.sentence.startswith("75.0 % of 40 images of 2 classes are recognised, with linear probe. ")
        and "has 50.0 %" in summary.sentence
    )
    assert summary.sentence.endswith("Mind this.") and [row[0] for row in summary.tables[1].rows] == [
        "linear probe",
        START,
    ]
    same = replace(found, chosen=means, test=start).summary()
    assert "That is the frozen start" in same.sentence and [row[0] for row in same.tables[1].rows] == ["class means"]
    numbers = finite(found.numbers())
    assert json.loads(json.dumps(numbers)) == json.loads(json.dumps(numbers)) and numbers["test"]["interval"][0] > 0.5
    assert [row["chosen"] for row in numbers["tried"]] == [False, True, False]


def test_without_a_test_nothing_is_claimed() -> None:
    untested = tried("class means", "-" * 10)
    found = Adapted(Path("x"), (untested,), untested, LABELS, ("a", "b"), None, None, None, ())
    assert found.summary().sentence == "Taken: class means." and len(found.summary().tables) == 1
    assert found.summary().tables[0].rows[0][2:5] == [None, None, None]
    assert finite(found.numbers())["tried"][0]["balanced"] is None
