"""The linear classification probe: one vector an image, frozen, and a linear classifier on top."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from situs.backbones.base import Backbone
from situs.errors import SitusError
from situs.evaluate.accuracy import hard
from situs.evaluate.features import Pool, extract
from situs.evaluate.probe import WEIGHT_DECAYS, Probe, Probes, fit_probe, score
from situs.methods.base import Batch, Method
from situs.results import Cell, Summary, Table, percent


@dataclass(frozen=True)
class ClassProbe(Probe):
    """pool: what an image's vector is."""

    pool: Pool

    def numbers(self) -> dict[str, Any]:
        """What was read off, and how it was fitted."""
        found = self.score
        read = {"pool": self.pool, "accuracy": found.accuracy, "loss": found.loss, "count": found.count}
        return {**read, **super().numbers()}


@dataclass(frozen=True)
class ClassProbes(Probes[ClassProbe]):
    """Classes read off frozen features. classes: their names."""

    file: ClassVar[str] = "probe-class"

    classes: Sequence[str] = field(kw_only=True)

    def summary(self) -> Summary:
        """What is recognised of each model; a row a model."""
        (name, first), *rest = self.probes.items()
        words = {"mean": "the mean of its patches", "cls": "its CLS token"}[first.pool]
        said = (
            f"A linear classifier on {words} recognises {percent(first.score.accuracy, 2)} of {first.score.count:,} "
            f"images in {name} (chance {percent(1 / len(first.score.counts), 2)})."
        )
        said += "".join(f" In {other} it is {percent(probe.score.accuracy, 2)}." for other, probe in rest)
        header = ["model", "pool", "top-1, %", "loss", "images", "images fitted to", "weight decay"]
        rows: list[list[Cell]] = [
            [name, probe.pool, f"{100 * probe.score.accuracy:.2f}", probe.score.loss, probe.score.count,
             probe.train_count, f"{probe.fitted.weight_decay:g}"]
            for name, probe in self.probes.items()
        ]  # fmt: skip
        return Summary(said, (Table(self.data, header, rows),))


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
    return ClassProbe(score(fitted.linear, [held], classes), fitted, len(labels), pool)


def _labels(labels: Tensor | None) -> Tensor:
    if labels is None:
        raise SitusError("a classification probe needs labels, and the data has none", field="data")
    return hard(labels)
