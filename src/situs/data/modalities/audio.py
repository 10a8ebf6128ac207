"""Audio clips: WAV, FLAC and OGG, decoded in a worker to one rate and length; shift, noise and features on the device.

In folders, such as Google Speech Commands as published (v1 and v2), or in parquet with an audio column. The lists of
Speech Commands decide the splits; without them the official rule does: the SHA-1 of a file's name up to `_nohash_`, so
that a speaker is in one split only. The 12-class task of the papers is ten words, *unknown* (all others) and *silence*
cut from the background noise; unknown and silence have a tenth of the clips of the ten words together, each.

A batch is [B, 1, features, frames]: an image of the sound, time from left to right. A transformer over frames takes
patches of a whole frame (40 × 1), one over spectrogram patches takes squares.
"""

from __future__ import annotations

import hashlib
import io
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from situs.core.random import uniform
from situs.data.audio import AUDIO, AudioConfig, add_noise, gain_at, shift, spectrogram
from situs.data.augment.recipes import AugmentConfig
from situs.data.batch import Batch
from situs.data.modalities.base import Measured, grey_levels, measure
from situs.data.modalities.image import check_scale
from situs.data.pipeline import Noise, Pipeline
from situs.data.sources.base import EncodedSource, Source, Wanted, choose_split, has_shards
from situs.data.sources.folder import FolderSource, find_splits, walk
from situs.data.sources.parquet import COLUMNS, ParquetSource
from situs.data.sources.subset import class_labels
from situs.errors import BrokenSampleError, DataError, SitusError, counted, first_line, missing_extra, verb
from situs.files import absolute

if TYPE_CHECKING:
    from situs.data.config import DataConfig


AUDIO_SUFFIXES = frozenset({".wav", ".flac", ".ogg", ".oga", ".opus"})
NOISE_FOLDER = "_background_noise_"
WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
SILENCE, UNKNOWN = "_silence_", "_unknown_"
_LISTS = {"val": "validation_list.txt", "test": "testing_list.txt"}
_NO_CLIPS = (NOISE_FOLDER, *_LISTS.values())
_SHARE = 0.1  # of validation and of test by the hash, and of unknown and silence relative to the ten words
_MOST = (1 << 27) - 1
_HEAD, _PCM, _CHANNELS = 44, b"\x10\0\0\0\1\0", 1024  # of a WAV without other chunks; soundfile's most channels
# Each split cuts from its own part of every noise file, so that training uses no noise of a test.
_NOISE_PARTS = {"train": (0.0, 0.8), "val": (0.8, 0.9), "test": (0.9, 1.0)}


def need_soundfile() -> None:
    """Refuses where soundfile is not installed."""
    try:
        import soundfile  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise missing_extra("soundfile", "audio", "reading audio files") from error


def decode_wave(data: bytes, name: str, rate: int) -> Tensor:
    """The wave in `data`, [T] float32: the mean of its channels, at `rate` samples a second."""
    wave, file_rate = _plain_wav(data) or _decoded(data, name)
    if not len(wave):
        raise BrokenSampleError(f"{name}: contains no samples")
    if not np.isfinite(wave).all():
        raise BrokenSampleError(f"{name}: contains samples that are not finite numbers")
    mono = wave[:, 0] if wave.shape[1] == 1 else wave.mean(axis=1)
    return torch.from_numpy(resample(mono, file_rate, rate))


def _plain_wav(data: bytes) -> tuple[np.ndarray, int] | None:
    """The samples [T, C] of a 16-bit PCM WAV and their rate, bit for bit as soundfile reads them, in a tenth of its
    time. None for any other or unusual file, which is left to soundfile."""
    if len(data) < _HEAD or data[:4] != b"RIFF" or data[8:16] != b"WAVEfmt " or data[16:22] != _PCM:
        return None
    channels, rate, _, block, bits = struct.unpack_from("<HIIHH", data, 22)
    size = int.from_bytes(data[40:44], "little")
    usual = bits == 16 and 1 <= channels <= _CHANNELS and block == 2 * channels and rate > 0
    if data[36:40] != b"data" or not usual or not size or size % block or _HEAD + size != len(data):
        return None
    return np.frombuffer(data, "<i2", offset=_HEAD).reshape(-1, channels).astype(np.float32) / 32768, rate


