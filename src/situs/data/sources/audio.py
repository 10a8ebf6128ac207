"""One encoded clip to one wave: WAV, FLAC and OGG by soundfile, mono, at one rate and of one length."""

from __future__ import annotations

import io
import math
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from situs.data.audio import AUDIO, AudioConfig
from situs.data.sources.base import EncodedSource, Wanted
from situs.data.sources.folder import FileSource
from situs.data.sources.parquet import ParquetSource
from situs.errors import BrokenSampleError, SitusError, missing_extra

AUDIO_SUFFIXES = frozenset({".wav", ".flac", ".ogg", ".oga", ".opus"})
NOISE_FOLDER = "_background_noise_"
LISTS = {"val": "validation_list.txt", "test": "testing_list.txt"}
_HEAD, _PCM, _CHANNELS = 44, b"\x10\0\0\0\1\0", 1024  # of a WAV without other chunks; soundfile's most channels
# Each split cuts from its own part of every noise file, so that no clip of a test was heard in training.
_SHARES = {"train": (0.0, 0.8), "val": (0.8, 0.9), "test": (0.9, 1.0)}


def need_soundfile() -> None:
    """Refuses where audio files cannot be read."""
    try:
        import soundfile  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise missing_extra("soundfile", "audio", "reading audio files") from error


def decode_wave(data: bytes, name: str, rate: int) -> Tensor:
    """The wave in `data`, [T] float32: the mean of its channels, at so many samples a second."""
    wave, own = _plain_wav(data) or _decoded(data, name)
    if not len(wave):
        raise BrokenSampleError(f"{name}: holds no samples")
    if not np.isfinite(wave).all():
        raise BrokenSampleError(f"{name}: holds samples that are no numbers")
    mono = wave[:, 0] if wave.shape[1] == 1 else wave.mean(axis=1)
    return torch.from_numpy(resample(mono, own, rate))


def _plain_wav(data: bytes) -> tuple[np.ndarray, int] | None:
    """The samples [T, C] of a 16-bit PCM WAV and their rate, to the bit as soundfile reads them, in a tenth of its
    time. None for any other file, and for one in which anything is unusual: soundfile judges it."""
    if len(data) < _HEAD or data[:4] != b"RIFF" or data[8:16] != b"WAVEfmt " or data[16:22] != _PCM:
        return None
    channels, own, _, block, bits = struct.unpack_from("<HIIHH", data, 22)
    size = int.from_bytes(data[40:44], "little")
    usual = (
        bits == 16 and 1 <= channels <= _CHANNELS and block == 2 * channels and own > 0 and size and not size % block
    )
    if data[36:40] != b"data" or not usual or _HEAD + size != len(data):
        return None
    return np.frombuffer(data, "<i2", offset=_HEAD).reshape(-1, channels).astype(np.float32) / 32768, own


def _decoded(data: bytes, name: str) -> tuple[np.ndarray, int]:
    """The samples [T, C] of any file that soundfile reads, and their rate."""
    need_soundfile()
    import soundfile  # pyright: ignore[reportMissingImports]

    try:
        return soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, RuntimeError, TypeError, ValueError, MemoryError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].partition("object at")[0]
        reason = "its format is not recognised" if "BytesIO" in reason else reason
        raise BrokenSampleError(f"{name}: cannot be decoded as audio ({reason[:120]})") from error


