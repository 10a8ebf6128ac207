"""Puzzles that MP3 and DropPos have learned to solve, and pictures of their solutions.

Every patch is put where the model predicts it; patches at the same place are averaged, and a place without a patch
stays empty. MP3 sees all patches, with a context of them as keys (Figures 2, 12 and 13), also the patches of two images
shuffled together (14 and 15). DropPos sees some patches, and the positions of a few of them (its Figure 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Unpack

import torch
from torch import Tensor

from situs.core.jigsaw import patch_size_of
from situs.core.permutation import random_permutation
from situs.core.position import distances
from situs.core.random import uniform
from situs.core.tokens import mask_of, patchify, put_at, take, unpatchify
from situs.data.batch import Batch
from situs.errors import SitusError
from situs.limits import check_value, check_values
from situs.methods.measured import Puzzle, SolvesPuzzles
from situs.models.data import AnyData, AnyModel, Chosen, load_set, made_with, opened
from situs.models.model import anchor_notes, puzzle_method
from situs.results import Result, Summary, Table, percent

Grid = tuple[int, ...]
RATIOS = (0.0, 0.25, 0.5, 0.75)
"""η of MP3 and γ of DropPos in the papers' figures."""

POSITION_RATIOS = (0.75, 0.95)
"""γ_pos: that of DropPos's training, and that of its Figure 3."""


class PuzzleRatios(NamedTuple):
    """The ratios of a puzzle. ratio: η of MP3, γ of DropPos. position_ratio: γ_pos; None for MP3."""

    ratio: float
    position_ratio: float | None = None

    @property
    def ratios(self) -> tuple[float, ...]:
        """As `SolvesPuzzles.at` takes them."""
        return tuple(ratio for ratio in self if ratio is not None)

    @property
    def text(self) -> str:
        """`η = 0.5`, or `γ = 0.5, γ_pos = 0.95`."""
        if self.position_ratio is None:
            return f"η = {self.ratio:g}"
        return f"γ = {self.ratio:g}, γ_pos = {self.position_ratio:g}"


class PuzzleScores(NamedTuple):
    """Over all images. right: share of right predictions. off_by: mean distance of all predictions from the right
    place, in patches. empty: share of the visible patches' places that no patch is put at."""

    images: int
    right: float
    off_by: float
    empty: float


