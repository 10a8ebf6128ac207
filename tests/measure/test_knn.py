from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from situs.errors import SitusError
from situs.measure import knn
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
