"""Position accuracy as a page: DropPos's grid with its mean, or MP3's curve over η."""

from __future__ import annotations

import math
from collections.abc import Mapping

from situs.evaluate.position import Cell as GridCell
from situs.evaluate.position import PositionGrid
from situs.methods.droppos import DropPos
from situs.methods.mp3 import MP3
from situs.report import figures
from situs.report.html import Page
from situs.report.value_grid import value_grid
from situs.results import Cell, percent

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


def grid_page(
    grid: PositionGrid, method: DropPos, name: str, facts: Mapping[str, Cell]
) -> tuple[Page, dict[str, bytes]]:
    """The page of DropPos's grid and its pictures."""
    page = Page(f"{name}: position accuracy", lead=grid_finding(grid))
    picture = figures.png(_heatmap(grid))
    config = method.config
    trained = f"γ = {config.mask_ratio:g} and γ_pos = {config.position_mask_ratio:g}"
    section = page.section("The grid of γ and γ_pos")
    section.figure(picture, f"Share of dropped places guessed right, in percent. The run was trained at {trained}.")
    if (missing := _missing(grid)) is not None:
        section.note(missing)
    header, rows = grid_table(grid)
    page.section("Numbers").table(header, rows, f"Over {grid.count:,} images of {grid.places} patches.")
    page.section("What the numbers mean").text(GRID_MEANING)
    page.section("How this page was made").facts(facts)
    return page, {"grid": picture}


def grid_finding(grid: PositionGrid) -> str:
    """The result in words."""
    found = [cell for cell in grid.cells if cell.accuracy is not None]
    best = max(found, key=lambda cell: cell.accuracy or 0.0)
    worst = min(found, key=lambda cell: cell.accuracy or 0.0)
    chance = 1 / grid.places
    cells = f"the {len(found)} cells" if len(found) == len(grid.cells) else f"{len(found)} of {len(grid.cells)} cells"
    return (
        f"The mean position accuracy over {cells} is {percent(grid.mean, 2)}, {grid.mean / chance:.1f} times chance "
        f"({percent(chance, 2)}): from {_at(worst)} to {_at(best)}."
    )


def grid_table(grid: PositionGrid) -> tuple[list[str], list[list[Cell]]]:
    """Header and a row for each cell."""
    header = ["γ", "γ_pos", "patches seen", "places dropped", "accuracy, %"]
    rows: list[list[Cell]] = [
        [f"{cell.mask_ratio:g}", f"{cell.position_mask_ratio:g}", cell.visible, cell.dropped,
         None if cell.accuracy is None else f"{100 * cell.accuracy:.2f}"]
        for cell in grid.cells
    ]  # fmt: skip
    return header, rows


def curve_page(
    found: Mapping[float, float], count: int, method: MP3, name: str, facts: Mapping[str, Cell]
) -> tuple[Page, dict[str, bytes]]:
    """The page of MP3's curve and its pictures. count: images."""
    places = method.backbone.num_tokens
    page = Page(f"{name}: position accuracy", lead=curve_finding(found, method))
    series = {
        "this run": (list(found), [100 * value for value in found.values()]),
        f"chance, 1 / {places}": (list(found), [100 / places] * len(found)),
    }
    label = "η at evaluation, share of patches that are no keys"
    picture = figures.png(figures.curves(series, label, "places guessed right, %"))
    section = page.section("Over the share of patches that are no keys")
    section.figure(picture, f"Share of all patches whose place is guessed right. Trained at η = {_trained(method)}.")
    header, rows = curve_table(found)
    section.table(header, rows, f"Over {count:,} images of {places} patches.")
    anchors = method.config.anchor_ratio
    if anchors:
        section.note(f"This run tells {percent(anchors, None)} of the patches their place, here too.")
    page.section("What the numbers mean").text(CURVE_MEANING)
    page.section("How this page was made").facts(facts)
    return page, {"curve": picture}


def curve_finding(found: Mapping[float, float], method: MP3) -> str:
    """The result in words, at the η nearest to the one trained with."""
    eta = min(found, key=lambda ratio: abs(ratio - method.config.mask_ratio))
    chance = 1 / method.backbone.num_tokens
    return (
        f"At η = {eta:g} (trained at {_trained(method)}) the place of {percent(found[eta], 2)} of all patches is "
        f"guessed right, {found[eta] / chance:.1f} times chance ({percent(chance, 2)})."
    )


def curve_table(found: Mapping[float, float]) -> tuple[list[str], list[list[Cell]]]:
    """Header and a row for each η."""
    return ["η", "accuracy, %"], [[f"{ratio:g}", f"{100 * value:.2f}"] for ratio, value in found.items()]


def _trained(method: MP3) -> str:
    return f"{method.config.mask_ratio:g}"


def _at(cell: GridCell) -> str:
    return f"{percent(cell.accuracy or 0.0, 2)} (γ = {cell.mask_ratio:g}, γ_pos = {cell.position_mask_ratio:g})"


def _missing(grid: PositionGrid) -> str | None:
    """Why cells are missing, in one remark."""
    reasons = dict.fromkeys(cell.reason for cell in grid.cells if cell.reason is not None)
    return f"Some cells cannot be measured: {next(iter(reasons))}." if reasons else None


def _heatmap(grid: PositionGrid) -> figures.Figure:
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
