"""Balanced accuracy, the largest class and Wilson's interval, beside scikit-learn and the equation they come from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.dummy import DummyClassifier
from sklearn.metrics import balanced_accuracy_score, confusion_matrix

from situs.measure.accuracy import Accuracy, ByClass, ClassAccuracy, Z, by_class, mixed_pairs, wilson
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
    assert "A model that always predicts 'c', the largest class, has a top-1 of 43.24 %" in text
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
        (
            [[40, 4], [4, 60]],
            "model recognises 92.59 % of 108 images of 2 classes. A model that always predicts 'dog',",
        ),
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


def of_classes(count: int) -> tuple[ClassAccuracy, torch.Tensor]:
    """Class n has n + 1 samples; the odd ones are taken for the class before, but for n / 10 of them."""
    answers = torch.zeros(count, count, dtype=torch.int64)
    for number in range(count):
        right = number // 10 if number % 2 else number + 1
        answers[number, number] = right
        answers[number, number - 1] += number + 1 - right
    rows = ByClass.of(answers)
    whole = Accuracy(rows.top1, 0.875, int(answers.sum()), 0.25, rows.balanced, rows.majority, count)
    return ClassAccuracy(whole, answers, tuple(f"c{n}" for n in range(count)), provenance=Provenance({})), answers


@pytest.mark.parametrize("count", [2, 10, 11, 12, 13, 30, 31])
def test_what_is_listed_and_drawn_of_many_and_of_few_classes(count: int) -> None:
    found, answers = of_classes(count)
    said, figures = found.summary(), found.figures()
    columns = dict(zip(said.tables[0].header, said.tables[0].rows[0], strict=True))
    assert ("top-5" in columns) == (count >= 11) == (found.numbers()["top5"] == 0.875)  # from eleven classes on
    assert columns["loss"] == "0.2500" and columns["top-1"] == f"{100 * found.accuracy.top1:.2f} %"
    few = count <= 30
    assert len(said.tables) == 1 + few and len(found.details()) == 1 - few
    table = (said.tables[1:] or found.details())[0]
    assert len(table.rows) == (count if few else 10)
    if few:
        shares, crossed = figures
        right = {f"c{n}": 100 * float(answers[n, n]) / (n + 1) for n in range(count)}
        assert shares.values[0] == pytest.approx(right)
        ((predicted, _),), rows, columns_ = crossed.values[0].values(), *crossed.values[1:3]
        assert predicted.sum(dim=1).tolist() == pytest.approx([100.0] * count)
        assert [predicted[n, n].item() for n in range(count)] == pytest.approx([*right.values()])
        assert rows == [f"c{n} ({n + 1:,})" for n in range(count)] and columns_ == found.classes
        assert crossed.options["limits"] == (0, 100) and crossed.options["cell"][1] == (0.62 if count <= 12 else 0.3)
        assert [list(row) for row in table.rows][1] == ["c1", 2, "0.00", int(answers[:, 1].sum()), "c0"]
        assert [row[4] for row in table.rows][::2] == ["none"] * len(table.rows[::2])
    else:
        assert [row[0] for row in table.rows][:5] == ["c1", "c3", "c5", "c7", "c9"]  # which are never right
        assert [row[2] for row in table.rows] == sorted(
            (row[2] for row in table.rows), key=lambda cell: float(str(cell))
        )
        drawn = {"top-1": found.accuracy.top1, "balanced": found.accuracy.balanced,
                 "largest class": found.accuracy.majority, "top-5": 0.875}  # fmt: skip
        assert figures[0].values == (pytest.approx({name: 100 * share for name, share in drawn.items()}), "%")
    majority = f"top-1 (always predicting the largest class: {100 * count / answers.sum():.2f} %)"
    assert said.numbers == (
        (f"{100 * found.accuracy.top1:.2f} %", majority),
        (f"{100 * found.accuracy.balanced:.2f} %", "balanced accuracy"),
    )


@pytest.mark.parametrize(
    ("empty", "said"),
    [
        (0, None),
        (1, "1 of 9 classes has no samples here, and was not tested ('c8')."),
        (3, "3 of 9 classes have no samples here, and were not tested ('c6', 'c7', 'c8')."),
        (4, "4 of 9 classes have no samples here, and were not tested ('c5', 'c6', 'c7', …)."),
    ],
)
def test_three_classes_without_samples_are_named(empty: int, said: str | None) -> None:
    answers = torch.diag(torch.tensor([5] * (9 - empty) + [0] * empty))
    text = ByClass.of(answers).words([f"c{n}" for n in range(9)])
    assert said in text if said else "no samples" not in text


def test_samples_of_one_class_have_nothing_to_tell_apart() -> None:
    rows = ByClass.of(torch.tensor([[3, 1], [0, 0]]))
    assert rows.verdict(["a", "b"]).startswith("all samples are of one class")
    assert "All samples are of one class" in rows.words(["a", "b"])
    assert "All samples" not in rows.words(["a", "b"], judged=True)


def test_the_pairs_that_are_mixed_most_stand_first() -> None:
    answers = torch.tensor([[90, 2, 5], [7, 80, 0], [5, 1, 70]])
    assert mixed_pairs(answers, "abc", 3) == [(1, 0), (0, 2), (2, 0)]  # of equal ones the first
    assert mixed_pairs(answers, "abc", 9) == [(1, 0), (0, 2), (2, 0), (0, 1), (2, 1)]  # and none that is never mixed
    assert answers[0, 0] == 90
