"""Neighbours layer by layer as a page."""

from __future__ import annotations

from situs.evaluate.knn import POOLS, LayerKnn
from situs.report import figures
from situs.report.html import Page

MEANING = """
Every image becomes one vector after each block, through the model's final norm: its CLS token, or the mean of its
patches. A test image gets the class that weighs most among its k nearest training images by cosine similarity. Nothing
is trained, so this measures how the representation itself groups the images.
"""


def page(found: LayerKnn) -> Page:
    """The curve over the layers and its table."""
    said = found.summary()
    page = Page(f"{found.provenance.name}: nearest neighbours", lead=said.sentence)
    section = page.section("Layer by layer")
    if found.why_last is None:
        caption = "Share of test images whose class the neighbours name, after each block."
        section.figure(curves(found), caption, name="layers")
    else:
        section.note(f"Only the last layer: {found.why_last}.")
    tau = found.temperature
    weight = "every neighbour counts as one" if tau is None else f"weights exp(similarity / {tau:g})"
    caption = f"{found.count:,} images, k = {found.k} of {found.bank:,} training images, {weight}."
    section.table(said.tables[0].header, said.tables[0].rows, caption)
    page.section("What the numbers mean").text(MEANING)
    page.section("How this page was made").facts(found.provenance.facts)
    return page


def curves(found: LayerKnn) -> figures.Figure:
    """One line a pool over the layers, and chance."""
    series = {}
    for row in found.rows:
        x, y = series.setdefault(POOLS[row.pool], ([], []))
        x.append(row.layer)
        y.append(100 * row.accuracy)
    layers = sorted({row.layer for row in found.rows})
    series["chance"] = layers, [100 * found.chance] * len(layers)
    figure = figures.curves(series, "after block", "test images named right, %")
    figure.axes[0].set_xticks(layers if len(layers) <= 16 else layers[::2])
    return figure
