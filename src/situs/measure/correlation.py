"""Correlation of the features of two places, in one image and in two (MP3: appendix D, Figure 10).

The paper takes "the Pearson correlation of the last layer's representation between each position pair within the same
image, averaged across the validation set", and the same "between each position pair of two random images": each
correlation is taken over the channels, and the results average to two maps [N, N]. The second is here the average over
*all* ordered pairs of different images, which is what random pairs estimate, without their noise: with Z_b the features
of image b, each row less its mean and of length 1,

    within = 1/n Σ_b Z_b Z_bᵀ        across = (S Sᵀ - Σ_b Z_b Z_bᵀ) / (n (n - 1)),  S = Σ_b Z_b
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from situs.backbones.base import Backbone
from situs.core.position import distances
from situs.data.batch import Batch
from situs.errors import SitusError, unknown_name
from situs.measure.features import LAST, Layer, patch_layers
from situs.measure.position.vectors import spread_places
from situs.models.data import AnyData, AnyModel, Chosen, load_set, made_with, opened
from situs.results import Figure, Result, Summary, Table

HEAD = {
    "within_near": "near",
    "within": "1 sample",
    "across_same": "same position",
    "across": "2 samples",
    "position": "shared position",
    "image": "shared sample",
}
LINES = {
    "within_near": "1 sample, neighbours",
    "within": "1 sample",
    "across_same": "2 samples, same position",
    "across": "2 samples",
}
MEANING = """
The numbers are Pearson correlations over the channels of two feature vectors. "1 sample": the two vectors are from one
sample (mean over all samples). "2 samples": the two vectors are from different samples (mean over all pairs of samples;
MP3's Figure 10 draws random pairs of samples instead). "Near": the positions are neighbours in one sample. "Same
position": the two vectors are from the same position in two samples. "Shared position" is "same position" minus "2
samples": the correlation that a shared position adds. "Shared sample" is "1 sample" minus "2 samples": the correlation
that a shared sample adds.
"""
HARDLY = 0.01
"""A smaller gain is called none."""
LARGEST = 400
"""The most places whose maps go into the JSON."""


@dataclass(frozen=True)
class Correlation:
    """Mean Pearson correlations between the features of places i and j, [N, N] float64 on the CPU, over n images."""

    grid: tuple[int, ...]
    within: Tensor
    across: Tensor
    images: int

    @property
    def means(self) -> dict[str, float]:
        """Means over pairs of places.

        within_near: one image, neighbouring places. within: one image, any two places. across_same: two images, the
        same place. across: two images, two places. position: the gain from a shared place. image: the gain from a
        shared image.
        """
        distance = distances(self.grid)
        other = distance > 0
        near = (distance > 0) & (distance <= 1)
        means = {
            "within_near": float(self.within[near].mean()),
            "within": float(self.within[other].mean()),
            "across_same": float(self.across.diagonal().mean()),
            "across": float(self.across[other].mean()),
        }
        means["position"] = means["across_same"] - means["across"]
        means["image"] = means["within"] - means["across"]
        return means

    def by_distance(self) -> tuple[list[int], list[float], list[float]]:
        """Distances in whole patches, and the mean correlation within and across at each; within is 1 at 0."""
        rounded = distances(self.grid).round().long()
        steps = rounded.unique().tolist()
        means = [[float(map_[rounded == step].mean()) for step in steps] for map_ in (self.within, self.across)]
        return steps, means[0], means[1]

    def numbers(self) -> dict[str, Any]:
        """The means, over pairs of places and over distance."""
        steps, within, across = self.by_distance()
        curves = {"distance": steps, "within_by_distance": within, "across_by_distance": across}
        return {"grid": list(self.grid), **self.means, **curves}


@dataclass(frozen=True)
class Correlations(Result):
    """The correlations at every depth of a model, in order. depth: the one whose maps are drawn."""

    file: ClassVar[str] = "correlation"
    subject: ClassVar[str] = "correlation between positions"
    meaning: ClassVar[str] = MEANING
    depths: Mapping[str, Correlation]
    depth: str = LAST

    def summary(self) -> Summary:
        """The correlations at the end of the model, and the depth with most position; a row for each depth."""
        last = self.depths[LAST].means
        if last["position"] < HARDLY:
            more, finding = "no more", "This measure finds no position in the features"
        else:
            more, finding = f"{last['position']:.2f} more", "The features depend on position"
        means = {depth: correlation.means for depth, correlation in self.depths.items()}
        peak = max(means, key=lambda depth: means[depth]["position"])
        where = _after(peak)
        sentence = (
            f"After the final norm, the mean correlation of the features of two different positions is "
            f"{last['within']:.2f} within one sample, and {last['across']:.2f} across two samples. The features of one "
            f"sample {'form a cluster' if last['image'] > HARDLY else 'form no cluster'}. Across two samples, the "
            f"correlation at the same position is {last['across_same']:.2f}, {more} than at different positions. "
            f"{finding}. "
            f"The difference in correlation between the same position and different positions is largest {where}: "
            f"{means[peak]['position']:.2f}."
        )
        rows = [[depth, *(f"{values[key]:.3f}" for key in HEAD)] for depth, values in means.items()]
        title = self.provenance.title(self.provenance.counted(self.depths[self.depth].images))
        labels = {
            "within": "correlation of two positions in one sample",
            "across_same": "correlation of the same position in two samples",
            "across": "correlation of two positions in two samples",
        }
        numbers = tuple((f"{means[self.depth][key]:.2f}", words) for key, words in labels.items())
        return Summary(sentence, (Table(title, ["after", *HEAD.values()], rows),), numbers=numbers)

    def figures(self) -> list[Figure]:
        """One depth over distance, its maps, and every depth."""
        shown, names = self.depths[self.depth], [depth.replace("embedding", "embed") for depth in self.depths]
        steps, within, across = shown.by_distance()
        lines = {"within one sample": (steps[1:], within[1:]), "across two samples": (steps, across)}
        (h, w), after = shown.grid, _after(self.depth).capitalize()
        rows, columns, chosen = spread_places((h, w))
        maps = {
            title: values[chosen].reshape(len(rows), len(columns), h, w)
            for title, values in (("within one sample", shown.within), ("across two samples", shown.across))
        }
        depths = {
            label: (range(len(names)), [correlation.means[key] for correlation in self.depths.values()])
            for key, label in LINES.items()
        }
        return [
            Figure(
                "distance",
                f"{after}. If the correlation across two samples falls with distance, the features depend on position. "
                "This dependence comes from the model, from a layout that all samples share (for example sky at the "
                "top), or from both. If the correlation falls faster within one sample than across two samples, "
                "neighbours have similar content.",
                "figures.curves",
                (lines, "distance between the positions, patches", "mean Pearson correlation"),
            ),
            Figure(
                "maps",
                f"{after}: each map shows the correlation of the ringed position with all {h} × {w} "
                "positions. Maps within one sample and across two samples have different colour scales. The ringed "
                "position itself is left out of the scales.",
                "places.mosaics",
                (maps, rows, columns, "Pearson correlation"),
                section="The maps",
            ),
            Figure(
                "layers",
                "Each line shows means over pairs of different positions, except the line "
                '"2 samples, same position". That line compares the same position in two samples.',
                "figures.curves",
                (depths, "after block", "mean Pearson correlation"),
                {"x_names": names},
            ),
        ]

    def numbers(self) -> dict[str, Any]:
        """Means at every depth and over distance; the maps of the last depth too, where they are not too large (N²)."""
        last = self.depths[LAST]
        maps = {"within": last.within, "across": last.across} if len(last.within) <= LARGEST else {}
        kept = {
            name: [[round(value, 5) for value in row] for row in maps[name].tolist()] if maps else None
            for name in ("within", "across")
        }
        return {"images": last.images, "depths": {name: value.numbers() for name, value in self.depths.items()}, **kept}


def analyze_correlation(
    model: AnyModel, data: AnyData = None, *, depth: str = LAST, seed: int = 0, **chosen: Unpack[Chosen]
) -> Correlations:
    """Correlation of the features of two places, in one image and in two, at every depth of a model.

    model: whatever `open_model` takes. data: a path or a source; None for the images that a run was trained on. depth:
    whose maps are drawn: "embedding", a block's number, or "norm". chosen: see `load_set`; the default count is 64.
    """
    model = opened(model, seed)
    chosen.setdefault("count", 64)
    loader = load_set(model, data, **chosen)
    depths = correlate(model.backbone, loader, positions=model.positions)
    if depth not in depths:
        raise unknown_name("depth", depth, depths, field="depth")
    facts = None if model.positions else {"positions": "left out, as in its training"}
    return Correlations(depths, depth, provenance=made_with(model, loader, seed, more=facts))


@torch.no_grad()
def correlate(backbone: Backbone, batches: Iterable[Batch], *, positions: bool = True) -> dict[str, Correlation]:
    """The correlations at every depth of a model in eval mode: depth -> maps, in order.

    positions: False leaves every kind of position out, as MP3 trains.
    """
    backbone.require("tokens")
    sums: dict[str, _Sums] = {}

    def see(layer: Layer) -> None:
        sums.setdefault(layer.depth, _Sums(layer.grid)).add(layer.patches)

    for batch in batches:
        patch_layers(backbone, backbone.embed(batch.inputs), backbone.positions() if positions else None, see)
    if not sums or next(iter(sums.values())).images < 2:
        raise SitusError("correlations across samples need at least two samples", field=("count", "data"))
    return {depth: sum_.result() for depth, sum_ in sums.items()}


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
    """Rows [..., D] with mean 0 and length 1, so that the product of two is their Pearson correlation; a constant row
    becomes 0."""
    centred = features - features.mean(dim=-1, keepdim=True)
    return centred / centred.norm(dim=-1, keepdim=True).clamp(min=1e-12)


def _after(depth: str) -> str:
    return {LAST: "after the final norm", "embedding": "before the first block"}.get(depth, f"after block {depth}")
