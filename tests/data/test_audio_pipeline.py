"""From clips to batches, without any audio file: a source of tones stands for the files."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from situs.core.random import normal
from situs.data.audio_pipeline import AudioConfig, AudioPipeline, Scale, measure_scale, set_level
from situs.data.augment.audio import AudioAugment
from situs.data.batch import Batch
from situs.data.loader import StreamLoader
from situs.data.sampler import BatchPlan
from situs.data.sources.audio import ClipConfig, NoiseBank
from situs.data.sources.base import Source
from situs.data.sources.images import BrokenImageError
from situs.data.spectrogram import SpectrogramConfig, spectrogram
from situs.errors import SitusError

CONFIG = AudioConfig(clip=ClipConfig(seconds=0.2), features=SpectrogramConfig(mels=20, coefficients=12))
SAMPLES = 3200


class Tones(Source):
    def __init__(self, count: int = 24, broken: tuple[int, ...] = ()) -> None:
        super().__init__("tones", ("low", "high"), None, strict=False)
        self.count, self.broken = count, broken

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> dict[str, Any]:
        if index in self.broken:
            raise BrokenImageError(f"tone {index}: is torn")
        pitch = (300 if index % 2 == 0 else 2000) + 10 * index
        return {"wave": 0.3 * torch.sin(2 * torch.pi * pitch * torch.arange(SAMPLES) / 16_000), "label": index % 2}


def bank() -> NoiseBank:
    wave = 0.1 * normal(0, 0, torch.arange(2), "bank", (8000,)).flatten()
    return NoiseBank(wave, torch.tensor([0, 8000]), torch.tensor([8000, 8000]))


def pipeline(source: Source, *, training: bool = True, config: AudioConfig = CONFIG, **more: Any) -> AudioPipeline:
    return AudioPipeline(source, config, measure_scale(source, config), training=training, **more)


def loaded(source: Source, *, epoch: int = 0, workers: int = 0, rank: int = 0, world: int = 1, training: bool = True,
           config: AudioConfig = CONFIG) -> list[Batch]:  # fmt: skip
    augment = AudioAugment(time_masks=1, time_width=4, band_masks=1, band_width=3)
    made = pipeline(source, training=training, config=config, augment=augment, noise_bank=bank())
    plan = BatchPlan(len(source), 8, 0, rank, world, shuffle=training, drop_last=training)
    return list(StreamLoader(made, plan, torch.device("cpu"), workers).iterate(epoch))


def same(one: Tensor, two: Tensor) -> None:
    torch.testing.assert_close(one, two, rtol=0, atol=2e-5)


def test_workers_and_ranks_change_nothing() -> None:
    alone = loaded(Tones(broken=(5,)), epoch=2)
    assert [batch.inputs.shape for batch in alone] == [(8, 18, 12)] * 3
    for one, two in zip(alone, loaded(Tones(broken=(5,)), epoch=2, workers=1), strict=True):
        same(one.inputs, two.inputs)
        assert torch.equal(one.targets["label"], two.targets["label"]) and torch.equal(one.ids, two.ids)
    ranks = [loaded(Tones(broken=(5,)), epoch=2, rank=rank, world=2) for rank in range(2)]
    for step, batch in enumerate(alone):
        same(torch.cat([share[step].inputs for share in ranks]), batch.inputs)
    assert not torch.allclose(alone[0].inputs, loaded(Tones(broken=(5,)), epoch=3)[0].inputs)


def test_evaluation_is_the_scaled_spectrogram_and_leaves_out_what_is_broken() -> None:
    source = Tones(broken=(5,))
    batches = loaded(source, training=False)
    ids = torch.cat([batch.ids for batch in batches])
    assert ids.tolist() == [row for row in range(24) if row != 5]
    scale = measure_scale(source, CONFIG)
    found = torch.cat([batch.inputs for batch in batches])
    for row, frames in zip(ids.tolist(), found, strict=True):
        wave = source.read(row)["wave"]
        same(frames, (spectrogram(wave[None], CONFIG.features)[0] - scale.mean) / scale.std)
    torch.testing.assert_close(found.mean((0, 1)), torch.zeros(12), rtol=0, atol=1e-4)
    torch.testing.assert_close(found.std((0, 1), correction=0), torch.ones(12), rtol=0, atol=1e-4)


def test_training_does_what_the_numbers_say() -> None:
    """Slowly: one clip's shift, noise and features by hand."""
    source = Tones()
    made = pipeline(source, noise_bank=bank(), augment=AudioAugment(shift_ms=20, noise_level=0.7))
    ids = torch.arange(24)
    values = made.collate(0, ids.tolist(), [source.read(row) for row in ids.tolist()])
    numbers = made.noise(ids, 4)
    batch = made.finish(values, ids, numbers)
    noisy = 0
    for row in range(24):
        by = int(numbers["shift"][row].double() * 641) - 320
        wave = torch.zeros(SAMPLES)
        wave[max(0, by) : SAMPLES + min(0, by)] = values["wave"][row, max(0, -by) : SAMPLES - max(0, by)]
        if numbers["level"][row, 1] < 0.8:
            noisy += 1
            piece = bank().cut(numbers["cut"][row : row + 1], SAMPLES)[0]
            wave = (wave + 0.7 * numbers["level"][row, 0] * piece).clamp(-1, 1)
        frames = spectrogram(wave[None], CONFIG.features)[0]
        torch.testing.assert_close(batch.inputs[row], (frames - made.scale.mean) / made.scale.std, rtol=0, atol=1e-3)
    assert 12 <= noisy < 24


