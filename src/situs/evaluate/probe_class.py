"""The linear classification probe: one vector an image, frozen, and a linear classifier on top."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from situs.backbones.base import Backbone
from situs.errors import SitusError
from situs.evaluate.features import Pool, extract
from situs.evaluate.online import hard
from situs.evaluate.probe import WEIGHT_DECAYS, Fitted, Score, fit_probe, score
from situs.methods.base import Batch, Method


@dataclass(frozen=True)
class ClassProbe:
    """score: over the test split. train_count: images it was fitted to."""

    score: Score
    fitted: Fitted
    pool: Pool
    train_count: int


def probe_class(
    model: Backbone | Method,
    train: Iterable[Batch],
    test: Iterable[Batch],
    classes: int,
    *,
    pool: Pool = "mean",
    seed: int = 0,
    precision: str = "fp32",
    positions: bool = True,
    weight_decays: tuple[float, ...] = WEIGHT_DECAYS,
) -> ClassProbe:
    """Fits to the pooled features of `train` and scores on those of `test`.

    pool: the mean of the patches or CLS. positions: for a backbone, whether its own take part.
    """
    backbone = model.backbone if isinstance(model, Method) else model
    backbone.require("tokens")
    sees = model.sees_positions if isinstance(model, Method) else positions
    sets = []
    for batches in (train, test):
        found = extract(backbone, batches, pool, positions=sees, precision=precision)
        sets.append((found.features, _labels(found.labels)))
    (inputs, labels), held = sets
    fitted = fit_probe(inputs, labels, classes, weight_decays=weight_decays, seed=seed)
    return ClassProbe(score(fitted.linear, [held], classes), fitted, pool, len(labels))


def _labels(labels: Tensor | None) -> Tensor:
    if labels is None:
        raise SitusError("a classification probe needs labels, and the data has none (--data)")
    return hard(labels)
