"""Puzzles of frames: what is drawn is what was put there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import small_vit

from situs.measure.reconstruct import PuzzleRatios, Reconstruction, study
from situs.methods import MP3, Batch, DropPos, DropPosConfig, MP3Config
from situs.methods.measured import Puzzle
from situs.pages.reconstruct import more_clips_figure, one_clip_figure, order_figure, page
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
    clip, pieces, together = one_clip_figure(found).axes
    assert torch.equal(torch.as_tensor(clip.images[0].get_array()), clips[0, 0])
    drawn = torch.as_tensor(together.images[0].get_array())
    came: dict[int, list[int]] = {}
    for place, to in zip(puzzle.places[0].tolist(), puzzle.guesses[0].tolist(), strict=True):
        came.setdefault(to, []).append(place)
    for at, frames in came.items():
        assert torch.allclose(drawn[:, at], clips[0, 0][:, frames].mean(dim=1))
    empty, marked = (collection.get_paths() for collection in together.collections)
    left = {round(path.vertices[:, 0].min()) for path in empty}
    assert left == {at for at in range(FRAMES) if at not in came}
    assert {round(path.vertices[:, 0].min()) for path in marked} == set(puzzle.guesses[0, :4].tolist())
    assert together.get_title(loc="left") == f"{100 * float(puzzle.right[0].double().mean()):.0f} % right"
    shuffled = torch.as_tensor(pieces.images[0].get_array())  # every frame once, in another order
    own = sorted(clips[0, 0].T.tolist())
    assert sorted(shuffled.T.tolist()) == own and not torch.equal(shuffled, clips[0, 0])


def test_more_clips_and_their_orders_are_theirs() -> None:
    found = solved()
    puzzle = found.solved[ETA]
    rows = more_clips_figure(found, ETA).axes
    shown = [torch.as_tensor(axis.images[0].get_array()) for axis in rows]
    assert torch.equal(shown[0], found.images[1, 0]) and torch.equal(shown[2], found.images[2, 0])
    for row, axis in enumerate(order_figure(puzzle).axes[:3]):
        points = torch.as_tensor(axis.collections[0].get_offsets().data)
        assert torch.equal(points.long(), torch.stack([puzzle.places[row], puzzle.guesses[row]], dim=1))
        assert axis.get_title().startswith(f"clip {row + 1}: ")


def test_droppos_shows_what_was_told_and_asks_for_the_rest() -> None:
    backbone = small_vit((BANDS, FRAMES), depth=1, patch_size=(BANDS, 1), in_chans=1, positions="sincos")
    config = DropPosConfig(mask_ratio=0.0, position_mask_ratio=0.5, decoder_width=16, decoder_heads=2, decoder_depth=1)
    method = DropPos(backbone, config).eval()
    clips = Batch(torch.rand(2, 1, BANDS, FRAMES), torch.arange(2))
    setting = PuzzleRatios(0.0, 0.5)
    found = study(method, [clips], [setting], lambda x: x)
    puzzle, told = found.solved[setting], one_clip_figure(found).axes[1]
    drawn, places = torch.as_tensor(told.images[0].get_array()), puzzle.places[0, : puzzle.asked].tolist()
    assert 0 < puzzle.asked < FRAMES
    assert torch.equal(drawn[:, places], clips.inputs[0, 0][:, places])
    assert float(drawn.abs().sum()) == pytest.approx(float(drawn[:, places].abs().sum()))
    points = order_figure(puzzle).axes[0].collections[0].get_offsets()
    assert len(points) == FRAMES - puzzle.asked


def test_the_page_of_a_row_speaks_of_clips(outline: Any) -> None:
    torch.manual_seed(0)
    backbone = small_vit((BANDS, FRAMES), depth=1, patch_size=(BANDS, 1), in_chans=1, positions="sincos")
    clips = Batch(torch.rand(4, 1, BANDS, FRAMES), torch.arange(4))
    for told, more in ((0.0, ["Two clips in one, 1 text, 1 figure"]), (0.3, [])):
        method = MP3(backbone, MP3Config(mask_ratio=0.5, anchor_ratio=told)).eval()
        found = study(method, [clips], [PuzzleRatios(0.0), ETA], lambda x: x, show=3, pairs=1)
        drawn = page(replace(found, provenance=Provenance({"seed": 0}, things="clips")))
        assert outline(drawn.render()) == [
            "First screen, 1 figure",
            f"How many positions are predicted right, {'1 text, ' if told else ''}2 rows",
            "One clip, 1 text",
            "More clips, 1 figure",
            "Predicted against true order, 1 figure",
            *more,
            "How this page was made, facts",
        ]
        text = drawn.render()
        assert " of the tested patches of 4 clips" in text and "At η = 0.5. Each panel is a clip" in text
