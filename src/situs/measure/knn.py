"""Weighted nearest neighbours on frozen features, layer by layer.

Cosine similarity, the k nearest of the training set, weighted by exp(similarity / τ).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.backbones.base import Backbone
from situs.errors import SitusError
from situs.limits import check_value
from situs.measure.accuracy import ByClass, by_class, class_table, hard, labels_of
from situs.measure.features import Pool, layer_features
from situs.methods.base import Batch
from situs.models.data import AnyData, AnyModel, Chosen, check_labels, load_bank, made_with, opened
from situs.models.inference import evaluating
from situs.results import Figure, Result, Summary, Table, percent, points
from situs.train.step import autocast

AT_ONCE = 1 << 25
"""Similarities computed at a time: 128 MiB in float32."""

NEIGHBOURS = 20
"""The default k; fewer where the classes have fewer samples."""

POOLS = {"cls": "CLS token", "mean": "mean of the patches"}
MEANING = """
After each block the model's final norm is applied, and every sample becomes one vector: its CLS token, or the mean of
its patches. For each test sample, the k training samples with the most similar vectors (by cosine) are found. Each of
these k samples votes for its class. A more similar sample has a larger weight, unless the title of the table says
"equal weights". The class with the largest total weight wins. Nothing is trained, so kNN measures how the
representation itself groups the samples.
"""


@dataclass(frozen=True)
class LayerAccuracy:
    """layer: number of blocks before the features. pool: mean of the patches, or CLS. balanced: the mean over the
    classes of their accuracies."""

    layer: int
    pool: Pool
    accuracy: float
    balanced: float


@dataclass(frozen=True)
class LayerKnn(Result):
    """rows: for each pool, layer by layer. bank, count: training and test samples. why_last: why only the last layer.

    k, temperature: of the neighbours and their weights. answers: [C, C] counts by (true, predicted), after the last
    block, by the better pool. classes: names.
    """

    file: ClassVar[str] = "knn"
    subject: ClassVar[str] = "nearest neighbours"
    meaning: ClassVar[str] = MEANING
    rows: tuple[LayerAccuracy, ...]
    bank: int
    count: int
    why_last: str | None
    k: int
    temperature: float | None
    answers: Tensor
    classes: Sequence[str]

    @property
    def majority(self) -> float:
        """The share of the largest class."""
        return ByClass.of(self.answers).majority

    def summary(self) -> Summary:
        """The last layer and the best one; a row for each layer, two columns for each pool."""
        last = max(row.layer for row in self.rows)
        ends = {row.pool: row.accuracy for row in self.rows if row.layer == last}
        samples = self.provenance.counted(self.count)
        shares = " and ".join(f"{percent(share, 2)} with the {POOLS[pool]}" for pool, share in ends.items())
        text = f"After the last block, the top-1 of kNN is {shares}."
        text += f" {ByClass.of(self.answers).words(self.classes)}"
        best = max(self.rows, key=lambda row: row.accuracy)
        if best.accuracy > max(ends.values()):
            text += (
                f" The best top-1 is {percent(best.accuracy, 2)}, with the {POOLS[best.pool]} after block {best.layer}."
            )
        cells = {(row.layer, row.pool): [points(row.accuracy), points(row.balanced)] for row in self.rows}
        layers = sorted({row.layer for row in self.rows})
        rows = [[layer, *itertools.chain(*(cells[layer, pool] for pool in ends))] for layer in layers]
        weights = "equal weights" if self.temperature is None else f"weights exp(similarity / {self.temperature:g})"
        title = self.provenance.title(f"{samples}, k = {self.k} of {self.bank:,}, {weights}")
        header = ["after block", *itertools.chain(*((f"{POOLS[pool]}, %", "balanced, %") for pool in ends))]
        notes = () if self.why_last is None else (f"Only the last layer: {self.why_last}.",)
        label = f"best top-1, after block {best.layer} (always predicting the largest class: {percent(self.majority)})"
        return Summary(text, (Table(title, header, rows),), notes, ((percent(best.accuracy, 2), label),))

    def numbers(self) -> dict[str, Any]:
        """Every layer, and the settings of the neighbours."""
        return {
            "k": self.k,
            "temperature": self.temperature,
            "rows": [asdict(row) for row in self.rows],
            "bank": self.bank,
            "count": self.count,
            "why_last": self.why_last,
            **ByClass.of(self.answers).numbers(),
            "classes": by_class(self.answers, self.classes),
        }

    def figures(self) -> list[Figure]:
        """A line for each pool over the layers, and the largest class's share."""
        if self.why_last is not None:
            return [Figure("", "", "bars", ({POOLS[row.pool]: 100 * row.accuracy for row in self.rows}, "%"))]
        series: dict[str, tuple[list[int], list[float]]] = {}
        for row in self.rows:
            x, y = series.setdefault(POOLS[row.pool], ([], []))
            x.append(row.layer)
            y.append(100 * row.accuracy)
        caption = "Share of test samples that kNN classifies right, after each block."
        values = (series, "after block", "test samples right, %")
        return [Figure("layers", caption, "figures.curves", values, {"level": ("largest class", 100 * self.majority)})]

    def details(self) -> list[Table]:
        """The classes after the last block."""
        return [class_table(self.answers, self.classes, self.provenance.things)]


