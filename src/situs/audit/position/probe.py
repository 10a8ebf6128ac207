"""What the features of a patch tell of its place, at every depth, by linear readers fitted in closed form.

One pass over some images gathers two sums a depth: of the features at each place, and of their products. Two readers
follow from them: ridge regression to (row, column), and linear discriminant analysis with the places as classes. The
ridge is the one that reads each half of these images best from the other, which the same sums tell. A second pass reads
other images. Three conditions tell apart where the knowledge comes from:

    as it is              the model as it was trained
    positions removed     what the patches' contents, and their company, give away by themselves
    patches shuffled      positions in place under contents in random order: what the positions tell by themselves
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from situs.analyze.layers import Layer, patch_layers
from situs.audit.position.reader import Reader, Reading, Sums
from situs.backbones.base import Backbone
from situs.core.permutation import random_permutation
from situs.core.random import uniform
from situs.core.tokens import take
from situs.data.batch import Batch
from situs.errors import SitusError

OWN, REMOVED, SHUFFLED = "as it is", "positions removed", "patches shuffled"


@dataclass(frozen=True)
class Probed:
    """Readings by condition, each in the model's order. fitted, tested: images."""

    readings: dict[str, list[Reading]]
    fitted: int
    tested: int


def conditions_of(backbone: Backbone, positions: bool) -> tuple[str, ...]:
    """Those that differ for a model: one without positions, or trained without them, has nothing to remove."""
    return (OWN, REMOVED, SHUFFLED) if positions and backbone.positions().kinds else (OWN,)


@torch.no_grad()
def probe_places(backbone: Backbone, batches: Iterable[Batch], *, positions: bool = True, seed: int = 0) -> Probed:
    """Reads places off the features of a model in eval mode. batches: gone through twice, in the same order.

    Every other image fits the readers, the rest are read. positions: False for a model that was trained without them.
    """
    backbone.require("tokens")
    halves: dict[Key, tuple[Sums, Sums]] = {}

    def fit(first: int, key: Key, layer: Layer) -> None:
        pair = halves.setdefault(key, (Sums(layer.grid), Sums(layer.grid)))
        for which, half in enumerate(pair):
            half.add(layer.patches[(which - first) % 2 :: 2])

    _walk(backbone, batches, 0, positions, seed, fit)
    readers = {key: Reader(*pair) for key, pair in halves.items()}
    _walk(backbone, batches, 1, positions, seed, lambda _, key, layer: readers[key].read(layer.patches))
    if not readers or not all(reader.images for reader in readers.values()):
        said = "reading places needs at least two images: one to fit, one to read"
        raise SitusError(said, field=("count", "data"))
    readings: dict[str, list[Reading]] = {}
    for (condition, depth), reader in readers.items():
        readings.setdefault(condition, []).append(reader.reading(depth))
    fitted, tested = (sum(half.images for half in next(iter(halves.values()))), next(iter(readers.values())).images)
    return Probed(readings, fitted, tested)


Key = tuple[str, str]
"""Condition and depth."""


def _walk(
    backbone: Backbone,
    batches: Iterable[Batch],
    part: int,
    positions: bool,
    seed: int,
    see: Callable[[int, Key, Layer], None],
) -> None:
    """Shows every depth of images number part, part + 2, … under each condition, with the number of the first."""
    conditions = conditions_of(backbone, positions)
    seen = used = 0
    for batch in batches:
        chosen = slice((part - seen) % 2, None, 2)
        seen += len(batch.ids)
        ids = batch.ids[chosen]
        if not len(ids):
            continue
        tokens = backbone.embed(batch.inputs[chosen])
        for condition in conditions:
            given = tokens
            if condition == SHUFFLED:
                noise = uniform(seed, 0, ids, "audit.positions", (tokens.shape[1],))
                given = take(tokens, random_permutation(noise))
            places = backbone.positions() if positions and condition != REMOVED else None
            patch_layers(backbone, given, places, lambda layer, n=used, c=condition: see(n, (c, layer.depth), layer))
        used += len(ids)
