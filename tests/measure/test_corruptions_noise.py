"""The three noises against their laws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from situs.measure.corruptions import Draw, corrupt, gaussian_noise, impulse_noise, poisson, shot_noise


def draw(name: str, count: int = 4) -> Draw:
    return Draw(0, 1, torch.arange(count), name)


def test_gaussian_noise_has_its_deviation_and_no_bias() -> None:
    grey = torch.full((4, 3, 64, 64), 0.5)
    added = gaussian_noise(grey, draw("gaussian_noise"), 0.08) - grey
    sigmas = added.numel() ** -0.5
    assert abs(added.mean()) < 4 * 0.08 * sigmas
    assert added.std().item() == pytest.approx(0.08, rel=4 * sigmas)
    assert stats.kstest(added.flatten().numpy() / 0.08, "norm").pvalue > 1e-3
    # Channels and neighbours are independent.
    assert abs(np.corrcoef(added[:, 0].flatten(), added[:, 1].flatten())[0, 1]) < 0.04
    assert abs(np.corrcoef(added[..., 1:].flatten(), added[..., :-1].flatten())[0, 1]) < 0.03


@pytest.mark.parametrize("photons", [3, 60, 500])
def test_poisson_is_the_inverse_of_scipys_distribution(photons: int) -> None:
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(0, 256, (5000,), generator=generator).float()
    noise = torch.rand(5000, generator=generator)
    found = poisson(levels, photons, noise)
    slow = stats.poisson.ppf(noise.double().numpy(), levels.double().numpy() / 255 * photons)
    slow[levels == 0] = 0  # where SciPy says −1 at noise 0
    np.testing.assert_array_equal(found.numpy(), np.maximum(slow, 0))


def test_poisson_at_the_ends() -> None:
    most = 1 - 2.0**-24
    found = poisson(torch.tensor([0.0, 0.0, 255.0, 255.0]), 60, torch.tensor([0.0, most, 0.0, most]))
    assert found[:2].tolist() == [0.0, 0.0]
    assert found[3] == stats.poisson.ppf(most, 60)


def test_shot_noise_keeps_the_mean_and_spreads_with_the_light() -> None:
    for value in (0.2, 0.6):
        level = round(value * 255) / 255
        grey = torch.full((4, 1, 64, 64), level)
        found = shot_noise(grey, draw("shot_noise"), 25)
        assert found.mean().item() == pytest.approx(level, rel=0.02)
        assert found.var().item() == pytest.approx(level / 25, rel=0.05)


def test_impulse_noise_hits_its_share_half_white_half_black() -> None:
    grey = torch.full((4, 3, 64, 64), 0.5)
    found = impulse_noise(grey, draw("impulse_noise"), 0.17)
    hit = found != 0.5
    assert hit.float().mean().item() == pytest.approx(0.17, abs=0.007)
    assert set(found[hit].tolist()) == {0.0, 1.0}
    assert found[hit].mean().item() == pytest.approx(0.5, abs=0.03)
    # Each channel for itself: colours appear.
    assert (hit[:, 0] & ~hit[:, 1]).any()


def test_black_and_white_are_cut_and_not_wrapped() -> None:
    for value in (0.0, 1.0):
        found = corrupt(torch.full((1, 1, 32, 32), value), "gaussian_noise", 5, torch.tensor([0]))
        assert (found - value).abs().max() < 0.6
        assert (found == value).float().mean() > 0.4
