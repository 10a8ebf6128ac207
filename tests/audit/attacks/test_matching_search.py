"""Distances and priors against slow hand computations; the optimiser keeps the best, obeys bounds, stops, and mixes
no two searches."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from situs.audit.attacks.matching import (
    MatchingConfig,
    border_steps,
    gradient_distances,
    name_weights,
    optimise,
    variation,
)
from situs.audit.deadline import Deadline
from situs.errors import SitusError


def chance(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_distances_by_hand() -> None:
    target = {"a": chance(2, 3, 4), "b": 10 * chance(2, 5, seed=1)}
    guess = {"a": chance(2, 3, 4, seed=2), "b": chance(2, 5, seed=3)}
    squared, cosine = (gradient_distances(guess, target, kind) for kind in ("l2", "cosine"))
    for p in range(2):
        for column, name in enumerate(target):
            g, t = guess[name][p].flatten().tolist(), target[name][p].flatten().tolist()
            error = sum((x - y) ** 2 for x, y in zip(g, t, strict=True)) / sum(y * y for y in t)
            dot = sum(x * y for x, y in zip(g, t, strict=True))
            angle = dot / math.sqrt(sum(x * x for x in g) * sum(y * y for y in t))
            assert float(squared[p, column]) == pytest.approx(error)
            assert float(cosine[p, column]) == pytest.approx(1 - angle)


@pytest.mark.parametrize("kind", ["l2", "cosine"])
def test_what_is_only_rounding_does_not_count(kind: str) -> None:
    """A key's bias has no gradient but rounding, and both sides round differently."""
    real = chance(1, 50)
    target, guess = ({"a": real, "noise": 1e-9 * chance(1, 50, seed=seed)} for seed in (1, 2))
    assert float((name_weights(target) * gradient_distances(guess, target, kind))[0, 1]) < 1e-12
    nothing = {"a": real, "noise": torch.zeros(1, 50, dtype=torch.float64)}
    assert (name_weights(nothing) * gradient_distances(nothing, nothing, kind)).isfinite().all()


def test_weights_by_hand() -> None:
    target = {"a": torch.full((1, 4), 3.0), "b": torch.full((1, 1), 1.0)}  # squares 36 and 1, five numbers
    torch.testing.assert_close(name_weights(target), torch.tensor([[36 / 36.36, 1 / 1.36]]))
    floor = 0.36 + 10 * 0.5**2 * 5
    torch.testing.assert_close(name_weights(target, 0.5), torch.tensor([[36 / (36 + floor), 1 / (1 + floor)]]))
    # Where noise swamps all, every number weighs alike: the weighted sum is the plain squared error.
    guess = {"a": torch.ones(1, 4), "b": torch.zeros(1, 1)}
    found = name_weights(target, 1e3) * gradient_distances(guess, target, "l2")
    torch.testing.assert_close(found / found.sum(), torch.tensor([[16 / 17, 1 / 17]]), rtol=1e-4, atol=1e-4)


def test_priors_by_hand() -> None:
    images = chance(2, 1, 1, 4, 6)
    x = images[1, 0, 0]
    down = [abs(float(x[i + 1, j] - x[i, j])) for i in range(3) for j in range(6)]
    across = [abs(float(x[i, j + 1] - x[i, j])) for i in range(4) for j in range(5)]
    assert float(variation(images)[1]) == pytest.approx(sum(down) / len(down) + sum(across) / len(across))
    # A grid of 2 x 3 patches, each 2 x 2: one border down, two across.
    rows = [float(x[2, j] - x[1, j]) ** 2 for j in range(6)]
    columns = [float(x[i, j + 1] - x[i, j]) ** 2 for i in range(4) for j in (1, 3)]
    expected = sum(rows) / len(rows) + sum(columns) / len(columns)
    assert float(border_steps(images, (2, 3))[1]) == pytest.approx(expected)
    assert float(border_steps(images, (1, 1))[1]) == 0


def bowl(centre: Tensor):
    def objective(images: Tensor) -> tuple[Tensor, Tensor]:
        loss = (images - centre).square().flatten(1).sum(dim=1)
        return loss, loss

    return objective


def test_searches_do_not_mix() -> None:
    centre, start = chance(3, 1, 1, 2, 2), chance(3, 1, 1, 2, 2, seed=1)
    config = MatchingConfig(iterations=40)
    together = optimise(bowl(centre), start, config, Deadline(), "x")
    for p in range(3):
        alone = optimise(bowl(centre[p : p + 1]), start[p : p + 1], config, Deadline(), "x")
        assert torch.equal(alone.images[0], together.images[p])
        assert torch.equal(alone.loss[0], together.loss[p])


