"""Consistency as a page: what was found in words, curves over γ, the table, what a shuffled image looks like."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from situs.core.jigsaw import move_patches
from situs.errors import counted
from situs.measure.consistency import TELLING, Consistency, ConsistencyCurve, puzzle
from situs.report import figures
from situs.report.html import Page
from situs.results import percent

MEANING = """
`x` is an image and `x̃` the same image with the patches of a block mask shuffled among themselves; γ is the share of
patches in the mask. Diff.Norm is ‖F(x) − F(x̃)‖, where F is the vector that the classifier reads, as a mean over the
images, and beside it the mean of its square (Eq. 6 of MJP; the published code prints the norm). Consistency is the
share of images whose answer stays the same, right or wrong.

Mask not told: every place keeps its own position, so the model is misled about where the shuffled patches stand. This
measures shuffling itself.

Mask told: the masked places are forgotten, so the model knows which patches have no place. On a plain ViT shuffling
inside the mask then changes nothing, so the number measures lost positions. The papers do not say which of the two they
report.
"""
_GAMMA = "γ, share of the patches that are shuffled"


def page(found: ConsistencyCurve) -> Page:
    """The curves, the numbers, and one image at each γ."""
    rows, said = found.rows, found.summary()
    page = Page(f"{found.provenance.name}: consistency under shuffled patches", lead=said.sentence)
    judged = [row for row in rows if row.consistency is not None]
    worst = min((row for row in rows if not row.told), key=lambda row: (row.consistency or 0, -row.ratio), default=None)
    if worst is not None and worst.consistency is not None:
        page.number(percent(worst.consistency), f"of answers stay at γ = {worst.ratio:g}, mask not told")
    if worst is not None and worst.clean_norm:
        page.number(percent(worst.diff_norm / worst.clean_norm), f"of its length the {found.reads} moves there")
    if judged:
        caption = "Share of images over γ: those whose answer stays the same, and right answers."
        page.opening.figure(_shares(rows), caption, name="shares")
    section = page.section("Over the share of shuffled patches") if judged else page.opening
    caption = f"Diff.Norm over γ: how far the {found.reads} moves, as a mean."
    section.figure(_norms(found), caption, name="norms")
    cells = sorted(said.tables[0].rows, key=lambda row: row[2] != TELLING[True])
    section = page.section("Numbers")
    caption = f"Over {counted(rows[0].count, 'images')}, block masks drawn for each image apart."
    section.table(said.tables[0].header, cells, caption).note(_notes(found))
    if found.example is not None:
        caption = "One image at each γ. The block mask is outlined; the patches inside it are shuffled."
        page.section("What the model sees").figure(_images(found, found.example), caption, name="images")
    return page.end(found.provenance.facts, MEANING)


def _notes(found: ConsistencyCurve) -> str:
    norm = found.rows[0].clean_norm
    notes = [f"Mask told: {found.untellable}." if found.untellable else f"Told, a masked place gets {found.unknown}."]
    notes.append(f"F is the {found.reads}, whose norm is {norm:.4g} on images left as they are.")
    if any(row.masked < 2 and row.ratio for row in found.rows):
        notes.append("A mask of fewer than two patches has nothing to shuffle.")
    if found.no_top1 is not None:
        notes.append(f"There is no top-1: {found.no_top1}.")
    return " ".join(notes)


def _series(rows: Sequence[Consistency], name: str, label: str) -> dict[str, tuple[list[float], list[float]]]:
    found = {}
    for told, words in TELLING.items():
        chosen = [row for row in rows if row.told == told and getattr(row, name) is not None]
        if chosen:
            found[f"{label}{words}"] = [row.ratio for row in chosen], [getattr(row, name) for row in chosen]
    return found


def _shares(rows: Sequence[Consistency]) -> figures.Figure:
    series = _series(rows, "consistency", "consistency, ") | _series(rows, "top1", "top-1, ")
    shares = {name: (x, [100 * value for value in y]) for name, (x, y) in series.items()}
    return figures.curves(shares, _GAMMA, "share of all, %")


def _norms(found: ConsistencyCurve) -> figures.Figure:
    label = f"Diff.Norm, ‖F(x) − F(x̃)‖\nof the {found.reads}"
    series = _series(found.rows, "diff_norm", "")
    series["‖F(x)‖ itself, for scale"] = [row.ratio for row in found.rows], [row.clean_norm for row in found.rows]
    return figures.curves(series, _GAMMA, label)


def _images(found: ConsistencyCurve, example: torch.Tensor) -> figures.Figure:
    """One image at every γ, the mask outlined."""
    ratios = sorted({row.ratio for row in found.rows})[:8]
    images, masks = [], []
    for ratio in ratios:
        mask, index = puzzle(found.grid, torch.zeros(1, dtype=torch.int64), ratio, found.seed)
        images.append(move_patches(example[None].cpu(), found.grid, index)[0])
        masks.append(mask[0])
    titles = [f"γ = {ratio:g}" for ratio in ratios]
    return figures.image_grid(images, titles, columns=8, masks=masks, grid=found.grid)
