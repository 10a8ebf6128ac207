"""Position accuracy of a pretrained model, by its own position head.

DropPos: the grid of γ (patches masked) × γ_pos (positions dropped), plain top-1 on the dropped positions, and its mean.
MP3: accuracy over the share η of patches that are no keys (the paper's Figure 5). Top-5 stands beside both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Unpack

import torch
from torch import Tensor

from situs.errors import SitusError
from situs.limits import check_values
from situs.methods.base import Batch
from situs.methods.measured import SolvesPuzzles
from situs.models.data import AnyData, AnyModel, Chosen, load_set, made_with, opened
from situs.models.inference import Total, evaluating
from situs.models.model import anchor_notes, puzzle_method
from situs.results import Figure, Result, Summary, Table, percent, points
from situs.train.step import autocast

RATIOS = (0.0, 0.25, 0.5, 0.75, 0.9)
"""η of MP3's curve."""

MASK_RATIOS = (0.0, 0.25, 0.5, 0.75)
POSITION_RATIOS = (0.25, 0.5, 0.75, 0.95)
"""γ and γ_pos of DropPos's 16 cells."""

GRID = """
The encoder sees a fraction 1 − γ of the patches of a sample. A fraction γ_pos of the visible patches has no position.
These patches all get the same learned vector instead of a position. The run's position head predicts which of the N
positions each of these patches came from. The numbers are the top-1 accuracy over these patches.

With a larger γ, the model sees fewer patches. With a larger γ_pos, fewer of the visible patches have a position.
A cell is one pair of γ and γ_pos. The mean gives all cells the same weight, as in DropPos's paper.
"""
CURVE = """
No patch has a position. A fraction η of the patches are only queries: they attend to the other patches, but no patch
attends to them. The other patches are the context. For every patch, including the context, the run's position head
predicts which of the N positions the patch came from. The weights are the same at every η; only the evaluation changes.
"""

TOP = 5
"""The k of top-k beside top-1."""


@dataclass(frozen=True)
class GridCell:
    """One cell of the grid. accuracy: share of the dropped positions predicted right; None where `reason` says why.

    visible: patches per sample at γ. dropped: those of them whose position is dropped at γ_pos. top5: share of the
    dropped positions that are among the model's first five.
    """

    mask_ratio: float
    position_mask_ratio: float
    visible: int | None
    dropped: int | None
    accuracy: float | None
    reason: str | None = None
    top5: float | None = None

    def __str__(self) -> str:
        return f"{percent(self.accuracy or 0.0, 2)} (γ = {self.mask_ratio:g}, γ_pos = {self.position_mask_ratio:g})"


