"""The page of solved puzzles, and its pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from matplotlib.figure import Figure
from torch import Tensor

from situs.core.permutation import random_permutation
from situs.core.random import uniform
from situs.core.tokens import mask_of
from situs.measure.reconstruct import (
    Grid,
    Mix,
    PuzzleRatios,
    Reconstruction,
    hidden_and_wrong,
    paint_places,
    place_patches,
)
from situs.methods.measured import Puzzle
from situs.pages.frames import frame_sections, in_a_row
from situs.report.html import Page
from situs.report.puzzles import Panel, panels
from situs.results import channels_drawn, percent

Solved = Mapping[PuzzleRatios, Puzzle]
"""The puzzles of the images on the page, by setting."""


def page(found: Reconstruction) -> Page:
    """The scores, and the puzzles of a few images."""
    said = found.summary()
    page = Page(f"What {found.provenance.name} makes of loose patches", lead=said.sentence)
    best, score = max(found.scores.items(), key=lambda each: each[1].right)
    page.number(percent(score.right), f"of the patches asked for put right at {best.text}")
    section = page.section("How many patches are put right")
    section.table(said.tables[0].header, said.tables[0].rows, _SCORES_CAPTION)
    for note in filter(None, (*said.notes, channels_drawn(found.images.shape[1]))):
        section.text(note)
    told = next(iter(found.scores)).position_ratio is not None
    drawn = frame_sections if in_a_row(found.grid) else _droppos_sections if told else _mp3_sections
    drawn(page, found)
    return page.end(found.provenance.facts)


_SCORES_CAPTION = (
    "Right: share of guesses that are the true place. Off by: mean distance of a guess from it, in patches, right ones "
    "included. Left empty: places whose patch was shown and that no patch is put at."
)


def _mp3_sections(page: Page, found: Reconstruction) -> None:
    section = page.section("One image")
    section.text(
        "The model gets all patches in no order and without positions (input). A random share 1 − η of them, the "
        "context (outlined in green), serves as keys; every patch, context included, is then put where the model "
        "says it was."
    )
    drawn = one_image_figure(found.images[0], found.solved, found.seed)
    page.opening.figure(drawn, f"{_PLACED} Top: the context in its true places.", name="one")
    drawn, caption = placed_figure(found.images, found.solved), f"{_PLACED} The share of right guesses is over each."
    page.section("More images").figure(drawn, caption, name="placed")
    if found.mixes:
        section = page.section("Two images in one")
        section.text(
            "The patches of two images are shuffled together and dealt out in two sets of equal size. Neither set is "
            "an image, yet the model builds one of each. "
            + " ".join(_stayed(number, pair) for number, pair in enumerate(found.mixes, start=1))
        )
        for number, (pair, mixes) in enumerate(zip(found.pairs, found.mixes, strict=True), start=1):
            section.figure(mix_figure(pair, mixes), f"Pair {number}. {_PLACED}", name=f"mix-{number}")


_PLACED = (
    "Patches that meet in a place are averaged, hatched places got none, and a green line runs around context patches "
    "(where they were put)."
)


def _stayed(number: int, pair: Mapping[PuzzleRatios, Mix]) -> str:
    shares = ", ".join(f"{percent(mix.stayed, 0)} at {setting.text}" for setting, mix in pair.items())
    return f"In pair {number} the patches that are put where they stood in their own image are {shares}."


def _droppos_sections(page: Page, found: Reconstruction) -> None:
    for number, dropped in enumerate(dict.fromkeys(setting.position_ratio for setting in found.solved)):
        solved = {setting: puzzle for setting, puzzle in found.solved.items() if setting.position_ratio == dropped}
        section = page.section(f"γ_pos = {dropped:g}")
        section.text(
            f"Of the patches that are left at each γ, a share of {dropped:g} is not told where it stands; the others "
            "are (outlined in green). The share of right guesses is over each picture."
        )
        (section if number else page.opening).figure(
            verdict_figure(found.images, solved),
            "Black and hatched: not shown to the model. White with a red edge: its place is guessed wrong. All else is "
            "right, or told.",
            name=f"verdict-{dropped:g}",
        )
        section.figure(
            placed_figure(found.images, solved),
            "The same puzzles with each patch where the model puts it; patches that meet are averaged, hatched places "
            "got none.",
            name=f"placed-{dropped:g}",
        )


def _panel(
    image: Tensor, taken: Tensor, places: Tensor, puzzle: Puzzle, title: str = "", *, known: int | None = None
) -> Panel:
    """The patches `taken` of an image put at `places`, [1, K] each; the first `known` outlined, unless they are all."""
    picture, filled = place_patches(image[None], taken, places, puzzle.grid)
    outlined = None if known is None else mask_of(places[:, :known], filled.shape[1])[0].numpy()
    return Panel(picture[0].numpy(), title, outlined=outlined, empty=~filled[0].numpy())


def placed_panel(image: Tensor, puzzle: Puzzle, row: int, title: str = "") -> Panel:
    """Image `row` of a puzzle with each patch where the model puts it.

    The context or the told patches are outlined, unless that were all of them.
    """
    places, guesses = puzzle.places[row : row + 1], puzzle.guesses[row : row + 1]
    known = puzzle.known if puzzle.known < places.shape[1] else None
    return _panel(image, places, guesses, puzzle, title, known=known)


def own_places_panel(image: Tensor, puzzle: Puzzle, title: str = "") -> Panel:
    """The context of the first image in its own places; the others are left empty."""
    places = puzzle.places[:1, : puzzle.known]
    return _panel(image, places, places, puzzle, title)


def unordered_panel(image: Tensor, puzzle: Puzzle, row: int, seed: int = 0) -> Panel:
    """The patches of a puzzle in no order, as the model gets them; the context outlined."""
    noise = uniform(seed, 0, torch.tensor([row]), "analyze.layout", (puzzle.grid[0] * puzzle.grid[1],))
    layout = random_permutation(noise)[:, : puzzle.places.shape[1]]
    return _panel(image, puzzle.places[row : row + 1], layout, puzzle, known=puzzle.known)


def verdict_panel(image: Tensor, puzzle: Puzzle, row: int, title: str = "") -> Panel:
    """DropPos's Figure 3: hidden patches black, wrongly placed ones white, those that were told outlined."""
    hidden, wrong = (marks[row : row + 1] for marks in hidden_and_wrong(puzzle))
    painted = paint_places(paint_places(image[None], hidden, puzzle.grid, 0.0), wrong, puzzle.grid, 1.0)
    told = mask_of(puzzle.places[row : row + 1, : puzzle.known], hidden.shape[1])
    marks = {"outlined": told[0].numpy(), "hidden": hidden[0].numpy(), "wrong": wrong[0].numpy()}
    return Panel(painted[0].numpy(), title, **marks)


