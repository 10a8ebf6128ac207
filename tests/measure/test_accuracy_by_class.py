"""Balanced accuracy, the largest class and Wilson's interval, beside scikit-learn and the equation they come from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.dummy import DummyClassifier
from sklearn.metrics import balanced_accuracy_score, confusion_matrix

from situs.measure.accuracy import Accuracy, ByClass, ClassAccuracy, Z, by_class, wilson
from situs.results import Provenance


def drawn(seed: int, classes: int, count: int, right: float) -> tuple[np.ndarray, np.ndarray]:
    """Labels of classes of very different sizes, and answers of which some are right."""
    chance = np.random.default_rng(seed)
    sizes = 0.5 ** np.arange(classes)
    truth = np.concatenate([np.arange(classes), chance.choice(classes, count - classes, p=sizes / sizes.sum())])
    return truth, np.where(chance.random(count) < right, truth, chance.integers(0, classes, count))


@pytest.mark.parametrize("seed", range(5))
def test_it_is_what_scikit_learn_says(seed: int) -> None:
    truth, named = drawn(seed, 6, 188, 0.4)
    table = torch.tensor(confusion_matrix(truth, named, labels=range(6)))
    rows = ByClass.of(table)
    assert rows.balanced == pytest.approx(balanced_accuracy_score(truth, named), abs=1e-12)
    guess = DummyClassifier(strategy="most_frequent").fit(truth[:, None], truth)
    assert rows.majority == pytest.approx(guess.score(truth[:, None], truth), abs=1e-12)
    assert rows.only is None
    assert [row["named"] for row in by_class(table, list("abcdef"))] == np.bincount(named, minlength=6).tolist()


@pytest.mark.parametrize(("hits", "count"), [(16, 37), (36, 37), (37, 37), (0, 5), (1, 1), (500, 1000)])
def test_the_ends_of_the_interval_are_z_deviations_away(hits: int, count: int) -> None:
    low, high = wilson(hits, count)
    assert 0 <= low <= hits / count <= high <= 1
    for end in (low, high):  # where a share of `end` would be z of its own deviations from what was seen
        assert abs(hits / count - end) == pytest.approx(Z * (end * (1 - end) / count) ** 0.5, abs=1e-9)


def test_one_class_for_everything_is_called_so() -> None:
    table = torch.zeros(6, 6, dtype=torch.int64)
    table[:, 2] = torch.tensor([3, 4, 16, 5, 6, 3])
    rows = ByClass.of(table)
    assert (rows.only, rows.majority, rows.balanced) == (2, 16 / 37, pytest.approx(1 / 6))
    text = rows.words(list("abcdef"))
    assert "Always predicting 'c', the largest class, has a top-1 of 43.24 %" in text
    assert "28.7 % to 59.1 %" in text and "is 16.67 %" in text
    assert "predicts one class, 'c', for all samples" in text


@pytest.mark.parametrize(
    ("hits", "verdict"),
    [
        (16, "too few to distinguish"),
        (14, "too few to distinguish"),
        (30, None),
        (2, "worse than always predicting the largest"),
    ],
)
def test_what_the_interval_lets_be_told(hits: int, verdict: str | None) -> None:
    """Of 30 samples of 15, 10 and 5, as many right as are asked for."""
    table = torch.zeros(3, 3, dtype=torch.int64)
    left = hits
    for row, size in enumerate((15, 10, 5)):
        right = min(left, size - 1 if hits < 30 else size)
        left -= right
        table[row, row], table[row, (row + 1) % 3] = right, size - right
    text = ByClass.of(table).words(["a", "b", "c"])
    verdicts = ("too few to distinguish", "worse than always predicting the largest", "for all samples")
    assert [each for each in verdicts if each in text] == ([] if verdict is None else [verdict])


def test_classes_without_a_sample_are_named_and_count_for_nothing() -> None:
    table = torch.tensor([[4, 0, 0], [1, 3, 0], [0, 0, 0]])
    rows = ByClass.of(table)
    assert rows.balanced == (1 + 0.75) / 2
    assert "1 of 3 classes has no samples here, and was not tested ('c')." in rows.words(["a", "b", "c"])
    assert by_class(table, ["a", "b", "c"])[2] == {
        "class": "c", "count": 0, "top1": None, "named": 0, "taken_for": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("table", "first"),
    [
        ([[0, 4], [0, 32]], "predicts one class, 'dog', for all samples, so it distinguishes nothing."),
        (
            [[2, 2], [2, 30]],
            "model recognises 88.89 % of 36 images of 2 classes, but the samples are too few",
        ),
        ([[40, 4], [4, 60]], "model recognises 92.59 % of 108 images of 2 classes. Always predicting 'dog', the"),
    ],
)
def test_the_headline_of_an_accuracy_does_not_flatter(table: list[list[int]], first: str) -> None:
    """Of a page many read the first line alone."""
    answers = torch.tensor(table)
    count, rows = int(answers.sum()), ByClass.of(answers)
    top1 = float(answers.diagonal().sum()) / count
    whole = Accuracy(top1, 1.0, count, 0.1, rows.balanced, rows.majority, 2, rows.only)
    found = ClassAccuracy(whole, answers, ("cat", "dog"), provenance=Provenance({}))
    said = found.summary().sentence
    assert first in said.partition(" Balanced")[0] and said.count("apart") == ("apart" in first)
