"""Utility: neighbours and leave-one-out figures against scikit-learn's."""

from __future__ import annotations

import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.model_selection import LeaveOneOut
from sklearn.neighbors import KNeighborsClassifier

from situs.audit.split.utility import cosine, leave_one_out_knn, leave_one_out_probe, neighbours

CHANCE = torch.Generator().manual_seed(0)
LABELS = torch.arange(30) % 3
FEATURES = torch.randn(30, 8, generator=CHANCE, dtype=torch.float64) + 0.8 * torch.nn.functional.one_hot(LABELS, 8)


def test_neighbours_that_stay() -> None:
    assert neighbours(FEATURES, 2 * FEATURES) == 1 == cosine(FEATURES, 2 * FEATURES)
    other = torch.randn(30, 8, generator=CHANCE, dtype=torch.float64)
    mixed = neighbours(other, FEATURES)
    assert mixed is not None and 0 < mixed < 0.5  # five of 29 by chance: 17 %
    assert neighbours(FEATURES[:10], FEATURES[:10]) is None


def test_knn_leaves_each_sample_out() -> None:
    unit = torch.nn.functional.normalize(FEATURES, dim=-1)
    right = 0
    for train, test in LeaveOneOut().split(unit.numpy()):
        near = KNeighborsClassifier(5).fit(unit[train].numpy(), LABELS[train].numpy())
        order = near.kneighbors(unit[test].numpy())[1][0]
        votes = LABELS[train][order]
        counts = [(int((votes == vote).sum()), -place) for place, vote in enumerate(votes)]
        right += int(votes[-max(counts)[1]] == LABELS[test][0])
    assert leave_one_out_knn(FEATURES, LABELS) == pytest.approx(right / 30)


def test_the_probe_leaves_each_sample_out() -> None:
    x = (FEATURES - FEATURES.mean(dim=0)) / FEATURES.std(dim=0)
    x = torch.cat([x, torch.ones(30, 1, dtype=x.dtype)], dim=1).numpy()
    y = torch.nn.functional.one_hot(LABELS).double().numpy()
    right = 0
    for train, test in LeaveOneOut().split(x):
        fitted = Ridge(alpha=3.0, fit_intercept=False).fit(x[train], y[train])
        right += int(fitted.predict(x[test])[0].argmax() == LABELS[test][0])
    assert leave_one_out_probe(FEATURES, LABELS) == pytest.approx(right / 30)
