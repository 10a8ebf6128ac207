"""The page of solved puzzles whose patches stand in a row, such as the frames of a spectrogram."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from matplotlib.figure import Figure
from torch import Tensor

from situs.core.permutation import random_permutation
from situs.core.random import uniform
from situs.core.tokens import mask_of
from situs.measure.reconstruct import Mix, PuzzleRatios, Reconstruction, place_patches
from situs.methods.measured import Puzzle
from situs.report.html import Page
from situs.report.strips import Order, Strip, orders, strips
from situs.results import percent

_TIME = "place in the clip, in frames"
_PLACED = (
    "Time runs from left to right and the numbers of a frame from the bottom up; brighter is more. Frames that meet in "
    "a place are averaged, and hatched places got none."
)


def in_a_row(grid: tuple[int, ...]) -> bool:
    """Whether the places stand in a row."""
    return len(grid) == 1 or 1 in grid


def frame_sections(page: Page, found: Reconstruction) -> None:
    """One clip in pieces and put together at every setting, more clips, and the order found against the true one."""
    own = min(found.solved, key=lambda setting: math.dist(setting.ratios, found.trained.ratios))
    told = own.position_ratio is not None
    section = page.section("One clip")
    section.text(_DROPPOS if told else _MP3)
    page.opening.figure(one_clip_figure(found), f"{_PLACED} {_TOLD if told else _CONTEXT}", name="one")
    if len(found.images) > 1:
        drawn = more_clips_figure(found, own)
        page.section("More clips").figure(drawn, f"At {own.text}. {_PLACED}", name="placed")
    section = page.section("The order found against the true one")
    section.figure(
        order_figure(found.solved[own]),
        f"At {own.text}, a panel a clip: a point is a frame, where it was (across) and where the model puts it (up); "
        "on the line it is right. Over each panel the share of the frames asked for that are put right.",
        name="order",
    )
    if found.mixes:
        section = page.section("Two clips in one")
        section.text(
            "The frames of two clips are shuffled together and dealt out in two sets of equal size; the model builds a "
            "clip of each."
        )
        for number, (pair, mixes) in enumerate(zip(found.pairs, found.mixes, strict=True), start=1):
            section.figure(mix_figure(pair, mixes), f"Pair {number}. {_PLACED}", name=f"mix-{number}")


_MP3 = (
    "The model gets all frames of a spectrogram in no order (pieces). A random share 1 − η of them, the context, "
    "serves as keys; every frame, context included, is then put where the model says it was."
)
_CONTEXT = "A green bar marks the context, where it is not all frames."
_DROPPOS = (
    "A share γ of the frames is not shown. Of the others a share γ_pos is not told where it stands: these are put "
    "where the model says they were."
)
_TOLD = "A green bar marks frames that were told their place."


def one_clip_figure(found: Reconstruction) -> Figure:
    """The first clip, and at each setting its pieces and what the model makes of them."""
    rows = [Strip("clip", _picture(found.images[0], found.grid))]
    for setting, puzzle in found.solved.items():
        rows += _solved(found.images[0], puzzle, 0, found.seed, setting.text)
    return strips(rows, _TIME)


def more_clips_figure(found: Reconstruction, setting: PuzzleRatios) -> Figure:
    """The other clips that are shown, each as it is and as the model puts it together at one setting."""
    puzzle, rows = found.solved[setting], []
    for row in range(1, len(found.images)):
        image = found.images[row]
        rows.append(Strip(f"clip {row + 1}", _picture(image, found.grid)))
        rows.append(_put(image, puzzle, row, f"{_share(puzzle, row)} put right"))
    return strips(rows, _TIME)


def order_figure(puzzle: Puzzle) -> Figure:
    """Where the frames of each clip that were asked for are put, over where they were."""
    places, guesses = puzzle.places[:, puzzle.asked :], puzzle.guesses[:, puzzle.asked :]
    found = [
        Order(f"clip {row + 1}: {_share(puzzle, row)}", places[row].numpy(), guesses[row].numpy())
        for row in range(len(places))
    ]
    return orders(found, max(puzzle.grid), "true place", "place found")


def mix_figure(pair: tuple[Tensor, Tensor], mixes: Mapping[PuzzleRatios, Mix]) -> Figure:
    """Two clips, and what is built of their frames shuffled together, at each η."""
    grid = next(iter(mixes.values())).puzzles[0].grid
    rows = [Strip(f"clip {number}", _picture(clip[0], grid)) for number, clip in enumerate(pair, start=1)]
    for setting, mix in mixes.items():
        title = f"{setting.text}: {percent(mix.stayed, 0)} put where they stood in their own clip"
        for which, (given, puzzle) in enumerate(zip(mix.inputs, mix.puzzles, strict=True), start=1):
            rows.append(Strip(f"pieces {which}", _picture(given[0], grid), title if which == 1 else ""))
            rows.append(_put(given[0], puzzle, 0, "")._replace(name=f"built {which}"))
    return strips(rows, _TIME)


def _solved(image: Tensor, puzzle: Puzzle, row: int, seed: int, text: str) -> Iterator[Strip]:
    """The pieces as the model gets them, and put together."""
    places = puzzle.places[row : row + 1]
    if puzzle.asked:  # told ones stand at their place, and the others nowhere
        told = places[:, : puzzle.asked]
        yield _strip("told", image, told, told, puzzle, None, text)
    else:
        noise = uniform(seed, 0, torch.tensor([row]), "analyze.layout", (max(puzzle.grid),))
        layout = random_permutation(noise)[:, : places.shape[1]]
        yield _strip("pieces", image, places, layout, puzzle, puzzle.known, text)
    yield _put(image, puzzle, row, f"{_share(puzzle, row)} put right")


def _put(image: Tensor, puzzle: Puzzle, row: int, title: str) -> Strip:
    places, guesses = puzzle.places[row : row + 1], puzzle.guesses[row : row + 1]
    return _strip("put together", image, places, guesses, puzzle, puzzle.known, title)


def _strip(
    name: str, image: Tensor, taken: Tensor, places: Tensor, puzzle: Puzzle, known: int | None, title: str
) -> Strip:
    """The frames `taken` at `places`, [1, K] each; the first `known` marked, unless they are all."""
    made, filled = place_patches(image[None], taken, places, puzzle.grid)
    marked = None
    if known is not None and known < taken.shape[1]:
        marked = mask_of(places[:, :known], filled.shape[1])[0].numpy()
    return Strip(name, _picture(made[0], puzzle.grid), title, ~filled[0].numpy(), marked)


def _picture(image: Tensor, grid: tuple[int, ...]) -> Tensor:
    """A clip [C, H, W] with time from left to right, [numbers of a frame, frames]."""
    return image.mean(dim=0) if grid[0] == 1 else image.mean(dim=0).T


def _share(puzzle: Puzzle, row: int) -> str:
    return percent(float(puzzle.right[row].double().mean()), 0)
