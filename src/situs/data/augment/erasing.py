"""Random erasing (Zhong et al., 2020): a random rectangle of a normalised image becomes noise."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from situs.core.random import normal

NOISE = 24  # whether, two numbers for each of ten attempts, two for the place, one for the noise
_ATTEMPTS = 10
_TABLE_ROWS = 1024
_RATIO = (0.3, 1 / 0.3)


@cache
def normal_table(device: torch.device) -> Tensor:
    """2^20 standard normal numbers, always the same; a sample reads them from its own random start."""
    return normal(0, 0, torch.arange(_TABLE_ROWS, device=device), "erasing.table", (_TABLE_ROWS,)).flatten()


def erase(
    images: Tensor, noise: Tensor, probability: float, table: Tensor, area: tuple[float, float] = (0.02, 1 / 3)
) -> Tensor:
    """`images` [B, C, H, W] with a rectangle of a share in `area` replaced, in a share `probability` of them.

    noise: [B, 24]. table: `normal_table`.
    Aspect log-uniform in [0.3, 1/0.3]; the first of ten attempts smaller than the image is taken.
    """
    height, width = images.shape[2:]
    share = area[0] + noise[:, 1 : 1 + _ATTEMPTS] * (area[1] - area[0])
    low, high = (math.log(bound) for bound in _RATIO)
    aspect = torch.exp(low + noise[:, 1 + _ATTEMPTS : 1 + 2 * _ATTEMPTS] * (high - low))
    h = torch.sqrt(share * (height * width) * aspect).round()
    w = torch.sqrt(share * (height * width) / aspect).round()
    fits = (h < height) & (w < width)
    first = fits.to(torch.uint8).argmax(dim=1, keepdim=True)
    chosen = fits.gather(1, first) & (noise[:, :1] < probability)
    h, w = h.gather(1, first), w.gather(1, first)
    top = (noise[:, 21:22] * (height - h + 1)).floor()
    left = (noise[:, 22:23] * (width - w + 1)).floor()
    y = torch.arange(height, device=images.device).view(1, -1)
    x = torch.arange(width, device=images.device).view(1, -1)
    rows, columns = (y >= top) & (y < top + h) & chosen, (x >= left) & (x < left + w)
    erased = (rows[:, :, None] & columns[:, None, :])[:, None]
    start = (noise[:, 23:24] * table.numel()).long()
    place = (start + torch.arange(images[0].numel(), device=images.device)) % table.numel()
    return torch.where(erased, table[place].view(images.shape), images)
