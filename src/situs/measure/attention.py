"""Where a model's heads attend: maps over images, over relative offsets (MP3's Figures 8 and 11), and their entropy.

Averages are over patch tokens as queries and keys. Prefix tokens (CLS, registers) are keys of the softmax, so they
count in the entropy of a query; their share of the attention is reported apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from situs.backbones.attention_maps import See, check_attention_maps, has_cls, watch_attention
from situs.backbones.base import Backbone
from situs.core.position import distances, relative_index
from situs.data.batch import Batch
from situs.errors import SitusError
from situs.limits import check_value
from situs.models.data import AnyData, AnyModel, Chosen, load_set, made_with, opened
from situs.results import Figure, Result, Summary, Table, channels_drawn, percent

MEANING = """
The entropy of a head is −Σ a log a, where a is the attention of a query to a key. The sum includes all keys, also
prefix tokens. The entropy is averaged over the samples and all patch queries. An entropy of 0 nats means attention to
one token only. An entropy of log S nats means equal attention to all S tokens. The distance (in patches) is the mean
distance between a query and the patches that it attends to, weighted by the attention.

The maps by relative offset show the mean attention of a patch to the patch that is Δrow rows and Δcolumn columns away.
The mean is over all pairs of patches with this offset. Rare offsets have fewer pairs, so their means are noisier, but
not biased. The rarest offset, from corner to corner, occurs once per sample.
"""
LOCAL = 0.5
"""A head is local where its mean distance is below this share of that of uniform attention."""
_WEIGHTS_AT_ONCE = 1 << 23
"""Pairs of tokens per head computed together: a layer's weights then stay below about a gigabyte."""


@dataclass(frozen=True)
class Survey:
    """Every head of a model, averaged over images and queries; L layers of H heads on a grid (h, w).

    entropy: [L, H], nats. relative: [L, H, 2h-1, 2w-1], mean weight of the pairs with an offset (key − query); the
    query itself is in the middle. distance: [L, H], mean distance of the attended patches, in patches. prefix_share:
    [L, H], attention to prefix tokens. All float64 on the CPU.
    """

    grid: tuple[int, ...]
    images: int
    tokens: int
    entropy: Tensor
    relative: Tensor
    distance: Tensor
    prefix_share: Tensor

    @property
    def uniform_entropy(self) -> float:
        """The entropy of equal attention to all tokens, log S: no head can have more."""
        return math.log(self.tokens)


@dataclass(frozen=True)
class AttentionMaps:
    """Maps [n, H, h, w] of `layer`, counted from 0, over images [n, C, H, W] in [0, 1].

    cls: whether they are the attention of CLS. positions: whether the model used its positions.
    """

    images: Tensor
    maps: Tensor
    layer: int
    cls: bool
    positions: bool = True

    @property
    def brightest_tenth(self) -> float:
        """The share of the mean map on its brightest tenth of the patches, averaged over the images."""
        return float(top_share(self.maps.mean(dim=1)).mean())


