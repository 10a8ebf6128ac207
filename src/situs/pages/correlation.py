"""The page of the correlations between places."""

from __future__ import annotations

from collections.abc import Mapping

from situs.measure.correlation import Correlation, Correlations
from situs.measure.layers import LAST
from situs.measure.position.vectors import spread_places
from situs.report import figures, places
from situs.report.html import Page, Section
from situs.results import Table

MEANING = """
Pearson correlation over the channels of two feature vectors, averaged over all images (one image) or over all pairs of
different images (MP3's Figure 10, which draws random pairs).
"""

COLUMNS = {
    "within_near": "1 sample, neighbours",
    "within": "1 sample",
    "across_same": "2 samples, same place",
    "across": "2 samples",
}


def page(found: Correlations) -> Page:
    """The maps of one depth, that depth over distance, and every depth."""
    said, shown = found.summary(), found.depths[found.depth]
    page = Page(f"Correlation between places: {found.provenance.name}", lead=said.sentence)
    page.number(f"{shown.means['within']:.2f}", "correlation of two places of one image")
    page.number(f"{shown.means['across_same']:.2f}", "of the same place in two images")
    page.number(f"{shown.means['across']:.2f}", "of two places in two images")
    _distance(page.opening, shown, found.depth)
    _maps(page.section("The maps"), shown, found.depth)
    _depths(page.section("From layer to layer"), found.depths, said.tables[0])
    return page.end(found.provenance.facts, MEANING)


def _maps(section: Section, found: Correlation, depth: str) -> None:
    h, w = found.grid
    rows, columns, chosen = spread_places((h, w))
    panels = {
        title: maps[chosen].reshape(len(rows), len(columns), h, w)
        for title, maps in (("within one sample", found.within), ("across two samples", found.across))
    }
    section.figure(
        places.mosaics(panels, rows, columns, "Pearson correlation"),
        f"{_after(depth)}: each map shows how the ringed place correlates with all {h} × {w} places. The two scales "
        "differ; neither counts the ringed place itself.",
        name="maps",
    )


def _distance(section: Section, found: Correlation, depth: str) -> None:
    steps, within, across = found.by_distance()
    series = {"within one sample": (steps[1:], within[1:]), "across two samples": (steps, across)}
    section.figure(
        figures.curves(series, "distance between the places, patches", "mean Pearson correlation"),
        f"{_after(depth)}. What falls with distance across images is position: as the model was told it, and as all "
        "images share it (photographs have skies above). What falls faster within one image is that "
        "neighbours show the same thing.",
        name="distance",
    )


def _depths(section: Section, found: Mapping[str, Correlation], table: Table) -> None:
    names = [depth.replace("embedding", "embed") for depth in found]
    series = {COLUMNS[key]: (range(len(names)), [each.means[key] for each in found.values()]) for key in COLUMNS}
    drawn = figures.curves(series, "after block", "mean Pearson correlation", x_names=names)
    caption = "Means over pairs of places, two different ones where nothing else is said."
    section.figure(drawn, caption, name="layers")
    section.table(
        table.header,
        table.rows,
        "Near: neighbours in one image. Same place: in two images. Shared place: what two images gain when the "
        "place is the same (third less fourth). Shared image: what two places gain when the image is the same (second "
        "less fourth).",
    )


def _after(depth: str) -> str:
    return {LAST: "After the final norm", "embedding": "Before the first block"}.get(depth, f"After block {depth}")
