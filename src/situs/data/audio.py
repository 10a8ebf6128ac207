"""The config of audio clips, their log-mels and MFCCs, and their augmentation, in batches on the device.

The conventions are librosa's: a frame is a Hann window of the wave; its power spectrum goes through Slaney's triangles
(equal areas, linear below 1 kHz and logarithmic above), into decibels, and for MFCCs through an orthonormal cosine
transform. The tests hold it to librosa: in float64 within 1e-9, in float32 within 2e-3 (the values are decibels).

Augmentation is time shift and background noise: pure functions of waves and uniform numbers of each sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from situs.config import Checked
from situs.errors import SitusError
from situs.limits import Count, NotNegative, Positive, Share, Within

_LEAST_POWER = 1e-10  # librosa's; -100 dB
_RANGE = 80.0  # decibels below a clip's loudest band
_LINEAR = 200 / 3  # Hz a mel below 1 kHz
_BREAK = 1000.0
_STEP = math.log(6.4) / 27  # log Hz a mel above it


@dataclass(frozen=True, kw_only=True)
class AudioConfig(Checked):
    """Audio clips and their features. The features of a clip have the shape [1, features, frames]."""

    retired: ClassVar = {
        "fft_size": (None, "the Fourier transform of a frame has the length of its window"),
        "low_hz": (0.0, "the lowest band begins at 0 Hz"),
        "high_hz": (None, "the highest band ends at half the sampling rate"),
        "range_db": (_RANGE, "values more than 80 dB below a clip's maximum are raised to 80 dB below the maximum"),
        "centred": (False, "frames lie within the clip"),
        "level": ("as_is", "each clip keeps its own volume"),
    }

    kind: Literal["mfcc", "logmel"] = "mfcc"
    """Features of a clip. mfcc: MFCCs. logmel: log-mel bands."""

    rate: Annotated[int, Within("[1000, 192000]")] = 16_000
    """Sampling rate in Hz."""

    window_ms: Positive = 30.0
    """Length of a frame, in milliseconds."""

    hop_ms: Positive = 10.0
    """Distance between the starts of two frames, in milliseconds."""

    mels: Count = 40
    """Number of mel bands, from 0 Hz to half the sampling rate. Values more than 80 dB below a clip's maximum are
    raised to 80 dB below the maximum."""

    coefficients: Count = 40
    """Number of MFCCs, counted from the lowest. It is at most the number of mel bands."""

    seconds: Positive = 1.0
    """Length of a clip in seconds. Shorter clips are padded with silence at the end; longer clips are cut at the
    end."""

    task: Literal["all", "commands"] = "all"
    """Classes. all: every word is a class. commands: the ten words of Speech Commands, unknown (all other words) and
    silence."""

    silence: Literal["noise", "empty"] = "noise"
    """With task=commands: content of the clips of silence. noise: background noise at a random level. empty: digital
    silence, as in the evaluation of TensorFlow's Speech Commands example."""

    noise: str | None = None
    """Folder with background noise. Default: the folder `_background_noise_` of the data set."""

    snr_db: float | None = None
    """In evaluation, add background noise at this signal-to-noise ratio in dB. With "none", no noise is added."""

    def check(self) -> None:
        if self.kind == "mfcc" and self.coefficients > self.mels:
            allowed = f"at most {self.mels}, the number of mel bands"
            raise SitusError(field="coefficients", value=self.coefficients, allowed=allowed)
        if min(self.window, self.hop) < 1:
            name = "window_ms" if self.window < 1 else "hop_ms"
            raise SitusError(field=name, value=getattr(self, name), allowed=f"at least one sample at {self.rate:,} Hz")
        if (empty := _empty_band(self)) is not None:
            reason = f"with a window of {self.window} samples, band {empty} contains no frequency"
            raise SitusError(field="mels", value=self.mels, allowed=f"smaller, or window_ms must be larger: {reason}")
        if self.samples < self.window:
            allowed = f"at least {self.window / self.rate:g} s, the length of a frame"
            raise SitusError(field="seconds", value=self.seconds, allowed=allowed)

    @property
    def window(self) -> int:
        """Samples of a window."""
        return round(self.window_ms * self.rate / 1000)

    @property
    def hop(self) -> int:
        """Samples from one frame to the next."""
        return round(self.hop_ms * self.rate / 1000)

    @property
    def samples(self) -> int:
        """Samples of a clip."""
        return round(self.rate * self.seconds)

    @property
    def size(self) -> tuple[int, int]:
        """Features of a frame, and frames of a clip."""
        width = self.coefficients if self.kind == "mfcc" else self.mels
        return width, 1 + (self.samples - self.window) // self.hop


