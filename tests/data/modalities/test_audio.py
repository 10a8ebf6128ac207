"""From clips to batches, without any audio file: a source of tones stands for the files."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from recipes import RECIPES
from torch import Tensor

from situs.core.random import normal
from situs.data.audio import AudioAugment, AudioConfig, spectrogram
from situs.data.augment.recipes import AugmentConfig
from situs.data.batch import Batch
from situs.data.loader import Loader
from situs.data.modalities.audio import Audio, AudioPipeline, NoiseBank, from_bits, measure_scale, to_bits
from situs.data.sampler import BatchPlan
from situs.data.sources.base import Source
from situs.errors import BrokenSampleError, SitusError

CONFIG = AudioConfig(seconds=0.2, mels=20, coefficients=12)
SAMPLES = 3200


class Tones(Source):
    def __init__(self, count: int = 24, broken: tuple[int, ...] = ()) -> None:
        super().__init__("tones", ("low", "high"), None, strict=False)
        self.count, self.broken = count, broken

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> dict[str, Any]:
        if index in self.broken:
            raise BrokenSampleError(f"tone {index}: is torn")
        pitch = (300 if index % 2 == 0 else 2000) + 10 * index
        return {"wave": 0.3 * torch.sin(2 * torch.pi * pitch * torch.arange(SAMPLES) / 16_000), "label": index % 2}


def bank() -> NoiseBank:
    wave = 0.1 * normal(0, 0, torch.arange(2), "bank", (8000,)).flatten()
    return NoiseBank(wave, torch.tensor([0, 8000]), torch.tensor([8000, 8000]))


def pipeline(
    source: Source, augment: AugmentConfig | None = None, config: AudioConfig = CONFIG, **more: Any
) -> AudioPipeline:
    return AudioPipeline(source, config, measure_scale(source, config), augment=augment, **more)


def heard(**changed: Any) -> AugmentConfig:
    return AugmentConfig(audio=AudioAugment(**changed))


def loaded(source: Source, *, epoch: int = 0, workers: int = 0, rank: int = 0, world: int = 1, training: bool = True,
           config: AudioConfig = CONFIG) -> list[Batch]:  # fmt: skip
    augment = heard() if training else None
    made = pipeline(source, augment, config, noise_bank=bank())
    plan = BatchPlan(len(source), 8, 0, rank, world, shuffle=training, drop_last=training)
    return list(Loader(made, plan, torch.device("cpu"), workers).iterate(epoch))


def same(one: Tensor, two: Tensor) -> None:
    torch.testing.assert_close(one, two, rtol=0, atol=2e-5)


def test_evaluation_is_the_scaled_spectrogram_and_leaves_out_what_is_broken() -> None:
    source = Tones(broken=(5,))
    batches = loaded(source, training=False)
    ids = torch.cat([batch.ids for batch in batches])
    assert ids.tolist() == [row for row in range(24) if row != 5]
    mean, std = measure_scale(source, CONFIG)
    found = torch.cat([batch.inputs for batch in batches])
    for row, frames in zip(ids.tolist(), found, strict=True):
        wave = from_bits(to_bits(source.read(row)["wave"]))
        same(frames[0], (spectrogram(wave[None], CONFIG)[0] - mean[:, None]) / std[:, None])
    torch.testing.assert_close(found.mean((0, 1, 3)), torch.zeros(12), rtol=0, atol=1e-4)
    torch.testing.assert_close(found.std((0, 1, 3), correction=0), torch.ones(12), rtol=0, atol=1e-4)


def test_training_does_what_the_numbers_say() -> None:
    """Slowly: one clip's shift, noise and features by hand."""
    source = Tones()
    made = pipeline(source, heard(shift_ms=20, noise_level=0.7), noise_bank=bank())
    ids = torch.arange(24)
    values = made.collate(0, ids.tolist(), [source.read(row) for row in ids.tolist()])
    numbers = made.noise(ids, 4)
    batch = made.finish(values, ids, numbers)
    noisy = 0
    for row in range(24):
        by = int(numbers["shift"][row].double() * 641) - 320
        wave = torch.zeros(SAMPLES)
        wave[max(0, by) : SAMPLES + min(0, by)] = from_bits(values["wave"])[row, max(0, -by) : SAMPLES - max(0, by)]
        if numbers["level"][row, 1] < 0.8:
            noisy += 1
            piece = bank().cut(numbers["cut"][row : row + 1], SAMPLES)[0]
            wave = (wave + 0.7 * numbers["level"][row, 0] * piece).clamp(-1, 1)
        frames = (spectrogram(wave[None], CONFIG)[0] - made.mean[:, None]) / made.std[:, None]
        torch.testing.assert_close(batch.inputs[row, 0], frames, rtol=0, atol=1e-3)
    assert 12 <= noisy < 24