def resample(wave: np.ndarray, own: int, rate: int) -> np.ndarray:
    """wave [T] of `own` samples a second at another rate, by a polyphase filter that lets nothing alias."""
    if own == rate:
        return wave
    from scipy.signal import resample_poly

    common = math.gcd(own, rate)
    return resample_poly(wave, rate // common, own // common).astype(np.float32)


def fit(wave: Tensor, samples: int) -> Tensor:
    """The first `samples` of a wave [T], with silence behind a shorter one."""
    return torch.nn.functional.pad(wave[:samples], (0, max(0, samples - len(wave))))


class ClipReader(EncodedSource):
    """`read` of encoded clips: "wave" [samples] float32, and "label" where there is one."""

    clip: AudioConfig
    things = "clips"

    def read(self, index: int) -> dict[str, Any]:
        wave = fit(decode_wave(self.payload(index), self.entry(index), self.clip.rate), self.clip.samples)
        label = self.label(index)
        return {"wave": wave} if label is None else {"wave": wave, "label": label}


class ClipFiles(ClipReader, FileSource):
    """Audio files. root: the folder that `files` are relative to. labels: the class number of each, or None."""

    def __init__(
        self, name: str, root: Path, files: list[str], labels: list[int] | None, classes: tuple[str, ...] | None,
        clip: AudioConfig = AUDIO, *, strict: bool = False,
    ) -> None:  # fmt: skip
        need_soundfile()
        self.root, self._files, self._labels, self.clip = root, files, labels, clip
        super().__init__(name, classes, None, strict)


class ClipRows(ClipReader, ParquetSource):
    """Rows of parquet files with a column `audio: {bytes, path}`."""

    def __init__(self, path: Path, wanted: Wanted, clip: AudioConfig = AUDIO) -> None:
        need_soundfile()
        self.clip = clip
        super().__init__(path, wanted._replace(kind="audio"))


class FoundAudio(NamedTuple):
    """files: audio files relative to the folder, sorted by code point. others: how many files are no audio by name."""

    files: list[str]
    others: int


def walk_audio(root: Path) -> FoundAudio:
    """The audio files below a folder, without hidden ones and without the background noise."""
    files, others = [], 0
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name != NOISE_FOLDER]
        for name in names:
            if Path(name).suffix.lower() in AUDIO_SUFFIXES and not name.startswith(".") and _regular(folder, name):
                files.append((Path(folder) / name).relative_to(root).as_posix())
            elif name not in LISTS.values():
                others += 1
    return FoundAudio(sorted(files), others)


def _regular(folder: str, name: str) -> bool:
    """No pipe, which would be waited for, and no link to nothing."""
    return (Path(folder) / name).is_file()


class NoiseBank(NamedTuple):
    """Background noise. waves: [M] float32, all files behind one another. starts, lengths: [F] of what may be cut."""

    waves: Tensor
    starts: Tensor
    lengths: Tensor

    def to(self, device: torch.device) -> NoiseBank:
        """On the device."""
        return NoiseBank(*(each.to(device) for each in self))

    def cut(self, numbers: Tensor, samples: int) -> Tensor:
        """A piece for each row, [B, samples]. numbers: [B, 2] in [0, 1), for the file and for the place in it."""
        file = (numbers[:, 0] * len(self.starts)).long().clamp_(max=len(self.starts) - 1)
        free = self.lengths[file] - samples
        start = self.starts[file] + (numbers[:, 1].double() * (free + 1)).long()
        return self.waves[start[:, None] + torch.arange(samples, device=numbers.device)]


def noise_folder(path: Path, clip: AudioConfig = AUDIO) -> Path:
    """Where the background noise of the set at `path` lies: where the config says, else beside its clips."""
    if clip.noise is None:
        return (path if path.is_dir() else path.parent) / NOISE_FOLDER
    if not (folder := Path(clip.noise).expanduser()).is_dir():
        raise SitusError(f"{folder}: no such folder of background noise", field="audio.noise")
    return folder


def read_noise(folder: Path, split: str, clip: AudioConfig = AUDIO) -> tuple[NoiseBank | None, list[str]]:
    """What a split may cut from the noise files in a folder, and a sentence on each that was left out.

    split: train, val or test. None where there is no noise that is long enough.
    """
    low, high = _SHARES[split]
    waves, starts, lengths, notes, total = [], [], [], [], 0
    for name in walk_audio(folder).files if folder.is_dir() else []:
        file = folder / name
        try:
            wave = decode_wave(file.read_bytes(), str(file), clip.rate)
        except (BrokenSampleError, OSError) as error:
            notes.append(f"{error}; left out of the noise")
            continue
        first, last = round(low * len(wave)), round(high * len(wave))
        if last - first < clip.samples:
            notes.append(f"{file}: left out of the noise of {split}, its part of {last - first} samples is too short")
            continue
        waves.append(wave)
        starts.append(total + first)
        lengths.append(last - first)
        total += len(wave)
    if not waves:
        return None, notes
    return NoiseBank(torch.cat(waves), torch.tensor(starts), torch.tensor(lengths)), notes
