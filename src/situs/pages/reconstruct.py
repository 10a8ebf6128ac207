"""The page of solved puzzles, and its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from matplotlib.figure import Figure
from torch import Tensor

from situs.core.permutation import random_permutation
from situs.core.random import uniform
from situs.core.tokens import mask_of
from situs.measure.reconstruct import (
    Mix,
    PuzzleRatios,
    Reconstruction,
    hidden_and_wrong,
    paint_places,
    place_patches,
)
from situs.methods.measured import Puzzle
from situs.report.html import Page
from situs.report.puzzles import Panel, in_a_row, panels
from situs.results import channels_drawn, percent

Solved = Mapping[PuzzleRatios, Puzzle]
"""The puzzles of the images on the page, by setting."""


def page(result: Reconstruction) -> Page:
    """The scores, and the puzzles of a few images."""
    summary = result.summary()
    page = Page(f"Jigsaw puzzles solved by {result.provenance.name}", lead=summary.sentence)
    best, score = max(result.scores.items(), key=lambda item: item[1].right)
    page.number(percent(score.right), f"of the predicted positions are right at {best.text}")
    section = page.section("How many positions are predicted correctly")
    section.table(summary.tables[0].header, summary.tables[0].rows, _SCORES_CAPTION)
    for note in filter(None, (*summary.notes, channels_drawn(result.images.shape[1]))):
        section.text(note)
    is_droppos = next(iter(result.scores)).position_ratio is not None
    if in_a_row(result.grid):
        section.text(_IN_TIME)
    (_droppos_sections if is_droppos else _mp3_sections)(page, result)
    return page.end(result.provenance.facts)


_SCORES_CAPTION = (
    "Right: the fraction of correct predictions. Mean error: the mean distance between the predicted and the true "
    "position. Positions left empty: of the true positions of the shown patches, the fraction where the model "
    "placed no patch."
)

_IN_TIME = (
    "Each strip is a clip. Time runs from left to right, and frequency from the bottom up. Brighter is louder. A patch "
    "is a frame."
)


def _mp3_sections(page: Page, result: Reconstruction) -> None:
    section = page.section("One image")
    section.text(
        'The model gets all patches in random order and without positions (the row "input" of the figure). The '
        "context (outlined in green) is a random choice of patches: a fraction 1 − η of all, where η is the fraction "
        "outside the context. Only the context serves as keys and values. "
        "Every patch, including the context, is then drawn at its predicted position."
    )
    drawn = one_image_figure(result.images[0], result.solved, result.seed)
    page.opening.figure(drawn, f"{_PLACED} Top: the context at its true positions.", name="one")
    caption = f"{_PLACED} The number above an image is the fraction of correct predictions."
    page.section("More images").figure(placed_figure(result.images, result.solved), caption, name="placed")
    if result.mixes:
        section = page.section("Two images in one")
        section.text(
            "The patches of two images are shuffled together and divided into two sets of equal size. Each set "
            "contains patches of both images. The model arranges the patches of a set as one image. "
            + " ".join(_stayed(number, pair) for number, pair in enumerate(result.mixes, start=1))
        )
        for number, (pair, mixes) in enumerate(zip(result.pairs, result.mixes, strict=True), start=1):
            section.figure(mix_figure(pair, mixes), f"Pair {number}. {_PLACED}", name=f"mix-{number}")


_PLACED = (
    "Patches at the same predicted position are averaged. The model placed no patch at hatched positions. Context "
    "patches have a green outline at their predicted positions."
)


def _stayed(number: int, pair: Mapping[PuzzleRatios, Mix]) -> str:
    shares = ", ".join(f"{percent(mix.stayed, 0)} at {setting.text}" for setting, mix in pair.items())
    placed = "placed at the position that they had in their original image"
    return f"In pair {number}, the fraction of patches {placed} is {shares}."


def _droppos_sections(page: Page, result: Reconstruction) -> None:
    for number, dropped in enumerate(dict.fromkeys(setting.position_ratio for setting in result.solved)):
        solved = {setting: puzzle for setting, puzzle in result.solved.items() if setting.position_ratio == dropped}
        section = page.section(f"γ_pos = {dropped:g}")
        section.text(
            f"γ_pos = {dropped:g} is the fraction of the shown patches that have no position. The other shown patches "
            "keep their position (outlined in green). The number above an image is the fraction of correct predictions."
        )
        (section if number else page.opening).figure(
            panels(
                [[*panels_of, image] for image, panels_of in _rows(result.images, solved, verdict_panel)], result.grid
            ),
            "Black hatched patches are hidden from the model. White patches with a red edge are predicted at a wrong "
            "position. All other patches are predicted correctly or have kept their position.",
            name=f"verdict-{dropped:g}",
        )
        section.figure(
            placed_figure(result.images, solved),
            "This figure shows the same puzzles with each patch at its predicted position. Patches at the same "
            "position are averaged. The model placed no patch at hatched positions.",
            name=f"placed-{dropped:g}",
        )


def _panel(
    image: Tensor, sources: Tensor, places: Tensor, puzzle: Puzzle, title: str = "", *, known: int | None = None
) -> Panel:
    """The patches `sources` of an image put at `places`, [1, K] each; the first `known` outlined, unless `known` is
    None."""
    picture, filled = place_patches(image[None], sources, places, puzzle.grid)
    outlined = None if known is None else mask_of(places[:, :known], filled.shape[1])[0].numpy()
    return Panel(picture[0].numpy(), title, outlined=outlined, empty=~filled[0].numpy())


def placed_panel(image: Tensor, puzzle: Puzzle, row: int, title: str = "") -> Panel:
    """Image `row` of a puzzle with each patch at its predicted position.

    The context (MP3) or the patches with a position (DropPos) are outlined, unless they are all.
    """
    places, guesses = puzzle.places[[row]], puzzle.guesses[[row]]
    known = puzzle.known if puzzle.known < places.shape[1] else None
    return _panel(image, places, guesses, puzzle, title, known=known)


def context_panel(image: Tensor, puzzle: Puzzle, title: str = "") -> Panel:
    """The context of the first image at its true positions; the other positions stay empty."""
    places = puzzle.places[[0], : puzzle.known]
    return _panel(image, places, places, puzzle, title)


def unordered_panel(image: Tensor, puzzle: Puzzle, row: int, seed: int = 0) -> Panel:
    """The patches of a puzzle in random order, as the model gets them; the context outlined."""
    noise = uniform(seed, 0, torch.tensor([row]), "analyze.layout", (puzzle.grid[0] * puzzle.grid[1],))
    layout = random_permutation(noise)[:, : puzzle.places.shape[1]]
    return _panel(image, puzzle.places[[row]], layout, puzzle, known=puzzle.known)


def verdict_panel(image: Tensor, puzzle: Puzzle, row: int, title: str = "") -> Panel:
    """DropPos's Figure 3: hidden patches black, wrong ones white, those with a position outlined."""
    hidden, wrong = (marks[[row]] for marks in hidden_and_wrong(puzzle))
    painted = paint_places(paint_places(image[None], hidden, puzzle.grid, 0.0), wrong, puzzle.grid, 1.0)
    positioned = mask_of(puzzle.places[[row], : puzzle.known], hidden.shape[1])
    marks = {"outlined": positioned[0].numpy(), "hidden": hidden[0].numpy(), "wrong": wrong[0].numpy()}
    return Panel(painted[0].numpy(), title, **marks)


