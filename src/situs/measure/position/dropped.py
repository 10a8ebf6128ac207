"""The linear position probe (DropPos, Table 7): from the final features of patches without a position to their place.

All patches are visible, and three quarters of them lose their position. A linear classifier predicts which of the N
places each of these came from. It is fitted to the training split and scored on another; the backbone is frozen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from situs.backbones.base import Backbone
from situs.core.masking import count_of
from situs.core.permutation import random_permutation
from situs.core.position import coordinates, distances
from situs.core.random import uniform
from situs.core.tokens import mask_of, take
from situs.errors import SitusError, counted
from situs.limits import check_value
from situs.measure.probe.linear import WEIGHT_DECAYS, Probe, Probes, fit_probe, score
from situs.methods.base import Batch, UnknownPosition
from situs.models import Model
from situs.models.inference import evaluating
from situs.results import Cell, Figure, Summary, Table, percent, points
from situs.train.step import autocast

RATIO = 0.75
MEANING = """
All patches are visible, but most have lost their position. From the final feature of each patch without a position, a
linear classifier predicts the place it came from. The backbone is frozen; the classifier is a logistic regression
fitted to the training split, with a weight decay chosen on a part of that split; the numbers are those of the other
split. The mean error is compared with that of always predicting the one best place.

A model that scores high infers places from the content of the patches and from the few patches that keep their
position. DropPos's Table 7 compares this before and after fine-tuning with labels: where the number rises, the task
itself needs positions.
"""


@dataclass(frozen=True)
class PositionProbe(Probe):
    """score: over the test split's dropped patches, classes are places. distance: mean error in patches.

    guess: the error of always predicting the one best place, for scale. unknown: what a patch without a position gets,
    in words.
    """

    distance: float
    guess: float
    unknown: str

    def numbers(self) -> dict[str, Any]:
        """The scores, and how it was fitted."""
        return {
            "accuracy": self.score.accuracy,
            "distance": self.distance,
            "constant_guess_distance": self.guess,
            "patches": self.score.count,
            "unknown": self.unknown,
            **super().numbers(),
        }


@dataclass(frozen=True)
class PositionProbes(Probes[PositionProbe]):
    """Position probes; the second model is the first one fine-tuned. ratio: share of the positions dropped."""

    file: ClassVar[str] = "probe-position"
    subject: ClassVar[str] = "linear position probe"
    meaning: ClassVar[str] = MEANING
    grid: tuple[int, ...] = field(kw_only=True)
    ratio: float = RATIO

    def summary(self) -> Summary:
        """Accuracy and mean error of the places; a row for each model."""
        names, probes = list(self.probes), list(self.probes.values())
        first, last = probes[0], probes[-1]
        sentence = (
            f"A linear classifier predicts the place of {percent(first.score.accuracy, 2)} of the patches without a "
            f"position right (chance {percent(1 / len(first.score.counts), 2)}), with a mean error of "
            f"{first.distance:.2f} patches."
        )
        if len(probes) > 1:
            sentence += f" With {names[-1]} it is {percent(last.score.accuracy, 2)} and {last.distance:.2f} patches."
        counts = ["patches tested", f"{self.provenance.things} fitted to"]
        header = ["model", "accuracy, %", "mean error, patches", "error of one guess", *counts]
        rows: list[list[Cell]] = [
            [name, points(probe.score.accuracy), probe.distance, probe.guess, probe.score.count,
             probe.train_count]
            for name, probe in self.probes.items()
        ]  # fmt: skip
        unknown = [f"In {name}, a patch that lost its position gets {probe.unknown}." for name, probe in
                   self.probes.items()]  # fmt: skip
        share = (percent(first.score.accuracy, 2), "places predicted right")
        return Summary(sentence, (Table(self.data, header, rows),), tuple(unknown), (share,))

    def figures(self) -> list[Figure]:
        """The accuracy of each model, and of each place."""
        places = math.prod(self.grid)
        shares = {name: 100 * probe.score.accuracy for name, probe in self.probes.items()}
        maps = {
            name: (100 * probe.score.hits.double() / probe.score.counts.clamp(min=1)).reshape(self.grid)
            for name, probe in self.probes.items()
        }
        labels = ("column of the patch", "row of the patch", "places predicted right, %")
        return [
            Figure("accuracy", "Share of patches without a position whose place a linear classifier predicts.",
                   "figures.bars", (shares | {f"chance, 1 / {places}": 100 / places}, labels[-1]), {"digits": ".2f"}),
            Figure("places", "The same share for each true place, in the layout of the input.",
                   "figures.heatmaps", (maps, *labels)),
        ]  # fmt: skip

    def numbers(self) -> dict[str, Any]:
        """The share of dropped positions, and every model."""
        return {"ratio": self.ratio, **super().numbers()}


def unknown_position_of(model: Model) -> UnknownPosition:
    """What a token without a position gets: the vector that the run learned for it, if any."""
    learned = None if model.method is None else model.method.unknown_position()
    if learned is not None:
        return learned
    model.backbone.require("tokens")
    if not model.positions or not model.backbone.positions().kinds:
        return UnknownPosition(None, "nothing: this model uses no positions, so no patch has one", False)
    return UnknownPosition(
        None, "a zero vector (and no rotation or bias), since this model learned no vector for unknown positions"
    )


def follow(models: Mapping[str, Model]) -> dict[str, UnknownPosition]:
    """The vector of each model for unknown positions; a model without one takes the first's, for comparison."""
    vectors = {name: unknown_position_of(model) for name, model in models.items()}
    (first, lent), *_ = vectors.items()
    if lent.vector is None:
        return vectors
    shared = UnknownPosition(
        lent.vector, f"the vector for unknown positions of {first}, because it learned none itself"
    )
    zero = {name: vector for name, vector in vectors.items() if vector.vector is None and vector.sighted}
    fits = {name for name in zero if models[name].backbone.dim == lent.vector.shape[0]}
    return {name: shared if name in fits else vector for name, vector in vectors.items()}