def evaluate_knn(
    model: AnyModel,
    data: AnyData = None,
    *,
    k: int | None = None,
    temperature: float | None = 0.07,
    train_count: int | None = 10_000,
    precision: str = "fp32",
    seed: int = 0,
    **chosen: Unpack[Chosen],
) -> LayerKnn:
    """Nearest neighbours on the frozen features of each layer, the training split as bank.

    model: whatever `open_model` takes. data: a path; None for the samples that a run was trained on. k: default 20, or
    the mean number of samples per class in the bank if that is smaller. temperature: τ; None for equal weights.
    train_count: largest size of the bank. chosen: see `load_set`.
    """
    if temperature is not None:
        check_value("temperature", temperature, "> 0")
    model = opened(model, seed)
    bank, test = load_bank(model, data, train_count=train_count, **chosen)
    if k is not None:
        _check_k(k, len(bank.source))
    options = {"k": k, "temperature": temperature, "precision": precision, "positions": model.positions}
    result = knn_by_layer(model.backbone, bank, test, check_labels(test), **options)
    provenance = made_with(model, test, seed, precision, beside=[bank], more={"bank_data": bank.source.name})
    return replace(result, provenance=provenance)


def knn_by_layer(
    backbone: Backbone,
    bank: Iterable[Batch],
    test: Iterable[Batch],
    classes: Sequence[str] = (),
    *,
    k: int | None = None,
    temperature: float | None = 0.07,
    precision: str = "fp32",
    positions: bool = True,
) -> LayerKnn:
    """The accuracy of the k nearest of `bank` on `test`, for each layer and pool; features through the final norm.

    classes: their names; by default their numbers. k: see `evaluate_knn`. positions: whether the backbone uses its own.
    """
    backbone.require("tokens")
    with evaluating(backbone):
        train, train_labels = labelled_features(backbone, bank, precision, positions=positions)
        test_features, labels = labelled_features(backbone, test, precision, positions=positions)
    classes = classes or [str(number) for number in range(int(torch.cat([train_labels, labels]).max()) + 1)]
    layers, count = train.shape[1], len(classes)
    k = min(NEIGHBOURS, max(1, len(train_labels) // count)) if k is None else k
    rows, ends = [], []
    for p, pool in enumerate(pools_of(backbone)):
        for layer in range(layers):
            options = {"classes": count, "k": k, "temperature": temperature}
            named = knn_scores(train[p, layer], train_labels, test_features[p, layer], **options).argmax(dim=-1)
            answers = torch.bincount(labels * count + named, minlength=count**2).view(count, count).cpu()
            share = int(answers.diagonal().sum()) / len(labels)
            rows.append(LayerAccuracy(backbone.depth - layers + 1 + layer, pool, share, ByClass.of(answers).balanced))
            if layer == layers - 1:
                ends.append((share, answers))
    why_last = backbone.refusals.get("depths")
    why_last = None if why_last is None else f"{backbone.name} gives only its last layer: {why_last}"
    best = max(ends, key=lambda end: end[0])[1]
    return LayerKnn(tuple(rows), len(train_labels), len(labels), why_last, k, temperature, best, classes)


def pools_of(backbone: Backbone) -> tuple[Pool, ...]:
    """How a model's features become one vector for each sample."""
    return ("cls", "mean") if backbone.num_prefix else ("mean",)


def labelled_features(
    backbone: Backbone, batches: Iterable[Batch], precision: str, **options: bool
) -> tuple[Tensor, Tensor]:
    """Features [pools, layers, n, D] and labels [n]. options: see `layer_features`."""
    pools = pools_of(backbone)
    parts, labels = [], []
    for batch in batches:
        labels.append(hard(labels_of(batch)))
        with autocast(batch.inputs.device, precision):
            parts.append(layer_features(backbone, batch.inputs, pools, **options).float())
    if not parts:
        raise SitusError("there are no samples to extract features from", field="data")
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

    train_features: [n, D]. train_labels: [n] in range(classes). test_features: [m, D]. temperature: τ; None for equal
    weights.
    """
    _check_k(k, len(train_features))
    bank = F.normalize(train_features.float(), dim=-1).T
    rows = max(1, AT_ONCE // bank.shape[1])
    scores = []
    for part in F.normalize(test_features.float(), dim=-1).split(rows):
        near = (part @ bank).topk(k, dim=-1)
        # Relative to the nearest: a common factor changes no answer, and a small τ cannot overflow.
        weight = torch.ones_like(near.values)
        if temperature is not None:
            weight = ((near.values - near.values[:, :1]) / temperature).exp()
        empty = weight.new_zeros(part.shape[0], classes)
        scores.append(empty.scatter_add(1, train_labels[near.indices], weight))
    return torch.cat(scores)


def small_k(count: int, classes: int) -> int:
    """k for a small bank: half the mean number of samples per class, from 1 to 20."""
    return min(NEIGHBOURS, max(1, count // (2 * classes)))


def knn_accuracy(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    k: int = 20,
    temperature: float | None = 0.07,
) -> float:
    """The share of test samples [m, D] that the k nearest training samples [n, D] classify right."""
    classes = int(train_labels.max()) + 1
    scores = knn_scores(train_features, train_labels, test_features, classes=classes, k=k, temperature=temperature)
    return float((scores.argmax(dim=-1) == test_labels).double().mean())


def _check_k(k: int, count: int) -> None:
    if not (1 <= k <= count):
        raise SitusError(field="k", value=k, allowed=f"in [1, {count}], the number of training samples")
