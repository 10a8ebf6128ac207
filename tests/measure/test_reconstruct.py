"""Puzzles: pictures against slow loops over pixels, and models that are wrong or right by construction."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import small_swin, small_vit
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from situs.core.when import When
from situs.errors import SitusError
from situs.measure import reconstruct
from situs.measure.reconstruct import (
    PuzzleRatios,
    PuzzleScores,
    Reconstruction,
    analyze_reconstruct,
    hidden_and_wrong,
    mix_pairs,
    paint_places,
    place_patches,
    settings_of,
    solve,
    solve_mix,
    study,
)
from situs.methods import Batch
from situs.methods.droppos import DropPos, DropPosConfig
from situs.methods.measured import Puzzle
from situs.methods.mp3 import MP3, MP3Config
from situs.models import Model
from situs.pages.reconstruct import _rows, context_panel, mix_figure, page, placed_panel, unordered_panel, verdict_panel
from situs.results import Provenance

GRID = (2, 3)


def score(puzzles: list[Puzzle]) -> PuzzleScores:
    """The scores of puzzles of one setting."""
    return reconstruct._scores(sum(map(reconstruct._sums, puzzles), torch.zeros(5, dtype=torch.float64)))


def make(kind: type[Any], config: Any) -> Any:
    torch.manual_seed(0)
    positions = "sincos" if kind is DropPos else None
    backbone = small_vit((8, 12), depth=1, positions=positions)
    return kind(backbone, config).eval()


def batch(count: int = 4) -> Batch:
    images = torch.rand(count, 3, 8, 12, generator=torch.Generator().manual_seed(1))
    return Batch(images, torch.arange(count))


def patch(image: Tensor, place: int, grid: tuple[int, int] = GRID, side: int = 4) -> Tensor:
    """Patch `place` of an image [C, H, W], by slicing."""
    row, column = divmod(place, grid[1])
    return image[:, row * side : (row + 1) * side, column * side : (column + 1) * side]


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(0, 2**31))
@settings(deadline=None, max_examples=30)
def test_patches_are_placed_and_averaged_as_by_hand(height: int, width: int, taken: int, seed: int) -> None:
    grid, count = (height, width), height * width
    chance = torch.Generator().manual_seed(seed)
    images = torch.rand(2, 3, 4 * height, 4 * width, dtype=torch.float64, generator=chance)
    index = torch.randint(count, (2, taken), generator=chance)
    places = torch.randint(count, (2, taken), generator=chance)
    pictures, filled = place_patches(images, index, places, grid)
    for number in range(2):
        for place in range(count):
            here = [
                patch(images[number], int(i), grid)
                for i, p in zip(index[number], places[number], strict=True)
                if p == place
            ]
            assert bool(filled[number, place]) == bool(here)
            expected = torch.stack(here).mean(dim=0) if here else torch.zeros(3, 4, 4, dtype=torch.float64)
            torch.testing.assert_close(patch(pictures[number], place, grid), expected)


def test_right_guesses_give_the_image_back() -> None:
    images = batch().inputs
    order = torch.rand(4, 6).argsort(dim=1)
    pictures, filled = place_patches(images, order, order, GRID)
    assert torch.equal(pictures, images)
    assert filled.all()


def test_painting_leaves_other_patches_alone() -> None:
    images = batch(2).inputs
    where = torch.tensor([[True, False, False, False, False, True], [False] * 6])
    painted = paint_places(images, where, GRID, 1.0)
    for place in range(6):
        expected = torch.ones(3, 4, 4) if place in (0, 5) else patch(images[0], place)
        assert torch.equal(patch(painted[0], place), expected)
    assert torch.equal(painted[1], images[1])


def test_hidden_and_wrong_places_of_figure_3() -> None:
    """Patches 4, 0 and 2 are shown; 4 is told, 0 is guessed right and 2 is put at 5."""
    puzzle = Puzzle(torch.tensor([[4, 0, 2]]), torch.tensor([[4, 0, 5]]), 1, 1, GRID)
    hidden, wrong = hidden_and_wrong(puzzle)
    assert hidden.nonzero()[:, 1].tolist() == [1, 3, 5]
    assert wrong.nonzero()[:, 1].tolist() == [2]
    found = score([puzzle])
    assert (found.images, found.right) == (1, 0.5)
    assert math.isclose(found.off_by, 0.5 * 1.0)  # from (0, 2) to (1, 2), and 0
    assert math.isclose(found.empty, 1 / 3)  # nothing is put at 2; 5 was not asked for
    image = batch(1).inputs[0]
    panel = verdict_panel(image, puzzle, 0)
    seen = torch.from_numpy(panel.image)
    for place, value in ((1, 0.0), (3, 0.0), (5, 0.0), (2, 1.0)):
        assert (patch(seen, place) == value).all()
    for place in (0, 4):
        assert torch.equal(patch(seen, place), patch(image, place))
    assert panel.outlined.nonzero()[0].tolist() == [4]


def test_each_image_has_a_panel_for_each_setting_and_the_first_row_names_them() -> None:
    images = batch(2).inputs
    whole = Puzzle(torch.tensor([[4, 0, 2]] * 2), torch.tensor([[4, 0, 5], [4, 0, 2]]), 1, 1, GRID)
    solved = {PuzzleRatios(0.5): whole, PuzzleRatios(0.75, 0.25): whole}
    rows = list(_rows(images, solved, verdict_panel))
    assert [image.title for image, _ in rows] == ["image", ""]
    titles = [[panel.title for panel in panels] for _, panels in rows]
    assert titles == [["η = 0.5: 50 %", "γ = 0.75: 50 %"], ["100 %", "100 %"]]
    for (image, panels), own in zip(rows, images, strict=True):
        assert torch.equal(torch.from_numpy(image.image), own)
        assert len(panels) == 2


def test_scores_weigh_every_guess_alike() -> None:
    one = Puzzle(torch.tensor([[0, 1]]), torch.tensor([[0, 0]]), 0, 0, (1, 2))
    two = Puzzle(torch.tensor([[1, 0], [0, 1]]), torch.tensor([[1, 0], [0, 1]]), 0, 0, (1, 2))
    found = score([one, two])
    assert found == (3, 5 / 6, 1 / 6, 0.5 / 3)
    with pytest.raises(SitusError, match=r"no samples to make jigsaw puzzles from"):
        score([])


def test_a_mix_deals_every_patch_of_both_images_once() -> None:
    first, second = batch(2).inputs, batch(4).inputs[2:]
    noise = torch.rand(2, 12, generator=torch.Generator().manual_seed(3))
    one, other, origin = mix_pairs(first, second, noise, GRID)
    for number in range(2):
        assert sorted(origin[number].tolist()) == list(range(12))
        for place in range(12):
            whole = (one, other)[place // 6][number]
            source = int(origin[number, place])
            real = (first, second)[source // 6][number]
            assert torch.equal(patch(whole, place % 6), patch(real, source % 6))


def spy_on_order(method: MP3, monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    """Lets the head answer with a function of the true places, whatever the features are."""
    own = MP3.forward

    def forward(self: MP3, given: Batch, draws: Any) -> Any:
        out = own(self, given, draws)
        logits = nn.functional.one_hot(answer(draws["order"]), 6).float()
        return out._replace(extras={**out.extras, "logits": logits})

    monkeypatch.setattr(MP3, "forward", forward)


def test_a_model_that_knows_solves_all_and_one_that_shifts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    method = make(MP3, MP3Config(mask_ratio=0.5))
    spy_on_order(method, monkeypatch, lambda order: order)
    puzzle = solve(method, batch(), PuzzleRatios(0.5))
    assert puzzle.known == 3
    assert puzzle.asked == 0
    assert score([puzzle]) == (4, 1.0, 0.0, 0.0)
    panel = placed_panel(batch().inputs[2], puzzle, 2)
    assert torch.equal(torch.from_numpy(panel.image), batch().inputs[2])
    assert panel.outlined.sum() == 3
    context = puzzle.places[2, :3]
    assert sorted(panel.outlined.nonzero()[0]) == sorted(context.tolist())
    monkeypatch.undo()
    spy_on_order(method, monkeypatch, lambda order: (order + 3) % 6)  # every patch one row further
    found = score([solve(method, batch(), PuzzleRatios(0.0))])
    assert found == (4, 0.0, 1.0, 0.0)


def test_puzzles_are_those_the_method_itself_sees() -> None:
    method = make(MP3, MP3Config(mask_ratio=0.5))
    whole = method.at(0.25)
    draws = whole.draw(batch(), When(seed=7, epoch=0))
    with torch.no_grad():
        logits = whole(batch(), draws).extras["logits"]
    puzzle = solve(method, batch(), PuzzleRatios(0.25), seed=7)
    assert torch.equal(puzzle.places, draws["order"])
    assert torch.equal(puzzle.guesses, logits.argmax(dim=-1))
    assert puzzle.known == 5
    assert not torch.equal(solve(method, batch(), PuzzleRatios(0.25), seed=8).places, puzzle.places)


def test_droppos_is_told_its_anchors_and_asked_for_the_rest() -> None:
    method = make(DropPos, DropPosConfig(decoder_width=16, decoder_heads=2, decoder_depth=1))
    puzzle = solve(method, batch(), PuzzleRatios(0.5, 0.5))
    assert puzzle.places.shape == (4, 3)
    assert (puzzle.known, puzzle.asked) == (2, 2)
    assert torch.equal(puzzle.guesses[:, :2], puzzle.places[:, :2])
    assert puzzle.right.shape == (4, 1)
    view = method.at(0.5, 0.5)
    draws = view.draw(batch(), When(seed=0, epoch=0))
    with torch.no_grad():
        logits = view(batch(), draws).extras["logits"]
    assert torch.equal(puzzle.guesses[:, 2:], logits.argmax(dim=-1))
    assert torch.equal(puzzle.places, draws["visible"])


def test_a_mix_counts_the_patches_that_stayed(monkeypatch: pytest.MonkeyPatch) -> None:
    method = make(MP3, MP3Config())
    pair = batch(1).inputs, batch(2).inputs[1:]
    mix = solve_mix(method, pair, PuzzleRatios(0.5), seed=3)
    stayed = []
    for half, puzzle in enumerate(mix.puzzles):
        for place, guess in zip(puzzle.places[0].tolist(), puzzle.guesses[0].tolist(), strict=True):
            stayed.append(int(mix.origin[0, 6 * half + place]) % 6 == guess)
    assert math.isclose(mix.stayed, sum(stayed) / 12)
    assert not torch.equal(mix.puzzles[0].places, mix.puzzles[1].places)  # each half has its own context
    for place, source in enumerate(mix.origin[0].tolist()):
        real = pair[source // 6][0]
        assert torch.equal(patch(mix.inputs[place // 6][0], place % 6), patch(real, source % 6))
    assert mix_figure(pair, {PuzzleRatios(0.5): mix}).axes
    monkeypatch.setattr("situs.pages.reconstruct.panels", lambda *given: given)
    (first, second), grid, names = mix_figure(pair, {PuzzleRatios(0.5): mix, PuzzleRatios(0.25): mix})  # type: ignore[misc]
    assert [panel.title for panel in first] == ["image 1", "image 2", "input 1", "built 1", "input 2", "built 2"]
    assert second[:2] == [None, None] and {panel.title for panel in second[2:]} == {""}
    assert (grid, names) == (GRID, ["η = 0.5", "η = 0.25"])
    for half, (seen, built) in enumerate(zip(first[2::2], first[3::2], strict=True)):
        puzzle = mix.puzzles[half]
        assert torch.equal(torch.from_numpy(seen.image), mix.inputs[half][0])
        assert sorted(seen.outlined.nonzero()[0]) == sorted(puzzle.places[0, : puzzle.known].tolist())
        assert torch.equal(torch.from_numpy(built.image), place_patches(mix.inputs[half], *puzzle[:2], GRID)[0][0])
    with pytest.raises(SitusError, match="no true positions"):
        solve_mix(make(MP3, MP3Config(anchor_ratio=0.2)), pair, PuzzleRatios(0.5))


def test_unordered_and_context_pictures_show_what_they_say() -> None:
    image = batch(1).inputs[0]
    puzzle = Puzzle(torch.tensor([[4, 0, 2, 1, 3, 5]]), torch.zeros(1, 6, dtype=torch.long), 2, 0, GRID)
    panel = unordered_panel(image, puzzle, 0, seed=1)
    seen = torch.from_numpy(panel.image)
    at = [next(p for p in range(6) if torch.equal(patch(seen, p), patch(image, own))) for own in range(6)]
    assert sorted(at) == list(range(6))
    assert sorted(panel.outlined.nonzero()[0]) == sorted([at[4], at[0]])
    assert placed_panel(image, puzzle, 0).outlined.nonzero()[0].tolist() == [0]  # where both were put
    assert placed_panel(image, puzzle._replace(known=6), 0).outlined is None  # all of them are no news
    context = context_panel(image, puzzle)
    assert (~context.empty).nonzero()[0].tolist() == [0, 4]
    for place in (0, 4):
        assert torch.equal(patch(torch.from_numpy(context.image), place), patch(image, place))


def test_settings_follow_the_papers_as_far_as_the_method_can() -> None:
    mp3, droppos = make(MP3, MP3Config()), make(DropPos, DropPosConfig(decoder_width=16, decoder_heads=2))
    assert [s.ratio for s in settings_of(mp3)] == [0.0, 0.25, 0.5, 0.75]
    assert settings_of(droppos, (0.5,)) == [PuzzleRatios(0.5, 0.75), PuzzleRatios(0.5, 0.95)]
    assert settings_of(droppos, None, (0.5,))[-1].text == "γ = 0.75, γ_pos = 0.5"
    with pytest.raises(SitusError) as error:
        analyze_reconstruct(Model("a run", mp3.backbone, mp3), position_ratios=(0.5,))
    assert error.value.field == "position_ratios"
    with pytest.raises(SitusError, match=r"ratios=\(\)"):
        settings_of(mp3, ())
    swin = small_swin(width=8, patch_size=2, model_args={"window_size": 2}, positions="sincos")
    sees_a_quarter = DropPos(swin, DropPosConfig(decoder_width=16, decoder_heads=2))
    assert settings_of(sees_a_quarter) == [PuzzleRatios(0.75, 0.75), PuzzleRatios(0.75, 0.95)]


def study_of(method: Any, tried: list[PuzzleRatios], **fields: Any) -> Any:
    parts = [Batch(batch(5).inputs[at : at + 2], torch.arange(at, min(at + 2, 5))) for at in (0, 2, 4)]
    return study(method, parts, tried, lambda images: images / 2, **fields)


def test_a_study_is_one_pass_that_equals_separate_solving() -> None:
    method = make(MP3, MP3Config())
    tried = [PuzzleRatios(0.0), PuzzleRatios(0.5)]
    found = study_of(method, tried, show=3, pairs=2)
    assert torch.equal(found.images, batch(5).inputs[:3] / 2)
    for setting in tried:
        whole = solve(method, batch(5), setting)
        assert found.scores[setting] == pytest.approx(score([whole]))
        assert torch.equal(found.solved[setting].places, whole.places[:3])
        assert torch.equal(found.solved[setting].guesses, whole.guesses[:3])
    assert len(found.mixes) == len(found.pairs) == 2
    assert torch.equal(found.pairs[1][1], batch(5).inputs[3:4] / 2)
    numbers = found.numbers()
    assert numbers["settings"][1]["right"] == found.scores[tried[1]].right
    assert [row[0] for row in found.summary().tables[0].rows] == ["η = 0", "η = 0.5"]


def test_a_study_names_where_most_and_where_least_is_put_right() -> None:
    places = torch.tensor([[0, 1, 2, 3]])
    puzzle = Puzzle(places, places.flip(1), 2, 0, (2, 2))
    easy, hard, own = (PuzzleRatios(ratio) for ratio in (0.0, 0.75, 0.5))
    scores = {
        own: PuzzleScores(1200, 0.5, 1.25, 0.1),
        hard: PuzzleScores(1200, 0.125, 2.5, 0.4),
        easy: PuzzleScores(1200, 0.875, 0.5, 0.0),
    }
    found = Reconstruction(torch.zeros(1, 3, 8, 8), dict.fromkeys(scores, puzzle), scores, own)
    said = found.summary()
    best, worst, trained = said.sentence.removesuffix(".").split(". ")
    assert all(part in best for part in ("87.5 %", "1,200 images", "η = 0"))
    assert all(part in worst for part in ("12.5 %", "η = 0.75", "2.5 patches")) and trained.endswith("η = 0.5")
    assert [row[:3] for row in said.tables[0].rows] == [
        ["η = 0.5", "50.0 %", "25.0 %"],
        ["η = 0.75", "12.5 %", "25.0 %"],
        ["η = 0", "87.5 %", "25.0 %"],
    ]
    alone = replace(found, scores={own: scores[own]}, solved={own: puzzle}).summary()
    assert "50.0 %" in alone.sentence and alone.sentence.count(". ") == 1


def test_pages_carry_their_figures_and_words(outline: Any) -> None:
    method = make(MP3, MP3Config(mask_ratio=0.5))
    found = study_of(method, [PuzzleRatios(0.0), PuzzleRatios(0.5)], show=2, pairs=1)
    drawn = page(replace(found, provenance=Provenance({"seed": 0})))
    assert set(drawn.pictures) == {"one", "placed", "mix-1"}
    text = drawn.render()
    assert "The model was trained with η = 0.5." in text
    assert "Two images in one" in text
    best = max(scores.right for scores in found.scores.values())
    assert f"{100 * best:.1f} % of the tested patches" in text

    method = make(DropPos, DropPosConfig(decoder_width=16, decoder_heads=2, decoder_depth=1))
    found = study_of(method, [PuzzleRatios(0.0, 0.5), PuzzleRatios(0.5, 0.5), PuzzleRatios(0.0, 0.75)], show=2)
    drawn = page(replace(found, provenance=Provenance({"seed": 0})))
    assert set(drawn.pictures) == {"verdict-0.5", "placed-0.5", "verdict-0.75", "placed-0.75"}
    assert not found.mixes
    assert "γ = 0.75, γ_pos = 0.75." in drawn.render()
    assert outline(drawn.render()) == [
        "First screen, 1 figure",
        "How many positions are predicted correctly, 3 rows",
        "γ_pos = 0.5, 1 text, 1 figure",
        "γ_pos = 0.75, 1 text, 2 figures",
        "How this page was made, facts",
    ]


@pytest.mark.parametrize("grid", [(98,), (98, 1), (1, 98)])
def test_frames_are_off_by_their_distance_on_the_line(grid: tuple[int, ...]) -> None:
    puzzle = Puzzle(torch.tensor([[5, 97, 40]]), torch.tensor([[9, 97, 10]]), 0, 0, grid)
    found = score([puzzle])
    assert found.off_by == pytest.approx((4 + 0 + 30) / 3) and found.right == pytest.approx(1 / 3)
    assert found.empty == pytest.approx(2 / 3)
    hidden, wrong = hidden_and_wrong(puzzle)
    assert int(hidden.sum()) == 95 and wrong.nonzero()[:, 1].tolist() == [5, 40]


def test_frames_are_put_where_the_model_says() -> None:
    """MP3 over a clip of 7 frames: the pictures of its puzzles, frame by frame."""
    torch.manual_seed(0)
    backbone = small_vit((7, 5), depth=1, patch_size=(1, 5), in_chans=1, positions="sincos")
    method = MP3(backbone, MP3Config(mask_ratio=0.0, anchor_ratio=0.3)).eval()
    clips = Batch(torch.rand(3, 1, 7, 5), torch.arange(3))
    found = study(method, [clips], [PuzzleRatios(0.0)], lambda x: x, show=2)
    puzzle = found.solved[PuzzleRatios(0.0)]
    assert found.grid == (7, 1) and puzzle.places.shape == (2, 7) and puzzle.hint_ratio == 0.3 and not found.mixes
    pictures, filled = place_patches(found.images, puzzle.places, puzzle.guesses, puzzle.grid)
    for clip in range(2):
        for row in range(7):
            came = [place for place, to in zip(puzzle.places[clip], puzzle.guesses[clip], strict=True) if to == row]
            assert bool(filled[clip, row]) == bool(came)
            mean = sum((found.images[clip, 0, place] for place in came), torch.zeros(5)) / max(len(came), 1)
            assert torch.allclose(pictures[clip, 0, row], mean, atol=1e-6)
