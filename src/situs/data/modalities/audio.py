"""Audio clips: decoded in a worker; shift, noise, spectrogram and SpecAugment in batches on the device.

A batch is [B, 1, features, frames]: an image of the sound, time from left to right. A transformer over frames takes
patches of a whole frame (40 × 1), one over spectrogram patches takes squares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from situs.core.random import uniform
from situs.data.audio import AudioConfig, spectrogram
from situs.data.augment.audio import add_noise, gain_at, mask_frames, shift
from situs.data.augment.recipes import AugmentConfig
from situs.data.batch import Batch
from situs.data.modalities.base import Measured, grey_levels, measure
from situs.data.modalities.image import check_scale
from situs.data.pipeline import Noise, Pipeline
from situs.data.sources.audio import (
    AUDIO_SUFFIXES,
    NOISE_FOLDER,
    NoiseBank,
    clip_splits,
    noise_folder,
    open_clips,
    part_of,
    read_noise,
)
from situs.data.sources.base import Source, Wanted
from situs.data.sources.parquet import COLUMNS
from situs.errors import SitusError
from situs.files import absolute

if TYPE_CHECKING:
    from situs.data.config import DataConfig

_FULL = 32768.0


def measure_scale(source: Source, config: AudioConfig) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each feature, [features] each."""
    mean, std, _ = measure(source, lambda sample: spectrogram(from_bits(to_bits(sample["wave"][None])), config)[0])
    return mean.float(), std.float()


def to_bits(wave: Tensor) -> Tensor:
    """A wave as 16 bits a sample: exact for a 16-bit file at its own rate, rounded for all others."""
    return (wave * _FULL).round_().clamp_(-_FULL, _FULL - 1).to(torch.int16)


def from_bits(waves: Tensor) -> Tensor:
    """What `to_bits` made, as floats in [-1, 1)."""
    return waves.float().div_(_FULL)


class AudioPipeline(Pipeline):
    """A source of clips ("wave", and "label" where there is one) to batches of features.

    scale: mean and deviation [features] on the training set. augment: None for evaluation. noise_bank: what background
    noise is cut from; None: no noise is added.
    """

    device_tensors = ("mean", "std", "bank")
    thread_safe = False  # a spectrogram turns off TF32 for a moment, for all threads

    def __init__(
        self,
        source: Source,
        config: AudioConfig,
        scale: tuple[Tensor, Tensor],
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
        self.config, self.bank, self.seed, self.augment = config, noise_bank, seed, augment
        self.mean, self.std = scale
        self.row_bytes = 2 * config.samples

    @property
    def facts(self) -> dict[str, Any]:
        """The noise of an evaluation."""
        return {} if self.training or self.config.snr_db is None else {"snr_db": self.config.snr_db}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"bank": None}  # workers only read: the noise stays with the loader

    def collate(self, epoch: int, draws: list[int], samples: list[dict[str, Any]]) -> dict[str, Tensor]:  # noqa: ARG002
        """[b, T] int16, and the labels."""
        values = {"wave": torch.stack([to_bits(sample["wave"]) for sample in samples])}
        if "label" in samples[0]:
            values["label"] = torch.tensor([sample["label"] for sample in samples])
        return values

    def noise(self, ids: Tensor, epoch: int) -> Noise:
        """The numbers of each sample; in evaluation the same in every epoch."""
        if self.augment is None:
            return {} if self.config.snr_db is None else {"cut": uniform(self.seed, 0, ids, "audio.snr", (2,))}
        numbers = {
            "shift": uniform(self.seed, epoch, ids, "audio.shift", ()),
            "cut": uniform(self.seed, epoch, ids, "audio.cut", (2,)),
            "level": uniform(self.seed, epoch, ids, "audio.level", (2,)),
        }
        if masks := self.augment.audio.masks:
            numbers["masks"] = uniform(self.seed, epoch, ids, "audio.masks", (masks, 2))
        return numbers

    def finish(self, values: Mapping[str, Tensor], ids: Tensor, noise: Noise) -> Batch:
        smoothing = 0.0 if self.augment is None else self.augment.label_smoothing
        targets = self.labels(values, smoothing)
        return Batch(self._view(values["wave"], noise), ids, targets)

    def _view(self, samples: Tensor, noise: Noise) -> Tensor:
        """Features [B, 1, features, frames] of waves [B, T] int16, of mean 0 and deviation 1 over the training set."""
        waves = self._with_noise(from_bits(samples), noise)
        frames = (spectrogram(waves, self.config) - self.mean[:, None]) / self.std[:, None]
        if "masks" in noise and self.augment is not None:
            frames = mask_frames(frames, noise["masks"], self.augment.audio)
        return frames[:, None].contiguous()

    def shown(self, inputs: Tensor) -> Tensor:
        return grey_levels(inputs)

    def _with_noise(self, waves: Tensor, noise: Noise) -> Tensor:
        """In training shifted and with random noise; in evaluation with noise at `snr_db`, where that is set."""
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


