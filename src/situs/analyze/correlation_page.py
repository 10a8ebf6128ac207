"""The page of `situs analyze correlation`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from situs.analyze.correlation import Correlation
from situs.analyze.layers import LAST
from situs.analyze.projection import spread_places
from situs.report import figures, places
from situs.report.html import Page, Section
from situs.results import Cell

COLUMNS = {
    "within_near": "1 image, neighbours",
    "within": "1 image",
    "across_same": "2 images, same place",
    "across": "2 images",
}
HEAD = {
    "within_near": "near",
    "within": "1 image",
    "across_same": "same place",
    "across": "2 images",
    "position": "shared place",
    "image": "shared image",
}
HARDLY = 0.01
"""A gain that is not worth a word."""
LARGEST = 400
"""The most places whose maps go into the JSON."""


def in_words(found: Mapping[str, Correlation]) -> str:
    """What the maps at the end of the model say, and where position weighs most."""
    last = found[LAST].summary
    if last["position"] < HARDLY:
        place = f"no more than two different places do ({last['across']:.2f}): no position is left in them"
    else:
        place = (
            f"{last['position']:.2f} more than two different places ({last['across']:.2f}): they keep their position"
        )
    peak, most = max(((depth, each.summary["position"]) for depth, each in found.items()), key=lambda pair: pair[1])
    where = {LAST: "after the final norm", "embedding": "before the first block"}.get(peak, f"after block {peak}")
    return (
        f"After the final norm the features of two places of one image correlate {last['within']:.2f} on average, "
        f"{last['image']:.2f} more than in two different images: features of one image "
        f"{'flock together' if last['image'] > HARDLY else 'do not flock together'}. The same place in two images "
        f"correlates {last['across_same']:.2f}, {place}. A shared place weighs most {where}: {most:.2f}."
    )


def make_page(
    name: str, found: Mapping[str, Correlation], facts: Mapping[str, Cell], depth: str = LAST
) -> tuple[Page, dict[str, bytes]]:
    """The page and its pictures by name; the maps are drawn of one depth."""
    page = Page(
        f"Correlation between places: {name}",
        lead="How alike the features of two places are, in one image and in two.",
    )
    pictures: dict[str, bytes] = {}
    page.section("What was found").text(in_words(found))
    _maps(page.section("The maps"), found[depth], depth, pictures)
    _distance(page.section("Over distance"), found[depth], depth, pictures)
    _depths(page.section("From layer to layer"), found, pictures)
    page.section("How this was made").facts(facts).text(
        "Pearson correlation over the channels of two feature vectors, averaged over all images (one image) or over "
        "all pairs of different images (MP3's Figure 10, which draws random pairs)."
    )
    return page, pictures


def overview(found: Mapping[str, Correlation]) -> tuple[list[str], list[list[Cell]]]:
    """Header and rows, one a depth."""
    rows: list[list[Cell]] = []
    for depth, each in found.items():
        summary = each.summary
        rows.append([depth, *(f"{summary[key]:.3f}" for key in HEAD)])
    return ["after", *HEAD.values()], rows


def to_json(found: Mapping[str, Correlation]) -> dict[str, Any]:
    """Means at every depth and over distance; of the end the maps too, where they are not too many numbers (N²)."""
    last = found[LAST]
    depths = {}
    for depth, each in found.items():
        steps, within, across = each.by_distance()
        depths[depth] = {
            "grid": list(each.grid),
            **each.summary,
            "distance": steps,
            "within_by_distance": within,
            "across_by_distance": across,
        }
    maps = {"within": last.within, "across": last.across}
    kept = {name: _rounded(each) if len(each) <= LARGEST else None for name, each in maps.items()}
    return {"images": last.images, "depths": depths, **kept}


def _rounded(maps: Tensor) -> list[list[float]]:
    return [[round(value, 5) for value in row] for row in maps.tolist()]


def _maps(section: Section, found: Correlation, depth: str, pictures: dict[str, bytes]) -> None:
    h, w = found.grid
    rows, columns = spread_places((h, w))
    chosen = torch.tensor([row * w + column for row in rows for column in columns])
    panels = {
        title: maps[chosen].reshape(len(rows), len(columns), h, w)
        for title, maps in (("within one image", found.within), ("across two images", found.across))
    }
    pictures["maps"] = figures.png(places.mosaics(panels, rows, columns, "Pearson correlation"))
    section.figure(
        pictures["maps"],
        f"{_after(depth)}: each map shows how the ringed place correlates with all {h} × {w} places. The two scales "
        "differ; neither counts the ringed place itself.",
    )


def _distance(section: Section, found: Correlation, depth: str, pictures: dict[str, bytes]) -> None:
    steps, within, across = found.by_distance()
    series = {"within one image": (steps[1:], within[1:]), "across two images": (steps, across)}
    drawn = figures.curves(series, "distance between the places, patches", "mean Pearson correlation")
    pictures["distance"] = figures.png(drawn)
    section.figure(
        pictures["distance"],
        f"{_after(depth)}. What falls with distance across images is position: as the model was told it, and as all "
        "photographs share it (skies above, things in the middle). What falls faster within one image is that "
        "neighbours show the same thing.",
    )


def _depths(section: Section, found: Mapping[str, Correlation], pictures: dict[str, bytes]) -> None:
    names = [depth.replace("embedding", "embed") for depth in found]
    series = {COLUMNS[key]: (range(len(names)), [each.summary[key] for each in found.values()]) for key in COLUMNS}
    drawn = places.lines_by_name(series, names, "after block", "mean Pearson correlation")
    pictures["layers"] = figures.png(drawn)
    section.figure(
        pictures["layers"],
        "Means over pairs of places, two different ones where nothing else is said.",
    )
    section.table(
        *overview(found),
        "Near: neighbours in one image. Same place: in two images. Shared place: what two images gain when the "
        "place is the same (third less fourth). Shared image: what two places gain when the image is the same (second "
        "less fourth).",
    )


def _after(depth: str) -> str:
    return {LAST: "After the final norm", "embedding": "Before the first block"}.get(depth, f"After block {depth}")
