from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from situs.errors import SitusError
from situs.measure import knn
from situs.measure.accuracy import ByClass
from situs.measure.features import Pool
from situs.measure.knn import LayerAccuracy, LayerKnn, knn_accuracy, knn_scores
from situs.pages import make_page


def data(n: int = 60, m: int = 25, dim: int = 7, classes: int = 4, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    train, test = (torch.randn(count, dim, generator=generator) for count in (n, m))
    labels = torch.randint(classes, (n,), generator=generator)
    return train, labels, test, torch.randint(classes, (m,), generator=generator)


def slow_scores(train: Tensor, labels: Tensor, test: Tensor, k: int, temperature: float, classes: int) -> np.ndarray:
    """One test sample and one neighbour at a time, in float64."""
    rows = []
    for one in test.double():
        near = []
        for other, label in zip(train.double(), labels, strict=True):
            near.append((float(one @ other) / math.sqrt(float(one @ one) * float(other @ other)), int(label)))
        near.sort(reverse=True)
        row = [0.0] * classes
        for similarity, label in near[:k]:
            row[label] += math.exp(similarity / temperature)
        rows.append(row)
    return np.array(rows)


@given(st.integers(0, 10_000), st.integers(1, 30), st.integers(2, 9))
def test_uniform_votes_are_those_of_scikit_learn(seed: int, k: int, classes: int) -> None:
    train, labels, test, truth = data(classes=classes, seed=seed)
    oracle = KNeighborsClassifier(k, weights="uniform", metric="cosine", algorithm="brute").fit(
        train.numpy(), labels.numpy()
    )
    scores = knn_scores(train, labels, test, classes=classes, k=k, temperature=None)
    assert scores.argmax(-1).tolist() == oracle.predict(test.numpy()).tolist()
    assert knn_accuracy(train, labels, test, truth, k, None) == oracle.score(test.numpy(), truth.numpy())


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.07), (20, 0.07), (60, 1.0)])
def test_weighted_votes_are_those_of_the_slow_loop(k: int, temperature: float) -> None:
    train, labels, test, truth = data()
    slow = slow_scores(train, labels, test, k, temperature, 4)
    fast = knn_scores(train, labels, test, classes=4, k=k, temperature=temperature).double().numpy()
    np.testing.assert_allclose(fast / fast.sum(1, keepdims=True), slow / slow.sum(1, keepdims=True), rtol=1e-4)
    assert knn_accuracy(train, labels, test, truth, k, temperature) == (slow.argmax(1) == truth.numpy()).mean()


def test_weights_matter() -> None:
    """One near neighbour outvotes two far ones by weight and not by count."""
    train = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.1]])
    pair = (train, torch.tensor([0, 1, 1]), torch.tensor([[1.0, 0.2]]), torch.tensor([0]))
    assert knn_accuracy(*pair, k=3, temperature=0.07) == 1.0
    assert knn_accuracy(*pair, k=3, temperature=None) == 0.0


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    train, labels, test, _ = data()
    whole = knn_scores(train, labels, test, classes=4)
    monkeypatch.setattr(knn, "AT_ONCE", 3 * len(train))
    torch.testing.assert_close(knn_scores(train, labels, test, classes=4), whole)


def test_only_the_direction_counts_and_a_small_temperature_is_safe() -> None:
    train, labels, test, truth = data()
    assert knn_accuracy(1e3 * train, labels, 1e-3 * test, truth) == knn_accuracy(train, labels, test, truth)
    assert knn_accuracy(train, labels, test, truth, 20, 1e-6) == knn_accuracy(train, labels, test, truth, 1, None)
    assert torch.isfinite(knn_scores(train, labels, test, classes=4, temperature=1e-6)).all()


@pytest.mark.parametrize(("k", "said"), [(0, r"k=0: must be in \[1, 60\]"), (61, r"k=61: must be in \[1, 60\]")])
def test_mistakes_are_named(k: int, said: str) -> None:
    with pytest.raises(SitusError, match=said):
        knn_accuracy(*data(), k)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("why", [None, "it has one block"])
