"""Weighted nearest neighbours on frozen features: how good a representation is before anything is trained on it.

Cosine similarity, the k nearest of the training set, each with the weight exp(similarity / τ).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.errors import SitusError
from situs.limits import check_value

AT_ONCE = 1 << 25
"""Similarities held at a time: 128 MiB in float32."""


@torch.no_grad()
def knn_scores(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    *,
    classes: int,
    k: int = 20,
    temperature: float | None = 0.07,
) -> Tensor:
    """The weight of each class among the neighbours, [m, classes]; no host sync.

    train_features: [n, D]. train_labels: [n] in range(classes). test_features: [m, D]. temperature: τ; None counts
    every neighbour as one.
    """
    _check(train_features, train_labels, test_features, k, temperature)
    bank = F.normalize(train_features.float(), dim=-1).T
    rows = max(1, AT_ONCE // bank.shape[1])
    scores = []
    for part in F.normalize(test_features.float(), dim=-1).split(rows):
        near = (part @ bank).topk(k, dim=-1)
        # Over the nearest's own weight: a common factor moves no class, and a small τ cannot overflow.
        weight = torch.ones_like(near.values)
        if temperature is not None:
            weight = ((near.values - near.values[:, :1]) / temperature).exp()
        empty = weight.new_zeros(part.shape[0], classes)
        scores.append(empty.scatter_add(1, train_labels[near.indices], weight))
    return torch.cat(scores)


def knn_accuracy(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    k: int = 20,
    temperature: float | None = 0.07,
) -> float:
    """The share of test samples [m, D] whose class the k nearest training samples [n, D] guess right."""
    if not len(test_features):
        raise SitusError("kNN needs at least one test sample")
    classes = int(train_labels.max()) + 1 if len(train_labels) else 0
    scores = knn_scores(train_features, train_labels, test_features, classes=classes, k=k, temperature=temperature)
    return float((scores.argmax(dim=-1) == test_labels).double().mean())


def _check(train: Tensor, labels: Tensor, test: Tensor, k: int, temperature: float | None) -> None:
    if train.dim() != 2 or test.dim() != 2 or train.shape[1] != test.shape[1] or labels.shape != train.shape[:1]:
        raise SitusError(
            f"kNN needs features [n, D] and [m, D] with labels [n], not {list(train.shape)}, {list(test.shape)} and "
            f"{list(labels.shape)}"
        )
    if not (1 <= k <= train.shape[0]):
        raise SitusError(field="k", value=k, allowed=f"in [1, {train.shape[0]}], the number of training samples")
    if temperature is not None:
        check_value("temperature", temperature, "> 0")