def test_noise_at_a_level_is_the_same_in_every_evaluation() -> None:
    config = replace(CONFIG, snr_db=5.0)
    noisy = loaded(Tones(), training=False, config=config)
    again = loaded(Tones(), training=False, config=config, epoch=3)
    assert all(torch.equal(one.inputs, two.inputs) for one, two in zip(noisy, again, strict=True))
    assert not torch.allclose(noisy[0].inputs, loaded(Tones(), training=False)[0].inputs, atol=0.1)
    with pytest.raises(SitusError, match="no background noise"):
        pipeline(Tones(), config=config)


def test_the_noise_of_an_evaluation_lies_so_many_decibels_below_each_clip() -> None:
    """Slowly: one clip's noise by hand."""
    made, ids = pipeline(Tones(4), config=replace(CONFIG, snr_db=5.0), noise_bank=bank()), torch.arange(4)
    values, numbers = made.collate(0, ids.tolist(), [Tones().read(row) for row in range(4)]), made.noise(ids, 0)
    batch = made.finish(values, ids, numbers)
    for row in range(4):
        wave, piece = from_bits(values["wave"])[row], bank().cut(numbers["cut"][row : row + 1], SAMPLES)[0]
        noise = piece / piece.norm() * wave.norm() / 10 ** (5.0 / 20)
        frames = (spectrogram((wave + noise)[None], CONFIG)[0] - made.mean[:, None]) / made.std[:, None]
        torch.testing.assert_close(batch.inputs[row, 0], frames, rtol=0, atol=1e-3)


def test_labels_are_smoothed_in_training_alone() -> None:
    source, ids = Tones(4), torch.arange(4)
    soft = pipeline(source, replace(heard(), label_smoothing=0.2), noise_bank=bank())
    values = soft.collate(0, [0, 1, 2, 3], [source.read(row) for row in range(4)])
    found = soft.finish(values, ids, soft.noise(ids, 0)).targets["label"]
    torch.testing.assert_close(found, torch.tensor([[0.9, 0.1], [0.1, 0.9]] * 2))
    assert pipeline(source).finish(values, ids, {}).targets["label"].tolist() == [0, 1, 0, 1]


def test_sixteen_bits_are_exact_for_what_has_no_more() -> None:
    whole = torch.arange(-32_768, 32_768, dtype=torch.int32)
    assert torch.equal(to_bits(whole.float() / 32_768).int(), whole)
    assert torch.equal(from_bits(whole.to(torch.int16)), whole.float() / 32_768)
    assert to_bits(torch.tensor([-1.5, 1.0, 1.5])).tolist() == [-32_768, 32_767, 32_767]


def test_a_picture_shows_the_mean_as_grey() -> None:
    inputs = torch.tensor([-9.0, -3.0, 0.0, 1.5, 3.0, 9.0]).view(1, 1, 2, 3)
    assert pipeline(Tones()).shown(inputs).flatten().tolist() == [0.0, 0.0, 0.5, 0.75, 1.0, 1.0]


def test_workers_are_not_sent_the_noise() -> None:
    made = pipeline(Tones(), heard(), noise_bank=bank())
    assert pickle.loads(pickle.dumps(made)).bank is None
    moved = made.to(torch.device("cpu"))
    assert moved.bank is not None and made.bank is not None and moved is not made


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(SitusError, match=r"at least 0\.03 s, the length of a frame"):
        AudioConfig(seconds=0.01)
    with pytest.raises(SitusError, match=r"operations=2: does not apply to clips"):
        Audio().check_augment(RECIPES["deit"])
    with pytest.raises(SitusError, match=r"none of its images can be read; .*tone 2"):
        measure_scale(Tones(3, broken=(0, 1, 2)), CONFIG)
