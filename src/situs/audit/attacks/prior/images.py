"""What images are like before anything is seen of them: a normal distribution over the cosines of the whole image.

Cosines diagonalise what neighbouring pixels share, also across the borders of patches, and the directions in which
colours vary together are rotated out. The variance of each cosine is that of public images, averaged over its
neighbours, and of photographs in general (it falls with the square of the frequency) as far as those are few.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from situs.audit.attacks.base import Normalisation

GENERAL = 8.0
"""So many public images count as much as what is known of photographs in general."""

GREY, SPREAD, SHARED = 0.46, 0.25, 0.9
"""Of photographs in general, in [0, 1]: mean and deviation of a pixel, and the correlation of two colours."""

FREE = 4.0
"""So many cosines of one image count as much as the distribution, where the image's own variance in a band is asked."""


@dataclass(frozen=True)
class ImagePrior:
    """Normal images [C, H, W]: mean [C, 1, 1]; rotation [C, C], whose columns are directions of colour; variance
    [C, H, W] of each cosine along each of them."""

    mean: Tensor
    rotation: Tensor
    variance: Tensor

    @cached_property
    def _bases(self) -> tuple[Tensor, Tensor]:
        height, width = self.variance.shape[1:]
        return _basis(height, self.variance), _basis(width, self.variance)

    def cosines(self, images: Tensor) -> Tensor:
        """Images without their mean [..., C, H, W] -> cosines along the directions of colour; orthogonal."""
        turned = torch.einsum("cd,...chw->...dhw", self.rotation, images)
        down, along = self._bases
        return down @ turned @ along.T

    def images(self, cosines: Tensor) -> Tensor:
        """The inverse of `cosines`."""
        down, along = self._bases
        plain = down.T @ cosines @ along
        return torch.einsum("cd,...dhw->...chw", self.rotation, plain)

    def to(self, device: torch.device) -> ImagePrior:
        """The same on a device."""
        return ImagePrior(self.mean.to(device), self.rotation.to(device), self.variance.to(device))

    def draw(self, count: int, chance: torch.Generator) -> Tensor:
        """Images of this kind, [count, C, H, W]."""
        like = torch.randn(count, *self.variance.shape, generator=chance, dtype=torch.float64).to(self.variance)
        return self.mean + self.images(like * self.variance.sqrt())

    def fitted(self, power: Tensor) -> ImagePrior:
        """The prior with this image's own contrast in each octave and colour. power [C, H, W]: the expected squares of
        its cosines."""
        band = _bands(*power.shape[1:]).to(power.device).flatten()
        ratio = (power / self.variance).flatten(1)
        total = ratio.new_full((len(ratio), int(band.max()) + 1), FREE).index_add_(1, band, ratio)
        count = ratio.new_full(total.shape, FREE).index_add_(1, band, torch.ones_like(ratio))
        return replace(self, variance=self.variance * (total / count)[:, band].view_as(power))


def image_prior(
    shape: tuple[int, int, int], public: Tensor | None = None, normalisation: Normalisation | None = None
) -> ImagePrior:
    """What is known of normalised images [C, H, W]. public: [n, C, H, W] of the same kind. Without a normalisation a
    number has mean 0 and deviation 1."""
    channels, height, width = shape
    count = 0 if public is None else len(public)
    device = None if public is None else public.device
    centre, scale = ((0.0,) * channels, (1.0,) * channels) if normalisation is None else normalisation
    grey, spread = (0.0, 1.0) if normalisation is None else (GREY, SPREAD)
    middle, unit = (torch.tensor(part, dtype=torch.float64, device=device) for part in (centre, scale))
    mean, deviation = (grey - middle) / unit, spread / unit
    together = SHARED + (1 - SHARED) * torch.eye(channels, dtype=torch.float64, device=device)
    colours = together * torch.outer(deviation, deviation)
    falling = _falling(height, width).to(mean)
    if public is None or not count:
        values, rotation = torch.linalg.eigh(colours)
        return ImagePrior(mean[:, None, None], rotation, values.clamp(min=1e-6)[:, None, None] * falling)
    images = public.double()
    mean = (count * images.mean(dim=(0, 2, 3)) + GENERAL * mean) / (count + GENERAL)
    centred = images - mean[:, None, None]
    seen = torch.einsum("nchw,ndhw->cd", centred, centred) / (height * width)
    values, rotation = torch.linalg.eigh((seen + GENERAL * colours) / (count + GENERAL))
    prior = ImagePrior(mean[:, None, None], rotation, values.clamp(min=1e-6)[:, None, None] * falling)
    power = _smooth(prior.cosines(centred).square().sum(dim=0) / falling) * falling
    return replace(prior, variance=(power + GENERAL * prior.variance) / (count + GENERAL))


def _basis(size: int, like: Tensor) -> Tensor:
    """The orthogonal matrix of cosines (DCT-II), [size, size]."""
    place = torch.arange(size, dtype=like.dtype, device=like.device)
    basis = torch.cos(math.pi / size * torch.outer(place, place + 0.5)) * math.sqrt(2 / size)
    basis[0] /= math.sqrt(2)
    return basis


def _falling(height: int, width: int) -> Tensor:
    """1 / frequency² of each cosine, with a mean of 1, [height, width]; the mean grey varies as the slowest cosine."""
    square = _frequency(height, width).square()
    found = 1 / square.clamp(min=1.0)
    return found / found.mean()


def _frequency(height: int, width: int) -> Tensor:
    """Half waves over the longer side, [height, width]."""
    down, along = (torch.arange(size, dtype=torch.float64) / size for size in (height, width))
    return max(height, width) * (down[:, None].square() + along.square()).sqrt()


def _bands(height: int, width: int) -> Tensor:
    """The octave of each cosine, 0 for the mean grey alone, [height, width]."""
    frequency = _frequency(height, width)
    return torch.where(frequency == 0, 0.0, 1 + frequency.clamp(min=1).log2()).long()


def _smooth(power: Tensor) -> Tensor:
    """Each number the mean of those around it, a third of its own frequency up and down, [C, height, width]."""
    for dim in (1, 2):
        size = power.shape[dim]
        place = torch.arange(size, device=power.device)
        low, high = place - place // 3, (place + place // 3 + 1).clamp(max=size)
        sums = torch.cat([torch.zeros_like(power.narrow(dim, 0, 1)), power.cumsum(dim)], dim)
        shape = [-1 if axis == dim else 1 for axis in range(3)]
        power = (sums.index_select(dim, high) - sums.index_select(dim, low)) / (high - low).view(shape)
    return power
