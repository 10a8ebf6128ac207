"""Puzzles of frames: what is drawn is what was put there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import small_vit

from situs.measure.reconstruct import PuzzleRatios, Reconstruction, study
from situs.methods import MP3, Batch, MP3Config
from situs.methods.measured import Puzzle
from situs.pages import make_page
from situs.pages.reconstruct import one_image_figure
from situs.results import Provenance

FRAMES, BANDS = 7, 5
ETA = PuzzleRatios(0.5)


def solved(*, upright: bool = False) -> Reconstruction:
    """Three clips whose frames are put at places chosen here, the first four of each the context."""
    chance = torch.Generator().manual_seed(0)
    images = torch.rand(3, 1, BANDS, FRAMES, generator=chance)
    places = torch.stack([torch.randperm(FRAMES, generator=chance) for _ in range(3)])
    guesses = torch.randint(FRAMES, (3, FRAMES), generator=chance)
    guesses[0, 0] = places[0, 0]
    grid = (FRAMES, 1) if upright else (1, FRAMES)
    images = images.mT if upright else images
    return Reconstruction(images, {ETA: Puzzle(places, guesses, 4, 0, grid)}, {}, ETA)


@pytest.mark.parametrize("upright", [False, True])
def test_a_strip_shows_each_frame_where_it_was_put(upright: bool) -> None:
    found = solved(upright=upright)
    puzzle, clips = found.solved[ETA], solved().images
    clip, context, pieces, together = one_image_figure(found.images[0], found.solved).axes
    drawn = [torch.as_tensor(axis.images[0].get_array().copy()).flip(0) for axis in (clip, context, pieces, together)]
    assert torch.allclose(drawn[0].float(), clips[0, 0])
    shown = puzzle.places[0, :4].tolist()
    assert torch.allclose(drawn[1].float()[:, shown], clips[0, 0][:, shown])
    came: dict[int, list[int]] = {}
    for place, to in zip(puzzle.places[0].tolist(), puzzle.guesses[0].tolist(), strict=True):
        came.setdefault(to, []).append(place)
    for at, frames in came.items():
        assert torch.allclose(drawn[3].float()[:, at], clips[0, 0][:, frames].mean(dim=1))
    left = {round(patch.get_x()) for patch in together.patches}
    assert left == {at for at in range(FRAMES) if at not in came}
    assert together.get_title() == f"{100 * float(puzzle.right[0].double().mean()):.0f} % right"
    own = sorted(clips[0, 0].T.tolist())  # every frame once, in another order
    assert sorted(drawn[2].float().T.tolist()) == own and not torch.equal(drawn[2].float(), clips[0, 0])


def test_the_page_of_a_row_speaks_of_clips(outline: Any, undrawn: None) -> None:
    torch.manual_seed(0)
    backbone = small_vit((BANDS, FRAMES), depth=1, patch_size=(BANDS, 1), in_chans=1, positions="sincos")
    clips = Batch(torch.rand(4, 1, BANDS, FRAMES), torch.arange(4))
    for told, more in ((0.0, ["Two clips in one, 1 text, 1 figure"]), (0.3, [])):
        method = MP3(backbone, MP3Config(mask_ratio=0.5, anchor_ratio=told)).eval()
        found = study(method, [clips], [PuzzleRatios(0.0), ETA], lambda x: x, show=3, pairs=1)
        drawn = make_page(replace(found, provenance=Provenance({"seed": 0}, things="clips")))
        assert outline(drawn.render()) == [
            "First screen, 1 figure",
            f"How many positions are predicted correctly, {'2 texts' if told else '1 text'}, 2 rows",
            "One clip, 1 text",
            "More clips, 1 figure",
            *more,
            "How this page was made, facts",
        ]
        text = drawn.render()
        assert " of the tested patches of 4 clips" in text and "Each strip is a clip" in text