def _percent(puzzle: Puzzle, row: int) -> str:
    return percent(float(puzzle.right[row].double().mean()), 0)


def one_image_figure(image: Tensor, solved: Solved, seed: int = 0) -> Figure:
    """MP3's Figure 2 for the first image: context, input and reconstruction at each η."""
    rows: list[list[Panel | None]] = [[Panel(image.numpy(), "image")], [None], [None]]
    for setting, puzzle in solved.items():
        rows[0].append(context_panel(image, puzzle, setting.text))
        rows[1].append(unordered_panel(image, puzzle, 0, seed))
        rows[2].append(placed_panel(image, puzzle, 0, f"{_percent(puzzle, 0)} right"))
    return panels(rows, next(iter(solved.values())).grid, ["context", "input", "reconstruction"])


def placed_figure(images: Tensor, solved: Solved) -> Figure:
    """Each image and its reconstruction at each setting."""
    rows = [[image, *solutions] for image, solutions in _rows(images, solved, placed_panel)]
    return panels(rows, next(iter(solved.values())).grid)


def _rows(images: Tensor, solved: Solved, draw: Callable[..., Panel]) -> Iterator[tuple[Panel, list[Panel]]]:
    """Each image, and a panel of it for each setting."""
    for row, image in enumerate(images):
        solutions = []
        for setting, puzzle in solved.items():
            symbol = "η" if setting.position_ratio is None else "γ"
            head = f"{symbol} = {setting.ratio:g}: " if row == 0 else ""
            solutions.append(draw(image, puzzle, row, f"{head}{_percent(puzzle, row)}"))
        yield Panel(image.numpy(), "image" if row == 0 else ""), solutions


def mix_figure(pair: tuple[Tensor, Tensor], mixes: Mapping[PuzzleRatios, Mix]) -> Figure:
    """MP3's Figures 14 and 15: two images, and what the model builds from their shuffled patches, at each η.

    pair and the mixes' inputs: images [B, C, H, W] in [0, 1]; the first is shown.
    """
    rows: list[list[Panel | None]] = []
    for number, mix in enumerate(mixes.values()):
        first = number == 0
        row: list[Panel | None] = [
            Panel(image[0].numpy(), f"image {1 + which}") if first else None for which, image in enumerate(pair)
        ]
        for which, (patches, puzzle) in enumerate(zip(mix.inputs, mix.puzzles, strict=True)):
            # The patches were shuffled already, so the input is shown as it is.
            context = mask_of(puzzle.places[[0], : puzzle.known], puzzle.places.shape[1])
            titles = (f"input {1 + which}", f"built {1 + which}") if first else ("", "")
            row.append(Panel(patches[0].numpy(), titles[0], outlined=context[0].numpy()))
            row.append(placed_panel(patches[0], puzzle, 0, titles[1]))
        rows.append(row)
    grid = next(iter(mixes.values())).puzzles[0].grid
    return panels(rows, grid, [setting.text for setting in mixes])
