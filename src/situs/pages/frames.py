"""The page of solved puzzles whose patches form a sequence, such as the frames of a spectrogram."""

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

_TIME = "position in the clip, in frames"
_PLACED = (
    "Time runs from left to right and frequency from the bottom up; brighter is louder. Frames put at the same place "
    "are averaged; hatched places got no frame."
)


def in_a_row(grid: tuple[int, ...]) -> bool:
    """Whether the places form a sequence."""
    return len(grid) == 1 or 1 in grid


def frame_sections(page: Page, result: Reconstruction) -> None:
    """One clip in pieces and put together at every setting, more clips, and the predicted against the true order."""
    trained = min(result.solved, key=lambda setting: math.dist(setting.ratios, result.trained.ratios))
    is_droppos = trained.position_ratio is not None
    section = page.section("One clip")
    section.text(_DROPPOS if is_droppos else _MP3)
    page.opening.figure(one_clip_figure(result), f"{_PLACED} {_HINTS if is_droppos else _CONTEXT}", name="one")
    if len(result.images) > 1:
        drawn = more_clips_figure(result, trained)
        page.section("More clips").figure(drawn, f"At {trained.text}. {_PLACED}", name="placed")
    section = page.section("Predicted against true order")
    section.figure(
        order_figure(result.solved[trained]),
        f"At {trained.text}, one panel per clip. Each point is a frame: its true place (horizontal) and the place "
        "where the model puts it (vertical); points on the line are right. Above each panel: the share of frames put "
        "right.",
        name="order",
    )
    if result.mixes:
        section = page.section("Two clips in one")
        section.text(
            "The frames of two clips are shuffled together and divided into two sets of equal size; the model builds a "
            "clip from each."
        )
        for number, (pair, mixes) in enumerate(zip(result.pairs, result.mixes, strict=True), start=1):
            section.figure(mix_figure(pair, mixes), f"Pair {number}. {_PLACED}", name=f"mix-{number}")


_MP3 = (
    "The model gets all frames of a spectrogram in random order (pieces). A random share 1 − η of them, the context, "
    "serves as keys. Every frame, context included, is then put where the model predicts."
)
_CONTEXT = "A green bar marks the context, unless it is all frames."
_DROPPOS = (
    "A share γ of the frames is hidden. Of the others, a share γ_pos has no position: these are put where the model "
    "predicts."
)
_HINTS = "A green bar marks frames that have their position."


def one_clip_figure(result: Reconstruction) -> Figure:
    """The first clip, and at each setting its pieces and the model's reconstruction."""
    rows = [Strip("clip", _picture(result.images[0], result.grid))]
    for setting, puzzle in result.solved.items():
        rows += _solved(result.images[0], puzzle, 0, result.seed, setting.text)
    return strips(rows, _TIME)


def more_clips_figure(result: Reconstruction, setting: PuzzleRatios) -> Figure:
    """The other clips, each with the model's reconstruction at one setting."""
    puzzle, rows = result.solved[setting], []
    for row in range(1, len(result.images)):
        image = result.images[row]
        rows.append(Strip(f"clip {row + 1}", _picture(image, result.grid)))
        rows.append(_put(image, puzzle, row, f"{_share(puzzle, row)} put right"))
    return strips(rows, _TIME)


def order_figure(puzzle: Puzzle) -> Figure:
    """Predicted over true places of the frames whose place is predicted, for each clip."""
    places, guesses = puzzle.places[:, puzzle.asked :], puzzle.guesses[:, puzzle.asked :]
    clips = [
        Order(f"clip {row + 1}: {_share(puzzle, row)}", places[row].numpy(), guesses[row].numpy())
        for row in range(len(places))
    ]
    return orders(clips, max(puzzle.grid), "true place", "predicted place")


def mix_figure(pair: tuple[Tensor, Tensor], mixes: Mapping[PuzzleRatios, Mix]) -> Figure:
    """Two clips, and what the model builds from their shuffled frames, at each η."""
    grid = next(iter(mixes.values())).puzzles[0].grid
    rows = [Strip(f"clip {number}", _picture(clip[0], grid)) for number, clip in enumerate(pair, start=1)]
    for setting, mix in mixes.items():
        title = f"{setting.text}: {percent(mix.stayed, 0)} put at their place in their own clip"
        for number, (frames, puzzle) in enumerate(zip(mix.inputs, mix.puzzles, strict=True), start=1):
            rows.append(Strip(f"pieces {number}", _picture(frames[0], grid), title if number == 1 else ""))
            rows.append(_put(frames[0], puzzle, 0, "")._replace(name=f"built {number}"))
    return strips(rows, _TIME)


def _solved(image: Tensor, puzzle: Puzzle, row: int, seed: int, text: str) -> Iterator[Strip]:
    """The pieces as the model gets them, and put together."""
    places = puzzle.places[row : row + 1]
    if puzzle.asked:  # DropPos: frames with a position stand at their place, the others nowhere
        positioned = places[:, : puzzle.asked]
        yield _strip("positioned", image, positioned, positioned, puzzle, None, text)
    else:
        noise = uniform(seed, 0, torch.tensor([row]), "analyze.layout", (max(puzzle.grid),))
        layout = random_permutation(noise)[:, : places.shape[1]]
        yield _strip("pieces", image, places, layout, puzzle, puzzle.known, text)
    yield _put(image, puzzle, row, f"{_share(puzzle, row)} put right")


def _put(image: Tensor, puzzle: Puzzle, row: int, title: str) -> Strip:
    places, guesses = puzzle.places[row : row + 1], puzzle.guesses[row : row + 1]
    return _strip("put together", image, places, guesses, puzzle, puzzle.known, title)


def _strip(
    name: str, image: Tensor, sources: Tensor, places: Tensor, puzzle: Puzzle, known: int | None, title: str
) -> Strip:
    """The frames of `sources` put at `places`, [1, K] each; the first `known` marked, unless they are all."""
    placed, filled = place_patches(image[None], sources, places, puzzle.grid)
    marked = None
    if known is not None and known < sources.shape[1]:
        marked = mask_of(places[:, :known], filled.shape[1])[0].numpy()
    return Strip(name, _picture(placed[0], puzzle.grid), title, ~filled[0].numpy(), marked)


def _picture(image: Tensor, grid: tuple[int, ...]) -> Tensor:
    """A clip [C, H, W] with time from left to right, [numbers of a frame, frames]."""
    return image.mean(dim=0) if grid[0] == 1 else image.mean(dim=0).T


def _share(puzzle: Puzzle, row: int) -> str:
    return percent(float(puzzle.right[row].double().mean()), 0)
