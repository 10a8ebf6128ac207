"""Position accuracy as a page: DropPos's grid with its mean, or MP3's curve over η."""

from __future__ import annotations

import math

from situs.evaluate.position import PositionCurve, PositionGrid
from situs.report import figures
from situs.report.html import Page
from situs.report.value_grid import value_grid
from situs.results import percent

GRID_MEANING = """
The encoder is shown a share 1 − γ of the patches of an image; of those, a share γ_pos has lost its place and carries
the one vector that the run learned for lost places. The run's own position head says for each of them which of the N
places it came from. The numbers are plain top-1 over those patches alone: no weights, and no patch that was told its
place.

The larger γ_pos, the fewer anchors there are to go by; the larger γ, the less of the picture there is. The mean counts
every cell once, as the paper does.
"""

CURVE_MEANING = """
No patch is told its place. A share η of the patches serve only as queries: they look at the others, and nothing looks
at them. The run's own position head says for every patch, context included, which of the N places it came from. The
weights are the same at every η; only the evaluation changes.
"""


def grid_page(grid: PositionGrid) -> Page:
    """The page of DropPos's grid."""
    said, (gamma, gamma_pos) = grid.summary(), grid.trained
    page = Page(f"{grid.provenance.name}: position accuracy", lead=said.sentence)
    section = page.section("The grid of γ and γ_pos")
    trained = f"The run was trained at γ = {gamma:g} and γ_pos = {gamma_pos:g}."
    section.figure(heatmap(grid), f"Share of dropped places guessed right, in percent. {trained}", name="grid")
    if reasons := [cell.reason for cell in grid.cells if cell.reason is not None]:
        section.note(f"Some cells cannot be measured: {reasons[0]}.")
    caption = f"Over {grid.count:,} images of {grid.places} patches."
    page.section("Numbers").table(said.tables[0].header, said.tables[0].rows, caption)
    page.section("What the numbers mean").text(GRID_MEANING)
    page.section("How this page was made").facts(grid.provenance.facts)
    return page


def curve_page(found: PositionCurve) -> Page:
    """The page of MP3's curve."""
    said = found.summary()
    page = Page(f"{found.provenance.name}: position accuracy", lead=said.sentence)
    section = page.section("Over the share of patches that are no keys")
    caption = f"Share of all patches whose place is guessed right. Trained at η = {found.trained:g}."
    section.figure(curve(found), caption, name="curve")
    caption = f"Over {found.count:,} images of {found.places} patches."
    section.table(said.tables[0].header, said.tables[0].rows, caption)
    if found.anchors:
        section.note(f"This run tells {percent(found.anchors, None)} of the patches their place, here too.")
    page.section("What the numbers mean").text(CURVE_MEANING)
    page.section("How this page was made").facts(found.provenance.facts)
    return page


def curve(found: PositionCurve) -> figures.Figure:
    """Accuracy over η, and chance."""
    etas, places = list(found.accuracy), found.places
    series = {
        "this run": (etas, [100 * value for value in found.accuracy.values()]),
        f"chance, 1 / {places}": (etas, [100 / places] * len(etas)),
    }
    return figures.curves(series, "η at evaluation, share of patches that are no keys", "places guessed right, %")


def heatmap(grid: PositionGrid) -> figures.Figure:
    """γ down, γ_pos across; a dash where a cell cannot be measured."""
    gammas = list(dict.fromkeys(cell.mask_ratio for cell in grid.cells))
    positions = list(dict.fromkeys(cell.position_mask_ratio for cell in grid.cells))
    held = {(cell.mask_ratio, cell.position_mask_ratio): cell.accuracy for cell in grid.cells}
    values = [
        [math.nan if (value := held[row, column]) is None else 100 * value for column in positions] for row in gammas
    ]
    highest = max(value for row in values for value in row if not math.isnan(value))
    return value_grid(
        values,
        [f"{ratio:g}" for ratio in gammas],
        [f"{ratio:g}" for ratio in positions],
        "γ_pos, share of seen patches whose place is dropped",
        "γ, share of patches not seen",
        "places guessed right, %",
        limits=(0.0, max(10.0, 10.0 * math.ceil(highest / 10))),
    )
