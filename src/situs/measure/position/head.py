"""How well a pretrained model knows where its patches were, by its own position head.

DropPos: the grid of γ (patches not seen) × γ_pos (places dropped), plain top-1 on the dropped places, and its mean.
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
from situs.results import Figure, Result, Summary, Table, percent
from situs.train.step import autocast

RATIOS = (0.0, 0.25, 0.5, 0.75, 0.9)
"""η of MP3's curve."""

MASK_RATIOS = (0.0, 0.25, 0.5, 0.75)
POSITION_RATIOS = (0.25, 0.5, 0.75, 0.95)
"""γ and γ_pos of DropPos's 16 cells."""

GRID = """
The encoder is shown a share 1 − γ of the patches of a sample; of those, a share γ_pos has lost its place and carries
the one vector that the run learned for lost places. The run's own position head says for each of them which of the N
places it came from. The numbers are plain top-1 over those patches alone: no weights, and no patch that was told its
place.

The larger γ_pos, the fewer anchors there are to go by; the larger γ, the less of the picture there is. The mean counts
every cell once, as the paper does.
"""
CURVE = """
No patch is told its place. A share η of the patches serve only as queries: they look at the others, and nothing looks
at them. The run's own position head says for every patch, context included, which of the N places it came from. The
weights are the same at every η; only the evaluation changes.
"""

TOP = 5
"""How many of the likeliest places may hold the true one."""


@dataclass(frozen=True)
class GridCell:
    """One cell of the grid. accuracy: share of the dropped places guessed right, None where `reason` says why not.

    visible: patches a sample shows at γ. dropped: those of them whose place is dropped at γ_pos. top5: share of the
    dropped places that are among the model's five likeliest.
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
             _percent(cell.accuracy), _percent(cell.top5)]
            for cell in self.cells
        ]  # fmt: skip
        header = ["γ", "γ_pos", "patches seen", "places dropped", "accuracy, %", "top-5, %"]
        title = self.provenance.title(self.provenance.counted(self.count))
        reasons = [cell.reason for cell in self.cells if cell.reason is not None]
        notes = (f"Some cells cannot be measured: {reasons[0]}.",) if reasons else ()
        mean = (percent(self.mean), f"mean of the grid; chance {percent(chance)}")
        return Summary(said, (Table(title, header, rows),), notes, (mean,))

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
        labels = ("γ_pos, share of seen patches whose place is dropped", "γ, share of patches not seen")
        gamma, gamma_pos = self.trained
        return [
            Figure(
                "grid",
                "Share of dropped places guessed right, in percent. The run was trained at "
                f"γ = {gamma:g} and γ_pos = {gamma_pos:g}.",
                "figures.value_grids",
                ({"": (values, "places guessed right, %")}, [f"{g:g}" for g in gammas], [f"{g:g}" for g in across],
                 *labels),
                {"limits": (0.0, max(10.0, 10.0 * math.ceil(highest / 10)))},
            )
        ]  # fmt: skip


@dataclass(frozen=True)
class PositionCurve(Result):
    """MP3's curve: η -> share of all patches whose place is guessed right. count: samples. places: N.

    trained: η of the training. anchors: share of the patches that were told their place; trained_anchors: in training.
    top5: η -> share of all patches whose place is among the model's five likeliest.
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
        found, chance = self.accuracy[eta], 1 / self.places
        said = (
            f"At η = {eta:g} (trained at {self.trained:g}) the place of {percent(found, 2)} of all patches is guessed "
            f"right, {found / chance:.1f} times chance ({percent(chance, 2)})."
        )
        near = self.top5
        rows = [[f"{ratio:g}", _percent(right), _percent(near.get(ratio))] for ratio, right in self.accuracy.items()]
        table = Table(
            self.provenance.title(self.provenance.counted(self.count)), ["η", "accuracy, %", "top-5, %"], rows
        )
        best = max(self.accuracy, key=lambda eta: self.accuracy[eta])
        number = (percent(self.accuracy[best]), f"at η = {best:g}; chance {percent(chance)}")
        return Summary(said, (table,), anchor_notes(self.anchors, self.trained_anchors), (number,))

    def numbers(self) -> dict[str, Any]:
        """Every η."""
        found = [
            {"ratio": ratio, "accuracy": value, "top5": self.top5.get(ratio)} for ratio, value in self.accuracy.items()
        ]
        told = {"told": self.anchors, "told_in_training": self.trained_anchors}
        return {"places": self.places, "count": self.count, "accuracy": found, **told}

    def figures(self) -> list[Figure]:
        """Accuracy over η, and chance."""
        series = {"this run": (list(self.accuracy), [100 * value for value in self.accuracy.values()])}
        labels = ("η at evaluation, share of patches that are no keys", "places guessed right, %")
        caption = f"Share of all patches whose place is guessed right. Trained at η = {self.trained:g}."
        chance = {"level": (f"chance, 1 / {self.places}", 100 / self.places)}
        return [Figure("curve", caption, "figures.curves", (series, *labels), chance)]


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.2f}"


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
    """How well a run with a position head knows where its patches were: DropPos's grid, MP3's curve.

    model: whatever `open_model` takes. data: a path or a source; None for the samples that the run was trained on.
    ratios: γ of DropPos, η of MP3. position_ratios: γ_pos of DropPos. anchor_ratio: the share of the patches that MP3
    tells their place, 0 to ask without hints; None as in the training. chosen: see `load_set`.
    """
    model = opened(model, seed)
    method = puzzle_method(model, position_ratios, anchor_ratio)
    several = len(method.puzzle_ratios) > 1
    ratios = (MASK_RATIOS if several else RATIOS) if ratios is None else ratios
    loader = load_set(model, data, shared=True, **chosen)
    draws = {"seed": seed, "precision": precision}
    if several:
        asked = POSITION_RATIOS if position_ratios is None else position_ratios
        found = position_grid(method, loader, ratios, asked, **draws)
    else:
        found = position_curve(method, loader, ratios, **draws)
        assert isinstance(model.method, SolvesPuzzles)
        found = replace(found, trained_anchors=model.method.hint_ratio)
    return replace(found, provenance=made_with(model, loader, seed, precision))


