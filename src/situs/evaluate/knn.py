"""Weighted nearest neighbours on frozen features: how good a representation is before anything is trained on it.

Cosine similarity, the k nearest of the training set, each with the weight exp(similarity / τ); layer by layer, to see
where in the depth a representation separates the classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.backbones.base import Backbone
from situs.errors import SitusError
from situs.evaluate.accuracy import hard, labels_of
from situs.evaluate.features import Pool, layer_features
from situs.limits import check_value
from situs.methods.base import Batch
from situs.models.data import AnyData, AnyModel, Chosen, check_labels, load_bank, made_with, opened
from situs.models.inference import evaluating
from situs.results import Result, Summary, Table, percent
from situs.train.step import autocast

AT_ONCE = 1 << 25
"""Similarities held at a time: 128 MiB in float32."""

POOLS = {"cls": "CLS token", "mean": "mean of the patches"}


@dataclass(frozen=True)
class LayerAccuracy:
    """layer: blocks that the features have passed, the last of them `depth`. pool: mean of the patches, or CLS."""

    layer: int
    pool: Pool
    accuracy: float


@dataclass(frozen=True)
class LayerKnn(Result):
    """rows: for each pool, layer by layer. bank, count: training and test samples. why_last: why only the last layer.

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
        title = self.provenance.title(f"{self.provenance.counted(self.count)}, k = {self.k} of {self.bank:,}")
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


def evaluate_knn(
    model: AnyModel,
    data: AnyData = None,
    *,
    k: int = 20,
    temperature: float | None = 0.07,
    train_count: int | None = 10_000,
    precision: str = "fp32",
    seed: int = 0,
    **chosen: Unpack[Chosen],
) -> LayerKnn:
    """Nearest neighbours on the frozen features of each layer, the training split as bank.

    model: whatever `open_model` takes. data: a path; None for the samples that a run was trained on. temperature: τ;
    None counts every neighbour as one. train_count: at most so many samples as the bank. chosen: see `load_set`.
    """
    model = opened(model, seed)
    bank, test = load_bank(model, data, train_count=train_count, **chosen)
    chance = 1 / len(check_labels(test))
    told = {"k": k, "temperature": temperature, "precision": precision, "positions": model.positions, "chance": chance}
    found = knn_by_layer(model.backbone, bank, test, **told)
    made = made_with(model, test, seed, precision, beside=[bank], more={"bank_data": bank.source.name})
    return replace(found, provenance=made)


def knn_by_layer(
    backbone: Backbone,
    bank: Iterable[Batch],
    test: Iterable[Batch],
    *,
    k: int = 20,
    temperature: float | None = 0.07,
    precision: str = "fp32",
    positions: bool = True,
    chance: float = 0.0,
) -> LayerKnn:
    """The accuracy of the k nearest of `bank` on `test`, for each layer and pool; features through the final norm.

    positions: whether the backbone's own take part. chance: what a guess is right by, to be said beside them.
    """
    backbone.require("tokens")
    pools: tuple[Pool, ...] = ("cls", "mean") if backbone.num_prefix else ("mean",)
    with evaluating(backbone):
        train, train_labels = _features(backbone, bank, pools, positions, precision)
        held, labels = _features(backbone, test, pools, positions, precision)
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