@dataclass(frozen=True)
class Attention(Result):
    """Where a model's heads attend: over all samples, and over a few that are shown."""

    file: ClassVar[str] = "attention"
    meaning: ClassVar[str] = MEANING
    survey: Survey
    shown: AttentionMaps

    def summary(self) -> Summary:
        """The brightest tenth, the sharpest and the widest head, how many are local; a row for each layer."""
        survey, shown = self.survey, self.shown
        layers, heads = survey.entropy.shape
        low, high = int(survey.entropy.argmin()), int(survey.entropy.argmax())
        local = int((survey.distance < LOCAL * uniform_distance(survey.grid)).sum())
        locals_ = {0: "No head is local", 1: "One head is local"}
        sentence = (
            f"In layer {shown.layer + 1}, {percent(shown.brightest_tenth, 0)} of the attention from "
            f"{'CLS' if shown.cls else 'the average patch'} to patches goes to one tenth of the patches (those with "
            f"the most attention). Of {layers * heads} heads, {self._head(low)} has the most concentrated attention, "
            f"and {self._head(high)} has the widest. {locals_.get(local, f'{local} heads are local')} (a head is local "
            "if its mean distance is less than half the distance of uniform attention)."
        )
        by_layer = zip(survey.entropy, survey.distance, survey.prefix_share, strict=True)
        rows = [
            [str(layer), f"{nats.mean():.2f}", f"{nats.min():.2f}", f"{nats.max():.2f}", f"{far.mean():.1f}",
             percent(prefix.mean())]
            for layer, (nats, far, prefix) in enumerate(by_layer, start=1)
        ]  # fmt: skip
        header = ["layer", "mean entropy", "lowest", "highest", "distance", "to prefix tokens"]
        title = f"{self.provenance.name}: attention over {self.provenance.counted(survey.images)}"
        numbers = (
            (f"{survey.entropy.min():.2f} of {survey.uniform_entropy:.2f}", "nats: entropy of the sharpest head"),
            (f"{survey.distance.min():.1f}", "patches: mean distance of the most local head"),
            (
                percent(shown.brightest_tenth, 0),
                "of the attention to patches goes to the tenth of the patches with the most attention",
            ),
        )
        return Summary(sentence, (Table(title, header, rows),), numbers=numbers)

    def figures(self) -> list[Figure]:
        """Maps over images, layer by head, and by relative offset."""
        survey, shown = self.survey, self.shown
        whose = (
            "Attention of the CLS token to the patches"
            if shown.cls
            else "Mean attention of all patches to each patch (the model has no CLS token)"
        )
        without = "" if shown.positions else " The model was trained without positions and runs without positions here."
        panels = {
            "Entropy of each head": (survey.entropy, "nats"),
            "Mean distance of each head": (survey.distance, "patches"),
        }
        layers, heads = (range(1, count + 1) for count in survey.entropy.shape)
        return [
            Figure(
                "images",
                f"{whose}, in layer {shown.layer + 1}, scaled to sum to 1.{without} Each map has its own "
                f"colour scale, so compare shapes, not colours. {channels_drawn(shown.images.shape[1])}".strip(),
                "figures.attention_over_images",
                (shown.images.numpy(), shown.maps.numpy()),
            ),
            Figure(
                "heads",
                "Dark cells show low values: attention to few tokens (entropy) or to nearby patches (distance). "
                "Light cells show high values. Uniform attention would have an entropy of "
                f"{survey.uniform_entropy:.2f} nats and a distance of {uniform_distance(survey.grid):.1f} patches on "
                f"this {survey.grid[0]}×{survey.grid[1]} grid.",
                "figures.value_grids",
                (panels, layers, heads, "head", "layer"),
                {"digits": ".2f", "cell": (0.45, 0.27)},
            ),
            Figure(
                "relative",
                "Attention by relative offset. The query is in the middle of each map; the ticks mark its row and "
                f"column. Vertical offsets run from −{survey.grid[0] - 1} to {survey.grid[0] - 1}, horizontal "
                f"offsets from −{survey.grid[1] - 1} to {survey.grid[1] - 1}. The number below each map is the "
                "entropy of its head, in nats. The colour is the square root of the attention weight, from 0 to the "
                "map's maximum.",
                "figures.relative_maps",
                (survey.relative.numpy(), survey.entropy.numpy()),
                section="By relative offset",
            ),
        ]

    def _head(self, index: int) -> str:
        survey = self.survey
        layer, head = divmod(index, survey.entropy.shape[1])
        nats = float(survey.entropy.flatten()[index])
        equivalent = f"{nats:.2f} nats, like uniform attention to {math.exp(nats):.1f} of {survey.tokens} tokens"
        return f"head {head + 1} of layer {layer + 1} ({equivalent})"

    def numbers(self) -> dict[str, Any]:
        """Every head, and the maps that are shown."""
        survey, shown = self.survey, self.shown
        return {
            "images": survey.images,
            "grid": list(survey.grid),
            "tokens": survey.tokens,
            "positions": shown.positions,
            "uniform_entropy": survey.uniform_entropy,
            "uniform_distance": uniform_distance(survey.grid),
            "entropy": survey.entropy.tolist(),
            "distance": survey.distance.tolist(),
            "prefix_share": survey.prefix_share.tolist(),
            "maps": {
                "layer": shown.layer + 1,
                "of": "cls" if shown.cls else "mean of the patches",
                "images": len(shown.maps),
                "on_brightest_tenth": shown.brightest_tenth,
                "on_brightest_tenth_by_head": top_share(shown.maps).mean(dim=0).tolist(),
            },
        }


def row_entropy(weights: Tensor) -> Tensor:
    """−Σ_j a_j log a_j of each query's attention, in nats: [..., K] -> [...]."""
    return torch.special.entr(weights).sum(dim=-1)


