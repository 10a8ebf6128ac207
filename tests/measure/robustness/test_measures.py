"""mCE, AURRA and AUPR: small cases worked out by hand, and scikit-learn."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, precision_recall_curve

from situs.errors import SitusError
from situs.measure.accuracy import Accuracy
from situs.measure.robustness.measures import (
    ALEXNET,
    Anomalies,
    aupr,
    aurra,
    normalised_mce,
    response_curve,
    score,
)


def right(share: float) -> Accuracy:
    return Accuracy(share, 1.0, 100, 0.5, 0.5, 0.1, 12)


def test_mce_by_hand() -> None:
    cells = {
        "fog": {1: right(0.9), 2: right(0.8), 3: right(0.7), 4: right(0.6), 5: right(0.5)},  # error 0.3
        "snow": {severity: right(0.5) for severity in (1, 2, 3, 4, 5)},  # error 0.5
    }
    found = score(cells)
    assert found.errors == pytest.approx({"fog": 0.3, "snow": 0.5})
    assert found.raw == pytest.approx(0.4)
    assert found.normalised == pytest.approx((0.3 / 0.819 + 0.5 / 0.867) / 2)


def test_alexnet_is_one_by_its_own_measure_and_its_raw_mce_is_not() -> None:
    assert normalised_mce(ALEXNET) == pytest.approx(1.0)
    assert sum(ALEXNET.values()) / 15 == pytest.approx(0.789, abs=1e-6)


def test_a_perfect_model_has_none() -> None:
    cells = {name: {severity: right(1.0) for severity in (1, 2, 3, 4, 5)} for name in ALEXNET}
    found = score(cells)
    assert (found.raw, found.normalised) == (0.0, 0.0)


def test_without_all_five_severities_there_is_no_normalised_mce() -> None:
    found = score({"fog": {1: right(0.9), 3: right(0.7)}})
    assert found.raw == pytest.approx(0.2) and found.normalised is None


def test_a_mean_of_nothing_or_of_unlike_things_is_refused() -> None:
    with pytest.raises(SitusError, match="no corruptions"):
        score({})
    with pytest.raises(SitusError, match="different severities"):
        score({"fog": {1: right(0.5)}, "snow": {2: right(0.5)}})


def test_aurra_by_hand() -> None:
    # Most confident first: right, wrong, right, wrong -> 1, 1/2, 2/3, 1/2.
    confidence = torch.tensor([0.4, 0.9, 0.6, 0.8])
    correct = torch.tensor([False, True, True, False])
    assert response_curve(confidence, correct).tolist() == pytest.approx([1, 1 / 2, 2 / 3, 1 / 2])
    assert aurra(confidence, correct) == pytest.approx((1 + 1 / 2 + 2 / 3 + 1 / 2) / 4)
    assert aurra(confidence, torch.tensor([True] * 4)) == 1.0
    assert aurra(confidence, torch.tensor([False] * 4)) == 0.0


@given(st.lists(st.tuples(st.sampled_from([0.2, 0.5, 0.9]), st.booleans()), min_size=1, max_size=6))
def test_answers_of_equal_confidence_count_as_the_mean_over_their_orders(pairs: list[tuple[float, bool]]) -> None:
    """Against every order that a sort by confidence might have left them in."""
    orders = [
        [hit for _, hit in order]
        for order in itertools.permutations(pairs)
        if all(a[0] >= b[0] for a, b in itertools.pairwise(order))
    ]
    slow = [sum(sum(order[:k]) / k for k in range(1, len(order) + 1)) / len(order) for order in orders]
    confidence, correct = (torch.tensor(part) for part in zip(*pairs, strict=True))
    assert aurra(confidence, correct) == pytest.approx(sum(slow) / len(slow))


def test_confidence_that_says_nothing_gets_the_accuracy() -> None:
    correct = torch.arange(40) % 4 == 0
    assert aurra(torch.full((40,), 0.7), correct) == pytest.approx(0.25)
    with pytest.raises(SitusError, match="no predictions to rank"):
        aurra(torch.empty(0), torch.empty(0))


def test_aupr_by_hand() -> None:
    # Ranked by score: anomaly, normal, anomaly, normal. Precision at the anomalies: 1/1 and 2/3.
    assert aupr(torch.tensor([0.9, 0.5]), torch.tensor([0.7, 0.1])) == pytest.approx((1 + 2 / 3) / 2)
    assert aupr(torch.tensor([0.9, 0.8]), torch.tensor([0.1])) == 1.0
    # All alike: chance, the share of anomalies.
    assert aupr(torch.zeros(3), torch.zeros(9)) == pytest.approx(0.25)
    assert Anomalies("o", "val", 0.3, 3, 9, 5).chance == 0.25


@given(st.integers(0, 1000))
def test_aupr_is_scikit_learns_and_the_sum_over_its_curve(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    strange = -torch.randint(0, 9, (13,), generator=generator) / 10
    normal = -torch.randint(2, 10, (21,), generator=generator) / 10
    truth = [1] * 13 + [0] * 21
    scores = torch.cat([strange, normal]).double().numpy()
    found = aupr(strange, normal)
    assert found == pytest.approx(average_precision_score(truth, scores))
    precision, recall, _ = precision_recall_curve(truth, scores)
    assert found == pytest.approx(float(-((recall[1:] - recall[:-1]) * precision[:-1]).sum()))


def test_aupr_needs_both() -> None:
    for pair in ((torch.empty(0), torch.ones(2)), (torch.ones(2), torch.empty(0))):
        with pytest.raises(SitusError, match="AUPR needs"):
            aupr(*pair)
