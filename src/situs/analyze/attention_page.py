"""The page of `situs analyze attention`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from situs.analyze.attention import Survey, top_share, uniform_distance
from situs.report.attention import attention_over_images, head_tables, relative_maps
from situs.report.figures import channels_drawn, png
from situs.report.html import Page, Section
from situs.results import Cell, percent

LOCAL = 0.5
"""A head is called local where it looks less than this share as far as one that looks everywhere alike."""


@dataclass(frozen=True)
class Shown:
    """What the page shows over images [n, C, H, W] in [0, 1]: maps [n, H, h, w] of `layer`, counted from 0.

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


def attention_numbers(found: Survey, shown: Shown) -> dict[str, Any]:
    """What the page says, as JSON holds it."""
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


def layer_rows(found: Survey) -> list[list[str]]:
    """A row for each layer, as text: layer, mean, lowest and highest entropy, mean distance, share of prefix tokens."""
    return [
        [
            str(layer + 1),
            f"{nats.mean():.2f}",
            f"{nats.min():.2f}",
            f"{nats.max():.2f}",
            f"{far.mean():.1f}",
            percent(prefix.mean()),
        ]
        for layer, (nats, far, prefix) in enumerate(zip(found.entropy, found.distance, found.prefix_share, strict=True))
    ]


LAYER_HEADER = ("layer", "mean entropy", "lowest", "highest", "distance", "to prefix tokens")


def attention_page(name: str, found: Survey, shown: Shown, facts: Mapping[str, Cell]) -> tuple[Page, dict[str, bytes]]:
    """The page, and its figures by name. facts: how it was made."""
    pictures = {
        "images": png(attention_over_images(shown.images.numpy(), shown.maps.numpy())),
        "heads": png(
            head_tables(
                {
                    "Entropy of each head": (found.entropy.numpy(), "nats"),
                    "How far each head looks": (found.distance.numpy(), "patches"),
                }
            )
        ),
        "relative": png(relative_maps(found.relative.numpy(), found.entropy.numpy())),
    }
    page = Page(f"Attention of {name}", lead=_lead(found, shown))
    _images(page.section("Over images"), shown, pictures["images"])
    if said := channels_drawn(shown.images.shape[1]):
        page.sections[-1].text(said)
    _heads(page.section("Layer by head"), found, pictures["heads"])
    _relative(page.section("By relative offset"), found, pictures["relative"])
    page.section("How this page was made").facts(facts)
    return page, pictures


def _lead(found: Survey, shown: Shown) -> str:
    layers, heads = found.entropy.shape
    low, high = int(found.entropy.argmin()), int(found.entropy.argmax())
    local = int((found.distance < LOCAL * uniform_distance(found.grid)).sum())
    whose = "CLS" if shown.cls else "the average patch"
    return (
        f"In layer {shown.layer + 1} {whose} puts {percent(shown.brightest_tenth, 0)} of its attention to patches on a "
        f"tenth of them. The sharpest of {layers * heads} heads is {_head(low, heads)} ({_nats(found, low)}), the "
        f"widest {_head(high, heads)} ({_nats(found, high)}). {_locals(local)} less than half as far as even "
        "attention would."
    )


def _locals(count: int) -> str:
    if count == 0:
        return "No head is local: none looks"
    return "One head is local: it looks" if count == 1 else f"{count} heads are local: they look"


def _head(index: int, heads: int) -> str:
    return f"head {index % heads + 1} of layer {index // heads + 1}"


def _nats(found: Survey, index: int) -> str:
    nats = float(found.entropy.flatten()[index])
    return f"{nats:.2f} nats, as if it saw {math.exp(nats):.1f} of {found.tokens} tokens"


def _images(section: Section, shown: Shown, picture: bytes) -> None:
    whose = (
        "What the CLS token takes from each patch"
        if shown.cls
        else "The model has no CLS token, so this is the mean over all patches of what each takes from each patch"
    )
    section.text(
        f"{whose}, in layer {shown.layer + 1}; what goes to prefix tokens is left out and the rest scaled to sum 1. "
        + ("" if shown.positions else "The model was trained without positions and is run without them here. ")
        + "On the brightest tenth of the patches lies "
        f"{percent(shown.brightest_tenth, 0)} of the mean map; even attention would put 10 % there."
    )
    section.figure(
        picture,
        "Each map has its own scale, from 0 (black) to its 99th percentile (light), so compare shapes, not colours, "
        "between maps.",
        alt="Images, the mean attention over heads, and the attention of each head.",
    )


def _heads(section: Section, found: Survey, picture: bytes) -> None:
    section.text(
        "The entropy of a head is −Σ a log a over the keys, prefix tokens included, averaged over "
        f"{found.images:,} images and all patch queries: 0 nats is one token, {found.uniform_entropy:.2f} nats "
        f"(log {found.tokens}) all tokens alike. The distance is that of the attended patches from the query; even "
        f"attention would have {uniform_distance(found.grid):.1f} patches on this {found.grid[0]}×{found.grid[1]} grid."
    )
    section.figure(picture, "Dark: sharp, near. Light: wide, far.", alt="Entropy and distance by layer and head.")
    section.table(LAYER_HEADER, layer_rows(found), "By layer, over its heads; entropies in nats, distance in patches.")


def _relative(section: Section, found: Survey, picture: bytes) -> None:
    height, width = found.grid
    section.text(
        "How much a patch takes on average from the patch that stands (Δrow, Δcolumn) away from it. The query is in "
        f"the middle; offsets run from −{height - 1} to {height - 1} down and from −{width - 1} to {width - 1} across. "
        "Each offset is averaged over just the pairs of patches that have it, so that offsets that occur seldom (a "
        f"corner's once an image, (0, 0) {height * width:,} times) are not darkened by the pairs that the image's "
        "border cuts off; they are noisier instead."
    )
    section.figure(
        picture,
        "Under each map its head's entropy in nats. Colours go with the square root of the weight, from 0 to each "
        "map's own maximum; ticks point at the query itself.",
        alt="Average attention by relative offset for every layer and head.",
    )
