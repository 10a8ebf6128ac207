"""The page of position vectors: several tables side by side, two known ones beneath them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from situs.measure.position.vectors import (
    FEWEST,
    NEIGHBOURS,
    SHOWN,
    Look,
    PositionTables,
    has_umap,
    similarities,
    spread_places,
    umap_points,
)
from situs.report import figures, places
from situs.report.html import Page, Section
from situs.results import Cell, percent


def page(found: PositionTables) -> Page:
    """What was found, projections, likeness, spectrum, and what a linear map reads off."""
    looks, references, said = found.looks, found.references, found.summary()
    names = ", ".join(dict.fromkeys(look.name for look in looks))
    page = Page(f"Positions of {names}", lead=said.sentence)
    for look in looks[:3]:
        two = look.decoded.two.mean
        page.number(
            f"{two:.2f} patches", f"error of a linear reader of {look.name} (blind {look.decoded.chance_two:.2f})"
        )
    page.section("What was found").table(*said.tables[0][1:])
    _projections(page, looks, found.seed)
    _alike(page.section("How alike the places are"), looks)
    _spectrum(page.section("How many directions they fill"), looks, references)
    _decoded(page.section("Reading a place off its vector"), looks, references)
    return page.end(found.provenance.facts)


def _projections(page: Page, looks: Sequence[Look], seed: int) -> None:
    section = page.section("The places in two and three dimensions")
    section.text(
        "Neighbours are joined. Where the vectors know the grid, the lines of rows and of columns form a sheet, "
        "however bent; where they do not, a tangle."
    )
    for number, look in enumerate(looks, start=1):
        labels = places.component_labels(look.components.shares)
        for dims, what in ((2, "plane"), (3, "space")):
            (page.opening if (number, dims) == (1, 2) else section).figure(
                _sheets(look, look.components.points[:, :dims], labels[:dims]),
                f"{look.title}: the {what} of the {'two' if dims == 2 else 'three'} largest principal components, with "
                "the share of the variance that each holds.",
                name=_file(f"pca-{dims}d", number),
            )
        _umap(section, look, number, seed)
    if not has_umap():
        section.note("UMAP is not installed, so its picture is missing: `pip install 'situs[umap]'`.")


def _sheets(look: Look, points: Any, labels: tuple[str, ...], *, as_image: bool = False) -> figures.Figure:
    """The places twice, with lines along each row and along each column."""
    panels = [
        places.Sheet(f"lines along each {along}", points, labels, along, as_image=as_image)
        for along in ("row", "column")
    ]
    return places.sheets(panels, look.table.grid)


def _umap(section: Section, look: Look, number: int, seed: int) -> None:
    if not has_umap() or len(look.table.rows) < FEWEST:
        return
    points = umap_points(look.table.rows, seed=seed)
    near = min(NEIGHBOURS, len(points) - 1)
    said = f"{look.title}: UMAP with {near} neighbours. Distances between far places mean little here."
    section.figure(_sheets(look, points, ("UMAP, 1st", "UMAP, 2nd")), said, name=_file("umap", number))


def _alike(section: Section, looks: Sequence[Look]) -> None:
    section.text("The cosine of the angle between a place's vector and every other's, the mean vector taken off.")
    for number, look in enumerate(looks, start=1):
        h, w = look.table.grid
        rows, columns, chosen = spread_places((h, w))
        maps = similarities(look.table.rows, chosen).reshape(len(rows), len(columns), h, w)
        drawn = places.mosaics({look.title: maps}, rows, columns, "cosine similarity", limits=(-1, 1))
        every = len(chosen) == h * w
        said = f"Each map shows all {h} × {w} places, for the one that is ringed" + (
            "." if every else f"; {len(chosen)} places at equal distances are shown."
        )
        section.figure(drawn, said, name=_file("cosine", number))


def _spectrum(section: Section, looks: Sequence[Look], references: Sequence[Look]) -> None:
    section.text(
        "Few directions: the table holds little but the grid. Many: it holds more than that, or noise. Only a table "
        "that can also be read is informative."
    )
    rows: list[list[Cell]] = [
        [_row_name(look), *(f"{100 * look.spectrum.explained_by(count):.2f}" for count in SHOWN)]
        for look in (*looks, *references)
    ]
    rows.append(["MJP's paper: DeiT-S", "54.61", "68.55", "77.95", "85.54", "90.74"])
    rows.append(["MJP's paper: DeiT-S + MJP", "46.74", "58.36", "69.10", "78.13", "84.55"])
    section.table(
        ["explained variance, %", *(f"k = {count}" for count in SHOWN)],
        rows,
        "By the k largest components of the centred table, prefix tokens left out (MJP's Table 6; its models have "
        "14 × 14 places, 384 channels).",
    )
    shown = max(look.spectrum.components_for(0.99) for look in looks) + 1
    series = {}
    for look in (*looks, *references):
        energy = np.asarray(look.spectrum.energy[:shown])
        series[_row_name(look)] = (np.arange(1, len(energy) + 1), 100 * energy)
    drawn = figures.curves(series, "number n of singular values", "accumulated energy, %")
    caption = "Share of Σσ² that the n largest singular values hold (MJP's Figure 4)."
    section.figure(drawn, caption, name="energy")


def _decoded(section: Section, looks: Sequence[Look], references: Sequence[Look]) -> None:
    folds = looks[0].decoded.folds
    section.text(
        f"The places are dealt out at random in {folds} parts. For each part a linear map is fitted on the vectors of "
        "the others and guesses the places of this one. 1-D: the index in reading order. 2-D: row and column, the mean "
        "of both errors."
    )
    rows: list[list[Cell]] = []
    for look in (*looks, *references):
        found = look.decoded
        one, two = (f"{each.mean:.3f}\u202f±\u202f{each.std:.3f}" for each in (found.one, found.two))
        told = (f"{found.chance_one:.2f}", f"{found.chance_two:.2f}", percent(found.exact, 0))
        rows.append([_row_name(look), one, two, f"{found.rows:.3f}", f"{found.columns:.3f}", *told])
    for name, one, two in PAPER:
        rows.append([f"MJP's paper: {name}", one, two, None, None, None, None, None])
    section.table(
        ["mean absolute error", "1-D", "2-D", "row", "column", "blind, 1-D", "blind, 2-D", "right place"],
        rows,
        "1-D in places, 2-D, row and column in patches; ± the deviation between folds; blind: the mean of the places "
        "fitted on; right place: share of guesses that round to the place itself.",
    )
    section.text(
        "The paper's Table 8 is in the same units. It does not say so, but a linear fit makes the error of the index "
        "w times the row's plus the column's, w the places in a row, and its 1-D figures are 10 to 14 times its 2-D "
        "figures on a grid of 14: raw indices, mean of both axes. Scaled to [0, 1] they would be 180 times."
    )
    section.note(*filter(None, map(few_places, looks)))
    for number, look in enumerate(looks, start=1):
        guesses = look.decoded.guesses[:, ::-1]
        drawn = _sheets(look, guesses, ("guessed column", "guessed row"), as_image=True)
        said = f"{look.title}: where each place is read to be, when the map was fitted without it."
        section.figure(drawn, said, name=_file("guesses", number))


PAPER = (
    ("DeiT-S", ".945\u202f±\u202f.031", ".076\u202f±\u202f.004"),
    ("DeiT-S + MJP (DAL-LN)", ".566\u202f±\u202f.013", ".042\u202f±\u202f.002"),
    ("DeiT-S + MJP (DAL-NLN)", "1.301\u202f±\u202f.035", ".134\u202f±\u202f.003"),
)
"""MJP's Table 8, on 14 × 14 places."""


def few_places(look: Look) -> str:
    """What to know of a fit on hardly more places than channels, or nothing."""
    count, channels = look.decoded.fitted, look.table.rows.shape[1]
    said = f"`{look.name}`: {count} places to fit {channels} channels"
    if count <= channels:
        return f"{said}: many maps fit them without error, and the one of least norm was taken."
    if count < 2 * channels:
        return (
            f"{said}: hardly enough, so that the map makes the most of every accident; a table that knows nothing is "
            "read worse than blindly."
        )
    return ""


def _row_name(look: Look) -> str:
    return look.name if look.table.kind == "reference" else look.title


def _file(name: str, number: int) -> str:
    """Of a picture; those of the first table bear no number."""
    return name if number == 1 else f"{name}-{number}"
