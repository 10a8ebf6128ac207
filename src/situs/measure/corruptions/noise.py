"""Gaussian, shot and impulse noise. Images are [B, C, H, W] in [0, 1]; results may leave it and are clipped later."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from situs.measure.corruptions.filters import Draw

LEVELS = 256


def gaussian_noise(images: Tensor, draw: Draw, sigma: float) -> Tensor:
    """Each value with its own normal noise of deviation `sigma`."""
    return images + sigma * draw.normal("noise", *images.shape[1:])


def shot_noise(images: Tensor, draw: Draw, photons: float) -> Tensor:
    """Light counted in photons: a Poisson number whose mean is value · `photons`, over `photons`."""
    counts = poisson((images * (LEVELS - 1)).round(), photons, draw.uniform("photons", *images.shape[1:]))
    return counts / photons


def impulse_noise(images: Tensor, draw: Draw, amount: float) -> Tensor:
    """A share `amount` of the values, each channel for itself, becomes 0 or 1 with equal chance."""
    noise = draw.uniform("place", *images.shape[1:])
    salt = draw.uniform("colour", *images.shape[1:]) < 0.5
    return torch.where(noise < amount, salt.to(images.dtype), images)


def poisson(levels: Tensor, photons: float, noise: Tensor) -> Tensor:
    """Poisson numbers of mean level / 255 · `photons` by inversion of their distribution, exact.

    levels: whole numbers in 0..255. noise: uniform in [0, 1), of the same shape. As there are only 256 means, their
    distributions are one table; level + noise is looked up in all of them at once, laid end to end.
    """
    most, ends = _distributions(photons)
    index = torch.searchsorted(ends.to(levels.device), (levels.double() + noise.double()).contiguous(), right=True)
    return (index - levels.long() * most).clamp(0, most).to(torch.float32)


@cache
def _distributions(photons: float) -> tuple[int, Tensor]:
    """How many counts there are, and the chance of at most k = 0, 1, … for each level, plus the level: sorted."""
    most = math.ceil(photons + 10 * math.sqrt(photons) + 10)  # more has less chance than 1e-9, the noise 6e-8
    level = torch.arange(LEVELS, dtype=torch.float64)[:, None]
    means = (level * (photons / (LEVELS - 1))).expand(-1, most)
    chance = torch.special.gammaincc(torch.arange(1, most + 1, dtype=torch.float64).expand_as(means), means)
    return most, (chance.clamp(max=1.0) + level).flatten()
