"""Augmentation of waves and spectrograms: time shift, background noise, and SpecAugment (Park et al., 2019).

Every function is pure: it takes waves or frames and uniform numbers of each sample, and no shape depends on a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from situs.config import Checked
from situs.limits import Natural, NotNegative, Share

_LONGEST, _WIDEST = 25, 7  # frames of a time mask, features of a band mask
_QUIET = 1e-10  # mean square below which a clip counts as silent


@dataclass(frozen=True, kw_only=True)
class AudioAugment(Checked):
    """The defaults are the recipe of TensorFlow's Speech Commands, which the papers follow."""

    retired: ClassVar = {
        "time_width": (_LONGEST, "a time mask has up to 25 frames"),
        "band_width": (_WIDEST, "a band mask has up to 7 features"),
    }

    shift_ms: NotNegative = 100.0
    """A clip is shifted by up to this much in either direction and padded with silence."""

    noise_share: Share = 0.8
    """Share of clips with background noise."""

    noise_level: NotNegative = 0.1
    """The noise is multiplied by a number uniform in [0, this)."""

    time_masks: Natural = 0
    """SpecAugment: intervals of up to 25 frames that are set to the mean."""

    band_masks: Natural = 0
    """SpecAugment: bands of up to 7 features that are set to the mean."""

    @property
    def masks(self) -> int:
        """Masks of both kinds."""
        return self.time_masks + self.band_masks


def shift(waves: Tensor, numbers: Tensor, most: int) -> Tensor:
    """waves [B, T] shifted by whole samples, uniform from -most to most, padded with zeros. numbers: [B]."""
    offset = (numbers.double() * (2 * most + 1)).long() - most
    index = torch.arange(waves.shape[1], device=waves.device) - offset[:, None]
    inside = (index >= 0) & (index < waves.shape[1])
    return torch.where(inside, waves.gather(1, index.clamp(0, waves.shape[1] - 1)), 0.0)


def add_noise(waves: Tensor, pieces: Tensor, gain: Tensor) -> Tensor:
    """waves + gain · pieces, [B, T], clipped to [-1, 1]. gain: [B]."""
    return (waves + gain[:, None] * pieces).clamp(-1, 1)


def gain_at(waves: Tensor, pieces: Tensor, decibels: float) -> Tensor:
    """The gain [B] that puts pieces [B, T] so many decibels below waves [B, T]; 0 where one is silent."""
    power, noise = waves.square().mean(1), pieces.square().mean(1)
    gain = (power / noise.clamp(min=_QUIET)).sqrt() * 10 ** (-decibels / 20)
    return torch.where((power > _QUIET) & (noise > _QUIET), gain, 0.0)


def mask_frames(frames: Tensor, numbers: Tensor, augment: AudioAugment) -> Tensor:
    """frames [B, C, N] of mean 0 with some intervals and bands set to 0. numbers: [B, masks, 2], width and start."""
    keep = torch.ones_like(frames, dtype=torch.bool)
    kinds = [(2, _LONGEST)] * augment.time_masks + [(1, _WIDEST)] * augment.band_masks
    for number, (side, widest) in enumerate(kinds):
        size = frames.shape[side]
        width = (numbers[:, number, 0] * (min(widest, size) + 1)).floor()
        start = (numbers[:, number, 1] * (size - width + 1)).floor()
        place = torch.arange(size, device=frames.device)
        hit = (place >= start[:, None]) & (place < (start + width)[:, None])
        keep &= ~(hit[:, :, None] if side == 1 else hit[:, None, :])
    return torch.where(keep, frames, 0.0)
