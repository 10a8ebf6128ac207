"""Clips of every kind that soundfile reads, brought to one rate, one channel and one length."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from situs.data.audio import AudioConfig
from situs.data.modalities import audio
from situs.data.modalities.audio import NoiseBank, decode_wave, fit, open_clips, read_noise, resample
from situs.data.sources.base import ANY
from situs.errors import BrokenSampleError, SitusError

TIME = np.arange(16_000) / 16_000
TONE = (0.5 * np.sin(2 * np.pi * 440 * TIME)).astype(np.float32)


def encoded(wave: np.ndarray, rate: int = 16_000, kind: str = "WAV", subtype: str | None = None) -> bytes:
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, wave, rate, format=kind, subtype=subtype)
    return file.getvalue()


class TestDecoding:
    @pytest.fixture(autouse=True)
    def _soundfile(self) -> None:
        pytest.importorskip("soundfile", reason="the extra `audio` is not installed")

    @pytest.mark.parametrize(
        ("kind", "subtype", "tolerance"),
        [("WAV", "PCM_16", 4e-5), ("WAV", "FLOAT", 0.0), ("FLAC", "PCM_24", 1e-6), ("OGG", "VORBIS", 0.05)],
    )
    def test_every_kind(self, kind: str, subtype: str, tolerance: float) -> None:
        wave = decode_wave(encoded(TONE, kind=kind, subtype=subtype), "tone", 16_000)
        assert (wave.dtype, wave.shape) == (torch.float32, (16_000,))
        np.testing.assert_allclose(wave, TONE, rtol=0, atol=tolerance)

    def test_stereo_is_the_mean_of_both(self) -> None:
        left, right = TONE, np.linspace(-0.5, 0.5, len(TONE), dtype=np.float32)
        wave = decode_wave(encoded(np.stack([left, right], axis=1), subtype="FLOAT"), "stereo", 16_000)
        np.testing.assert_allclose(wave, (left + right) / 2, rtol=0, atol=1e-7)

    @pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
    def test_another_rate_gives_the_same_tone(self, rate: int) -> None:
        own = (0.5 * np.sin(2 * np.pi * 440 * np.arange(rate) / rate)).astype(np.float32)
        wave = decode_wave(encoded(own, rate, subtype="FLOAT"), "tone", 16_000)
        assert wave.shape == (16_000,)
        np.testing.assert_allclose(wave[500:-500], TONE[500:-500], rtol=0, atol=2e-3)

    @pytest.mark.parametrize("rate", [8_000, 16_000, 44_100])
    @pytest.mark.parametrize("channels", [1, 2, 3])
    def test_plain_wav_is_read_as_soundfile_reads_it(
        self, monkeypatch: pytest.MonkeyPatch, channels: int, rate: int
    ) -> None:
        """To the bit, over every 16-bit value; and nothing else goes that way."""
        every = np.random.default_rng(0).permutation(np.arange(-32768, 32768)).astype(np.int16)
        data = encoded(every[: len(every) // channels * channels].reshape(-1, channels), rate, subtype="PCM_16")
        assert audio._plain_wav(data) is not None
        quick = decode_wave(data, "a.wav", 16_000)
        monkeypatch.setattr(audio, "_plain_wav", lambda _: None)
        assert torch.equal(quick, decode_wave(data, "a.wav", 16_000))

    def test_what_is_unusual_in_a_wav_is_left_to_soundfile(self) -> None:
        plain = encoded(TONE, subtype="PCM_16")
        others = [encoded(TONE, subtype=kind) for kind in ("PCM_24", "PCM_U8", "FLOAT", "ULAW", "ALAW")]
        odd = [plain[:-1], plain[:3001], plain + b"\0\0", plain[:44], plain[:40] + b"\xff" * 4 + plain[44:], b""]
        odd += [plain[:22] + b"\0\0" + plain[24:], plain[:24] + bytes(4) + plain[28:], plain[:32] + b"\4" + plain[33:]]
        assert all(audio._plain_wav(data) is None for data in [*others, *odd])
        listed = plain[:36] + b"LIST\4\0\0\0none" + plain[36:]
        assert torch.equal(decode_wave(listed, "a.wav", 16_000), decode_wave(plain, "a.wav", 16_000))
        assert len(decode_wave(plain[:3001], "a.wav", 16_000)) == (3001 - 44) // 2  # what is there of a file cut off

    @pytest.mark.parametrize(
        ("data", "said"),
        [
            (b"", "a.wav: cannot be decoded as audio"),
            (b"this is a text\n" * 20, "a.wav: cannot be decoded as audio"),
            (b"RIFF\x10\0\0\0WAVEfmt ", "a.wav: cannot be decoded as audio"),
        ],
    )
    def test_what_is_no_audio_is_named(self, data: bytes, said: str) -> None:
        with pytest.raises(BrokenSampleError, match=said) as caught:
            decode_wave(data, "a.wav", 16_000)
        assert "0x" not in str(caught.value)

    def test_no_samples_and_no_numbers_are_named(self) -> None:
        with pytest.raises(BrokenSampleError, match=r"a\.wav: contains no samples"):
            decode_wave(encoded(TONE[:0]), "a.wav", 16_000)
        broken = TONE.copy()
        broken[7] = np.nan
        with pytest.raises(BrokenSampleError, match=r"a\.wav: contains samples that are not finite numbers"):
            decode_wave(encoded(broken, subtype="FLOAT"), "a.wav", 16_000)

    def test_noise_is_cut_from_the_splits_own_part(self, tmp_path: Path) -> None:
        folder = tmp_path / "_background_noise_"
        folder.mkdir()
        long, brief = np.linspace(0, 1, 160_000, dtype=np.float32), np.full(19_000, 0.5, np.float32)
        (folder / "b.wav").write_bytes(encoded(long, subtype="FLOAT"))
        (folder / "a.wav").write_bytes(encoded(brief, subtype="FLOAT"))
        (folder / "c.wav").write_text("no noise")
        (folder / "README.md").write_text("of the noise")
        parts = {}
        for split, low, high in (("train", 0.0, 0.8), ("val", 0.8, 0.9), ("test", 0.9, 1.0)):
            bank, notes = read_noise(tmp_path / "_background_noise_", split)
            assert bank is not None
            assert len(bank.starts) == 1
            assert any("c.wav" in note for note in notes) and any("a.wav" in note for note in notes)
            numbers = torch.rand(200, 2, generator=torch.Generator().manual_seed(0))
            pieces = bank.cut(torch.cat([numbers, torch.tensor([[0.0, 0.0], [0.9999999, 0.9999999]])]), 16_000)
            assert float(pieces.min()) >= low - 1e-4 and float(pieces.max()) <= high + 1e-4
            parts[split] = pieces
        assert float(parts["train"].max()) <= float(parts["val"].min())
        assert read_noise(tmp_path / "nowhere", "train") == (None, [])


def test_without_soundfile_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(
        SitusError, match=r"reading audio files needs the package 'soundfile': pip install 'situs\[audio"
    ):
        open_clips(tmp_path, ANY)
    with pytest.raises(SitusError, match="'soundfile'") as caught:
        decode_wave(b"", "a.wav", 16_000)
    assert not isinstance(caught.value, BrokenSampleError)  # which a loader would skip


def test_resampling_lets_nothing_alias() -> None:
    """A tone of 6 kHz is above what 8,000 samples per second can hold: it goes, and does not come back as 2 kHz."""
    high = np.sin(2 * np.pi * 6000 * TIME).astype(np.float32)
    assert np.abs(resample(high, 16_000, 8_000)[200:-200]).max() < 0.01
    low = resample(TONE, 16_000, 8_000)
    np.testing.assert_allclose(low[200:-200], TONE[::2][200:-200], rtol=0, atol=2e-3)


def test_shorter_and_longer_clips() -> None:
    wave = torch.arange(1.0, 6.0)
    assert fit(wave, 3).tolist() == [1, 2, 3]
    assert fit(wave, 7).tolist() == [1, 2, 3, 4, 5, 0, 0]
    assert AudioConfig(seconds=0.5, rate=8000, mels=20, coefficients=20).samples == 4000


def test_a_cut_never_leaves_its_file() -> None:
    bank = NoiseBank(
        torch.cat([torch.full((30,), 1.0), torch.full((50,), 2.0)]), torch.tensor([0, 30]), torch.tensor([30, 50])
    )
    numbers = torch.rand(500, 2, generator=torch.Generator().manual_seed(1))
    pieces = bank.cut(numbers, 30)
    assert (pieces == pieces[:, :1]).all()
    assert {1.0, 2.0} == set(pieces[:, 0].tolist())
