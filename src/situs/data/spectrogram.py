"""Waves to log-mels and MFCCs, in batches on the device, by the conventions of librosa.

A frame is a Hann window of the wave; its power spectrum goes through Slaney's triangles (equal areas, linear below
1 kHz and logarithmic above), into decibels, and for MFCCs through an orthonormal cosine transform. The tests hold it to
librosa: in float64 within 1e-9, in float32 within 2e-3 (the values are decibels).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.config import Checked
from situs.errors import SitusError
from situs.limits import Count, NotNegative, Positive, Within

_LEAST_POWER = 1e-10  # librosa's; -100 dB
_LINEAR = 200 / 3  # Hz a mel below 1 kHz
_BREAK = 1000.0
_STEP = math.log(6.4) / 27  # log Hz a mel above it


@dataclass(frozen=True, kw_only=True)
class SpectrogramConfig(Checked):
    """What becomes of a wave."""

    kind: Literal["mfcc", "logmel"] = "mfcc"
    """MFCCs, or the log-mels that they are made of."""

    rate: Annotated[int, Within("[1000, 192000]")] = 16_000
    """Samples a second."""

    window_ms: Positive = 30.0
    """Length of a frame's window."""

    hop_ms: Positive = 10.0
    """From a frame to the next."""

    fft_size: Count | None = None
    """Samples of the transform; by default those of the window, which stands in the middle of a longer one."""

    mels: Count = 40
    """Mel bands."""

    coefficients: Count = 40
    """MFCCs kept, from the lowest; at most as many as there are mel bands."""

    low_hz: NotNegative = 0.0
    """Where the lowest band begins."""

    high_hz: Positive | None = None
    """Where the highest band ends; by default half the rate."""

    range_db: Positive | None = 80.0
    """What lies further below a clip's loudest band is raised to this distance; none: down to -100 dB."""

    centred: bool = False
    """Frame t is centred on sample t · hop, with silence around the clip: 101 frames of a second, and not 98."""

    def check(self) -> None:
        if self.kind == "mfcc" and self.coefficients > self.mels:
            raise SitusError(
                field="coefficients", value=self.coefficients, allowed=f"at most the {self.mels} mel bands"
            )
        if min(self.window, self.hop) < 1:
            at = "window_ms" if self.window < 1 else "hop_ms"
            raise SitusError(field=at, value=getattr(self, at), allowed=f"at least a sample of {self.rate:,} a second")
        if self.transform < self.window:
            allowed = f"at least the {self.window} samples of a window"
            raise SitusError(field="fft_size", value=self.fft_size, allowed=allowed)
        if not self.low_hz < self.highest <= self.rate / 2:
            allowed = f"above {self.low_hz:g} Hz and at most half the rate, {self.rate / 2:g}"
            raise SitusError(field="high_hz", value=self.highest, allowed=allowed)
        if (empty := _empty_band(self)) is not None:
            said = f"band {empty} would hold no frequency of a transform of {self.transform} samples"
            raise SitusError(field="mels", value=self.mels, allowed=f"fewer, or a longer transform: {said}")

    @property
    def window(self) -> int:
        """Samples of a window."""
        return round(self.window_ms * self.rate / 1000)

    @property
    def hop(self) -> int:
        """Samples from a frame to the next."""
        return round(self.hop_ms * self.rate / 1000)

    @property
    def transform(self) -> int:
        """Samples of the transform."""
        return self.fft_size or self.window

    @property
    def highest(self) -> float:
        """Where the highest band ends, in Hz."""
        return self.high_hz or self.rate / 2

    @property
    def width(self) -> int:
        """Numbers a frame."""
        return self.coefficients if self.kind == "mfcc" else self.mels

    def frames(self, samples: int) -> int:
        """Frames of a wave of so many samples."""
        around = 2 * (self.transform // 2) if self.centred else 0
        if samples + around < self.transform:
            raise SitusError(f"a wave of {samples} samples: must fill a frame, {self.transform} samples")
        return 1 + (samples + around - self.transform) // self.hop


def spectrogram(waves: Tensor, config: SpectrogramConfig) -> Tensor:
    """waves: [B, T] float in [-1, 1]. Their features, [B, width, frames]: decibels, or MFCCs of them."""
    config.frames(waves.shape[-1])  # refuses a wave that fills no frame
    with _whole_floats(waves.device):
        return _features(waves, config)


def _features(waves: Tensor, config: SpectrogramConfig) -> Tensor:
    tables = _tables(config, waves.dtype, waves.device)
    if config.centred:
        waves = F.pad(waves, 2 * (config.transform // 2,))
    frames = waves.unfold(-1, config.transform, config.hop) * tables.window
    spectrum = torch.fft.rfft(frames)
    power = spectrum.real.square() + spectrum.imag.square()
    levels = 10 * (power @ tables.mels).clamp(min=_LEAST_POWER).log10()
    if config.range_db is not None:
        levels = torch.maximum(levels, levels.amax((-2, -1), keepdim=True) - config.range_db)
    return levels.mT if tables.cosines is None else tables.cosines @ levels.mT


@contextmanager
def _whole_floats(device: torch.device) -> Iterator[None]:
    """On a GPU without TF32, which a training allows: its 10 bits would be a tenth of a decibel."""
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
    """window: [n]. mels: [n // 2 + 1, M]. cosines: [C, M], of MFCCs."""

    window: Tensor
    mels: Tensor
    cosines: Tensor | None


@lru_cache(maxsize=32)
def _tables(config: SpectrogramConfig, dtype: torch.dtype, device: torch.device) -> _Tables:
    """Made in float64 on the CPU: the same on every device."""
    spare = config.transform - config.window
    window = torch.hann_window(config.window, dtype=torch.float64)
    window = F.pad(window, (spare // 2, spare - spare // 2))
    cosines = _cosines(config.mels)[: config.coefficients] if config.kind == "mfcc" else None
    return _Tables(
        window.to(device, dtype),
        _mel_bank(config).to(device, dtype),
        None if cosines is None else cosines.to(device, dtype),
    )


def _mel_bank(config: SpectrogramConfig) -> Tensor:
    """[n // 2 + 1, M] float64: triangles from band to band, each with the area of one."""
    bins = torch.arange(config.transform // 2 + 1, dtype=torch.float64) * (config.rate / config.transform)
    edges = _hertz(torch.linspace(_mel(config.low_hz), _mel(config.highest), config.mels + 2, dtype=torch.float64))
    left, peak, right = edges[:-2], edges[1:-1], edges[2:]
    rising, falling = (bins[:, None] - left) / (peak - left), (right - bins[:, None]) / (right - peak)
    return torch.minimum(rising, falling).clamp(min=0) * (2 / (right - left))


@cache
def _empty_band(config: SpectrogramConfig) -> int | None:
    """The first band that holds no frequency."""
    return next(iter((_mel_bank(config) == 0).all(0).nonzero().flatten().tolist()), None)


def _mel(hertz: float) -> float:
    return hertz / _LINEAR if hertz < _BREAK else _BREAK / _LINEAR + math.log(hertz / _BREAK) / _STEP


def _hertz(mels: Tensor) -> Tensor:
    above = _BREAK * torch.exp(_STEP * (mels - _BREAK / _LINEAR))
    return torch.where(mels < _BREAK / _LINEAR, mels * _LINEAR, above)


def _cosines(count: int) -> Tensor:
    """[M, M] float64: the orthonormal cosine transform (DCT-II), a row a coefficient."""
    places = (torch.arange(count, dtype=torch.float64) + 0.5) * (math.pi / count)
    table = torch.cos(torch.arange(count, dtype=torch.float64)[:, None] * places) * math.sqrt(2 / count)
    table[0] /= math.sqrt(2)
    return table
