"""The way of a clip: decoded in a worker; level, shift, noise, spectrogram and SpecAugment in batches on the device."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from situs.config import Checked
from situs.core.random import uniform
from situs.data.augment.audio import AudioAugment, add_noise, gain_at, mask_frames, shift
from situs.data.batch import Batch
from situs.data.pipeline import Noise, Pipeline
from situs.data.sources.audio import ClipConfig, NoiseBank
from situs.data.sources.base import Source
from situs.data.sources.images import BrokenImageError
from situs.data.sources.subset import Subset
from situs.data.spectrogram import SpectrogramConfig, spectrogram
from situs.errors import SitusError

_LEAST = 1e-5  # the level below which a clip is left as it is


@dataclass(frozen=True, kw_only=True)
class AudioConfig(Checked):
    """What a model is given of a clip."""

    clip: ClipConfig = field(default_factory=ClipConfig)
    """What every clip is brought to."""

    features: SpectrogramConfig = field(default_factory=SpectrogramConfig)
    """What becomes of its wave."""

    level: Literal["as_is", "peak", "rms"] = "as_is"
    """Each clip at its own level, or brought to a peak of 1, or to a root mean square of 0.1."""

    layout: Literal["frames", "picture"] = "frames"
    """[frames, width], a frame a token; or [1, width, frames], for a transformer of spectrogram patches."""

    snr_db: float | None = None
    """Evaluation with background noise so many decibels below each clip; none: clean."""

    def check(self) -> None:
        if self.clip.rate != self.features.rate:
            allowed = f"the {self.clip.rate:,} samples a second of the clips"
            raise SitusError(field="features.rate", value=self.features.rate, allowed=allowed)
        self.features.frames(self.clip.samples)

    @property
    def frames(self) -> int:
        """Frames of a clip."""
        return self.features.frames(self.clip.samples)


class Scale(NamedTuple):
    """mean, std: [width], of the training set's features; what a model sees is (features - mean) / std."""

    mean: Tensor
    std: Tensor


def measure_scale(source: Source, config: AudioConfig, count: int = 1000) -> Scale:
    """Mean and deviation of each number of a frame, over a random choice of `count` clips, broken ones aside."""
    total = squares = torch.zeros(config.features.width, dtype=torch.float64)
    seen = 0
    part = Subset(source, count)
    for index in range(len(part)):
        try:
            wave = part.read(index)["wave"]
        except BrokenImageError:
            continue
        frames = spectrogram(set_level(wave[None], config.level), config.features)[0].double()
        total, squares, seen = total + frames.sum(0), squares + frames.square().sum(0), seen + len(frames)
    if not seen:
        raise SitusError(f"{source.name}: none of its {len(source)} clips can be read", field="data")
    mean = total / seen
    return Scale(mean.float(), (squares / seen - mean.square()).clamp(min=1e-6).sqrt().float())


def set_level(waves: Tensor, level: str) -> Tensor:
    """waves [B, T] at one level; a silent one stays."""
    if level == "as_is":
        return waves
    own = waves.abs().amax(1) if level == "peak" else waves.square().mean(1).sqrt()
    wanted = 1.0 if level == "peak" else 0.1
    return waves * torch.where(own > _LEAST, wanted / own.clamp(min=_LEAST), 1.0)[:, None]


class AudioPipeline(Pipeline):
    """A source of clips ("wave", and "label" where there is one) to batches of features.

    scale: of the training set. noise_bank: what background noise is cut from; none: no noise is added.
    """

    def __init__(
        self,
        source: Source,
        config: AudioConfig,
        scale: Scale,
        *,
        training: bool,
        augment: AudioAugment | None = None,
        noise_bank: NoiseBank | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(source, training=training)
        if config.snr_db is not None and noise_bank is None:
            raise SitusError(f"{source.name}: has no background noise to add", field="snr_db", value=config.snr_db)
        self.config, self.scale, self.bank, self.seed = config, scale, noise_bank, seed
        self.augment = (augment or AudioAugment()) if training else None
        self.row_bytes = 4 * config.clip.samples

    def to(self, device: torch.device) -> Self:
        """A copy whose scale and noise lie on the device."""
        moved = copy.copy(self)
        moved.scale = Scale(*(each.to(device) for each in self.scale))
        moved.bank = None if self.bank is None else self.bank.to(device)
        return moved

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"bank": None}  # workers only read: the noise stays with the loader

    def collate(self, epoch: int, draws: list[int], samples: list[dict[str, Any]]) -> dict[str, Tensor]:  # noqa: ARG002
        """[b, T], and the labels."""
        values = {"wave": torch.stack([sample["wave"] for sample in samples])}
        if "label" in samples[0]:
            values["label"] = torch.tensor([sample["label"] for sample in samples])
        return values

    def noise(self, ids: Tensor, epoch: int) -> Noise:
        """The numbers of each sample; in evaluation those of no epoch, so that every evaluation hears the same."""
        if self.augment is None:
            return {} if self.config.snr_db is None else {"cut": uniform(self.seed, 0, ids, "audio.snr", (2,))}
        found = {
            "shift": uniform(self.seed, epoch, ids, "audio.shift", ()),
            "cut": uniform(self.seed, epoch, ids, "audio.cut", (2,)),
            "level": uniform(self.seed, epoch, ids, "audio.level", (2,)),
        }
        if self.augment.masks:
            found["masks"] = uniform(self.seed, epoch, ids, "audio.masks", (self.augment.masks, 2))
        return found

    def finish(self, values: Mapping[str, Tensor], ids: Tensor, noise: Noise) -> Batch:
        """Features [B, N, C] or [B, 1, C, N], of mean 0 and deviation 1 over the training set."""
        waves = self._heard(set_level(values["wave"], self.config.level), noise)
        frames = (spectrogram(waves, self.config.features) - self.scale.mean) / self.scale.std
        if self.augment is not None and self.augment.masks:
            frames = mask_frames(frames, noise["masks"], self.augment)
        inputs = frames if self.config.layout == "frames" else frames.transpose(1, 2)[:, None].contiguous()
        return Batch(inputs, ids, {"label": values["label"]} if "label" in values else {})

    def _heard(self, waves: Tensor, noise: Noise) -> Tensor:
        """Shifted and with noise, as training or the wish for a noisy evaluation asks."""
        samples = waves.shape[1]
        if self.augment is not None:
            waves = shift(waves, noise["shift"], round(self.augment.shift_ms * self.config.clip.rate / 1000))
            if self.bank is None:
                return waves
            loud = noise["level"][:, 0] * self.augment.noise_level
            gain = torch.where(noise["level"][:, 1] < self.augment.noise_share, loud, 0.0)
            return add_noise(waves, self.bank.cut(noise["cut"], samples), gain)
        if self.config.snr_db is None or self.bank is None:
            return waves
        pieces = self.bank.cut(noise["cut"], samples)
        return waves + gain_at(waves, pieces, self.config.snr_db)[:, None] * pieces
