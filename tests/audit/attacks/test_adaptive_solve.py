"""Families, searches and roots, in float64, where every law is exact."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from builders import small_vit
from torch import Tensor

from situs.audit.attacks import adaptive
from situs.audit.attacks.adaptive import (
    Effort,
    Family,
    FirstBlock,
    Partly,
    TokenFit,
    Trial,
    _facts,
    family_of,
    first_block,
    search,
    separate,
    solve_directions,
)
from situs.audit.attacks.solver import SOLVED, TELLING
from situs.audit.attacks.tokens.block import read_block
from situs.audit.client import known_gradient, victim_gradients
from situs.audit.deadline import Deadline
from situs.audit.defences import MaskedJigsaw, Step
from situs.audit.stem import flat_weight, require_stem, table_rows
from situs.core.tokens import patchify
from situs.core.when import When
from situs.data.batch import Batch
from situs.data.sources.samples import load_samples

SIZE = (7, 7)


class Scene(NamedTuple):
    """x̃'s true patches [N, K], what algebra knows of them, the block, its family, θ as it is."""

    patches: Tensor
    partly: Partly
    block: FirstBlock
    family: Family
    theta: Tensor
    grid: tuple[int, int]


def scene(dim: int = 64, ratio: float = 0.3, number: int = 0, change: Any = None, biased: bool = False) -> Scene:
    torch.manual_seed(0)
    backbone = small_vit(28, width=dim, heads=4, patch_size=7, in_chans=1, num_classes=10).eval().double()
    if biased:
        torch.nn.init.normal_(backbone.model.blocks[0].norm2.bias)
    x = (load_samples("test").images[number : number + 1].double() / 255 - 0.5) / 0.3
    x = x + 0.1 * torch.randn_like(x)  # no two patches are equal
    defence, ids, stem = MaskedJigsaw(ratio), torch.tensor([number]), require_stem(backbone)
    method: Any = defence.method(backbone)
    draws = method.draw(Batch(ids, ids), When(seed=0, epoch=0))
    mask = draws["mask"][0]
    if change is not None:
        change(x, mask)
    upload = victim_gradients(backbone, x, torch.tensor([3]), step=Step(dtype=torch.float64), defence=defence, ids=ids)
    extra = known_gradient(method, require_stem(method.backbone), upload)
    assert extra is not None
    rows = table_rows(upload[stem.table], stem) - extra
    partly = separate(rows, flat_weight(upload[stem.weight]), upload["unknown"], mask, torch.float64)
    block = first_block(read_block(backbone), stem, upload, mask, method.unknown.detach())
    assert isinstance(block, FirstBlock)
    patches = patchify(x, SIZE)[0][draws["index"][0]]
    theta = (patches - partly.base) @ partly.z.T
    return Scene(patches, partly, block, family_of(block, partly), theta, backbone.grid)


@pytest.fixture(scope="module")
def usual() -> Scene:
    return scene()


def everywhere(of: Scene) -> Tensor:
    return torch.arange(len(of.theta))


@torch.no_grad()
def test_the_truth_is_in_the_family_and_theta_is_free_along_it(usual: Scene) -> None:
    """All that is linear leaves as many dimensions as Z has, and one token for every θ: attention is out of it."""
    family = family_of(usual.block, usual.partly, loose=0)
    r = len(usual.partly.z)
    assert family.along.shape[0] == r == int(usual.partly.hidden.sum()) - 1
    assert torch.linalg.matrix_rank(family.turn) == r
    phi = family.phi(everywhere(usual), usual.theta)
    torch.testing.assert_close(family.theta(everywhere(usual), phi), usual.theta)
    found, real = (m - m.mean(dim=1, keepdim=True) for m in (
        family.streams(everywhere(usual), phi), usual.block.middle(usual.patches)
    ))  # fmt: skip
    assert float((found - real).norm() / real.norm()) < 1e-6


@torch.no_grad()
def test_a_norm_with_a_bias_has_one_unknown_and_one_equation_more() -> None:
    """A deviation that the norm divides by is then found for each token, and no dimension is left open beside θ."""
    of = scene(biased=True)
    family = family_of(of.block, of.partly, loose=0)
    r = len(of.partly.z)
    assert family.along.shape[0] == r
    phi = family.phi(everywhere(of), of.theta)
    found, real = (m - m.mean(dim=1, keepdim=True) for m in (
        family.streams(everywhere(of), phi), of.block.middle(of.patches)
    ))  # fmt: skip
    assert float((found - real).norm() / real.norm()) < 1e-6