@dataclass(frozen=True)
class PositionGrid(Result):
    """DropPos's grid, row by row of γ. count: samples. places: N, so that chance is 1 / N.

    trained: γ and γ_pos of the training.
    """

    file: ClassVar[str] = "position"
    subject: ClassVar[str] = "position accuracy"
    meaning: ClassVar[str] = GRID
    cells: tuple[GridCell, ...]
    count: int
    places: int
    trained: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over the cells that can be measured, each counting once."""
        accuracies = [cell.accuracy for cell in self.cells if cell.accuracy is not None]
        return sum(accuracies) / len(accuracies)

    def summary(self) -> Summary:
        """The mean over the cells, the lowest and the highest; a row for each cell."""
        measured = [cell for cell in self.cells if cell.accuracy is not None]
        worst, best = (choose(measured, key=lambda cell: cell.accuracy or 0.0) for choose in (min, max))
        chance, whole = 1 / self.places, len(self.cells)
        cells = f"the {len(measured)} cells" if len(measured) == whole else f"{len(measured)} of {whole} cells"
        sentence = (
            f"The mean position accuracy over {cells} is {percent(self.mean, 2)}, {self.mean / chance:.1f} times "
            f"chance ({percent(chance, 2)}). The accuracies of the cells are between {worst} and {best}."
        )
        rows = [
            [f"{cell.mask_ratio:g}", f"{cell.position_mask_ratio:g}", cell.visible, cell.dropped,
             points(cell.accuracy), points(cell.top5)]
            for cell in self.cells
        ]  # fmt: skip
        header = ["γ", "γ_pos", "patches visible", "positions dropped", "accuracy, %", "top-5, %"]
        title = self.provenance.title(self.provenance.counted(self.count))
        reasons = [cell.reason for cell in self.cells if cell.reason is not None]
        notes = (f"Some cells cannot be measured: {reasons[0]}.",) if reasons else ()
        mean = (percent(self.mean), f"mean position accuracy over all cells (chance: {percent(chance)})")
        return Summary(sentence, (Table(title, header, rows),), notes, (mean,))

    def numbers(self) -> dict[str, Any]:
        """Every cell and their mean."""
        cells = [asdict(cell) for cell in self.cells]
        return {"places": self.places, "cells": cells, "count": self.count, "mean": self.mean}

    def figures(self) -> list[Figure]:
        """γ down, γ_pos across; a dash where a cell cannot be measured."""
        gammas = list(dict.fromkeys(cell.mask_ratio for cell in self.cells))
        across = list(dict.fromkeys(cell.position_mask_ratio for cell in self.cells))
        shares = {(cell.mask_ratio, cell.position_mask_ratio): cell.accuracy for cell in self.cells}
        values = [
            [math.nan if (share := shares[row, column]) is None else 100 * share for column in across] for row in gammas
        ]
        highest = 100 * max(share for share in shares.values() if share is not None)
        labels = ("γ_pos, fraction of visible patches without a position", "γ, fraction of patches masked")
        gamma, gamma_pos = self.trained
        return [
            Figure(
                "grid",
                "Percentage of correct predictions among the visible patches without a position. The run was trained "
                f"at γ = {gamma:g} and γ_pos = {gamma_pos:g}.",
                "figures.value_grids",
                ({"": (values, "positions predicted correctly, %")}, [f"{g:g}" for g in gammas],
                 [f"{g:g}" for g in across], *labels),
                {"limits": (0.0, max(10.0, 10.0 * math.ceil(highest / 10)))},
            )
        ]  # fmt: skip


@dataclass(frozen=True)
class PositionCurve(Result):
    """MP3's curve: η -> share of all patches whose position is predicted right. count: samples. places: N.

    trained: η of the training. anchors: share of the patches with a position as a hint; trained_anchors: in training.
    top5: η -> share of all patches whose place is among the model's first five.
    """

    file: ClassVar[str] = "position"
    subject: ClassVar[str] = "position accuracy"
    meaning: ClassVar[str] = CURVE
    accuracy: dict[float, float]
    count: int
    places: int
    trained: float
    anchors: float = 0.0
    top5: dict[float, float] = field(default_factory=dict)
    trained_anchors: float = 0.0

    def summary(self) -> Summary:
        """The accuracy at the η nearest to the one trained with; a row for each η."""
        eta = min(self.accuracy, key=lambda ratio: abs(ratio - self.trained))
        accuracy, chance = self.accuracy[eta], 1 / self.places
        sentence = (
            f"At η = {eta:g}, the model predicts the position correctly for {percent(accuracy, 2)} of all patches, "
            f"{accuracy / chance:.1f} times chance ({percent(chance, 2)}). The training used η = {self.trained:g}."
        )
        near = self.top5
        rows = [[f"{ratio:g}", points(right), points(near.get(ratio))] for ratio, right in self.accuracy.items()]
        table = Table(
            self.provenance.title(self.provenance.counted(self.count)), ["η", "accuracy, %", "top-5, %"], rows
        )
        best = max(self.accuracy, key=lambda eta: self.accuracy[eta])
        number = (percent(self.accuracy[best]), f"position accuracy at η = {best:g} (chance: {percent(chance)})")
        return Summary(sentence, (table,), anchor_notes(self.anchors, self.trained_anchors), (number,))

    def numbers(self) -> dict[str, Any]:
        """Every η."""
        rows = [
            {"ratio": ratio, "accuracy": value, "top5": self.top5.get(ratio)} for ratio, value in self.accuracy.items()
        ]
        hints = {"told": self.anchors, "told_in_training": self.trained_anchors}
        return {"places": self.places, "count": self.count, "accuracy": rows, **hints}

    def figures(self) -> list[Figure]:
        """Accuracy over η, and chance."""
        series = {"this run": (list(self.accuracy), [100 * value for value in self.accuracy.values()])}
        labels = ("η at evaluation, fraction of patches outside the context", "positions predicted correctly, %")
        caption = f"Fraction of all patches whose position is predicted correctly. Trained at η = {self.trained:g}."
        chance = {"level": (f"chance, 1 / {self.places}", 100 / self.places)}
        return [Figure("curve", caption, "figures.curves", (series, *labels), chance)]


def evaluate_position(
    model: AnyModel,
    data: AnyData = None,
    *,
    ratios: Sequence[float] | None = None,
    position_ratios: Sequence[float] | None = None,
    anchor_ratio: float | None = None,
    precision: str = "fp32",
    seed: int = 0,
    **chosen: Unpack[Chosen],
) -> PositionGrid | PositionCurve:
    """The position accuracy of a run with a position head: DropPos's grid, MP3's curve.

    model: whatever `open_model` takes. data: a path or a source; None for the samples that the run was trained on.
    ratios: γ of DropPos, η of MP3. position_ratios: γ_pos of DropPos. anchor_ratio: the share of the patches that get
    their position as a hint (MP3), 0 for none; None as in the training. chosen: see `load_set`.
    """
    model = opened(model, seed)
    method = puzzle_method(model, position_ratios, anchor_ratio)
    several = len(method.puzzle_ratios) > 1
    ratios = (MASK_RATIOS if several else RATIOS) if ratios is None else ratios
    loader = load_set(model, data, shared=True, **chosen)
    draws = {"seed": seed, "precision": precision}
    if several:
        drop_ratios = POSITION_RATIOS if position_ratios is None else position_ratios
        result = position_grid(method, loader, ratios, drop_ratios, **draws)
    else:
        result = position_curve(method, loader, ratios, **draws)
        assert isinstance(model.method, SolvesPuzzles)
        result = replace(result, trained_anchors=model.method.hint_ratio)
    return replace(result, provenance=made_with(model, loader, seed, precision))


def position_grid(
    method: SolvesPuzzles,
    batches: Iterable[Batch],
    ratios: Sequence[float] = MASK_RATIOS,
    position_ratios: Sequence[float] = POSITION_RATIOS,
    *,
    seed: int = 0,
    precision: str = "fp32",
) -> PositionGrid:
    """Every cell in one pass, always with the same draws, with the weights of `method`.

    A cell that the backbone cannot have (Swin sees one patch of each 2x2 cell, so γ = .75) says why.
    """
    check_values("position_ratios", position_ratios, "(0, 1]")
    settings = [(gamma, gamma_pos) for gamma in ratios for gamma_pos in position_ratios]
    solved = _solve(method, batches, settings, seed, precision)
    cells = [GridCell(*setting, *solved.cells[setting]) for setting in settings]
    return PositionGrid(tuple(cells), solved.count, math.prod(method.grid), method.trained_ratios)


def position_curve(
    method: SolvesPuzzles,
    batches: Iterable[Batch],
    ratios: Sequence[float] = RATIOS,
    *,
    seed: int = 0,
    precision: str = "fp32",
) -> PositionCurve:
    """The share of all patches whose position is predicted right at each η, in one pass, always with the same draws.

    The weights are those of `method`, whatever η it was trained with.
    """
    solved = _solve(method, batches, [(ratio,) for ratio in ratios], seed, precision)
    shares = {ratio: solved.share((ratio,)) for ratio in ratios}
    top5 = {ratio: solved.cells[ratio,].top5 or 0.0 for ratio in ratios}
    places, trained = math.prod(method.grid), method.trained_ratios
    hints = {"anchors": solved.hint_ratio, "trained_anchors": method.hint_ratio}
    return PositionCurve(shares, solved.count, places, *trained, top5=top5, **hints)


def position_accuracy(
    method: SolvesPuzzles, batches: Iterable[Batch], *, seed: int = 0, precision: str = "fp32"
) -> float:
    """The share of the positions predicted right, at the ratios of the training."""
    ratios = method.trained_ratios
    return _solve(method, batches, [ratios], seed, precision).share(ratios)


class _Cell(NamedTuple):
    """Puzzles at some ratios: patches visible and tested; the share predicted right, or why not; the share whose place
    is among the first five."""

    visible: int | None = None
    tested: int | None = None
    right: float | None = None
    reason: str | None = None
    top5: float | None = None


class _Solved(NamedTuple):
    """cells: by ratios. count: samples. hint_ratio: share of the tested patches that had their position as a hint."""

    cells: dict[tuple[float, ...], _Cell]
    count: int
    hint_ratio: float

    def share(self, ratios: tuple[float, ...]) -> float:
        cell = self.cells[ratios]
        if cell.right is None:
            raise SitusError(str(cell.reason))
        return cell.right


def _solve(
    method: SolvesPuzzles, batches: Iterable[Batch], settings: Sequence[tuple[float, ...]], seed: int, precision: str
) -> _Solved:
    """The method's puzzles at several ratios, solved in one pass over the samples of all ranks."""
    views: dict[tuple[float, ...], SolvesPuzzles] = {}
    cells: dict[tuple[float, ...], _Cell] = {}
    check_values("ratios", [setting[0] for setting in settings], "[0, 1)")
    for setting in settings:
        try:
            views[setting] = method.at(*setting)
        except SitusError as error:
            cells[setting] = _Cell(reason=str(error))
    if not views:
        raise SitusError(f"nothing can be measured: {cells[settings[0]].reason}")
    sums = Total()
    shapes: dict[tuple[float, ...], tuple[int, int]] = {}
    hint_ratio = 0.0
    with evaluating(method):
        for batch in batches:
            hits: list[Tensor] = []
            for setting, view in views.items():
                with autocast(batch.inputs.device, precision):
                    puzzle = view.solve(batch, seed=seed)
                shapes[setting], hint_ratio = (puzzle.places.shape[1], puzzle.right.shape[1]), puzzle.hint_ratio
                assert puzzle.ranks is not None
                hits += [puzzle.right.sum().double(), (puzzle.ranks < TOP).sum().double()]
            sums.add(torch.stack([*hits, hits[0].new_tensor(float(len(batch.ids)))]))
    *hits, count = sums.over_ranks().tolist()
    for (setting, (visible, tested)), right, near in zip(shapes.items(), hits[::2], hits[1::2], strict=True):
        cells[setting] = _Cell(visible, tested, right / (count * tested), None, near / (count * tested))
    return _Solved(cells, int(count), hint_ratio)
