"""PSNR up to gain, offset, flips, shifts and two levels: against a search by hand, and what it must not forgive."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from situs.audit.scores import aligned_psnr, psnr, two_levels

REAL = torch.rand(3, 3, 12, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def noise(like: Tensor, seed: int = 1) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed), dtype=like.dtype)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: 0.01 * x - 3,
        lambda x: -x,
        lambda x: x * torch.tensor([0.5, 2.0, 7.0]).view(3, 1, 1) + torch.tensor([0.1, -9.0, 0.0]).view(3, 1, 1),
        lambda x: x.flip(-1),
        lambda x: x.flip(-2) * 40,
        lambda x: x.flip(-1, -2),
    ],
)
def test_gain_offset_and_flips_hide_nothing(change: object) -> None:
    assert callable(change)
    assert aligned_psnr(change(REAL), REAL).min() > 150
    assert psnr(change(REAL).clamp(0, 1), REAL).max() < 20


@pytest.mark.parametrize("shift", [(0, 1), (2, -3), (-3, 4)])
def test_a_shift_leaves_only_what_it_moved_out_of_the_picture(shift: tuple[int, int]) -> None:
    moved = torch.rand(REAL.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    down, across = shift
    height, width = REAL.shape[2:]
    rows, columns = (slice(max(s, 0), n + min(s, 0)) for s, n in ((down, height), (across, width)))
    back = tuple(slice(max(-s, 0), n + min(-s, 0)) for s, n in ((down, height), (across, width)))
    moved[:, :, rows, columns] = REAL[:, :, back[0], back[1]]
    spread = (REAL - REAL.mean(dim=(2, 3), keepdim=True)).square()
    seen = REAL[:, :, back[0], back[1]]
    inside = (seen - seen.mean(dim=(2, 3), keepdim=True)).square()
    left = (spread.flatten(1).sum(1) - inside.flatten(1).sum(1)) / REAL[0].numel()
    torch.testing.assert_close(aligned_psnr(moved, REAL), -10 * left.clamp(min=1e-20).log10(), rtol=1e-6, atol=1e-6)


def slow(picture: np.ndarray, real: np.ndarray) -> float:
    """Every flip and every shift of one channel, gain and offset by least squares, the rest as the mean: the best."""
    height, width = real.shape
    best = math.inf
    for vertical, horizontal in product((1, -1), repeat=2):
        turned = picture[::vertical, ::horizontal]
        for down, across in product(range(-(height // 4), height // 4 + 1), range(-(width // 4), width // 4 + 1)):
            x, y = [], []
            for i, j in product(range(height), range(width)):
                if 0 <= i - down < height and 0 <= j - across < width:
                    x.append(turned[i - down, j - across])
                    y.append(real[i, j])
            a = np.stack([x, np.ones(len(x))], axis=1)
            fit, *_ = np.linalg.lstsq(a, np.array(y), rcond=None)
            y = np.array(y)
            gone = np.sum((y - y.mean()) ** 2) - np.sum((y - a @ fit) ** 2)
            best = min(best, (np.sum((real - real.mean()) ** 2) - gone) / real.size)
    return -10 * math.log10(max(best, 1e-20))


@pytest.mark.parametrize("seed", range(6))
def test_no_search_by_hand_comes_closer_by_much_and_a_right_alignment_is_found(seed: int) -> None:
    """The shift is chosen by correlation, so that a search over all may beat it where nothing is alike."""
    chance = torch.Generator().manual_seed(seed)
    real = torch.rand(1, 8, 8, generator=chance, dtype=torch.float64)
    picture = real.flip(-1).roll((1, -1), (-2, -1)) * 3 + 0.2 * torch.randn(1, 8, 8, generator=chance).double()
    by_hand, ours = slow(picture[0].numpy(), real[0].numpy()), float(aligned_psnr(picture[None], real[None]))
    assert by_hand - 1e-6 <= ours  # two levels may come closer still
    lost = float(aligned_psnr(noise(real)[None], real[None]))
    assert lost < slow(noise(real)[0].numpy(), real[0].numpy()) + 1.5


def test_text_behind_noise_is_read_by_a_threshold() -> None:
    """Every pixel of two levels behind noise of a fifth of their distance, where plain PSNR says 14 dB."""
    page = (torch.rand(1, 1, 32, 32, generator=torch.Generator().manual_seed(2)) > 0.8).double()
    seen = page + 0.12 * noise(page)
    assert 15 < float(psnr(seen.clamp(0, 1), page)) < 24 and float(aligned_psnr(seen, page)) > 100
    assert torch.equal(two_levels(seen[0]), page[0])


@pytest.mark.parametrize("shift", [(1, 0), (2, -3)])
def test_text_behind_noise_is_read_where_it_was_moved_too(shift: tuple[int, int]) -> None:
    page = (torch.rand(1, 1, 32, 32, generator=torch.Generator().manual_seed(2)) > 0.8).double()
    moved = page.roll(shift, (2, 3))
    seen = moved + 0.12 * noise(page)
    torch.testing.assert_close(aligned_psnr(seen, page), aligned_psnr(moved, page))


def between(grey: Tensor, mask: Tensor) -> float:
    """The variance between two classes of numbers."""
    share = mask.double().mean()
    return float(share * (1 - share) * (grey[mask].mean() - grey[~mask].mean()) ** 2)


@pytest.mark.parametrize("seed", range(5))
def test_two_levels_is_otsus_threshold(seed: int) -> None:
    """Against every split."""
    picture = torch.rand(2, 5, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    grey, split = picture.mean(dim=0).flatten(), two_levels(picture)[0].flatten().bool()
    levels = grey.sort().values[:-1]
    assert between(grey, split) == pytest.approx(max(between(grey, grey > level) for level in levels))


@pytest.mark.parametrize("value", [0.0, 0.5, 7.0])
def test_one_grey_knows_the_mean_and_nothing_else(value: float) -> None:
    variance = (REAL - REAL.mean(dim=(2, 3), keepdim=True)).square().flatten(1).mean(dim=1)
    torch.testing.assert_close(aligned_psnr(torch.full_like(REAL, value), REAL), -10 * variance.log10())


@given(st.integers(0, 10**6), st.floats(0.01, 2.0))
def test_it_never_says_less_than_psnr_and_help_for_noise_is_small(seed: int, size: float) -> None:
    picture = REAL + size * noise(REAL, seed)
    assert bool((aligned_psnr(picture, REAL) >= psnr(picture, REAL) - 1e-9).all())
    blind = aligned_psnr(torch.full_like(REAL, 0.5), REAL)
    assert bool((aligned_psnr(noise(REAL, seed), REAL) < blind + 1.0).all())
