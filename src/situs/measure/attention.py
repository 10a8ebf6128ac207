"""Where a model's heads look: maps over images, over relative offsets (MP3's Figures 8 and 11), and their entropy.

Queries and keys that are averaged here are patch tokens; prefix tokens (CLS, registers) are keys of the softmax like
any other, so they count in a row's entropy, and the share that they take is told apart.
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
The entropy of a head is −Σ a log a over the keys, prefix tokens included, averaged over the images and all patch
queries: 0 nats is one token, and log S all S tokens alike. The distance is that of the attended patches from the query,
in patches.

By relative offset: how much a patch takes on average from the patch that stands (Δrow, Δcolumn) away from it. Each
offset is averaged over just the pairs of patches that have it, so that offsets that occur seldom (a corner's once an
image) are not darkened by the pairs that the image's border cuts off; they are noisier instead.
"""
LOCAL = 0.5
"""A head is called local where it looks less than this share as far as one that looks everywhere alike."""
_WEIGHTS_AT_ONCE = 1 << 23
"""Pairs of tokens looked at together, for each head: a layer's weights then stay below about a gigabyte."""


@dataclass(frozen=True)
class Survey:
    """Every head of a model, averaged over images and query places; L layers of H heads on a grid (h, w).

    entropy: [L, H], nats. relative: [L, H, 2h-1, 2w-1], mean weight of the pairs with an offset (key − query), whose
    middle is the query itself. distance: [L, H], mean distance of what is attended to among the patches, in patches.
    prefix_share: [L, H], attention that goes to prefix tokens. All float64 on the CPU.
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
    """What is laid over images [n, C, H, W] in [0, 1]: maps [n, H, h, w] of `layer`, counted from 0.

    cls: whether they are those of CLS. positions: whether the model was given its positions.
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
    """Where a model's heads look: over all images, and over a few that are shown."""

    file: ClassVar[str] = "attention"
    meaning: ClassVar[str] = MEANING
    survey: Survey
    shown: AttentionMaps

    def summary(self) -> Summary:
        """The brightest tenth, the sharpest and the widest head, how many are local; a row a layer."""
        found, shown = self.survey, self.shown
        layers, heads = found.entropy.shape
        low, high = int(found.entropy.argmin()), int(found.entropy.argmax())
        local = int((found.distance < LOCAL * uniform_distance(found.grid)).sum())
        locals_ = {0: "No head is local: none looks", 1: "One head is local: it looks"}
        said = (
            f"In layer {shown.layer + 1} {'CLS' if shown.cls else 'the average patch'} puts "
            f"{percent(shown.brightest_tenth, 0)} of its attention to patches on a tenth of them. The sharpest of "
            f"{layers * heads} heads is {self._head(low)}, the widest {self._head(high)}. "
            f"{locals_.get(local, f'{local} heads are local: they look')} less than half as far as even attention "
            "would."
        )
        each = zip(found.entropy, found.distance, found.prefix_share, strict=True)
        rows = [
            [str(layer), f"{nats.mean():.2f}", f"{nats.min():.2f}", f"{nats.max():.2f}", f"{far.mean():.1f}",
             percent(prefix.mean())]
            for layer, (nats, far, prefix) in enumerate(each, start=1)
        ]  # fmt: skip
        header = ["layer", "mean entropy", "lowest", "highest", "distance", "to prefix tokens"]
        title = f"{self.provenance.name}: attention over {self.provenance.counted(found.images)}"
        numbers = (
            (f"{found.entropy.min():.2f} of {found.uniform_entropy:.2f}", "nats, the sharpest head of all"),
            (f"{found.distance.min():.1f}", "patches, how far the nearest-looking head looks"),
            (percent(shown.brightest_tenth, 0), "of the mean map on a tenth of the patches"),
        )
        return Summary(said, (Table(title, header, rows),), numbers=numbers)

    def figures(self) -> list[Figure]:
        """Over images, layer by head, and by relative offset."""
        found, shown = self.survey, self.shown
        whose = (
            "What the CLS token takes from each patch"
            if shown.cls
            else "The model has no CLS token, so this is the mean over all patches of what each takes from each patch"
        )
        without = "" if shown.positions else " The model was trained without positions and is run without them here."
        panels = {
            "Entropy of each head": (found.entropy, "nats"),
            "How far each head looks": (found.distance, "patches"),
        }
        layers, heads = (range(1, count + 1) for count in found.entropy.shape)
        return [
            Figure(
                "images",
                f"{whose}, in layer {shown.layer + 1}; what goes to prefix tokens is left out and the rest scaled to "
                f"sum 1.{without} Each map has its own scale, from 0 (black) to its 99th percentile (light): compare "
                f"shapes, not colours, between maps. {channels_drawn(shown.images.shape[1])}".strip(),
                "attention.attention_over_images",
                (shown.images.numpy(), shown.maps.numpy()),
            ),
            Figure(
                "heads",
                "Dark: sharp, near. Light: wide, far. Attention to all alike would have "
                f"{found.uniform_entropy:.2f} nats and a distance of {uniform_distance(found.grid):.1f} patches on "
                f"this {found.grid[0]}×{found.grid[1]} grid.",
                "figures.value_grids",
                (panels, layers, heads, "head", "layer"),
                {"digits": ".2f", "cell": (0.45, 0.27)},
            ),
            Figure(
                "relative",
                "Attention by relative offset. The query is in the middle, where the ticks point; offsets run from "
                f"−{found.grid[0] - 1} to {found.grid[0] - 1} down and from −{found.grid[1] - 1} to "
                f"{found.grid[1] - 1} across. Under each map its head's entropy in nats. Colours go with the square "
                "root of the weight, from 0 to each map's own maximum.",
                "attention.relative_maps",
                (found.relative.numpy(), found.entropy.numpy()),
                section="By relative offset",
            ),
        ]

    def _head(self, index: int) -> str:
        found = self.survey
        layer, head = divmod(index, found.entropy.shape[1])
        nats = float(found.entropy.flatten()[index])
        seen = f"{nats:.2f} nats, as if it saw {math.exp(nats):.1f} of {found.tokens} tokens"
        return f"head {head + 1} of layer {layer + 1} ({seen})"

    def numbers(self) -> dict[str, Any]:
        """Every head, and the maps that are shown."""
        found, shown = self.survey, self.shown
        return {
            "images": found.images,
            "grid": list(found.grid),
            "tokens": found.tokens,
            "positions": shown.positions,
            "uniform_entropy": found.uniform_entropy,
            "uniform_distance": uniform_distance(found.grid),
            "entropy": found.entropy.tolist(),
            "distance": found.distance.tolist(),
            "prefix_share": found.prefix_share.tolist(),
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
    """The mean distance of two places drawn at random: what a head that looks everywhere alike would have."""
    return float(distances(grid).mean())


def query_maps(weights: Tensor, prefix: int, grid: tuple[int, ...], *, cls: bool) -> Tensor:
    """What an image's summary looks at: [B, H, S, S] -> [B, H, h, w], shares of the patches alone, sum 1.

    cls: the first token's attention; else the mean over all patches' attention.
    """
    rows = weights[:, :, 0, prefix:] if cls else weights[:, :, prefix:, prefix:].mean(dim=2)
    return (rows / rows.sum(dim=-1, keepdim=True)).unflatten(-1, grid)


def top_share(maps: Tensor, share: float = 0.1) -> Tensor:
    """How much of each map lies on its brightest `share` of the places: [..., h, w] -> [...]; even attention: `share`.

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
    """Where a model's heads look: over all images, and laid over a few.

    model: whatever `open_model` takes. data: a path or a source; None for the images that a run was trained on. layer:
    whose maps are laid over images, from 1; None for the last. show: how many. chosen: see `load_set`; 64 where no
    count is said.
    """
    check_value("show", show, ">= 1")
    model = opened(model, seed)
    backbone, positions = model.backbone, model.positions
    check_attention_maps(backbone)
    depth = check_layer(backbone, layer)
    chosen.setdefault("count", 64)
    loader = load_set(model, data, **chosen)
    found = survey(backbone, loader, positions=positions)
    first = next(iter(loader)).inputs[:show]
    maps = image_maps(backbone, first, depth, positions=positions)
    pictures = loader.shown(first).cpu()
    shown = AttentionMaps(pictures, maps, depth, has_cls(backbone), positions)
    return Attention(found, shown, provenance=made_with(model, loader, seed))


@torch.no_grad()
def survey(backbone: Backbone, batches: Iterable[Batch], *, positions: bool = True) -> Survey:
    """Looks at every head over all images. positions: whether the model is given its own (False after MP3)."""
    check_attention_maps(backbone)
    p, count = backbone.num_prefix, 0
    sums: dict[str, list[Tensor]] = {"entropy": [], "prefix": [], "relative": []}

    def see(layer: int, weights: Tensor) -> None:
        queries = weights[:, :, p:]
        found = {
            "entropy": row_entropy(queries).mean(dim=2).sum(dim=0, dtype=torch.float64),
            "prefix": queries[..., :p].sum(dim=-1).mean(dim=2).sum(dim=0, dtype=torch.float64),
            "relative": relative_sums(queries[..., p:], backbone.grid),
        }
        for name, value in found.items():
            if layer == len(sums[name]):
                sums[name].append(value)
            else:
                sums[name][layer] += value

    for batch in batches:
        count += len(batch.inputs)
        _watch(backbone, batch.inputs, positions, see)
    if not count:
        raise SitusError("there are no images to look at", field="data")
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
    found: list[Tensor] = []
    cls = has_cls(backbone)

    def see(depth: int, weights: Tensor) -> None:
        if depth == layer:
            found.append(query_maps(weights, backbone.num_prefix, backbone.grid, cls=cls).cpu())

    _watch(backbone, images, positions, see)
    return torch.cat(found)


def check_layer(backbone: Backbone, layer: int | None) -> int:
    """A layer as people count it, 1 to L (None: the last), as an index from 0."""
    number = backbone.depth if layer is None else layer
    if not 1 <= number <= backbone.depth:
        raise SitusError(field="layer", value=layer, allowed=f"in 1 to {backbone.depth}, the layers of {backbone.name}")
    return number - 1


def _watch(backbone: Backbone, images: Tensor, positions: bool, see: See) -> None:
    """Shows every layer's weights to `see`, for a few images at a time."""
    for part in images.split(max(1, _WEIGHTS_AT_ONCE // (backbone.num_prefix + backbone.num_tokens) ** 2)):
        stream = backbone.assemble(backbone.embed(part), backbone.positions() if positions else None)
        watch_attention(backbone, stream, see)
