"""Neighbours layer by layer as a page."""

from __future__ import annotations

from collections.abc import Mapping

from situs.evaluate.knn_layers import LayerKnn
from situs.report import figures
from situs.report.html import Page
from situs.results import Cell, percent

POOLS = {"cls": "CLS token", "mean": "mean of the patches"}

MEANING = """
Every image becomes one vector after each block, through the model's final norm: its CLS token, or the mean of its
patches. A test image gets the class that weighs most among its k nearest training images by cosine similarity. Nothing
is trained, so this measures how the representation itself groups the images.
"""


def make_page(
    found: LayerKnn, name: str, k: int, temperature: float | None, chance: float, facts: Mapping[str, Cell]
) -> tuple[Page, dict[str, bytes]]:
    """The page and its pictures. chance: 1 / classes."""
    page = Page(f"{name}: nearest neighbours", lead=finding(found, chance))
    section = page.section("Layer by layer")
    pictures = {}
    if found.why_last is None:
        pictures["layers"] = figures.png(_curves(found, chance))
        section.figure(pictures["layers"], "Share of test images whose class the neighbours name, after each block.")
    else:
        section.note(f"Only the last layer: {found.why_last}.")
    weight = "every neighbour counts as one" if temperature is None else f"weights exp(similarity / {temperature:g})"
    caption = f"{found.count:,} images, k = {k} of {found.bank:,} training images, {weight}."
    section.table(*table(found), caption)
    page.section("What the numbers mean").text(MEANING)
    page.section("How this page was made").facts(facts)
    return page, pictures


def finding(found: LayerKnn, chance: float) -> str:
    """The result in words."""
    last = max(row.layer for row in found.rows)
    ends = {row.pool: row.accuracy for row in found.rows if row.layer == last}
    said = " and ".join(f"{percent(share, 2)} by the {POOLS[pool]}" for pool, share in ends.items())
    said = f"After the last block the neighbours name the right class of {said} (chance {percent(chance, 2)})."
    best = max(found.rows, key=lambda row: row.accuracy)
    if best.accuracy > max(ends.values()):
        said += f" The best is block {best.layer}'s {POOLS[best.pool]}: {percent(best.accuracy, 2)}."
    return said


def table(found: LayerKnn) -> tuple[list[str], list[list[Cell]]]:
    """Header and a row a layer, a column a pool."""
    pools = list(dict.fromkeys(row.pool for row in found.rows))
    shares = {(row.layer, row.pool): row.accuracy for row in found.rows}
    layers = sorted({row.layer for row in found.rows})
    rows: list[list[Cell]] = [[layer, *(f"{100 * shares[layer, pool]:.2f}" for pool in pools)] for layer in layers]
    return ["after block", *(f"{POOLS[pool]}, %" for pool in pools)], rows


def _curves(found: LayerKnn, chance: float) -> figures.Figure:
    series = {}
    for row in found.rows:
        x, y = series.setdefault(POOLS[row.pool], ([], []))
        x.append(row.layer)
        y.append(100 * row.accuracy)
    layers = sorted({row.layer for row in found.rows})
    series["chance"] = layers, [100 * chance] * len(layers)
    figure = figures.curves(series, "after block", "test images named right, %")
    figure.axes[0].set_xticks(layers if len(layers) <= 16 else layers[::2])
    return figure