def position_grid(
    method: SolvesPuzzles,
    batches: Iterable[Batch],
    ratios: Sequence[float] = MASK_RATIOS,
    position_ratios: Sequence[float] = POSITION_RATIOS,
    *,
    seed: int = 0,
    precision: str = "fp32",
) -> PositionGrid:
    """Every cell over one pass, the same draws every time; the weights are those of `method`, untouched.

    A cell that the backbone cannot have (Swin sees one patch of each 2x2 cell, so γ = .75) says why.
    """
    check_values("position_ratios", position_ratios, "(0, 1]")
    settings = [(gamma, gamma_pos) for gamma in ratios for gamma_pos in position_ratios]
    found = _ask(method, batches, settings, seed, precision)
    cells = [GridCell(*setting, *found.cells[setting], found.top5.get(setting)) for setting in settings]
    return PositionGrid(tuple(cells), found.count, math.prod(method.grid), method.trained_ratios)


def position_curve(
    method: SolvesPuzzles,
    batches: Iterable[Batch],
    ratios: Sequence[float] = RATIOS,
    *,
    seed: int = 0,
    precision: str = "fp32",
) -> PositionCurve:
    """The share of all patches whose place is guessed right at each η, over one pass, the same draws every time.

    The weights are those of `method`, whatever η it was trained with.
    """
    found = _ask(method, batches, [(ratio,) for ratio in ratios], seed, precision)
    shares = {ratio: found.share((ratio,)) for ratio in ratios}
    top5 = {ratio: found.top5[ratio,] for ratio in ratios}
    places, trained = math.prod(method.grid), method.trained_ratios
    told = {"anchors": found.told, "trained_anchors": method.hint_ratio}
    return PositionCurve(shares, found.count, places, *trained, top5=top5, **told)


def position_accuracy(
    method: SolvesPuzzles, batches: Iterable[Batch], *, seed: int = 0, precision: str = "fp32"
) -> float:
    """The share of the places asked for that are named rightly, at the ratios of the training."""
    own = method.trained_ratios
    return _ask(method, batches, [own], seed, precision).share(own)


class _Found(NamedTuple):
    """cells: ratios -> patches seen, those of them asked for, share named rightly, or why not. count: samples.

    told: share of those asked for that were told their place. top5: ratios -> share whose place is among the five
    likeliest.
    """

    cells: dict[tuple[float, ...], tuple[int | None, int | None, float | None, str | None]]
    count: int
    told: float
    top5: dict[tuple[float, ...], float]

    def share(self, ratios: tuple[float, ...]) -> float:
        *_, share, reason = self.cells[ratios]
        if share is None:
            raise SitusError(str(reason))
        return share


def _ask(
    method: SolvesPuzzles, batches: Iterable[Batch], settings: Sequence[tuple[float, ...]], seed: int, precision: str
) -> _Found:
    """The method's puzzles at several ratios, solved in one pass over the samples of all ranks."""
    views: dict[tuple[float, ...], SolvesPuzzles] = {}
    cells: dict[tuple[float, ...], tuple[int | None, int | None, float | None, str | None]] = {}
    check_values("ratios", [setting[0] for setting in settings], "[0, 1)")
    for setting in settings:
        try:
            views[setting] = method.at(*setting)
        except SitusError as error:
            cells[setting] = None, None, None, str(error)
    if not views:
        raise SitusError(f"nothing can be measured: {cells[settings[0]][-1]}")
    sums = Total()
    shapes: dict[tuple[float, ...], tuple[int, int]] = {}
    told = 0.0
    with evaluating(method):
        for batch in batches:
            hits: list[Tensor] = []
            for setting, view in views.items():
                with autocast(batch.inputs.device, precision):
                    puzzle = view.solve(batch, seed=seed)
                shapes[setting], told = (puzzle.places.shape[1], puzzle.right.shape[1]), puzzle.hint_ratio
                assert puzzle.ranks is not None
                hits += [puzzle.right.sum().double(), (puzzle.ranks < TOP).sum().double()]
            sums.add(torch.stack([*hits, hits[0].new_tensor(float(len(batch.ids)))]))
    *hits, count = sums.over_ranks().tolist()
    top5 = {}
    for (setting, (seen, asked)), right, near in zip(shapes.items(), hits[::2], hits[1::2], strict=True):
        cells[setting], top5[setting] = (seen, asked, right / (count * asked), None), near / (count * asked)
    return _Found(cells, int(count), told, top5)
