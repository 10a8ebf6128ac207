"""The way of a clip: decoded in a worker; level, shift, noise, spectrogram and SpecAugment in batches on the device.

A batch is [B, 1, numbers of a frame, frames]: a picture of the sound, time from left to right. A transformer over
frames takes patches of a whole frame (40 × 1), one of spectrogram patches squares.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from situs.core.random import uniform
from situs.data.audio import AudioConfig
from situs.data.augment.audio import add_noise, gain_at, mask_frames, shift
from situs.data.augment.mix import soft_labels
from situs.data.augment.recipes import AugmentConfig
from situs.data.batch import Batch
from situs.data.pipeline import Noise, Pipeline
from situs.data.sources.audio import NoiseBank
from situs.data.sources.base import Source
from situs.data.sources.subset import Subset
from situs.data.spectrogram import spectrogram
from situs.errors import BrokenSampleError, SitusError

_LEAST = 1e-5  # the level below which a clip is left as it is
_FULL = 32768.0
_OF_CLIPS = {"audio", "label_smoothing", "repeated"}
_SHOWN = 3.0  # deviations from the mean that are black and white in a picture


class Scale(NamedTuple):
    """mean, std: [width], of the training set's features; what a model sees is (features - mean) / std."""

    mean: Tensor
    std: Tensor


def measure_scale(source: Source, config: AudioConfig, count: int = 1000) -> Scale:
    """Mean and deviation of each number of a frame, over a random choice of `count` clips, broken ones aside."""
    total = squares = torch.zeros(config.width, dtype=torch.float64)
    seen, last = 0, "it is empty"
    part = Subset(source, count)
    for index in range(len(part)):
        try:
            wave = part.read(index)["wave"]
        except BrokenSampleError as error:
            last = str(error)
            continue
        frames = spectrogram(set_level(from_bits(to_bits(wave[None])), config.level), config)[0].double()
        total, squares, seen = total + frames.sum(1), squares + frames.square().sum(1), seen + frames.shape[1]
    if not seen:
        raise SitusError(
            f"{source.name}: none of the {len(part)} clips looked at can be read; the last: {last}", field="data"
        )
    mean = total / seen
    return Scale(mean.float(), (squares / seen - mean.square()).clamp(min=1e-6).sqrt().float())


def set_level(waves: Tensor, level: str) -> Tensor:
    """waves [B, T] at one level; a silent one stays."""
    if level == "as_is":
        return waves
    own = waves.abs().amax(1) if level == "peak" else waves.square().mean(1).sqrt()
    wanted = 1.0 if level == "peak" else 0.1
    return waves * torch.where(own > _LEAST, wanted / own.clamp(min=_LEAST), 1.0)[:, None]


def to_bits(wave: Tensor) -> Tensor:
    """A wave of 16 bits a sample: a 16-bit file at its own rate is the same to the bit, all else is rounded."""
    return (wave * _FULL).round_().clamp_(-_FULL, _FULL - 1).to(torch.int16)


def from_bits(waves: Tensor) -> Tensor:
    """The same as floats in [-1, 1)."""
    return waves.float().div_(_FULL)


def check_augment(augment: AugmentConfig) -> None:
    """Refuses what is done to images alone."""
    for each in fields(augment):
        value = getattr(augment, each.name)
        if each.name not in _OF_CLIPS and value != each.default:
            said = "is for images; clips take label_smoothing, repeated and what stands under audio"
            raise SitusError(f"{each.name}={value}: {said}", field=f"augment.{each.name}")


class AudioPipeline(Pipeline):
    """A source of clips ("wave", and "label" where there is one) to batches of features.

    scale: of the training set. augment: None for evaluation. noise_bank: what background noise is cut from; none: no
    noise is added.
    """

    beside = False  # a spectrogram forbids TF32 for a moment, to all threads

    def __init__(
        self,
        source: Source,
        config: AudioConfig,
        scale: Scale,
        *,
        augment: AugmentConfig | None = None,
        noise_bank: NoiseBank | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(source, training=augment is not None)
        if augment is None and config.snr_db is not None and noise_bank is None:
            raise SitusError(
                f"{source.name}: has no background noise to add", field="audio.snr_db", value=config.snr_db
            )
        if augment is not None:
            check_augment(augment)
        self.config, self.scale, self.bank, self.seed, self.augment = config, scale, noise_bank, seed, augment
        self.row_bytes = 2 * config.samples

    @property
    def facts(self) -> dict[str, Any]:
        """The noise of an evaluation."""
        return {} if self.training or self.config.snr_db is None else {"snr_db": self.config.snr_db}

    def to(self, device: torch.device) -> Self:
        """A copy whose scale and noise lie on the device."""
        moved = copy.copy(self)
        moved.scale = Scale(*(each.to(device) for each in self.scale))
        moved.bank = None if self.bank is None else self.bank.to(device)
        return moved

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"bank": None}  # workers only read: the noise stays with the loader

    def collate(self, epoch: int, draws: list[int], samples: list[dict[str, Any]]) -> dict[str, Tensor]:  # noqa: ARG002
        """[b, T] int16, and the labels."""
        values = {"wave": torch.stack([to_bits(sample["wave"]) for sample in samples])}
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
        if masks := self.augment.audio.masks:
            found["masks"] = uniform(self.seed, epoch, ids, "audio.masks", (masks, 2))
        return found

    def finish(self, values: Mapping[str, Tensor], ids: Tensor, noise: Noise) -> Batch:
        targets = {"label": values["label"]} if "label" in values else {}
        if self.augment is not None and self.augment.label_smoothing and targets:
            assert self.source.classes is not None, "labels come with classes"
            targets["label"] = soft_labels(targets["label"], len(self.source.classes), self.augment.label_smoothing)
        return Batch(self._view(values["wave"], noise), ids, targets)

    def _view(self, samples: Tensor, noise: Noise) -> Tensor:
        """Features [B, 1, width, frames] of waves [B, T] int16, of mean 0 and deviation 1 over the training set."""
        waves = self._heard(set_level(from_bits(samples), self.config.level), noise)
        mean, std = self.scale
        frames = (spectrogram(waves, self.config) - mean[:, None]) / std[:, None]
        if "masks" in noise and self.augment is not None:
            frames = mask_frames(frames, noise["masks"], self.augment.audio)
        return frames[:, None].contiguous()

    def shown(self, inputs: Tensor) -> Tensor:
        """Grey levels [B, 1, width, frames] in [0, 1]: three deviations below the mean are 0, three above are 1."""
        return (inputs / (2 * _SHOWN) + 0.5).clamp(0.0, 1.0)

    def _heard(self, waves: Tensor, noise: Noise) -> Tensor:
        """Shifted and with noise, as training or the wish for a noisy evaluation asks."""
        samples = waves.shape[1]
        if self.augment is not None:
            audio = self.augment.audio
            waves = shift(waves, noise["shift"], round(audio.shift_ms * self.config.rate / 1000))
            if self.bank is None:
                return waves
            loud = noise["level"][:, 0] * audio.noise_level
            gain = torch.where(noise["level"][:, 1] < audio.noise_share, loud, 0.0)
            return add_noise(waves, self.bank.cut(noise["cut"], samples), gain)
        if self.config.snr_db is None or self.bank is None:
            return waves
        pieces = self.bank.cut(noise["cut"], samples)
        return waves + gain_at(waves, pieces, self.config.snr_db)[:, None] * pieces
