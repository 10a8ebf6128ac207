"""How well a pretrained model knows where its patches were, by its own position head.

DropPos: the grid of γ (patches not seen) × γ_pos (places dropped), plain top-1 on the dropped places, and its mean.
MP3: accuracy over the share η of patches that are no keys (the paper's Figure 5).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from situs.errors import SitusError
from situs.evaluate.inference import evaluating, sum_over_ranks
from situs.limits import check_value
from situs.methods.base import Batch, Method
from situs.methods.droppos import DropPos
from situs.methods.mp3 import MP3
from situs.results import Result, Summary, Table, percent
from situs.train.step import autocast

RATIOS = (0.0, 0.25, 0.5, 0.75, 0.9)
"""η of MP3's curve."""

MASK_RATIOS = (0.0, 0.25, 0.5, 0.75)
POSITION_MASK_RATIOS = (0.25, 0.5, 0.75, 0.95)
"""γ and γ_pos of DropPos's 16 cells."""


@dataclass(frozen=True)
class Cell:
    """One cell of the grid. accuracy: share of the dropped places guessed right, None where `reason` says why not.

    visible: patches an image shows at γ. dropped: those of them whose place is dropped at γ_pos.
    """

    mask_ratio: float
    position_mask_ratio: float
    visible: int | None
    dropped: int | None
    accuracy: float | None
    reason: str | None = None

    def __str__(self) -> str:
        return f"{percent(self.accuracy or 0.0, 2)} (γ = {self.mask_ratio:g}, γ_pos = {self.position_mask_ratio:g})"


@dataclass(frozen=True)
class PositionGrid(Result):
    """DropPos's grid, row by row of γ. count: images. places: N, so that chance is 1 / N.

    trained: γ and γ_pos of the training.
    """

    file: ClassVar[str] = "position"

    cells: tuple[Cell, ...]
    count: int
    places: int
    trained: tuple[float, float]

    @property
    def mean(self) -> float:
        """The mean over the cells that can be measured, each counting once."""
        found = [cell.accuracy for cell in self.cells if cell.accuracy is not None]
        return sum(found) / len(found)

    def summary(self) -> Summary:
        """The mean over the cells, the worst and the best; a row for each cell."""
        found = [cell for cell in self.cells if cell.accuracy is not None]
        worst, best = (choose(found, key=lambda cell: cell.accuracy or 0.0) for choose in (min, max))
        chance, whole = 1 / self.places, len(self.cells)
        cells = f"the {len(found)} cells" if len(found) == whole else f"{len(found)} of {whole} cells"
        said = (
            f"The mean position accuracy over {cells} is {percent(self.mean, 2)}, {self.mean / chance:.1f} times "
            f"chance ({percent(chance, 2)}): from {worst} to {best}."
        )
        rows = [
            [f"{cell.mask_ratio:g}", f"{cell.position_mask_ratio:g}", cell.visible, cell.dropped,
             None if cell.accuracy is None else f"{100 * cell.accuracy:.2f}"]
            for cell in self.cells
        ]  # fmt: skip
        header = ["γ", "γ_pos", "patches seen", "places dropped", "accuracy, %"]
        return Summary(said, (Table(self.provenance.title(f"{self.count:,} images"), header, rows),))

    def numbers(self) -> dict[str, Any]:
        """Every cell and their mean."""
        cells = [asdict(cell) for cell in self.cells]
        return {"places": self.places, "cells": cells, "count": self.count, "mean": self.mean}


@dataclass(frozen=True)
class PositionCurve(Result):
    """MP3's curve: η -> share of all patches whose place is guessed right. count: images. places: N.

    trained: η of the training. anchors: share of the patches that the run tells their place, here too.
    """

    file: ClassVar[str] = "position"

    accuracy: dict[float, float]
    count: int
    places: int
    trained: float
    anchors: float = 0.0

    def summary(self) -> Summary:
        """The accuracy at the η nearest to the one trained with; a row for each η."""
        eta = min(self.accuracy, key=lambda ratio: abs(ratio - self.trained))
        found, chance = self.accuracy[eta], 1 / self.places
        said = (
            f"At η = {eta:g} (trained at {self.trained:g}) the place of {percent(found, 2)} of all patches is guessed "
            f"right, {found / chance:.1f} times chance ({percent(chance, 2)})."
        )
        rows = [[f"{ratio:g}", f"{100 * value:.2f}"] for ratio, value in self.accuracy.items()]
        return Summary(said, (Table(self.provenance.title(f"{self.count:,} images"), ["η", "accuracy, %"], rows),))

    def numbers(self) -> dict[str, Any]:
        """Every η."""
        found = [{"ratio": ratio, "accuracy": value} for ratio, value in self.accuracy.items()]
        return {"places": self.places, "count": self.count, "accuracy": found}


