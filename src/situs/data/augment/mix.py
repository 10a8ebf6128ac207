"""Images of a batch mixed or erased: MixUp (Zhang et al., 2018), CutMix (Yun et al., 2019), label smoothing, and random
erasing (Zhong et al., 2020).

A sample's partner is another of the batch. Rows are paired (0, 1), (2, 3)…, so that a global batch cut into even parts,
by ranks or by gradient accumulation, mixes the same pairs as the whole; the order is shuffled, so a neighbour is a
random sample. Whether, how and how much to mix is drawn for each sample.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.core.random import normal

NOISE = 5  # one that is unused, which of the two, how much, and two for the box
_QUANTILES = 4096


@cache
def _beta_quantiles(alpha: float, device: torch.device) -> Tensor:
    """The quantiles of Beta(α, α) at i / 4096, by which a uniform number becomes a Beta number on the device."""
    import numpy as np
    from scipy.special import betaincinv

    values = betaincinv(alpha, alpha, np.linspace(0.0, 1.0, _QUANTILES + 1))
    return torch.from_numpy(values).to(device, torch.float32)


def beta(noise: Tensor, alpha: float) -> Tensor:
    """Beta(α, α) numbers from uniform ones of any shape, by the quantile function, linear between 4,096 points."""
    table = _beta_quantiles(alpha, noise.device)
    place = noise * _QUANTILES
    below = place.long().clamp(max=_QUANTILES - 1)
    return torch.lerp(table[below], table[below + 1], place - below)


def partners(count: int, device: torch.device) -> Tensor:
    """Row i's partner: [B], i with its last bit flipped; the last row of an odd batch has none."""
    return (torch.arange(count, device=device) ^ 1).clamp(max=count - 1)


def soft_multi_labels(labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Labels [B, K] of 1, 0 and -1 (unknown) as soft ones: half of `smoothing` on the other value, NaN for unknown."""
    shares = labels.to(torch.float32) * (1.0 - smoothing) + smoothing / 2
    return shares.masked_fill(labels < 0, torch.nan)


def soft_labels(labels: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """One-hot labels [B, K] with the mass `smoothing` spread evenly over all classes."""
    return F.one_hot(labels, classes).to(torch.float32) * (1.0 - smoothing) + smoothing / classes


def mix(
    images: Tensor,
    targets: Tensor,
    noise: Tensor,
    *,
    mixup: float,
    cutmix: float,
) -> tuple[Tensor, Tensor]:
    """Images [B, C, H, W] and soft labels [B, K] mixed with their partners'. noise: [B, 5].

    mixup, cutmix: their α, 0 for none; where both are on, each mixes half of the samples. CutMix mixes labels by the
    share of pixels actually replaced. A label that is NaN in either of two mixed samples is NaN in the mixture.
    """
    count, _, height, width = images.shape
    other = partners(count, images.device)
    cut = noise[:, 1] < (0.5 if mixup > 0 and cutmix > 0 else float(cutmix > 0))
    keep_up = beta(noise[:, 2], mixup) if mixup > 0 else torch.ones_like(noise[:, 2])
    keep_cut = beta(noise[:, 2], cutmix) if cutmix > 0 else torch.ones_like(noise[:, 2])
    inside = _boxes(keep_cut, noise[:, 3:5], height, width)
    kept = torch.where(cut, 1.0 - inside.float().mean((1, 2)), keep_up)
    weight = torch.where(cut.view(-1, 1, 1), 1.0 - inside.float(), kept.view(-1, 1, 1))[:, None]
    kept = kept[:, None]
    shares = torch.where(kept == 1.0, targets, torch.lerp(targets[other], targets, kept))  # 0 · NaN would be NaN
    return torch.lerp(images[other], images, weight), shares


def _boxes(keep: Tensor, place: Tensor, height: int, width: int) -> Tensor:
    """[B, H, W] bool: the rectangle of share 1 − keep around a uniform centre, cut at the image's border."""
    side = torch.sqrt(1.0 - keep)
    h, w = (height * side).floor(), (width * side).floor()
    cy, cx = (place[:, 0] * height).floor(), (place[:, 1] * width).floor()
    y = torch.arange(height, device=keep.device).view(1, -1)
    x = torch.arange(width, device=keep.device).view(1, -1)
    top, left = (cy - (h / 2).floor())[:, None], (cx - (w / 2).floor())[:, None]
    bottom, right = (cy + (h / 2).floor())[:, None], (cx + (w / 2).floor())[:, None]
    return ((y >= top) & (y < bottom))[:, :, None] & ((x >= left) & (x < right))[:, None, :]


ERASE_NOISE = 24  # whether, two numbers for each of ten attempts, two for the place, one for the noise
_ATTEMPTS = 10
_TABLE_ROWS = 1024
_AREA, _RATIO = (0.02, 1 / 3), (0.3, 1 / 0.3)


@cache
def normal_table(device: torch.device) -> Tensor:
    """2^20 standard normal numbers, always the same; a sample reads them from its own random start."""
    return normal(0, 0, torch.arange(_TABLE_ROWS, device=device), "erasing.table", (_TABLE_ROWS,)).flatten()


def erase(images: Tensor, noise: Tensor, probability: float, table: Tensor) -> Tensor:
    """`images` [B, C, H, W] with a rectangle of 2 to 33 % replaced, in a share `probability` of them.

    noise: [B, 24]. table: `normal_table`. Aspect log-uniform in [0.3, 1/0.3]; the first of ten attempts smaller than
    the image is taken.
    """
    height, width = images.shape[2:]
    share = _AREA[0] + noise[:, 1 : 1 + _ATTEMPTS] * (_AREA[1] - _AREA[0])
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