def relative_sums(weights: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Sum of the weights by offset (key − query): [B, H, N, N] of patches -> [H, 2h-1, 2w-1] float64."""
    height, width = grid
    offset = relative_index(grid, weights.device).T.flatten()  # relative_index counts query − key
    total = weights.sum(dim=0, dtype=torch.float64).flatten(1)
    sums = total.new_zeros(total.shape[0], (2 * height - 1) * (2 * width - 1)).index_add(1, offset, total)
    return sums.unflatten(1, (2 * height - 1, 2 * width - 1))


def offset_counts(grid: tuple[int, ...]) -> Tensor:
    """How many pairs of places have each offset, [2h-1, 2w-1]: N for (0, 0), one for each corner."""
    rows, columns = (side - torch.arange(1 - side, side).abs() for side in grid)
    return (rows[:, None] * columns[None, :]).double()


def offset_distances(grid: tuple[int, ...]) -> Tensor:
    """The length of each offset in patches, [2h-1, 2w-1]."""
    rows, columns = (torch.arange(1 - side, side, dtype=torch.float64) for side in grid)
    return torch.hypot(rows[:, None], columns[None, :])


def uniform_distance(grid: tuple[int, ...]) -> float:
    """The mean distance of two random places: that of uniform attention."""
    return float(distances(grid).mean())


def query_maps(weights: Tensor, prefix: int, grid: tuple[int, ...], *, cls: bool) -> Tensor:
    """Attention to the patches, scaled to sum 1: [B, H, S, S] -> [B, H, h, w].

    cls: of the first token; else the mean over all patches.
    """
    rows = weights[:, :, 0, prefix:] if cls else weights[:, :, prefix:, prefix:].mean(dim=2)
    return (rows / rows.sum(dim=-1, keepdim=True)).unflatten(-1, grid)


def top_share(maps: Tensor, share: float = 0.1) -> Tensor:
    """The part of each map on its brightest `share` of the places: [..., h, w] -> [...]; uniform attention: `share`.

    Where that is no whole number of places, the last one counts in part.
    """
    flat = maps.flatten(-2)
    ordered = flat.sort(dim=-1, descending=True).values
    wanted = share * flat.shape[-1] - torch.arange(flat.shape[-1], device=maps.device)
    return (ordered * wanted.clamp(0.0, 1.0).to(maps.dtype)).sum(dim=-1) / flat.sum(dim=-1)


def analyze_attention(
    model: AnyModel,
    data: AnyData = None,
    *,
    layer: int | None = None,
    show: int = 6,
    seed: int = 0,
    **chosen: Unpack[Chosen],
) -> Attention:
    """Where a model's heads attend: over all images, and as maps over a few.

    model: whatever `open_model` takes. data: a path or a source; None for the images that a run was trained on. layer:
    of the maps, from 1; None for the last. show: how many images have maps. chosen: see `load_set`; the default count
    is 64.
    """
    check_value("show", show, ">= 1")
    model = opened(model, seed)
    backbone, positions = model.backbone, model.positions
    check_attention_maps(backbone)
    depth = check_layer(backbone, layer)
    chosen.setdefault("count", 64)
    loader = load_set(model, data, **chosen)
    heads = survey(backbone, loader, positions=positions)
    first = next(iter(loader)).inputs[:show]
    maps = image_maps(backbone, first, depth, positions=positions)
    pictures = loader.shown(first).cpu()
    shown = AttentionMaps(pictures, maps, depth, has_cls(backbone), positions)
    return Attention(heads, shown, provenance=made_with(model, loader, seed))


@torch.no_grad()
def survey(backbone: Backbone, batches: Iterable[Batch], *, positions: bool = True) -> Survey:
    """Every head over all images. positions: whether the model uses its own (False after MP3)."""
    check_attention_maps(backbone)
    p, count = backbone.num_prefix, 0
    sums: dict[str, list[Tensor]] = {"entropy": [], "prefix": [], "relative": []}

    def see(layer: int, weights: Tensor) -> None:
        queries = weights[:, :, p:]
        values = {
            "entropy": row_entropy(queries).mean(dim=2).sum(dim=0, dtype=torch.float64),
            "prefix": queries[..., :p].sum(dim=-1).mean(dim=2).sum(dim=0, dtype=torch.float64),
            "relative": relative_sums(queries[..., p:], backbone.grid),
        }
        for name, value in values.items():
            if layer == len(sums[name]):
                sums[name].append(value)
            else:
                sums[name][layer] += value

    for batch in batches:
        count += len(batch.inputs)
        _watch(backbone, batch.inputs, positions, see)
    if not count:
        raise SitusError("there are no samples to measure", field="data")
    means = {name: torch.stack(layers).cpu() / count for name, layers in sums.items()}
    relative = means["relative"] / offset_counts(backbone.grid)
    weighted = means["relative"] * offset_distances(backbone.grid)
    return Survey(
        grid=backbone.grid,
        images=count,
        tokens=backbone.num_prefix + backbone.num_tokens,
        entropy=means["entropy"],
        relative=relative,
        distance=weighted.sum(dim=(-2, -1)) / means["relative"].sum(dim=(-2, -1)),
        prefix_share=means["prefix"],
    )


@torch.no_grad()
def image_maps(backbone: Backbone, images: Tensor, layer: int, *, positions: bool = True) -> Tensor:
    """`query_maps` of one layer (from 0), of CLS where there is one: images [B, C, H, W] -> [B, H, h, w] on the CPU."""
    maps: list[Tensor] = []
    cls = has_cls(backbone)

    def see(depth: int, weights: Tensor) -> None:
        if depth == layer:
            maps.append(query_maps(weights, backbone.num_prefix, backbone.grid, cls=cls).cpu())

    _watch(backbone, images, positions, see)
    return torch.cat(maps)


def check_layer(backbone: Backbone, layer: int | None) -> int:
    """The index from 0 of a layer counted from 1; None for the last."""
    number = backbone.depth if layer is None else layer
    if not 1 <= number <= backbone.depth:
        raise SitusError(field="layer", value=layer, allowed=f"in 1 to {backbone.depth}, the layers of {backbone.name}")
    return number - 1


def _watch(backbone: Backbone, images: Tensor, positions: bool, see: See) -> None:
    """Calls `see` with every layer's weights, for a few images at a time."""
    for part in images.split(max(1, _WEIGHTS_AT_ONCE // (backbone.num_prefix + backbone.num_tokens) ** 2)):
        stream = backbone.assemble(backbone.embed(part), backbone.positions() if positions else None)
        watch_attention(backbone, stream, see)