def position_method(method: Method | None, name: str) -> DropPos | MP3:
    """The method, where it has a position head; else one sentence."""
    if isinstance(method, DropPos | MP3):
        return method
    if method is None:
        raise SitusError(f"{name}: is no run, and only a run keeps its position head; name a DropPos or MP3 run")
    kind = type(method).__name__
    raise SitusError(f"{name}: was trained by {kind}, which has no position head; DropPos and MP3 runs have one")


def position_grid(
    method: DropPos,
    batches: Iterable[Batch],
    mask_ratios: Sequence[float] = MASK_RATIOS,
    position_mask_ratios: Sequence[float] = POSITION_MASK_RATIOS,
    *,
    seed: int = 0,
    precision: str = "fp32",
) -> PositionGrid:
    """Every cell over one pass, the same draws every time; the weights are those of `method`, untouched.

    A cell that the backbone cannot have (Swin sees one patch of each 2x2 cell, so γ = .75) says why.
    """
    for gamma in mask_ratios:
        check_value("mask_ratios", gamma, "[0, 1)")
    for gamma_pos in position_mask_ratios:
        check_value("position_mask_ratios", gamma_pos, "(0, 1]")
    blank = [_cell(method, gamma, gamma_pos) for gamma in mask_ratios for gamma_pos in position_mask_ratios]
    views = [view for view, _ in blank if view is not None]
    if not views:
        raise SitusError(f"no cell of the grid can be measured: {blank[0][1].reason}")
    sums: Tensor | None = None
    with evaluating(method):
        for batch in batches:
            hits = torch.stack([_hits(view, batch, seed, precision) for view in views])
            found = torch.cat([hits, hits.new_full((1,), float(len(batch.ids)))])
            sums = found if sums is None else sums + found
    if sums is None:
        raise SitusError("there are no samples to evaluate on", field="data")
    *right, count = sum_over_ranks(sums).tolist()
    hits_of = iter(right)
    cells = [
        cell if cell.dropped is None else replace(cell, accuracy=next(hits_of) / (count * cell.dropped))
        for _, cell in blank
    ]
    trained = method.config.mask_ratio, method.config.position_mask_ratio
    return PositionGrid(tuple(cells), int(count), method.count, trained)


def _cell(method: DropPos, mask_ratio: float, position_mask_ratio: float) -> tuple[DropPos | None, Cell]:
    """The weights at these ratios and the cell without its accuracy; no weights where they are refused."""
    try:
        view = method.at(mask_ratio, position_mask_ratio)
    except SitusError as error:
        return None, Cell(mask_ratio, position_mask_ratio, None, None, None, str(error))
    view.config = replace(view.config, affinity=None)  # the loss is not asked for, and its weights cost a forward
    return view, Cell(mask_ratio, position_mask_ratio, view.visible, view.visible - view.anchors, None)


def position_curve(
    method: MP3,
    batches: Iterable[Batch],
    ratios: Sequence[float] = RATIOS,
    *,
    seed: int = 0,
    precision: str = "fp32",
) -> PositionCurve:
    """The share of all patches whose place is guessed right at each η, over one pass, the same draws every time.

    The weights are those of `method`, whatever η it was trained with.
    """
    views = {ratio: method.at(ratio) for ratio in ratios}
    sums: Tensor | None = None
    with evaluating(method):
        for batch in batches:
            hits = torch.stack([_hits(view, batch, seed, precision) for view in views.values()])
            tokens = hits.new_full((1,), float(len(batch.ids) * method.backbone.num_tokens))
            found = torch.cat([hits, tokens])
            sums = found if sums is None else sums + found
    if sums is None:
        raise SitusError("there are no samples to evaluate on", field="data")
    *right, total = sum_over_ranks(sums).tolist()
    found, places = {ratio: hits / total for ratio, hits in zip(views, right, strict=True)}, method.backbone.num_tokens
    return PositionCurve(found, int(total) // places, places, method.config.mask_ratio, method.config.anchor_ratio)


def _hits(view: DropPos | MP3, batch: Batch, seed: int, precision: str) -> Tensor:
    draws = view.draw(batch, seed=seed, epoch=0)
    with autocast(batch.inputs.device, precision):
        extras = view(batch, draws).extras
    return (extras["logits"].argmax(dim=-1) == extras["places"]).sum().double()