def test_neighbours_of_the_last_layer_alone_are_no_curve_and_say_why(why: str | None) -> None:
    made = make_page(LayerKnn((LayerAccuracy(1, "mean", 0.5, 0.5),), 10, 5, why, 3, 0.07, torch.eye(2), ("a", "b")))
    assert set(made.pictures) == ({"layers"} if why is None else set())
    assert ("Only the last layer: it has one block." in made.render()) is (why is not None)


def layers(*rows: tuple[int, Pool, float, float], temperature: float | None = 0.07) -> LayerKnn:
    answers = torch.tensor([[9, 1], [3, 7]])
    found = tuple(LayerAccuracy(*row) for row in rows)
    return LayerKnn(found, 3000, 20, None, 3, temperature, answers, ("a", "b"))


ROWS: list[tuple[int, Pool, float, float]] = [
    (2, "cls", 0.25, 0.375), (3, "cls", 0.5, 0.625), (2, "mean", 0.75, 0.8125), (3, "mean", 0.4375, 0.5),
]  # fmt: skip


def test_the_best_layer_is_named_where_it_is_not_the_last() -> None:
    found = layers(*ROWS)
    said = found.summary()
    assert said.sentence.startswith(
        "After the last block, the top-1 of kNN is 50.00 % with the CLS token and 43.75 % with the mean of the patches."
    )
    assert said.sentence.endswith(" The best top-1 is 75.00 %, with the mean of the patches after block 2.")
    assert ByClass.of(found.answers).words(found.classes) in said.sentence
    assert said.numbers == (
        ("75.00 %", "best top-1, after block 2 (always predicting the largest class: 50.0 %)"),
    )  # fmt: skip
    (table,) = said.tables
    assert [list(row) for row in table.rows] == [
        [2, "25.00", "37.50", "75.00", "81.25"], [3, "50.00", "62.50", "43.75", "50.00"],
    ]  # fmt: skip
    assert table.header[0] == "after block" and len(table.header) == 5
    assert "20 images, k = 3 of 3,000, weights exp(similarity / 0.07)" in table.title
    assert "equal weights" in layers(*ROWS, temperature=None).summary().tables[0].title
    assert "The best top-1" not in layers(*ROWS[:2]).summary().sentence  # the last layer is the best


def test_the_curve_has_a_line_for_each_pool_and_the_largest_class() -> None:
    (curve,) = layers(*ROWS).figures()
    assert curve.values[0] == {"CLS token": ([2, 3], [25.0, 50.0]), "mean of the patches": ([2, 3], [75.0, 43.75])}
    assert curve.options["level"] == ("largest class", 50.0)
    (bars,) = replace(layers(*ROWS[1::2]), why_last="x").figures()
    assert bars.values[0] == {"CLS token": 50.0, "mean of the patches": 43.75}
    assert layers(*ROWS).numbers()["majority"] == 0.5


@pytest.mark.parametrize(
    ("count", "classes", "k"), [(5, 3, 1), (11, 3, 1), (12, 3, 2), (119, 3, 19), (120, 3, 20), (1200, 3, 20)]
)
def test_a_small_bank_takes_half_a_class(count: int, classes: int, k: int) -> None:
    assert knn.small_k(count, classes) == k


def test_the_weights_are_relative_to_the_nearest_and_fall_by_the_temperature() -> None:
    angles = torch.tensor([0.0, 0.1, 0.3])
    bank = torch.stack([angles.cos(), angles.sin()], dim=1)
    scores = knn_scores(bank, torch.arange(3), torch.tensor([[2.0, 0.0]]), classes=3, k=3)
    assert scores[0].tolist() == pytest.approx([math.exp((math.cos(a) - 1) / 0.07) for a in angles.tolist()], rel=1e-4)
    assert knn_scores(bank, torch.arange(3), bank, classes=3, k=1, temperature=None).tolist() == torch.eye(3).tolist()