def test_noise_at_a_level_is_the_same_in_every_evaluation() -> None:
    config = AudioConfig(clip=CONFIG.clip, features=CONFIG.features, snr_db=5.0)
    noisy = loaded(Tones(), training=False, config=config)
    again = loaded(Tones(), training=False, config=config, epoch=3)
    assert all(torch.equal(one.inputs, two.inputs) for one, two in zip(noisy, again, strict=True))
    assert not torch.allclose(noisy[0].inputs, loaded(Tones(), training=False)[0].inputs, atol=0.1)
    with pytest.raises(SitusError, match="no background noise"):
        pipeline(Tones(), training=False, config=config)


def test_levels() -> None:
    waves = torch.stack([0.01 * torch.ones(100), torch.linspace(-0.5, 0.3, 100), torch.zeros(100)])
    assert torch.equal(set_level(waves, "as_is"), waves)
    peak, rms = set_level(waves, "peak"), set_level(waves, "rms")
    torch.testing.assert_close(peak.abs().amax(1), torch.tensor([1.0, 1.0, 0.0]))
    torch.testing.assert_close(rms.square().mean(1).sqrt(), torch.tensor([0.1, 0.1, 0.0]))


def test_a_picture_is_the_frames_turned() -> None:
    source = Tones()
    config = AudioConfig(clip=CONFIG.clip, features=CONFIG.features, layout="picture")
    pictures = loaded(source, training=False, config=config)[0].inputs
    assert pictures.shape == (8, 1, 12, 18)
    assert torch.equal(pictures[:, 0].transpose(1, 2), loaded(source, training=False)[0].inputs)


def test_workers_are_not_sent_the_noise() -> None:
    made = pipeline(Tones(), noise_bank=bank())
    assert pickle.loads(pickle.dumps(made)).bank is None
    moved = made.to(torch.device("cpu"))
    assert moved.bank is not None and made.bank is not None and moved is not made


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(SitusError, match="8,000 samples a second of the clips"):
        AudioConfig(clip=ClipConfig(rate=8000))
    with pytest.raises(SitusError, match="must fill a frame"):
        AudioConfig(clip=ClipConfig(seconds=0.01))
    with pytest.raises(SitusError, match="none of its 3 clips"):
        measure_scale(Tones(3, broken=(0, 1, 2)), CONFIG)
    assert isinstance(measure_scale(Tones(3, broken=(0,)), CONFIG), Scale)
