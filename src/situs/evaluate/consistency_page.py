"""Consistency as a page: what was found in words, curves over γ, the table, what a shuffled image looks like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from situs.core.jigsaw import move_patches
from situs.evaluate.consistency import Consistency, Shuffled
from situs.report import figures
from situs.report.html import Page, Section
from situs.results import Cell, percent

TELLING = {True: "mask told", False: "mask not told"}
TABLE_1 = 0.15
"""γ of the paper's Table 1, of which the page speaks first."""

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


def make_page(
    rows: Sequence[Consistency],
    view: Shuffled,
    name: str,
    facts: Mapping[str, Cell],
    *,
    no_top1: str | None = None,
    example: Tensor | None = None,
    seed: int = 0,
) -> tuple[Page, dict[str, bytes]]:
    """The page and its pictures. no_top1: why there is no top-1. example: an image [C, H, W] in [0, 1]."""
    page = Page(f"{name}: consistency under shuffled patches", lead=finding(rows, view))
    pictures = {"norms": figures.png(_norms(rows, view))}
    section = page.section("Over the share of shuffled patches")
    if any(row.consistency is not None for row in rows):
        pictures["shares"] = figures.png(_shares(rows))
        caption = "Share of images over γ: those whose answer stays the same, and right answers."
        section.figure(pictures["shares"], caption)
    section.figure(pictures["norms"], f"Diff.Norm over γ: how far the {view.backbone.reads} moves, as a mean.")
    _table(page.section("Numbers"), rows)
    notes = [f"Mask told: {view.untellable}." if view.untellable else f"Told, a masked place gets {view.unknown}."]
    notes.append(f"F is the {view.backbone.reads}, whose norm is {rows[0].clean_norm:.4g} on images left as they are.")
    if any(row.masked == 1 for row in rows):
        notes.append("A mask of one patch has nothing to shuffle.")
    if no_top1 is not None:
        notes.append(f"There is no top-1: {no_top1}.")
    page.sections[-1].note(" ".join(notes))
    if example is not None:
        pictures["images"] = figures.png(_images(rows, view, example, seed))
        page.section("What the model sees").figure(
            pictures["images"], "One image at each γ. The block mask is outlined; the patches inside it are shuffled."
        )
    page.section("What the numbers mean").text(MEANING)
    page.section("How this page was made").facts(facts)
    return page, pictures


def finding(rows: Sequence[Consistency], view: Shuffled) -> str:
    """The result at the γ nearest to Table 1's, in words."""
    shown = [row for row in rows if row.ratio > 0] or list(rows)
    ratio = min((row.ratio for row in shown), key=lambda ratio: abs(ratio - TABLE_1))
    at = {row.told: row for row in rows if row.ratio == ratio}
    row = at[False]
    part = f"{percent(row.diff_norm / row.clean_norm)} of its length" if row.clean_norm else "from a length of 0"
    said = f"With {percent(ratio, None)} of the patches shuffled and the model not told, "
    if row.consistency is not None:
        said += f"{percent(row.consistency)} of {row.count:,} answers stay the same, and "
    said += f"the {view.backbone.reads} moves by {row.diff_norm:.3g} ({part})."
    if True in at:
        told = at[True]
        same = "" if told.consistency is None else f"{percent(told.consistency)} stay the same and "
        said += f" Told which places to distrust, {same}it moves by {told.diff_norm:.3g}."
    return said


def table(rows: Sequence[Consistency]) -> tuple[list[str], list[list[Cell]]]:
    """Header and a row for each γ × told or not."""
    header = ["γ", "patches shuffled", "", "top-1, %", "consistency, %", "Diff.Norm", "Diff.Norm² (Eq. 6)"]
    cells: list[list[Cell]] = [
        [f"{r.ratio:g}", r.masked, TELLING[r.told], _percent(r.top1), _percent(r.consistency), r.diff_norm,
         r.diff_norm_squared]
        for r in rows
    ]  # fmt: skip
    return header, cells


def _table(section: Section, rows: Sequence[Consistency]) -> None:
    header, cells = table(sorted(rows, key=lambda row: not row.told))
    section.table(header, cells, f"Over {rows[0].count:,} images, block masks drawn for each image apart.")


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.2f}"


def _series(rows: Sequence[Consistency], name: str, label: str) -> dict[str, tuple[list[float], list[float]]]:
    found = {}
    for told, words in TELLING.items():
        chosen = [row for row in rows if row.told == told and getattr(row, name) is not None]
        if chosen:
            found[f"{label}{words}"] = [row.ratio for row in chosen], [getattr(row, name) for row in chosen]
    return found


def _shares(rows: Sequence[Consistency]) -> figures.Figure:
    series = _series(rows, "consistency", "consistency, ") | _series(rows, "top1", "top-1, ")
    percent = {name: (x, [100 * value for value in y]) for name, (x, y) in series.items()}
    return figures.curves(percent, "γ, share of the patches that are shuffled", "share of the images, %")


def _norms(rows: Sequence[Consistency], view: Shuffled) -> figures.Figure:
    label = f"Diff.Norm, ‖F(x) − F(x̃)‖\nof the {view.backbone.reads}"
    series = _series(rows, "diff_norm", "")
    series["‖F(x)‖ itself, for scale"] = [row.ratio for row in rows], [row.clean_norm for row in rows]
    return figures.curves(series, "γ, share of the patches that are shuffled", label)


def _images(rows: Sequence[Consistency], view: Shuffled, example: Tensor, seed: int) -> figures.Figure:
    """One image at every γ, the mask outlined."""
    ratios = sorted({row.ratio for row in rows})[:8]
    images, masks = [], []
    for ratio in ratios:
        mask, index = view.puzzle(torch.zeros(1, dtype=torch.int64), ratio, seed)
        images.append(move_patches(example[None].cpu(), view.grid, index)[0])
        masks.append(mask[0])
    titles = [f"γ = {ratio:g}" for ratio in ratios]
    return figures.image_grid(images, titles, columns=8, masks=masks, grid=view.grid)