def _decoded(data: bytes, name: str) -> tuple[np.ndarray, int]:
    """The samples [T, C] of any file that soundfile reads, and their rate."""
    need_soundfile()
    import soundfile  # pyright: ignore[reportMissingImports]

    try:
        return soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, RuntimeError, TypeError, ValueError, MemoryError) as error:
        reason = "its format is not recognised" if "BytesIO" in str(error) else first_line(error)
        raise BrokenSampleError(f"{name}: cannot be decoded as audio ({reason})") from error


def resample(wave: np.ndarray, old: int, rate: int) -> np.ndarray:
    """A wave [T] of `old` samples a second at another rate, by a polyphase filter against aliasing."""
    if old == rate:
        return wave
    from scipy.signal import resample_poly

    common = math.gcd(old, rate)
    return resample_poly(wave, rate // common, old // common).astype(np.float32)


def fit(wave: Tensor, samples: int) -> Tensor:
    """The first `samples` of a wave [T]; a shorter one is padded with silence."""
    return torch.nn.functional.pad(wave[:samples], (0, max(0, samples - len(wave))))


class ClipReader(EncodedSource):
    """`read` of encoded clips: "wave" [samples] float32, and "label" where there is one."""

    things = "clips"

    def read(self, index: int) -> dict[str, Any]:
        clip = self.settings
        wave = fit(decode_wave(self.payload(index), self.entry(index), clip.rate), clip.samples)
        return self.labelled({"wave": wave}, index)


class ClipFiles(ClipReader, FolderSource):
    """Audio files; without folders of splits, the lists of Speech Commands or the names decide the splits."""

    suffixes, ignored = AUDIO_SUFFIXES, _NO_CLIPS

    def _choose(self, path: Path, folders: list[str], split: str | None) -> str | None:
        return super()._choose(path, folders, split) if folders else None

    def _divide(self, path: Path, files: list[str], split: str | None) -> tuple[str | None, list[str], list[str]]:
        if split is None and any("/" not in file for file in files):
            return None, files, []
        chosen, (splits, notes) = part_of(split), _assign_splits(path, files)
        chosen_files = [file for file, part in zip(files, splits, strict=True) if part == chosen]
        if not chosen_files:
            raise SitusError(f"{path} has no clips of the split {chosen!r}", field="split")
        return chosen, chosen_files, notes


class ClipRows(ClipReader, ParquetSource):
    """Rows of parquet files with a column `audio: {bytes, path}`."""

    kind = "audio"


def open_clips(path: Path, wanted: Wanted) -> Source:
    """The clips at `path`: `label/file.wav` with or without lists, train/ and test/ of these, flat files, or parquet.

    Without a split it is the training split; a flat folder is read whole.
    """
    need_soundfile()
    part, audio = part_of(wanted.split), wanted.settings
    if has_shards(path, ".parquet"):
        source: ClipReader = ClipRows(path, wanted)
    elif path.is_dir():
        source = ClipFiles(path, wanted)
    else:
        raise DataError(f"{path}: must be a folder of audio files, or parquet with an audio column")
    if audio.task == "all" or not wanted.labels:
        return source
    if source.classes is None:
        source.notes.append(f"{source.name}: has no labels, so all clips are used and no silence is added")
        return source
    noise, notes = read_noise(folder := noise_folder(path, audio), part, audio)
    if noise is None and audio.silence == "noise":
        files = f"files of {10 * audio.seconds:g} s or more"
        reason = (
            f"contains no background noise for the clips of silence; put {files} there, name another "
            "folder, or set silence=empty"
        )
        raise SitusError(f"{folder}: {reason}", field=("audio.noise", "audio.silence"))
    commands = Commands(source, noise if audio.silence == "noise" else None, part)
    commands.notes += notes
    return commands


def clip_splits(path: Path) -> set[str]:
    """The splits of a set of clips: by its shards, its folders, its lists, or the official rule for named words."""
    if splits := find_splits(path, ".parquet"):
        return splits
    files = [] if has_shards(path, ".parquet") or path.is_file() else walk(path, _NO_CLIPS, AUDIO_SUFFIXES)[0]
    return set() if not files or any("/" not in file for file in files) else {*_NOISE_PARTS}


def part_of(split: str | None) -> str:
    """train, val or test, for any name of a split."""
    return choose_split(_NOISE_PARTS, split, "speech") or "train"


def hashed_split(name: str) -> str:
    """The split of a file by the official rule: train, val or test."""
    stem = name.rpartition("/")[2].partition("_nohash_")[0]
    share = int(hashlib.sha1(stem.encode(), usedforsecurity=False).hexdigest(), 16) % (_MOST + 1) / _MOST
    return "val" if share < _SHARE else "test" if share < 2 * _SHARE else "train"


def _assign_splits(path: Path, files: list[str]) -> tuple[list[str], list[str]]:
    """The split of each file, by the lists where there is one, otherwise by the hash of its name; and notes."""
    lists = {part: path / name for part, name in _LISTS.items() if (path / name).is_file()}
    if not lists:
        return [*map(hashed_split, files)], [
            f"{path.name}: has no lists of the splits, so the file names determine the split"
        ]
    listed: dict[str, str] = {}
    notes = [
        (
            f"{path.name}: has no {name}, so it has no {part} split; the clips of that split may be among the "
            "training clips"
        )
        for part, name in _LISTS.items()
        if part not in lists
    ]
    existing = set(files)
    for part, file in lists.items():
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        names = [name for line in lines if (name := line.strip().replace("\\", "/").removeprefix("./"))]
        for name in names:
            if listed.setdefault(name, part) != part:
                raise DataError(f"{file}: {name} is in {_LISTS['val']} as well")
        if missing := [name for name in names if name not in existing]:
            if existing.isdisjoint(names):
                raise DataError(
                    f"{file}: none of the clips that it lists is in {path}; the first is {missing[0][:80]!r}"
                )
            count = f"names {counted(len(missing), 'clips')} that {verb(len(missing), 'do')} not exist"
            notes.append(f"{file.name}: {count}; the first: {missing[0][:80]}")
    return [listed.get(file, "train") for file in files], notes


class Commands(Source):
    """The 12-class task over a set of single words: silence, unknown, and the ten words in the papers' order.

    Clips of the ten words come first, then those of unknown, always the same choice, then silence.
    noise: what silence is cut from, at a level uniform in [0, 1); without it silence is empty. part: train, val or
    test; each has its own cuts, the same on every machine.
    """

    things = "clips"

    def __init__(self, source: ClipReader, noise: NoiseBank | None, part: str) -> None:
        assert source.classes is not None
        missing = [word for word in WORDS if word not in source.classes]
        if missing:
            raise DataError(f"{source.name}: has no clips of {', '.join(missing)}, but the task needs all ten words")
        super().__init__(source.name, (SILENCE, UNKNOWN, *WORDS), None, source.strict)
        self.source, self.noise, self.part, self.samples = source, noise, part, source.settings.samples
        place = {name: number for number, name in enumerate(self.classes or ())}
        number = np.array([place.get(name, place[UNKNOWN]) for name in source.classes])
        labels = number[class_labels(source).numpy()]  # one that cannot be read, -1, is named when it is read
        words, unknown = np.flatnonzero(labels >= 2), np.flatnonzero(labels == 1)
        self.silent = math.ceil(_SHARE * len(words))
        self.rows = np.concatenate([words, np.sort(_first(source, unknown, self.silent))])
        self.labels = labels[self.rows].tolist()
        self.notes = list(source.notes)
        if silent := int((labels == 0).sum()):
            clips = (
                f"{counted(silent, 'clips')} of {SILENCE}, because the task makes its own clips of silence from noise"
            )
            self.notes.append(f"{self.name}: left out {clips}")
        if len(unknown) < self.silent:
            clips = f"has {counted(len(unknown), 'clips')} of unknown words, but the task needs {self.silent}"
            self.notes.append(f"{self.name}: {clips}")

    def __len__(self) -> int:
        return len(self.rows) + self.silent

    def key(self, index: int) -> str:
        """The clip's own name; silence is numbered."""
        number = index - len(self.rows)
        return f"{SILENCE}/{number}" if number >= 0 else self.source.key(int(self.rows[index]))

    def origin(self, index: int) -> tuple[Source, int]:
        return (self, index) if index >= len(self.rows) else self.source.origin(int(self.rows[index]))

    def label(self, index: int) -> int:
        return self.labels[index] if index < len(self.rows) else 0

    def read(self, index: int) -> dict[str, Any]:
        if index < len(self.rows):
            return self.source.read(int(self.rows[index])) | {"label": self.labels[index]}
        if self.noise is None:
            return {"wave": torch.zeros(self.samples), "label": 0}
        numbers = uniform(0, 0, torch.tensor([index - len(self.rows)]), f"speech.silence/{self.part}", (3,))
        return {"wave": self.noise.cut(numbers, self.samples)[0] * numbers[0, 2], "label": 0}


def _first(source: ClipReader, rows: np.ndarray, count: int) -> np.ndarray:
    """`count` of the rows, by the hash of their names: the choice hardly changes when samples are added or removed."""
    hashed = [hashlib.sha1(source.key(row).encode(), usedforsecurity=False).digest() for row in rows.tolist()]
    return rows[np.argsort(np.array(hashed), kind="stable")[:count]] if len(rows) else rows


class NoiseBank(NamedTuple):
    """Background noise. waves: [M] float32, all files concatenated. starts, lengths: [F], the part of each to cut."""

    waves: Tensor
    starts: Tensor
    lengths: Tensor

    def to(self, device: torch.device) -> NoiseBank:
        """On the device."""
        return NoiseBank(*(tensor.to(device) for tensor in self))

    def cut(self, numbers: Tensor, samples: int) -> Tensor:
        """A piece for each row, [B, samples]. numbers: [B, 2] in [0, 1), for the file and for the place in it."""
        file = (numbers[:, 0] * len(self.starts)).long()
        free = self.lengths[file] - samples
        start = self.starts[file] + (numbers[:, 1].double() * (free + 1)).long()
        return self.waves[start[:, None] + torch.arange(samples, device=numbers.device)]


def noise_folder(path: Path, clip: AudioConfig = AUDIO) -> Path:
    """The folder of the background noise of the set at `path`: that of the config, or the one beside its clips."""
    if clip.noise is None:
        return (path if path.is_dir() else path.parent) / NOISE_FOLDER
    if not (folder := Path(clip.noise).expanduser()).is_dir():
        raise SitusError(f"{folder}: no such folder of background noise", field="audio.noise")
    return folder


def read_noise(folder: Path, split: str, clip: AudioConfig = AUDIO) -> tuple[NoiseBank | None, list[str]]:
    """A split's part of the noise files in a folder, None where none is long enough; and a note on each left out.

    split: train, val or test.
    """
    low, high = _NOISE_PARTS[split]
    waves, starts, lengths, notes, total = [], [], [], [], 0
    for name in walk(folder, (), AUDIO_SUFFIXES)[0] if folder.is_dir() else []:
        file = folder / name
        try:
            wave = decode_wave(file.read_bytes(), str(file), clip.rate)
        except (BrokenSampleError, OSError) as error:
            notes.append(f"{error}; the file is not used as noise")
            continue
        first, last = round(low * len(wave)), round(high * len(wave))
        if last - first < clip.samples:
            notes.append(
                f"{file}: is not used as noise, because its part for {split} is too short ({last - first} samples)"
            )
            continue
        waves.append(wave)
        starts.append(total + first)
        lengths.append(last - first)
        total += len(wave)
    if not waves:
        return None, notes
    return NoiseBank(torch.cat(waves), torch.tensor(starts), torch.tensor(lengths)), notes


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
        return {
            "shift": uniform(self.seed, epoch, ids, "audio.shift", ()),
            "cut": uniform(self.seed, epoch, ids, "audio.cut", (2,)),
            "level": uniform(self.seed, epoch, ids, "audio.level", (2,)),
        }

    def finish(self, values: Mapping[str, Tensor], ids: Tensor, noise: Noise) -> Batch:
        smoothing = 0.0 if self.augment is None else self.augment.label_smoothing
        targets = self.labels(values, smoothing)
        return Batch(self._view(values["wave"], noise), ids, targets)

    def _view(self, samples: Tensor, noise: Noise) -> Tensor:
        """Features [B, 1, features, frames] of waves [B, T] int16, of mean 0 and deviation 1 over the training set."""
        waves = self._with_noise(from_bits(samples), noise)
        frames = (spectrogram(waves, self.config) - self.mean[:, None]) / self.std[:, None]
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
            allowed = f"the size of the clips' features ({data.audio.size[0]},{data.audio.size[1]})"
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
            f"Clips: {clip.seconds:g} s at {clip.rate:,} samples per second",
            f"Features: {width} {features} per frame, {frames} frames, input shape [1, {width}, {frames}]",
            "Each feature is normalised by its mean and standard deviation (situs.audio in config.json)",
        ]

    def is_at(self, path: Path, *, multi_label: bool) -> bool:  # noqa: ARG002
        return (path / NOISE_FOLDER).is_dir()

    def in_columns(self, schema: Any, *, asked: bool) -> bool:  # noqa: ARG002
        return not {*schema.names}.isdisjoint(COLUMNS["audio"])

    def splits(self, path: Path, data: DataConfig) -> set[str]:  # noqa: ARG002
        return clip_splits(path)

    def open(self, path: Path, wanted: Wanted, data: DataConfig) -> Source:  # noqa: ARG002
        return open_clips(path, wanted)

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