def _percent(puzzle: Puzzle, row: int) -> str:
    return percent(float(puzzle.right[row].double().mean()), 0)


def _title(setting: PuzzleRatios, puzzle: Puzzle, row: int) -> str:
    symbol = "η" if setting.position_ratio is None else "γ"
    return f"{symbol} = {setting.ratio:g}: {_percent(puzzle, row)}" if row == 0 else _percent(puzzle, row)


def one_image_figure(image: Tensor, solved: Solved, seed: int = 0) -> Figure:
    """MP3's Figure 2 for the first image: context, input and reconstruction at each η."""
    rows: list[list[Panel | None]] = [[Panel(image.numpy(), "image")], [None], [None]]
    for setting, puzzle in solved.items():
        rows[0].append(own_places_panel(image, puzzle, setting.text))
        rows[1].append(unordered_panel(image, puzzle, 0, seed))
        rows[2].append(placed_panel(image, puzzle, 0, f"{_percent(puzzle, 0)} right"))
    return panels(rows, _grid(solved), ["context", "input", "reconstruction"])


def placed_figure(images: Tensor, solved: Solved) -> Figure:
    """Each image and what is made of it at each setting."""
    return panels([[own, *made] for own, made in _rows(images, solved, placed_panel)], _grid(solved))


def verdict_figure(images: Tensor, solved: Solved) -> Figure:
    """DropPos's Figure 3: each γ, and the image last."""
    return panels([[*made, own] for own, made in _rows(images, solved, verdict_panel)], _grid(solved))


def _rows(images: Tensor, solved: Solved, draw: Callable[..., Panel]) -> Iterator[tuple[Panel, list[Panel]]]:
    """Each image, and a panel of it for each setting."""
    for row, image in enumerate(images):
        made = [draw(image, puzzle, row, _title(setting, puzzle, row)) for setting, puzzle in solved.items()]
        yield Panel(image.numpy(), "image" if row == 0 else ""), made


def _grid(solved: Solved) -> Grid:
    return next(iter(solved.values())).grid


def mix_figure(pair: tuple[Tensor, Tensor], mixes: Mapping[PuzzleRatios, Mix]) -> Figure:
    """MP3's Figures 14 and 15: two images, and what is built of their patches shuffled together, at each η.

    pair and the mixes' inputs: images [B, C, H, W] in [0, 1], of which the first is shown.
    """
    rows: list[list[Panel | None]] = []
    for number, mix in enumerate(mixes.values()):
        first = number == 0
        shown: list[Panel | None] = [
            Panel(image[0].numpy(), f"image {1 + which}") if first else None for which, image in enumerate(pair)
        ]
        for which, (given, puzzle) in enumerate(zip(mix.inputs, mix.puzzles, strict=True)):
            # The dealt patches stand in no order already, so the input is shown as it is.
            context = mask_of(puzzle.places[:1, : puzzle.known], puzzle.places.shape[1])
            titles = (f"input {1 + which}", f"built {1 + which}") if first else ("", "")
            shown.append(Panel(given[0].numpy(), titles[0], outlined=context[0].numpy()))
            shown.append(placed_panel(given[0], puzzle, 0, titles[1]))
        rows.append(shown)
    grid = next(iter(mixes.values())).puzzles[0].grid
    return panels(rows, grid, [setting.text for setting in mixes])