class Audio(Measured):
    """Audio clips as spectrograms, [1, features, frames] of each."""

    kind, things, suffixes, table, Config = "audio", "clips", AUDIO_SUFFIXES, "audio", AudioConfig
    unused = ("multi_label", "crop_share")
    augments, reading_option = frozenset({"audio", "label_smoothing", "repeated"}), "snr_db"

    def check(self, data: DataConfig) -> None:
        super().check(data)
        check_scale(data, data.audio.size[0], "feature")
        if data.img_size not in (None, data.audio.size):
            allowed = f"{data.audio.size[0]},{data.audio.size[1]}, the size of the clips' features"
            raise SitusError(field="img_size", value=data.img_size, allowed=allowed)

    def resolve(self, data: DataConfig, opened: Callable[[DataConfig], Source]) -> DataConfig:
        """With the size of the features and their mean and deviation over the training split."""
        if data.audio.noise is not None:
            data = replace(data, audio=replace(data.audio, noise=absolute(data.audio.noise)))
        data = replace(data, channels=1, img_size=data.img_size or data.audio.size)
        if data.mean and data.std:
            return data
        scale = measure_scale(opened(data), data.audio)
        mean, std = (tuple(round(value, 4) for value in part.tolist()) for part in scale)
        return replace(data, mean=data.mean or mean, std=data.std or std)

    def size(self, data: DataConfig) -> tuple[int, int]:
        """Features of a frame, and frames of a clip."""
        return data.audio.size

    def scale_length(self, data: DataConfig) -> int:
        return data.audio.size[0]

    def read_as(self, data: DataConfig, value: Any) -> DataConfig:
        return replace(data, audio=replace(data.audio, snr_db=value))

    def prepared(self, data: DataConfig) -> dict[str, Any]:
        """Without the noise of an evaluation and its folder."""
        return super().prepared(replace(data, audio=replace(data.audio, noise=None, snr_db=None)))

    def facts(self, data: DataConfig | None, shape: tuple[int, ...] | None, channels: int) -> list[str]:  # noqa: ARG002
        assert data is not None
        clip, (width, frames) = data.audio, data.audio.size
        features = "MFCCs" if clip.kind == "mfcc" else "log-mels"
        return [
            f"Clips: {clip.seconds:g} s at {clip.rate:,} samples a second",
            f"Features: {width} {features} of each of {frames} frames, [1, {width}, {frames}]",
            "Normalised by the mean and deviation of each, which config.json holds under situs.audio",
        ]

    def is_at(self, path: Path, *, multi_label: bool) -> bool:  # noqa: ARG002
        return (path / NOISE_FOLDER).is_dir()

    def in_columns(self, schema: Any, *, asked: bool) -> bool:  # noqa: ARG002
        return not {*schema.names}.isdisjoint(COLUMNS["audio"])

    def splits(self, path: Path, data: DataConfig) -> set[str]:  # noqa: ARG002
        return clip_splits(path)

    def open(self, path: Path, wanted: Wanted, data: DataConfig) -> Source:
        return open_clips(path, wanted, data.audio)

    def pipeline(self, source: Source, data: DataConfig, augment: AugmentConfig | None, *_: Any) -> Pipeline:
        """Reads background noise where training or evaluation adds some; each split has its own part of it."""
        bank, noisy = None, data.audio.snr_db is not None
        if augment is not None:
            noisy = augment.audio.noise_share > 0 and augment.audio.noise_level > 0
        if noisy and (data.path or data.audio.noise):
            folder = noise_folder(Path(data.path).expanduser(), data.audio)
            bank, notes = read_noise(folder, part_of(data.split or ("val" if augment is None else None)), data.audio)
            source.notes += notes
            if bank is None:
                source.notes.append(f"{source.name}: has no background noise, so none is added")
        mean, std = map(torch.tensor, self.normalisation(data))
        pipeline = AudioPipeline(source, data.audio, (mean, std), augment=augment, noise_bank=bank, seed=data.seed)
        # Decoding a second of sound costs more than training a small model on it.
        fits = len(source) * 2 * data.audio.samples <= data.resident_gib * 2**30
        pipeline.resident = data.resident == "always" or (data.resident == "auto" and fits)
        return pipeline