def test_steps_are_ten_times_shorter_after_three_five_and_seven_eighths() -> None:
    """Of signs that never change Adam makes steps of its whole size."""
    seen: list[float] = []

    def slope(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(float(images.detach()))
        return images.sum(dim=(1, 2, 3, 4)), images.detach().sum(dim=(1, 2, 3, 4))

    start = torch.zeros(1, 1, 1, 1, 1, dtype=torch.float64)
    optimise(slope, start, MatchingConfig(iterations=16, lr=0.5), Deadline(), "x")
    steps = [before - after for before, after in itertools.pairwise(seen)]
    assert steps == pytest.approx([0.5] * 6 + [0.05] * 4 + [0.005] * 4 + [0.0005])


@pytest.mark.parametrize("signed", [True, False])
def test_it_arrives_within_bounds(signed: bool) -> None:
    centre = torch.tensor([0.3, 5.0, -5.0, 0.9], dtype=torch.float64).view(1, 1, 1, 2, 2)
    bounds = torch.zeros(()), torch.ones(())
    config = MatchingConfig(iterations=400, signed=signed)
    found = optimise(bowl(centre), torch.full_like(centre, 0.5), config, Deadline(), "x", bounds)
    torch.testing.assert_close(found.images, centre.clamp(0, 1), atol=5e-3, rtol=0)
    assert found.done == 400


def test_the_best_is_kept_and_not_the_last() -> None:
    """An objective that gets worse with every look: the start is the best there is."""
    looks = iter(range(1, 100))

    def objective(images: Tensor) -> tuple[Tensor, Tensor]:
        loss = images.square().flatten(1).sum(dim=1) * 0 + next(looks)
        return loss, loss

    start = chance(2, 1, 1, 2, 2)
    found = optimise(objective, start, MatchingConfig(iterations=9), Deadline(), "x")
    assert torch.equal(found.images, start)
    assert found.loss.tolist() == [1, 1]


def test_time_and_ctrl_c_leave_the_best_so_far() -> None:
    centre, start = torch.zeros(1, 1, 1, 2, 2), torch.ones(1, 1, 1, 2, 2)
    late = Deadline(seconds=1e-6)
    found = optimise(bowl(centre), start, MatchingConfig(), late, "x")
    assert found.done == 1 and float(found.loss) == 4

    calls = iter(range(100))

    def interrupted(images: Tensor) -> tuple[Tensor, Tensor]:
        if next(calls) == 7:
            raise KeyboardInterrupt
        return bowl(centre)(images)

    deadline = Deadline()
    found = optimise(interrupted, start, MatchingConfig(), deadline, "x")
    assert deadline.interrupted
    assert found.done == 7
    assert float(found.loss) < 4


def test_ctrl_c_before_the_first_guess_is_raised() -> None:
    """The start is noise and no guess: kept, it would count as an image that an attack could not read."""
    deadline, start = Deadline(), torch.ones(1, 1, 1, 2, 2)

    def interrupted(_: Tensor) -> tuple[Tensor, Tensor]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimise(interrupted, start, MatchingConfig(), deadline, "x")
    assert deadline.interrupted


def test_lines_of_progress() -> None:
    said: list[str] = []
    optimise(
        bowl(torch.zeros(1, 1, 1, 2, 2)),
        torch.ones(1, 1, 1, 2, 2),
        MatchingConfig(iterations=20),
        Deadline(said.append),
        "it",
    )
    assert len(said) == 10
    assert said[-1].startswith("it: iteration 20 of 20, distance ")


@pytest.mark.parametrize("field", ["iterations", "parallel", "lr"])
def test_mistakes(field: str) -> None:
    with pytest.raises(SitusError) as caught:
        MatchingConfig(**{field: 0})
    assert (caught.value.field, caught.value.value) == (field, 0)


def test_how_it_searches_unless_it_is_told() -> None:
    """Inverting Gradients' choices: the sign of the gradient, Adam at 0.1, a little total variation."""
    told = MatchingConfig("l2", 1000, lr=0.1, signed=True, smooth=1e-4, border=1e-4, table=1.0, parallel=8)
    assert MatchingConfig() == told