def spectrogram(waves: Tensor, config: AudioConfig) -> Tensor:
    """The features of waves [B, T] float in [-1, 1]: [B, features, frames], log-mels in decibels, or MFCCs of them."""
    with _without_tf32(waves.device):
        tables = _tables(config, waves.dtype, waves.device)
        spectrum = torch.fft.rfft(waves.unfold(-1, config.window, config.hop) * tables.window)
        power = spectrum.real.square() + spectrum.imag.square()
        levels = 10 * (power @ tables.mels).clamp(min=_LEAST_POWER).log10()
        levels = torch.maximum(levels, levels.amax((-2, -1), keepdim=True) - _RANGE)
        return levels.mT if tables.cosines is None else tables.cosines @ levels.mT


@contextmanager
def _without_tf32(device: torch.device) -> Iterator[None]:
    """Turns off TF32, which a training allows on a GPU: its 10 bits would cost a tenth of a decibel."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class _Tables(NamedTuple):
    """window: [n]. mels: [n // 2 + 1, M]. cosines: [C, M], for MFCCs."""

    window: Tensor
    mels: Tensor
    cosines: Tensor | None


@lru_cache(maxsize=32)
def _tables(config: AudioConfig, dtype: torch.dtype, device: torch.device) -> _Tables:
    """Computed in float64 on the CPU, so that they are the same on every device."""
    window = torch.hann_window(config.window, dtype=torch.float64).to(device, dtype)
    mels = _mel_bank(config).to(device, dtype)
    if config.kind == "logmel":
        return _Tables(window, mels, None)
    return _Tables(window, mels, _cosines(config.mels)[: config.coefficients].to(device, dtype))


def _mel_bank(config: AudioConfig) -> Tensor:
    """[n // 2 + 1, M] float64: overlapping triangles, each with area 1."""
    bins = torch.arange(config.window // 2 + 1, dtype=torch.float64) * (config.rate / config.window)
    edges = _hertz(torch.linspace(0.0, _mel(config.rate / 2), config.mels + 2, dtype=torch.float64))
    left, peak, right = edges[:-2], edges[1:-1], edges[2:]
    rising, falling = (bins[:, None] - left) / (peak - left), (right - bins[:, None]) / (right - peak)
    return torch.minimum(rising, falling).clamp(min=0) * (2 / (right - left))


@cache
def _empty_band(config: AudioConfig) -> int | None:
    """The first band that holds no frequency."""
    return next(iter((_mel_bank(config) == 0).all(0).nonzero().flatten().tolist()), None)


def _mel(hertz: float) -> float:
    return hertz / _LINEAR if hertz < _BREAK else _BREAK / _LINEAR + math.log(hertz / _BREAK) / _STEP


def _hertz(mels: Tensor) -> Tensor:
    above = _BREAK * torch.exp(_STEP * (mels - _BREAK / _LINEAR))
    return torch.where(mels < _BREAK / _LINEAR, mels * _LINEAR, above)


def _cosines(count: int) -> Tensor:
    """[M, M] float64: the orthonormal cosine transform (DCT-II), one row for each coefficient."""
    angles = (torch.arange(count, dtype=torch.float64) + 0.5) * (math.pi / count)
    table = torch.cos(torch.arange(count, dtype=torch.float64)[:, None] * angles) * math.sqrt(2 / count)
    table[0] /= math.sqrt(2)
    return table


AUDIO = AudioConfig()


_QUIET = 1e-10  # mean square below which a clip counts as silent


@dataclass(frozen=True, kw_only=True)
class AudioAugment(Checked):
    """Augmentation of clips. The defaults are the recipe of TensorFlow's Speech Commands, which the papers follow."""

    retired: ClassVar = {
        name: (default, "frames and bands of a clip are not masked")
        for name, default in (("time_masks", 0), ("band_masks", 0), ("time_width", 25), ("band_width", 7))
    }

    shift_ms: NotNegative = 100.0
    """Largest random shift of a clip, in either direction. Silence fills the gap."""

    noise_share: Share = 0.8
    """Fraction of clips with background noise."""

    noise_level: NotNegative = 0.1
    """Largest volume of the noise. The volume is drawn uniformly between 0 and this value."""


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
    gain = (power / noise).sqrt() * 10 ** (-decibels / 20)
    return torch.where((power > _QUIET) & (noise > _QUIET), gain, 0.0)
