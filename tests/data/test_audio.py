"""Spectrograms against librosa 0.11: its stored output here, librosa itself where it is installed (slow)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from situs.config import from_dict
from situs.core.random import uniform
from situs.data.audio import AudioConfig, _without_tf32, spectrogram
from situs.errors import SitusError

STORED = Path(__file__).parent / "librosa.npz"
EVERY = 7  # of the frames that are stored
CASES: dict[str, AudioConfig] = {"paper": AudioConfig(), "logmel": AudioConfig(kind="logmel")}


def waves(rate: int = 16_000) -> Tensor:
    """[4, rate] float64: a rising tone with noise, near silence with a click, half silence, and all silence."""
    time = torch.arange(rate, dtype=torch.float64) / rate
    noise = uniform(3, 0, torch.arange(4), "spectrogram", (rate,)).double() - 0.5
    tone = 0.5 * torch.sin(2 * torch.pi * (200 + 0.2 * rate * time) * time) + 0.02 * noise[0]
    click = 1e-4 * noise[1]
    click[rate // 3] = 0.9
    return torch.stack([tone, click, torch.where(time < 0.5, noise[2], 0.0), torch.zeros_like(time)])


def by_librosa(config: AudioConfig, wave: np.ndarray) -> np.ndarray:
    """What librosa says of one wave, [frames, width]."""
    import librosa

    mels = librosa.feature.melspectrogram(
        y=wave, sr=config.rate, n_fft=config.window, hop_length=config.hop, center=False, n_mels=config.mels,
        dtype=np.float64,
    )  # fmt: skip
    levels = librosa.power_to_db(mels, ref=1.0, amin=1e-10, top_db=80.0)
    if config.kind == "mfcc":
        levels = librosa.feature.mfcc(S=levels, n_mfcc=config.coefficients)
    return levels.T


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 2e-3)])
def test_as_librosa_stored_it(case: str, dtype: torch.dtype, tolerance: float) -> None:
    """The stored arrays are float32 of values up to 600: 3e-5 is theirs."""
    config, kept = CASES[case], np.load(STORED)[case]
    found = spectrogram(waves(config.rate).to(dtype), config).mT[:, ::EVERY].double()
    assert found.shape == kept.shape
    assert kept.std() > 5
    np.testing.assert_allclose(found.numpy(), kept, rtol=0, atol=tolerance + 5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_as_librosa_itself(case: str) -> None:
    """Every frame. The stored arrays are what this test's librosa says, by `python tests/data/test_audio.py`."""
    pytest.importorskip("librosa", reason="librosa is no dependency of any extra: pip install librosa")
    config = CASES[case]
    given = waves(config.rate)
    wanted = np.stack([by_librosa(config, wave) for wave in given.numpy()])
    assert wanted.shape[1] == config.size[1]
    np.testing.assert_allclose(spectrogram(given, config).mT.numpy(), wanted, rtol=0, atol=1e-9)
    np.testing.assert_allclose(spectrogram(given.float(), config).mT.numpy(), wanted, rtol=0, atol=2e-3)
    np.testing.assert_allclose(np.load(STORED)[case], wanted[:, ::EVERY], rtol=0, atol=5e-5)


def test_a_second_has_the_papers_frames() -> None:
    assert AudioConfig().size == (40, 98)
    assert AudioConfig(kind="logmel", coefficients=99).size == (40, 98)


def test_a_clip_is_the_same_in_every_batch() -> None:
    """The range below the loudest band is the clip's own, not the batch's."""
    given = waves()
    together = spectrogram(given, CASES["paper"])
    for row, wave in enumerate(given):
        torch.testing.assert_close(spectrogram(wave[None], CASES["paper"])[0], together[row], rtol=0, atol=1e-9)


def test_a_frame_sees_its_own_samples() -> None:
    config = AudioConfig(kind="logmel")
    given = waves()[:1].clone()
    before = spectrogram(given, config)
    given[0, 8000] += 0.3
    changed = (spectrogram(given, config) - before).abs().amax(-2)[0].nonzero().flatten().tolist()
    assert changed == [frame for frame in range(98) if 160 * frame < 8000 < 160 * frame + 480]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"coefficients": 41}, "at most 40"),
        ({"mels": 256}, "with a window of 480 samples, band .* contains no frequency"),
        ({"hop_ms": 0.01}, "hop_ms=0.01: .*at least one sample at 16,000 Hz"),
        ({"window_ms": 0.01}, "window_ms=0.01: .*at least one sample at 16,000 Hz"),
        ({"seconds": 0.0299}, r"seconds=0\.0299: must be at least 0\.03 s, the length of a frame"),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(SitusError, match=said):
        AudioConfig(**wrong)


def test_a_frame_may_begin_at_every_sample() -> None:
    assert AudioConfig(hop_ms=1000 / 16_000).hop == 1
    assert AudioConfig(seconds=0.03).size == (40, 1) and AudioConfig(seconds=0.04).size == (40, 2)


def test_fields_of_earlier_versions_are_told() -> None:
    kept = {"fft_size": None, "low_hz": 0.0, "high_hz": None, "range_db": 80.0, "centred": False, "level": "as_is"}
    assert from_dict(AudioConfig, kept) == AudioConfig()
    with pytest.raises(SitusError, match="centred=True: is no longer a setting; frames lie within the clip"):
        from_dict(AudioConfig, {"centred": True})


def test_a_gpu_multiplies_without_tf32_and_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    monkeypatch.setattr(torch, "set_float32_matmul_precision", told.append)
    with _without_tf32(torch.device("cuda")):
        assert told == ["highest"]
    assert told == ["highest", "high"]
    with _without_tf32(torch.device("cpu")):
        assert told == ["highest", "high"]


if __name__ == "__main__":
    made = {case: [by_librosa(config, wave) for wave in waves(config.rate).numpy()] for case, config in CASES.items()}
    np.savez_compressed(STORED, **{case: np.stack(all_)[:, ::EVERY].astype(np.float32) for case, all_ in made.items()})