def place_patches(images: Tensor, taken: Tensor, places: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """The patches `taken` from images, each put at its entry of `places`; patches at the same place are averaged.

    images: [B, C, H, W]; taken, places: [B, K] on `grid` -> pictures [B, C, H, W], 0 where no patch is, and filled
    [B, N] bool.
    """
    size = patch_size_of(images, grid)
    put, filled = put_at(take(patchify(images, size), taken), places, math.prod(grid))
    return unpatchify(put, grid, size), filled


def paint_places(images: Tensor, where: Tensor, grid: Grid, value: float) -> Tensor:
    """Images with the patches at `where` [B, N] bool in one grey `value`: 0 is black, 1 white."""
    painted = where.unflatten(1, (1, *grid))
    height, width = patch_size_of(images, grid)
    pixels = painted.repeat_interleave(height, dim=2).repeat_interleave(width, dim=3)
    return torch.where(pixels, torch.as_tensor(value, dtype=images.dtype, device=images.device), images)


def hidden_and_wrong(puzzle: Puzzle) -> tuple[Tensor, Tensor]:
    """DropPos's Figure 3, [B, N] bool each: places whose patch is masked, and whose patch is put elsewhere."""
    count = math.prod(puzzle.grid)
    hidden = ~mask_of(puzzle.places, count)
    wrong = puzzle.guesses != puzzle.places
    return hidden, torch.zeros_like(hidden).scatter(1, puzzle.places, wrong)


def mix_pairs(first: Tensor, second: Tensor, noise: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """The patches of two images shuffled together and divided into two images again, in random order.

    first, second: [B, C, H, W]; noise: [B, 2N] -> mixes [B, C, H, W] twice, and origin [B, 2N]: the patch at place
    i of mix m comes from place origin[m·N + i] of `first`, or of `second` where that is N or more (less N).
    """
    size = patch_size_of(first, grid)
    origin = random_permutation(noise)
    both = take(torch.cat([patchify(first, size), patchify(second, size)], dim=1), origin)
    one, other = (unpatchify(half, grid, size) for half in both.chunk(2, dim=1))
    return one, other, origin


def _sums(puzzle: Puzzle) -> Tensor:
    """[5]: images, predictions, right ones, distances of all, and the share of positions left empty."""
    count = math.prod(puzzle.grid)
    places, guesses = puzzle.places[:, puzzle.asked :], puzzle.guesses[:, puzzle.asked :]
    far = distances(puzzle.grid)[places, guesses].sum()
    missed = mask_of(puzzle.places, count) & ~mask_of(puzzle.guesses, count)
    empty = missed.sum(dim=1).double() / puzzle.places.shape[1]
    right = (places == guesses).sum()
    return torch.stack([torch.tensor(float(len(places))), torch.tensor(float(places.numel())), right, far, empty.sum()])


def _scores(sums: Tensor) -> PuzzleScores:
    images, guesses, right, far, empty = sums.tolist()
    if not images:
        raise SitusError("there are no samples to make jigsaw puzzles from", field="data")
    return PuzzleScores(int(images), right / guesses, far / guesses, empty / images)


def settings_of(
    method: SolvesPuzzles, ratios: Sequence[float] | None = None, position_ratios: Sequence[float] | None = None
) -> list[PuzzleRatios]:
    """The settings to try on a method; by default those of the papers' figures that it can solve."""
    if ratios is not None:
        check_values("ratios", ratios, "[0, 1)")
    if position_ratios is not None:
        check_values("position_ratios", position_ratios, "(0, 1]")
    several = len(method.puzzle_ratios) > 1
    shares = (POSITION_RATIOS if position_ratios is None else position_ratios) if several else (None,)
    tried = [PuzzleRatios(ratio, share) for share in shares for ratio in (RATIOS if ratios is None else ratios)]
    return tried if ratios is not None else [setting for setting in tried if _can(method, setting)]


def _can(method: SolvesPuzzles, setting: PuzzleRatios) -> bool:
    try:
        method.at(*setting.ratios)
    except SitusError:
        return False
    return True


@torch.no_grad()
def solve(method: SolvesPuzzles, batch: Batch, setting: PuzzleRatios, *, seed: int = 0) -> Puzzle:
    """Puzzles of a batch at a setting, on the CPU, for a method in eval mode; the same for the same seed."""
    puzzle = method.at(*setting.ratios).solve(batch, seed=seed)
    return puzzle._replace(places=puzzle.places.cpu(), guesses=puzzle.guesses.cpu(), ranks=None)


class Mix(NamedTuple):
    """Two images shuffled together at one η. inputs: two sets of patches laid out as images, [B, C, H, W] each.

    puzzles: their solutions; places are those of the inputs. origin: see `mix_pairs`. stayed: share of the patches put
    at the place that they have in their image.
    """

    inputs: tuple[Tensor, Tensor]
    puzzles: tuple[Puzzle, Puzzle]
    origin: Tensor
    stayed: float


@torch.no_grad()
def solve_mix(method: SolvesPuzzles, pair: tuple[Tensor, Tensor], setting: PuzzleRatios, *, seed: int = 0) -> Mix:
    """MP3's solutions of two images' patches [B, C, H, W], shuffled together into two sets; on the CPU.

    A method that gives positions as hints is refused: in a mix of two images no patch has a true one.
    """
    if method.sees_positions:
        reason = "gives true positions as hints, but the patches in a mix of two samples have no true positions"
        raise SitusError(f"{type(method).__name__}: {reason}")
    count, grid = method.backbone.num_tokens, method.backbone.grid
    ids = torch.arange(len(pair[0]), device=pair[0].device)
    *inputs, origin = mix_pairs(*pair, uniform(seed, 0, ids, "analyze.mix", (2 * count,)), grid)
    # Each half is a puzzle of its own, with its own context.
    halves = [solve(method, Batch(half, 2 * ids + part), setting, seed=seed) for part, half in enumerate(inputs)]
    stayed = 0.0
    for puzzle, origin_half in zip(halves, origin.cpu().chunk(2, dim=1), strict=True):
        stayed += float((origin_half.gather(1, puzzle.places) % count == puzzle.guesses).double().mean()) / 2
    return Mix((inputs[0], inputs[1]), (halves[0], halves[1]), origin.cpu(), stayed)


@dataclass(frozen=True)
class Reconstruction(Result):
    """Puzzles of a method over a set. images: [n, C, H, W] in [0, 1], those shown; solved: their puzzles.

    scores: over the whole set. pairs and mixes: two images [1, C, H, W] each, and their solutions at each η. trained:
    the setting of the method's training; trained_hints: its share of patches with their position as a hint (MP3).
    seed: of the draws.
    """

    file: ClassVar[str] = "reconstruct"
    images: Tensor
    solved: Mapping[PuzzleRatios, Puzzle]
    scores: Mapping[PuzzleRatios, PuzzleScores]
    trained: PuzzleRatios
    pairs: Sequence[tuple[Tensor, Tensor]] = ()
    mixes: Sequence[Mapping[PuzzleRatios, Mix]] = ()
    seed: int = 0
    trained_hints: float = 0.0

    @property
    def grid(self) -> Grid:
        """Of the places."""
        return next(iter(self.solved.values())).grid

    def summary(self) -> Summary:
        """The settings with the most and the fewest right patches; a row for each setting."""
        best, worst = (choose(self.scores.items(), key=lambda item: item[1].right) for choose in (max, min))
        sentence = (
            f"At {best[0].text}, the model predicts the right position for {percent(best[1].right)} of the tested "
            f"patches of {self.provenance.counted(best[1].images)}"
        )
        if worst[0] != best[0]:
            off = f"{worst[1].off_by:.1f} patches"
            sentence += f". At {worst[0].text}, it predicts {percent(worst[1].right)} right, with a mean error of {off}"
        chance = percent(1 / math.prod(self.grid))
        rows = [
            [setting.text, percent(scores.right), chance, f"{scores.off_by:.2f}", percent(scores.empty)]
            for setting, scores in self.scores.items()
        ]
        data = self.provenance.facts.get("data")
        title = f"{self.provenance.name}: puzzles" + (f" of {data}" if data else "")
        table = Table(title, ["setting", "right", "chance", "mean error, patches", "positions left empty"], rows)
        hint_ratio = next(iter(self.solved.values())).hint_ratio
        return Summary(
            f"{sentence}. The model was trained with {self.trained.text}.",
            (table,),
            anchor_notes(hint_ratio, self.trained_hints),
        )

    def numbers(self) -> dict[str, Any]:
        """Every setting, and the share of the mixes' patches at their own place."""
        return {
            "settings": [{**setting._asdict(), **scores._asdict()} for setting, scores in self.scores.items()],
            "mixes": [
                [{"ratio": setting.ratio, "stayed": mix.stayed} for setting, mix in pair.items()] for pair in self.mixes
            ],
        }


def analyze_reconstruct(
    model: AnyModel,
    data: AnyData = None,
    *,
    ratios: Sequence[float] | None = None,
    position_ratios: Sequence[float] | None = None,
    anchor_ratio: float | None = None,
    show: int = 6,
    pairs: int = 2,
    seed: int = 0,
    **chosen: Unpack[Chosen],
) -> Reconstruction:
    """Puzzles that an MP3 or DropPos run solves: each patch where the model puts it, at several ratios.

    model: whatever `open_model` takes. data: a path or a source; None for the images that the run was trained on.
    ratios: η of MP3, γ of DropPos. position_ratios: γ_pos. anchor_ratio: the share of the patches that get their
    position as a hint (MP3), 0 for none; None as in the training. show: images shown on the page. pairs: pairs of
    images that are mixed (MP3). chosen: see `load_set`; the default count is 64.
    """
    check_value("show", show, ">= 1")
    check_value("pairs", pairs, ">= 0")
    model = opened(model, seed)
    method = puzzle_method(model, position_ratios, anchor_ratio)
    settings = settings_of(method, ratios, position_ratios)
    chosen.setdefault("count", 64)
    loader = load_set(model, data, **chosen)
    reconstruction = study(method, loader, settings, loader.shown, show=show, pairs=pairs, seed=seed)
    assert isinstance(model.method, SolvesPuzzles)
    return replace(reconstruction, trained_hints=model.method.hint_ratio, provenance=made_with(model, loader, seed))


def study(
    method: SolvesPuzzles,
    batches: Iterable[Batch],
    settings: Sequence[PuzzleRatios],
    look: Callable[[Tensor], Tensor],
    *,
    show: int = 6,
    pairs: int = 2,
    seed: int = 0,
) -> Reconstruction:
    """Solves every image at every setting, in one pass, and keeps the first `show` for the page.

    look: turns a model's inputs into pictures (`Loader.shown`). pairs: how many pairs of the images are mixed.
    """
    sums = {setting: torch.zeros(5, dtype=torch.float64) for setting in settings}
    kept: dict[PuzzleRatios, list[Puzzle]] = {setting: [] for setting in settings}
    images: list[Tensor] = []
    needed = max(show, 2 * pairs)
    for batch in batches:
        missing = needed - sum(map(len, images))
        if missing > 0:
            images.append(batch.inputs[:missing])
        for setting in settings:
            puzzle = solve(method, batch, setting, seed=seed)
            sums[setting] += _sums(puzzle)
            if missing > 0:
                kept[setting].append(_first(puzzle, missing))
    scores = {setting: _scores(reconstruction) for setting, reconstruction in sums.items()}
    chosen = torch.cat(images)
    solved = {setting: _first(_join(parts), show) for setting, parts in kept.items()}
    trained = PuzzleRatios(*method.trained_ratios)
    reconstruction = Reconstruction(
        look(chosen[:show]).cpu(), solved, scores, trained, seed=seed, trained_hints=method.hint_ratio
    )
    couples = [(chosen[[at]], chosen[[at + 1]]) for at in range(0, min(2 * pairs, len(chosen) - 1), 2)]
    if method.sees_positions:  # a mix has no true positions to give as hints
        return reconstruction

    def seen(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return look(pair[0]).cpu(), look(pair[1]).cpu()

    mixes: list[dict[PuzzleRatios, Mix]] = []
    for number, couple in enumerate(couples):
        mixed = {setting: solve_mix(method, couple, setting, seed=seed + number) for setting in settings}
        mixes.append({setting: mix._replace(inputs=seen(mix.inputs)) for setting, mix in mixed.items()})
    return replace(reconstruction, pairs=[*map(seen, couples)], mixes=mixes)


def _first(puzzle: Puzzle, count: int) -> Puzzle:
    return puzzle._replace(places=puzzle.places[:count], guesses=puzzle.guesses[:count])


def _join(parts: Sequence[Puzzle]) -> Puzzle:
    places, guesses = (torch.cat([getattr(part, name) for part in parts]) for name in ("places", "guesses"))
    return parts[0]._replace(places=places, guesses=guesses)
