"""Linear probes against scikit-learn, and what they must never do: look at the test set."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from situs.errors import SitusError
from situs.measure.probe import linear
from situs.measure.probe.linear import fit_linear, fit_probe, score, selection_rows


def data(count: int, classes: int = 4, dim: int = 6, seed: int = 0, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    """Overlapping classes in float64, columns of very different scale."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, dim, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    labels = torch.randint(classes, (count,), generator=generator)
    noise = torch.randn(count, dim, generator=generator, dtype=torch.float64)
    return (centres[labels] + spread * noise) * 10.0 ** torch.arange(-2, dim - 2, dtype=torch.float64) + 5, labels


def sklearn_fit(inputs: Tensor, labels: Tensor, weight_decay: float) -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    strength = 1 / (weight_decay * len(labels))
    model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, tol=1e-9, max_iter=5000))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.fit(inputs.numpy(), labels.numpy())


@pytest.mark.parametrize("weight_decay", [1e-3, 0.1])
def test_the_minimum_is_scikit_learns(weight_decay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, labels = data(300)
    monkeypatch.setattr(linear, "AT_ONCE", 4 * 37)  # several parts, the last one smaller
    ours = fit_linear(inputs, labels, 4, weight_decay)
    peer = sklearn_fit(inputs, labels, weight_decay)
    test, truth = data(500, seed=1)
    likely = torch.from_numpy(peer.predict_proba(test.numpy()))
    assert (ours(test).softmax(dim=-1) - likely).abs().max() < 1e-4
    found = score(ours, [(test[:123], truth[:123]), (test[123:], truth[123:])], 4)
    assert found.accuracy == peer.score(test.numpy(), truth.numpy())
    assert found.loss == pytest.approx(float(-likely.log().gather(1, truth[:, None]).mean()), abs=1e-5)
    assert 0.5 < found.accuracy < 0.95


def test_a_column_that_never_changes_does_no_harm() -> None:
    inputs, labels = data(200)
    fitted = fit_linear(torch.cat([inputs, torch.full((200, 1), 3.0)], dim=1), labels, 4, 1e-2)
    plain = fit_linear(inputs, labels, 4, 1e-2)
    assert torch.allclose(fitted(torch.cat([inputs, torch.full((200, 1), 9.0)], dim=1)), plain(inputs), atol=1e-4)


def test_score_counts_by_hand() -> None:
    inputs, labels = data(60)
    linear = fit_linear(inputs, labels, 4, 1e-2)
    found = score(linear, [(inputs, labels)], 4)
    said = linear(inputs).argmax(dim=1)
    for true in range(4):
        for guess in range(4):
            assert found.answers[true, guess] == int(((labels == true) & (said == guess)).sum())
    assert found.count == 60


def test_groups_stay_together_and_a_fifth_is_held() -> None:
    groups = torch.arange(50).repeat_interleave(3)
    held = selection_rows(groups, seed=4)
    assert held.view(50, 3).all(1).sum() == held.view(50, 3).any(1).sum() == 10
    assert torch.equal(held, selection_rows(groups, seed=4))
    assert not torch.equal(held, selection_rows(groups, seed=5))
    assert int(selection_rows(torch.tensor([3, 7]), 0).sum()) == 1
    with pytest.raises(SitusError, match="at least two training samples"):
        selection_rows(torch.zeros(5, dtype=torch.int64), 0)


def test_the_weight_decay_is_chosen_on_the_held_rows_and_the_fit_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, labels = data(120, dim=12, spread=2.5)
    decays = (1e-4, 1e-2, 1.0)
    monkeypatch.setattr(linear, "WEIGHT_DECAYS", decays)
    fitted = fit_probe(inputs, labels, 4, seed=2)
    held = selection_rows(torch.arange(120), 2)
    right = {}
    for decay in decays:
        peer = sklearn_fit(inputs[~held], labels[~held], decay)
        right[decay] = peer.score(inputs[held].numpy(), labels[held].numpy())
    assert {each.weight_decay: each.accuracy for each in fitted.tried} == right
    assert len(set(right.values())) > 1
    assert fitted.weight_decay == max(sorted(decays, reverse=True), key=lambda decay: right[decay])
    whole = fit_linear(inputs, labels, 4, fitted.weight_decay)
    assert torch.equal(fitted.linear.weight, whole.weight)
    again = fit_probe(inputs, labels, 4, seed=2)
    assert torch.equal(fitted.linear.weight, again.linear.weight)  # the same every time


def test_mistakes_are_named() -> None:
    inputs, labels = data(10)
    with pytest.raises(SitusError, match="no samples"):
        score(fit_linear(inputs, labels, 4, 0.1), [], 4)


@pytest.mark.parametrize("decays", [(1e-3, 1.0, 1e-1), (1.0, 1e-1, 1e-3), (1e-3, 1e-1, 1.0)])
def test_of_equally_good_weight_decays_the_greatest_is_taken(
    decays: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On classes far apart all of them are right on every held row, in whatever order they are given."""
    labels = torch.arange(60) % 3
    inputs = 10 * torch.nn.functional.one_hot(labels, 3).float() + 0.1 * torch.randn(60, 3, generator=_generator())
    monkeypatch.setattr(linear, "WEIGHT_DECAYS", decays)
    fitted = fit_probe(inputs, labels, 3)
    assert {each.accuracy for each in fitted.tried} == {1.0}
    assert fitted.weight_decay == 1.0
    assert torch.equal(fitted.linear.weight, fit_linear(inputs, labels, 3, 1.0).weight)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
