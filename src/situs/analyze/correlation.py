"""How alike the features of two places are, in one image and in two (MP3: appendix D, Figure 10).

The paper takes "the Pearson correlation of the last layer's representation between each position pair within the same
image, averaged across the validation set", and the same "between each position pair of two random images": each
correlation is taken over the channels, and the results average to two maps [N, N]. The second is here the average over
*all* ordered pairs of different images, which is what random pairs estimate, without their noise: with Z_b the features
of image b, each row less its mean and of length 1,

    within = 1/n Σ_b Z_b Z_bᵀ        across = (S Sᵀ - Σ_b Z_b Z_bᵀ) / (n (n - 1)),  S = Σ_b Z_b
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from situs.analyze.layers import Layer, patch_layers
from situs.backbones.base import Backbone
from situs.core.position import coordinates
from situs.data.batch import Batch
from situs.errors import SitusError


@dataclass(frozen=True)
class Correlation:
    """Mean Pearson correlations between the features of places i and j, [N, N] float64 on the CPU, over n images."""

    grid: tuple[int, ...]
    within: Tensor
    across: Tensor
    images: int

    @property
    def summary(self) -> dict[str, float]:
        """What the maps say: means over pairs of places.

        within_near: one image, places side by side. within: one image, any two places. across_same: two images, the
        same place. across: two images, two places. position: how much more alike a shared place makes two images.
        image: how much more alike a shared image makes two places.
        """
        distance = distances(self.grid)
        other = distance > 0
        near = (distance > 0) & (distance <= 1)
        found = {
            "within_near": float(self.within[near].mean()),
            "within": float(self.within[other].mean()),
            "across_same": float(self.across.diagonal().mean()),
            "across": float(self.across[other].mean()),
        }
        found["position"] = found["across_same"] - found["across"]
        found["image"] = found["within"] - found["across"]
        return found

    def by_distance(self) -> tuple[list[int], list[float], list[float]]:
        """Distances in whole patches, and the mean correlation within and across at each; within says 1 at 0."""
        rounded = distances(self.grid).round().long()
        steps = rounded.unique().tolist()
        means = [[float(each[rounded == step].mean()) for step in steps] for each in (self.within, self.across)]
        return steps, means[0], means[1]


@torch.no_grad()
def correlate(backbone: Backbone, batches: Iterable[Batch], *, positions: bool = True) -> dict[str, Correlation]:
    """The correlations at every depth of a model in eval mode: depth -> maps, in the model's order.

    positions: False leaves every kind of position out, as MP3 trains.
    """
    backbone.require("tokens")
    sums: dict[str, _Sums] = {}

    def see(layer: Layer) -> None:
        sums.setdefault(layer.depth, _Sums(layer.grid)).add(layer.patches)

    for batch in batches:
        patch_layers(backbone, backbone.embed(batch.inputs), backbone.positions() if positions else None, see)
    if not sums or next(iter(sums.values())).images < 2:
        raise SitusError("correlations across images need at least two of them (--count, --data)")
    return {depth: each.result() for depth, each in sums.items()}


class _Sums:
    """Σ_b Z_b Z_bᵀ and Σ_b Z_b over the images so far, float64 on the features' device."""

    def __init__(self, grid: tuple[int, ...]) -> None:
        self.grid, self.images = grid, 0
        self.products: Tensor | None = None
        self.total: Tensor | None = None

    def add(self, features: Tensor) -> None:
        """features: [B, N, D]."""
        z = standardised(features.double())
        flat = z.transpose(0, 1).flatten(1)
        products, total = flat @ flat.T, z.sum(dim=0)
        self.products = products if self.products is None else self.products + products
        self.total = total if self.total is None else self.total + total
        self.images += len(features)

    def result(self) -> Correlation:
        assert self.products is not None
        assert self.total is not None
        pairs = self.images * (self.images - 1)
        across = (self.total @ self.total.T - self.products) / pairs
        return Correlation(self.grid, (self.products / self.images).cpu(), across.cpu(), self.images)


def standardised(features: Tensor) -> Tensor:
    """Each row [..., D] less its mean and of length 1, so that a product of two is their Pearson correlation.

    A row of equal numbers correlates with nothing: it becomes 0.
    """
    centred = features - features.mean(dim=-1, keepdim=True)
    return centred / centred.norm(dim=-1, keepdim=True).clamp(min=1e-12)


def distances(grid: tuple[int, ...]) -> Tensor:
    """Euclidean distance between any two places in patches, [N, N] float64."""
    places = coordinates(grid).double()
    return (places[:, None] - places[None]).norm(dim=-1)
