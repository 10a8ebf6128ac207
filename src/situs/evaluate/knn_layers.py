"""Nearest neighbours on the features of each layer: where in the depth a representation separates the classes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from situs.backbones.base import Backbone
from situs.errors import SitusError
from situs.evaluate.accuracy import labels_of
from situs.evaluate.features import Pool, layer_features
from situs.evaluate.inference import evaluating
from situs.evaluate.knn import knn_accuracy
from situs.evaluate.online import hard
from situs.methods.base import Batch, Method
from situs.train.step import autocast


@dataclass(frozen=True)
class LayerAccuracy:
    """layer: blocks that the features have passed, the last of them `depth`. pool: mean of the patches, or CLS."""

    layer: int
    pool: Pool
    accuracy: float


@dataclass(frozen=True)
class LayerKnn:
    """rows: for each pool, layer by layer. bank, count: training and test images. why_last: why only the last layer."""

    rows: tuple[LayerAccuracy, ...]
    bank: int
    count: int
    why_last: str | None = None


def knn_by_layer(
    model: Backbone | Method,
    bank: Iterable[Batch],
    test: Iterable[Batch],
    *,
    k: int = 20,
    temperature: float | None = 0.07,
    precision: str = "fp32",
    positions: bool = True,
) -> LayerKnn:
    """The accuracy of the k nearest of `bank` on `test`, for each layer and pool; features through the final norm.

    temperature: τ; None counts every neighbour as one. positions: for a backbone, whether its own take part.
    """
    backbone = model.backbone if isinstance(model, Method) else model
    backbone.require("tokens")
    sees = model.sees_positions if isinstance(model, Method) else positions
    pools: tuple[Pool, ...] = ("cls", "mean") if backbone.num_prefix else ("mean",)
    with evaluating(model):
        train, train_labels = _features(backbone, bank, pools, sees, precision)
        held, labels = _features(backbone, test, pools, sees, precision)
    layers = train.shape[1]
    rows = [
        LayerAccuracy(
            layer=backbone.depth - layers + 1 + layer,
            pool=pool,
            accuracy=knn_accuracy(train[p, layer], train_labels, held[p, layer], labels, k, temperature),
        )
        for p, pool in enumerate(pools)
        for layer in range(layers)
    ]
    why = backbone.refusals.get("depths")
    told = None if why is None else f"{backbone.name} has its last layer alone: {why}"
    return LayerKnn(tuple(rows), len(train_labels), len(labels), told)


def _features(
    backbone: Backbone, batches: Iterable[Batch], pools: tuple[Pool, ...], positions: bool, precision: str
) -> tuple[Tensor, Tensor]:
    """Features [pools, layers, n, D] and labels [n]."""
    parts, labels = [], []
    for batch in batches:
        labels.append(hard(labels_of(batch)))
        with autocast(batch.inputs.device, precision):
            parts.append(layer_features(backbone, batch.inputs, pools, positions=positions).float())
    if not parts:
        raise SitusError("there are no samples to take features of (--data)")
    return torch.cat(parts, dim=2), torch.cat(labels)
