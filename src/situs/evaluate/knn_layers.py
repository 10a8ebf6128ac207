"""Nearest neighbours on the features of each layer: where in the depth a representation separates the classes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from situs.backbones.base import Backbone
from situs.errors import SitusError
from situs.evaluate.accuracy import hard, labels_of
from situs.evaluate.features import Pool, layer_features
from situs.evaluate.inference import evaluating
from situs.evaluate.knn import knn_accuracy
from situs.methods.base import Batch, Method
from situs.results import Result, Summary, Table, percent
from situs.train.step import autocast

POOLS = {"cls": "CLS token", "mean": "mean of the patches"}


@dataclass(frozen=True)
class LayerAccuracy:
    """layer: blocks that the features have passed, the last of them `depth`. pool: mean of the patches, or CLS."""

    layer: int
    pool: Pool
    accuracy: float


@dataclass(frozen=True)
class LayerKnn(Result):
    """rows: for each pool, layer by layer. bank, count: training and test images. why_last: why only the last layer.

    k, temperature: of the neighbours and their weights. chance: 1 / classes.
    """

    file: ClassVar[str] = "knn"

    rows: tuple[LayerAccuracy, ...]
    bank: int
    count: int
    why_last: str | None
    k: int
    temperature: float | None
    chance: float

    def summary(self) -> Summary:
        """The end of the model and its best layer; a row a layer, a column a pool."""
        last = max(row.layer for row in self.rows)
        ends = {row.pool: row.accuracy for row in self.rows if row.layer == last}
        said = " and ".join(f"{percent(share, 2)} by the {POOLS[pool]}" for pool, share in ends.items())
        said = f"After the last block the neighbours name the right class of {said} (chance {percent(self.chance, 2)})."
        best = max(self.rows, key=lambda row: row.accuracy)
        if best.accuracy > max(ends.values()):
            said += f" The best is block {best.layer}'s {POOLS[best.pool]}: {percent(best.accuracy, 2)}."
        shares = {(row.layer, row.pool): f"{100 * row.accuracy:.2f}" for row in self.rows}
        rows = [[layer, *(shares[layer, pool] for pool in ends)] for layer in sorted({row.layer for row in self.rows})]
        title = self.provenance.title(f"{self.count:,} images, k = {self.k} of {self.bank:,}")
        return Summary(said, (Table(title, ["after block", *(f"{POOLS[pool]}, %" for pool in ends)], rows),))

    def numbers(self) -> dict[str, Any]:
        """Every layer, and how the neighbours were counted."""
        return {
            "k": self.k,
            "temperature": self.temperature,
            "rows": [asdict(row) for row in self.rows],
            "bank": self.bank,
            "count": self.count,
            "why_last": self.why_last,
        }


def knn_by_layer(
    model: Backbone | Method,
    bank: Iterable[Batch],
    test: Iterable[Batch],
    *,
    k: int = 20,
    temperature: float | None = 0.07,
    precision: str = "fp32",
    positions: bool = True,
    classes: int | None = None,
) -> LayerKnn:
    """The accuracy of the k nearest of `bank` on `test`, for each layer and pool; features through the final norm.

    temperature: τ; None counts every neighbour as one. positions: for a backbone, whether its own take part.
    classes: how many the data has, for chance; None counts those of the labels.
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
    chance = 1 / (classes or len(torch.cat([train_labels, labels]).unique()))
    return LayerKnn(tuple(rows), len(train_labels), len(labels), told, k, temperature, chance)


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
        raise SitusError("there are no samples to take features of", field="data")
    return torch.cat(parts, dim=2), torch.cat(labels)
