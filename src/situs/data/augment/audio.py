"""What training does to waves and spectrograms: time shift, background noise, and SpecAugment (Park et al., 2019).

Every function is pure: waves or frames and uniform numbers of each sample in, no size depends on a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from situs.config import Checked
from situs.limits import Natural, NotNegative, Share

_LONGEST, _WIDEST = 25, 7  # of a stretch of frames, of a band
_QUIET = 1e-10  # mean square below which a clip counts as silent


@dataclass(frozen=True, kw_only=True)
class AudioAugment(Checked):
    """The defaults are the recipe of TensorFlow's Speech Commands, which the papers follow."""

    retired: ClassVar = {
        "time_width": (_LONGEST, "a stretch has up to 25 frames"),
        "band_width": (_WIDEST, "a band has up to 7 numbers of a frame"),
    }

    shift_ms: NotNegative = 100.0
    """A clip is moved by up to this much to either side; silence fills what is left free."""

    noise_share: Share = 0.8
    """Share of clips with background noise."""

    noise_level: NotNegative = 0.1
    """The noise is multiplied by a number uniform in [0, this)."""

    time_masks: Natural = 0
    """SpecAugment: stretches of up to 25 frames that become the mean."""

    band_masks: Natural = 0
    """SpecAugment: bands of up to 7 numbers of a frame that become the mean."""

    @property
    def masks(self) -> int:
        """Masks of both kinds."""
        return self.time_masks + self.band_masks


def shift(waves: Tensor, numbers: Tensor, most: int) -> Tensor:
    """waves [B, T] moved by whole samples, uniform from -most to most, with zeros behind them. numbers: [B]."""
    by = (numbers.double() * (2 * most + 1)).long() - most
    place = torch.arange(waves.shape[1], device=waves.device) - by[:, None]
    inside = (place >= 0) & (place < waves.shape[1])
    return torch.where(inside, waves.gather(1, place.clamp(0, waves.shape[1] - 1)), 0.0)


def add_noise(waves: Tensor, pieces: Tensor, gain: Tensor) -> Tensor:
    """waves + gain · pieces, [B, T], kept in [-1, 1]. gain: [B]."""
    return (waves + gain[:, None] * pieces).clamp(-1, 1)


def gain_at(waves: Tensor, pieces: Tensor, decibels: float) -> Tensor:
    """What pieces [B, T] are multiplied by to lie so many decibels below waves [B, T]: [B]; 0 where one is silent."""
    power, noise = waves.square().mean(1), pieces.square().mean(1)
    gain = (power / noise.clamp(min=_QUIET)).sqrt() * 10 ** (-decibels / 20)
    return torch.where((power > _QUIET) & (noise > _QUIET), gain, 0.0)


def mask_frames(frames: Tensor, numbers: Tensor, augment: AudioAugment) -> Tensor:
    """frames [B, C, N] of mean 0 with some stretches and bands at 0. numbers: [B, masks, 2], for width and place."""
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
