"""What algebra takes from an MJP step, held to made-up gradients in float64 and to a hand case."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from situs.audit.attacks.adaptive import Partly, Smoothness, separate, smoothest
from situs.audit.attacks.equations import conjugate
from situs.core.tokens import patchify, unpatchify


def step(n: int, m: int, d: int, k: int, seed: int, same: int = 0) -> tuple[torch.Tensor, ...]:
    """Gradients [n, d] and patches [n, k] of which the last m are hidden, `same` of those equal to the one before."""
    chance = torch.Generator().manual_seed(seed)
    g = torch.randn(n, d, generator=chance, dtype=torch.float64)
    x = torch.randn(n, k, generator=chance, dtype=torch.float64)
    for index in range(n - same, n):
        x[index] = x[index - 1]
    hidden = torch.arange(n) >= n - m
    return g, x, hidden


def separated(g: torch.Tensor, x: torch.Tensor, hidden: torch.Tensor, told: bool = True) -> Partly:
    rows = g.clone()
    rows[hidden] = 0
    return separate(rows, g.T @ x, g[hidden].sum(dim=0) if told else None, hidden, torch.float64)


@given(st.integers(1, 6), st.integers(0, 8), st.integers(7, 12), st.integers(0, 99))
def test_every_patch_is_known_across_m_less_one_directions(m: int, shown: int, k: int, seed: int) -> None:
    g, x, hidden = step(shown + m, m, shown + m + 4, k, seed)
    found = separated(g, x, hidden)
    assert found.z.shape == (m - 1, k)
    torch.testing.assert_close(found.z @ found.z.T, torch.eye(m - 1, dtype=torch.float64))
    open_part = (x - found.base) @ found.z.T @ found.z
    torch.testing.assert_close(found.base + open_part, x, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        found.base @ found.z.T, torch.zeros(len(x), m - 1, dtype=torch.float64), atol=1e-8, rtol=0
    )


def test_one_hidden_patch_is_solved_with_the_others() -> None:
    g, x, hidden = step(6, 1, 9, 5, 0)
    found = separated(g, x, hidden)
    assert len(found.z) == 0
    torch.testing.assert_close(found.base, x)


def test_without_the_sum_one_direction_more_is_open() -> None:
    g, x, hidden = step(7, 3, 12, 8, 1)
    found = separated(g, x, hidden, told=False)
    assert len(found.z) == 3
    assert not found.base[hidden].any()
    torch.testing.assert_close((x - found.base) @ (torch.eye(8) - found.z.T @ found.z), torch.zeros(7, 8).double())


def test_equal_hidden_patches_need_fewer_directions() -> None:
    g, x, hidden = step(8, 4, 14, 9, 2, same=1)
    assert len(separated(g, x, hidden).z) == 2


def test_more_hidden_patches_than_pixels_leave_all_pixels_open() -> None:
    g, x, hidden = step(10, 8, 20, 4, 3)
    found = separated(g, x, hidden)
    assert len(found.z) == 4
    torch.testing.assert_close(found.base + (x - found.base) @ found.z.T @ found.z, x, rtol=1e-6, atol=1e-6)


def test_all_patches_may_be_hidden() -> None:
    g, x, hidden = step(4, 4, 9, 6, 4)
    found = separated(g, x, hidden)
    torch.testing.assert_close(found.base + (x - found.base) @ found.z.T @ found.z, x)


# --- smoothness ------------------------------------------------------------------------------------------------


def energy(smooth: Smoothness, patches: torch.Tensor) -> torch.Tensor:
    """The sum of squared differences, from the definition."""
    image = unpatchify(patches.unsqueeze(0), smooth.grid, smooth.size)[0]
    parts = zip((-1, -2), smooth.pairs, strict=True)
    return torch.stack([(pair * image.diff(dim=dim).square()).sum() for dim, pair in parts]).sum()


def test_the_gradient_is_half_the_derivative_of_the_sum_of_squared_steps() -> None:
    image = torch.randn(1, 2, 6, 8, dtype=torch.float64)
    patches = patchify(image, (3, 2))[0].requires_grad_()
    smooth = Smoothness(torch.zeros(8, dtype=torch.bool), (2, 4), (3, 2), 12)
    by_hand = image.diff(dim=2).square().sum() + image.diff(dim=3).square().sum()
    torch.testing.assert_close(energy(smooth, patches), by_hand)
    [slope] = torch.autograd.grad(energy(smooth, patches), [patches])
    torch.testing.assert_close(smooth.gradient(patches.detach()), slope / 2)


def test_borders_of_hidden_places_do_not_count() -> None:
    hidden = torch.tensor([True, False])  # two patches side by side
    smooth = Smoothness(hidden, (1, 2), (2, 2), 4)
    flat = torch.tensor([[0.0] * 4, [5.0] * 4], dtype=torch.float64)
    assert float(energy(smooth, flat)) == 0
    assert float(energy(Smoothness(~hidden & hidden, (1, 2), (2, 2), 4), flat)) == 2 * 25


def test_the_smoothest_image_is_the_constant_where_z_may_give_it() -> None:
    """Patches of one grey each, unknown along that direction: the smoothest image has one grey."""
    z = torch.full((1, 4), 0.5, dtype=torch.float64)
    base = torch.zeros(4, 4, dtype=torch.float64)
    partly = Partly(base, z, torch.zeros(4, dtype=torch.bool))
    smooth = Smoothness(partly.hidden, (2, 2), (2, 2), 4)
    theta = torch.tensor([[6.0], [0.0], [6.0], [6.0]], dtype=torch.float64)
    free = torch.tensor([False, True, False, False])
    moved = smoothest(partly, smooth, theta, free)
    assert float(moved[1]) == pytest.approx(6.0, rel=1e-3)
    torch.testing.assert_close(moved[~free], theta[~free])


def test_conjugate_gradients_solve_a_system() -> None:
    chance = torch.Generator().manual_seed(0)
    a = torch.randn(9, 9, generator=chance, dtype=torch.float64)
    a = a @ a.T + torch.eye(9)
    right = torch.randn(9, generator=chance, dtype=torch.float64)
    torch.testing.assert_close(conjugate(lambda x: a @ x, right, 60, 1e-24), torch.linalg.solve(a, right))
    assert not conjugate(lambda x: a @ x, torch.zeros(9), 5, 1e-9).any()