def dropped_features(
    backbone: Backbone,
    batch: Batch,
    unknown: UnknownPosition,
    *,
    ratio: float = RATIO,
    seed: int = 0,
    stream: str = "probe.position",
    positions: bool = True,
) -> tuple[Tensor, Tensor]:
    """Final features [B, K, D] of the int(ratio · N) patches whose position is dropped, and their places [B, K].

    On a hierarchical model a patch is the area of one output token, and loses its position as a whole.
    """
    count = backbone.out_grid[0] * backbone.out_grid[1]
    order = random_permutation(uniform(seed, 0, batch.ids, stream, (count,)))
    places = order[:, : count_of(ratio, count)]
    known = None
    if positions:
        mask = mask_of(places, count)
        known = backbone.positions().forget(mask[:, _behind(backbone, mask.device)], unknown.vector)
    features = backbone.encode(backbone.embed(batch.inputs), known)
    return take(features.patches, places), places


def probe_position(
    backbone: Backbone,
    train: Iterable[Batch],
    test: Iterable[Batch],
    unknown: UnknownPosition,
    *,
    ratio: float = RATIO,
    seed: int = 0,
    precision: str = "fp32",
    positions: bool = True,
    weight_decays: Sequence[float] = WEIGHT_DECAYS,
) -> PositionProbe:
    """Fits to `train`, whose features are kept on the device, and scores on `test`, batch by batch.

    unknown: what a patch without a position gets. positions: whether the backbone uses its own.
    """
    backbone.require("tokens")
    grid, count = backbone.out_grid, math.prod(backbone.out_grid)
    check_value("ratio", ratio, "(0, 1]")
    if not count_of(ratio, count):
        raise SitusError(f"ratio={ratio}: must drop at least one of {counted(count, 'places')}", field="ratio")

    def features(batches: Iterable[Batch], split: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for batch in batches:
            stream = f"probe.position/{split}"
            with torch.no_grad(), autocast(batch.inputs.device, precision):
                final, places = dropped_features(
                    backbone, batch, unknown, ratio=ratio, seed=seed, stream=stream, positions=positions
                )
            ids = batch.ids[:, None].expand_as(places)
            yield final.flatten(0, 1).float(), places.flatten(), ids.flatten()

    with evaluating(backbone):
        parts = list(features(train, "train"))
        if not parts:
            raise SitusError("there are no samples to fit the probe to", field="data")
        inputs, places, groups = (torch.cat(part) for part in zip(*parts, strict=True))
        fitted = fit_probe(inputs, places, count, groups=groups, weight_decays=weight_decays, seed=seed)
        scores = score(fitted.linear, ((part, truth) for part, truth, _ in features(test, "test")), count)
    distance_of = distances(grid)
    error = float((scores.answers.double() * distance_of).sum() / scores.count)
    guess = float((scores.counts.double() @ distance_of).min() / scores.count)  # always predicting the best place
    return PositionProbe(scores, fitted, len(groups.unique()), error, guess, unknown.words)


def _behind(backbone: Backbone, device: torch.device) -> Tensor:
    """The output token of each token of the grid, [N]."""
    rows, columns = coordinates(backbone.grid, device).unbind(-1)
    (height, width), (high, wide) = backbone.grid, backbone.out_grid
    # Merges halve a side and round up, so that a whole number of tokens lies behind each but the last.
    return rows // -(-height // high) * wide + columns // -(-width // wide)