@pytest.mark.parametrize(
    ("dim", "ratio", "more"),
    [
        (32, 0.3, 3),  # 17 tokens: 15 equations outside of the span for 18 unknowns beside θ
        (20, 0.5, 15),  # and 2 for 17, more unknowns in all than there are channels
    ],
)
@torch.no_grad()
def test_where_channels_are_few_the_family_is_wider_and_holds_the_truth(dim: int, ratio: float, more: int) -> None:
    narrow = scene(dim, ratio)
    family = narrow.family
    assert family.along.shape[0] >= len(narrow.partly.z) + more
    off = narrow.block.middle(narrow.patches) - family.fixed
    off, along = (m - m.mean(dim=1, keepdim=True) for m in (off, family.along))
    bare = family.theta(everywhere(narrow), torch.zeros(len(off), len(along), dtype=torch.float64))
    truth, ways = torch.cat([off, narrow.theta - bare], dim=1), torch.cat([along, family.turn], dim=1)
    phi = truth @ torch.linalg.pinv(ways)
    assert float((truth - phi @ ways).norm() / truth.norm()) < 1e-6


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
@torch.no_grad()
def test_derivatives_are_those_of_differences(usual: Scene) -> None:
    family, block = usual.family, usual.block
    places = everywhere(usual)[:5]
    phi = family.phi(places, usual.theta[:5]) + 0.3 * torch.randn(5, len(family.along), dtype=torch.float64)
    functionals = torch.linalg.qr(torch.randn(17, 4, dtype=torch.float64))[0].T
    span = block.fc2

    def cost(phi: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
        a = block.plain.late(family.streams(places, phi)) * span.column
        inside = a @ span.inside.T
        size = (inside if given is None else inside @ given.T).norm(dim=1)
        return (span.outside(a).norm(dim=1) / size).square() / 2

    for given in (None, functionals):
        descent = trial(usual).descent(given)
        _, slope, _ = descent.normal(places, phi @ descent._turn)
        for axis in range(phi.shape[1]):
            step = torch.zeros_like(phi)
            step[:, axis] = 1e-6
            ahead, behind = (cost(phi + sign * step, given) for sign in (1, -1))
            torch.testing.assert_close(
                (slope @ descent._turn.T)[:, axis], (ahead - behind) / 2e-6, rtol=1e-4, atol=1e-6
            )


def trial(of: Scene) -> Trial:
    return Trial(of.block, of.family, of.partly, 1e3, Effort(steps=30), Deadline())


@torch.no_grad()
def test_a_search_ends_at_the_truth(usual: Scene) -> None:
    shown = (~usual.partly.hidden).nonzero()[:, 0]
    spread = usual.theta.std(dim=0)
    start = usual.theta[shown] + 0.3 * spread * torch.randn(len(shown), len(spread), dtype=torch.float64)
    family = usual.family
    at, fit = search(trial(usual), shown, family.phi(shown, start))
    right = (family.theta(shown, at) - usual.theta[shown]).norm(dim=1) < 1e-3 * usual.theta[shown].norm(dim=1)
    assert int(right.sum()) >= len(shown) - 2
    assert (right == (fit <= SOLVED)).all()  # the attacker knows which


@torch.no_grad()
def test_functionals_keep_out_what_was_seen(usual: Scene) -> None:
    late = usual.block.plain.late(usual.block.middle(usual.patches))
    functionals = adaptive._functionals(usual.block, late[:13])
    assert functionals.shape == (4, 17)
    inside = (late * usual.block.fc2.column) @ usual.block.fc2.inside.T @ functionals.T
    assert float(inside[:13].norm()) < 1e-8 * float(inside[13:].norm())


@pytest.mark.parametrize(
    ("shown", "fits", "among"),
    [
        ((0, 1, 2, 3), (0, 2, 3), (0, 2, 3)),
        ((0, 1, 2, 3), (1, 2), (1, 2)),
        ((0, 1, 2, 3), (1,), (0, 1, 2, 3)),  # one alone is no choice: all, as they are
        ((1, 2), (), (1, 2)),
    ],
)
@torch.no_grad()
def test_hidden_patches_are_looked_for_near_the_shown_ones(
    usual: Scene, shown: tuple[int, ...], fits: tuple[int, ...], among: tuple[int, ...]
) -> None:
    hidden = torch.tensor([place not in shown for place in range(16)])
    at = usual.family.phi(everywhere(usual), usual.theta)
    tokens = TokenFit(at, torch.tensor([SOLVED * (1.0 if place in fits else 1.01) for place in range(16)]))
    pool = adaptive._pool(trial(usual._replace(partly=usual.partly._replace(hidden=hidden))), tokens)
    torch.testing.assert_close(pool, usual.theta[list(among)])


@pytest.mark.parametrize("shown", [0, 1])
@torch.no_grad()
def test_where_nothing_is_shown_patches_have_the_energy_of_normalised_pixels(usual: Scene, shown: int) -> None:
    partly = usual.partly._replace(hidden=torch.arange(16) >= shown)
    many = replace(trial(usual._replace(partly=partly)), effort=Effort(starts=4000))
    pool = adaptive._pool(many, TokenFit(usual.theta, torch.zeros(16)))
    patches = pool @ partly.z
    assert patches.shape == (4000, 49)
    assert float(patches.square().mean()) == pytest.approx(1.0, rel=0.05)


def matched(found: Tensor, real: Tensor) -> float:
    """The largest distance of a real patch to its own of those found, one to one, over the largest norm."""
    from scipy.optimize import linear_sum_assignment

    cost = torch.cdist(real, found)
    rows, columns = linear_sum_assignment(cost.numpy())
    return float(cost[rows, columns].max() / real.norm(dim=1).max())


@pytest.mark.parametrize(
    ("dim", "ratio", "number"),
    [(64, 0.3, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((64, 0.5, 2), (32, 0.3, 0)))],
)
@torch.no_grad()
def test_all_patches_are_found(dim: int, ratio: float, number: int) -> None:
    of = scene(dim, ratio, number)
    found = solve_directions(of.block, of.partly, of.grid, SIZE, Effort(), Deadline())
    assert float(found.fit.max()) <= SOLVED
    patches, hidden = of.partly.patches(found.at), of.partly.hidden
    assert float((patches - of.patches)[~hidden].norm() / of.patches[~hidden].norm()) < 1e-4
    assert matched(patches[hidden], of.patches[hidden]) < 1e-4


@torch.no_grad()
def test_equal_hidden_patches_are_one_root_that_stands_twice() -> None:
    """The gradients of equal tokens are equal: only the attention they draw tells how many there are."""

    def repeat(x: Tensor, mask: Tensor) -> None:
        first, second = mask.nonzero()[:2, 0].tolist()
        where = [(slice(7 * (p // 4), 7 * (p // 4) + 7), slice(7 * (p % 4), 7 * (p % 4) + 7)) for p in (first, second)]
        x[0, 0, *where[1]] = x[0, 0, *where[0]].clone()

    of = scene(ratio=0.3, number=1, change=repeat)
    hidden = of.partly.hidden
    assert len(of.partly.z) == int(hidden.sum()) - 2
    found = solve_directions(of.block, of.partly, of.grid, SIZE, Effort(rounds=4), Deadline())
    assert float(found.fit.max()) <= SOLVED
    assert matched(of.partly.patches(found.at)[hidden], of.patches[hidden]) < 1e-4


@torch.no_grad()
def test_who_has_no_time_keeps_the_smoothest_guess(usual: Scene) -> None:
    ticks = iter(range(1000))
    deadline = Deadline(seconds=1e-9, clock=lambda: float(next(ticks)))
    found = solve_directions(usual.block, usual.partly, usual.grid, SIZE, Effort(rounds=1), deadline)
    hidden = usual.partly.hidden
    assert found.fit[hidden].isinf().all()
    assert found.at.isfinite().all()


@torch.no_grad()
def test_what_is_no_picture_or_proves_nothing_is_no_fit(usual: Scene) -> None:
    """Where rounding lets everything stick out, no solution tells itself from another."""
    family, places = family_of(usual.block, usual.partly, loose=0), everywhere(usual)
    phi = family.phi(places, usual.theta)
    attempt = trial(usual._replace(family=family))
    assert float(adaptive._fit_of(attempt, places, phi).max()) <= SOLVED
    quiet = replace(attempt, loud=1e-3 * float(usual.theta.norm(dim=1).min()))
    assert adaptive._fit_of(quiet, places, phi).isinf().all()
    held, usual.block.fc2.noise = usual.block.fc2.noise, usual.block.fc2.noise + 1e6
    off = phi + torch.randn_like(phi) * usual.theta.std()
    fit, sticks = (
        adaptive._fit_of(attempt, places, off),
        usual.block.fc2.residual(usual.block.plain.late(family.streams(places, off))),
    )
    explained = usual.block.fc2.expected(usual.block.plain.late(family.streams(places, off)))
    guess = int(sticks.argmax())  # as noise alone would be at most, though nothing proves it
    usual.block.fc2.noise = (held + 1e6) * float(sticks[guess] / explained[guess]) / (0.99 * SOLVED)
    assert SOLVED < float(adaptive._fit_of(attempt, places, off)[guess]) <= adaptive.DOUBTFUL
    usual.block.fc2.noise = held
    assert (sticks > TELLING).any()
    assert (fit[sticks > TELLING] > SOLVED).all()
    assert fit.isfinite().all()


@torch.no_grad()
def test_all_patches_may_be_hidden() -> None:
    of = scene(ratio=1.0)
    assert of.partly.hidden.all()
    found = solve_directions(of.block, of.partly, of.grid, SIZE, Effort(rounds=3), Deadline())
    fits = found.fit <= SOLVED
    assert int(fits.sum()) >= 12
    near = torch.cdist(of.partly.patches(found.at)[fits], of.patches).amin(dim=1)
    assert float(near.max()) < 1e-3 * float(of.patches.norm(dim=1).max())


@torch.no_grad()
def test_copies_are_not_believed_while_roots_are_missing(usual: Scene) -> None:
    """All four hidden patches differ: with two of them found, nothing may stand twice and be said to fit."""
    family, hidden = usual.family, usual.partly.hidden.nonzero()[:, 0]
    fit = torch.ones(16, dtype=torch.float64)
    fit[hidden[2:]] = torch.inf
    copied = adaptive._copied(trial(usual), TokenFit(family.phi(everywhere(usual), usual.theta), fit), 2)
    assert copied.fit.equal(fit)


def test_an_end_that_was_only_held_beside_a_root_is_a_guess_and_no_proof() -> None:
    ends = TokenFit(torch.zeros(4, 2), torch.tensor([0.9, SOLVED, 5.0, torch.inf]))
    fit = adaptive._unproven(ends).fit
    assert (fit > SOLVED).all()
    assert (fit[:2] <= adaptive.DOUBTFUL).all()
    assert torch.equal(fit[2:], ends.fit[2:])


@pytest.mark.parametrize(
    ("open_", "base", "hidden", "fit", "block", "proof", "verdict"),
    [
        (0, 0.0, 2, [0.0], True, None, "left grey"),
        (0, 1.0, 2, [0.0], True, "because the hidden patches are equal to each other", None),
        (0, 1.0, 1, [0.0], True, "because only one patch is hidden", None),
        (2, 1.0, 2, [0.1, 0.2], False, None, "leave 2 directions of each patch open"),
        (2, 1.0, 2, [0.1, SOLVED], True, "every patch agrees", None),
        (2, 1.0, 2, [0.1, 1.01 * SOLVED], True, None, "do not confirm that every patch"),
        (2, 1.0, 2, [0.1, math.inf], True, None, "do not confirm that every patch"),
    ],
)
def test_a_solution_is_proved_only_if_every_patch_fits(
    open_: int, base: float, hidden: int, fit: list[float], block: bool, proof: str | None, verdict: str | None
) -> None:
    mask = torch.arange(3) < hidden
    partly: Any = SimpleNamespace(z=torch.ones(open_, 4), base=torch.full((3, 4), base), hidden=mask)
    readable: Any = object() if block else "its first block cannot be read"
    facts = _facts(partly, TokenFit(torch.zeros(2, 1), torch.tensor(fit)), readable)
    assert facts["hidden"] == hidden and facts["open_directions"] == open_
    for name, wanted in (("proof", proof), ("verdict", verdict)):
        text = facts[name]
        assert text is None if wanted is None else wanted in str(text)
