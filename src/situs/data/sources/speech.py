"""Spoken words: Google Speech Commands as published (v1 and v2), folders of clips, and parquet with an audio column.

The lists that come with the set decide the splits; without them the official rule does: the SHA-1 of a file's name up
to `_nohash_`, so that a speaker is in one split alone. The 12-class task of the papers is ten words, *unknown* from all
others, and *silence* cut from the background noise, a tenth as many clips as of the ten words each.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from situs.core.random import uniform
from situs.data.audio import AUDIO, AudioConfig
from situs.data.sources.audio import (
    LISTS,
    ClipFiles,
    ClipReader,
    ClipRows,
    NoiseBank,
    noise_folder,
    read_noise,
    walk_audio,
)
from situs.data.sources.base import SPLITS, Source, Wanted, choose_split, list_shards, splits_of
from situs.data.sources.folder import split_folders
from situs.errors import BrokenSampleError, SitusError, counted, verb

WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
SILENCE, UNKNOWN = "_silence_", "_unknown_"
_SHARE = 0.1  # of validation and of test by the hash, and of unknown and silence beside the ten words
_MOST = (1 << 27) - 1


def hashed_split(name: str) -> str:
    """The split of a file by the official rule: train, val or test."""
    stem = name.rpartition("/")[2].partition("_nohash_")[0]
    number = int(hashlib.sha1(stem.encode(), usedforsecurity=False).hexdigest(), 16) % (_MOST + 1)
    share = number / _MOST
    return "val" if share < _SHARE else "test" if share < 2 * _SHARE else "train"


def open_speech(
    path: str | Path, split: str | None = None, *, labels: bool = True, strict: bool = False, audio: AudioConfig = AUDIO
) -> Source:
    """The clips at `path`: `label/file.wav` with or without lists, train/ and test/ of these, flat files, or parquet.

    split:  train, val or test; without one the training split, and of a flat folder all of it.
    labels: False reads any layout as a flat set.
    strict: a broken clip is an error for the loaders, not skipped.
    """
    path = Path(path).expanduser()
    part = part_of(split)
    if path.suffix == ".parquet" or (path.is_dir() and list_shards(path, ".parquet")):
        source: ClipReader = ClipRows(path, Wanted(split, labels, None, strict), audio)
    elif path.is_dir():
        source = _open_folder(path, split, labels=labels, strict=strict, clip=audio)
    else:
        raise SitusError(f"{path}: must be a folder of audio files, or parquet with an audio column", field="data")
    if audio.task == "all" or not labels:
        return source
    if source.classes is None:
        source.notes.append(f"{source.name}: has no labels, so that all its clips are taken, and no silence is added")
        return source
    noise, notes = read_noise(folder := noise_folder(path, audio), part, audio)
    if noise is None and audio.silence == "noise":
        said = (
            f"{folder}: no noise to cut silence from; put files of {10 * audio.seconds:g} s or more there, name another"
        )
        raise SitusError(f"{said} folder, or let silence be empty", field=("audio.noise", "audio.silence"))
    commands = Commands(source, noise if audio.silence == "noise" else None, part, audio)
    commands.notes += notes
    return commands


def speech_splits(path: Path) -> set[str]:
    """The splits of a set of clips: by its shards, its folders, its lists, or the official rule for named words."""
    if shards := list_shards(path, ".parquet"):
        return splits_of(shards)
    if folders := split_folders(path):
        return set(folders)
    files = walk_audio(path).files if path.is_dir() else []
    return set() if not files or any("/" not in file for file in files) else {"train", "val", "test"}


def part_of(split: str | None) -> str:
    """train, val or test, by any name of a split."""
    if split is None or split in SPLITS["train"]:
        return "train"
    choose_split(SPLITS, split, "speech")  # refuses a name that means no split
    return "test" if split == "test" else "val"


def _open_folder(path: Path, split: str | None, *, labels: bool, strict: bool, clip: AudioConfig) -> ClipFiles:
    folders, notes = split_folders(path), []
    chosen = choose_split(folders, split, str(path)) if folders else None
    root = path / chosen if chosen else path
    files, others = walk_audio(root)
    if not files:
        raise SitusError(f"{root}: holds no audio files (.wav, .flac, .ogg, .opus)", field="data")
    flat = any("/" not in file for file in files)
    home = next((path / name for name in SPLITS["train"] if name in folders), root)
    known = files if home == root else walk_audio(home).files
    classes = None if flat or not labels else tuple(sorted({file.partition("/")[0] for file in known if "/" in file}))
    if not folders and (split is not None or not flat):
        chosen, (told, notes) = part_of(split), _splits(path, files)
        files = [file for file, each in zip(files, told, strict=True) if each == chosen]
        if not files:
            raise SitusError(f"{path}: none of its clips is of the split {chosen!r}", field="split")
    numbers: list[int] | None = None
    if classes is not None:
        place = {name: number for number, name in enumerate(classes)}
        strange = next((file for file in files if file.partition("/")[0] not in place), None)
        if strange is not None:
            raise SitusError(f"{root / strange}: its class is not among the {len(classes)} of {home}", field="data")
        numbers = [place[file.partition("/")[0]] for file in files]
    source = ClipFiles(
        path.name + (f" ({chosen})" if chosen else ""), root, files, numbers, classes, clip, strict=strict
    )
    source.notes += notes
    if flat and labels and (beside := next((file for file in files if "/" in file), None)):
        stray = next(file for file in files if "/" not in file)
        source.notes.append(
            f"{source.name}: {stray} lies beside the folders, as of {beside}, so that they are no labels"
        )
    if others:
        source.notes.append(f"{source.name}: left out {counted(others, 'files')} (no audio by their names)")
    return source


def _splits(path: Path, files: list[str]) -> tuple[list[str], list[str]]:
    """The split of each file, by the lists where there is one, else by the hash of its name; and what is to be said."""
    lists = {part: path / name for part, name in LISTS.items() if (path / name).is_file()}
    if not lists:
        return [hashed_split(file) for file in files], [
            f"{path.name}: has no lists, so that the names decide the split"
        ]
    told: dict[str, str] = {}
    notes = [
        f"{path.name}: has no {name}, so that no clip is of {part}, and those of it may be among the training"
        for part, name in LISTS.items()
        if part not in lists
    ]
    known = set(files)
    for part, file in lists.items():
        names = [line.strip().replace("\\", "/").removeprefix("./") for line in _text(file).splitlines()]
        for name in filter(None, names):
            if told.setdefault(name, part) != part:
                raise SitusError(f"{file}: {name} stands in {LISTS['val']} as well", field="data")
        if strange := [name for name in names if name and name not in known]:
            if known.isdisjoint(names):
                raise SitusError(f"{file}: names no clip of {path}; the first: {strange[0][:80]!r}", field="data")
            named = f"names {counted(len(strange), 'clips')} that {verb(len(strange), 'are')} not here"
            notes.append(f"{file.name}: {named}; the first: {strange[0][:80]}")
    return [told.get(file, "train") for file in files], notes


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


class Commands(Source):
    """The 12-class task over a set of single words: silence, unknown, and the ten words in the papers' order.

    Clips of the ten words come first, then those of unknown, a choice that never changes, then silence.
    noise: what silence is cut from, at a level uniform in [0, 1); without it silence is empty. part: train, val or
    test, which has cuts of its own, the same wherever the set lies.
    """

    things = "clips"

    def __init__(self, source: ClipReader, noise: NoiseBank | None, part: str, clip: AudioConfig = AUDIO) -> None:
        assert source.classes is not None
        missing = [word for word in WORDS if word not in source.classes]
        if missing:
            raise SitusError(f"{source.name}: has no clips of {', '.join(missing)}, of the ten words", field="data")
        super().__init__(source.name, (SILENCE, UNKNOWN, *WORDS), None, source.strict)
        self.source, self.noise, self.part, self.clip = source, noise, part, clip
        place = {name: number for number, name in enumerate(self.classes or ())}
        own = np.array([place.get(name, place[UNKNOWN]) for name in source.classes])
        labels = own[np.array([_label(source, index) for index in range(len(source))], np.int64)]
        words, unknown = np.flatnonzero(labels >= 2), np.flatnonzero(labels == 1)
        wanted = math.ceil(_SHARE * len(words))
        self.rows = np.concatenate([words, np.sort(_first(source, unknown, wanted))])
        self.labels = labels[self.rows].tolist()
        self.silent = wanted
        self.notes = list(source.notes)
        if silent := int((labels == 0).sum()):
            self.notes.append(
                f"{self.name}: left out its own {counted(silent, 'clips')} of {SILENCE}, which the task cuts itself"
            )
        if len(unknown) < wanted:
            self.notes.append(
                f"{self.name}: {counted(len(unknown), 'clips')} of unknown words, where the task takes {wanted}"
            )

    def __len__(self) -> int:
        return len(self.rows) + self.silent

    def key(self, index: int) -> str:
        """The clip's own name; silence has a number."""
        over = index - len(self.rows)
        return f"{SILENCE}/{over}" if over >= 0 else self.source.key(int(self.rows[index]))

    def origin(self, index: int) -> tuple[Source, int]:
        """In the set of single words, but for silence."""
        return (self, index) if index >= len(self.rows) else self.source.origin(int(self.rows[index]))

    def label(self, index: int) -> int:
        """Among the twelve."""
        return self.labels[index] if index < len(self.rows) else 0

    def read(self, index: int) -> dict[str, Any]:
        """Clip `index`: "wave" [samples] and "label"."""
        if index < len(self.rows):
            return self.source.read(int(self.rows[index])) | {"label": self.labels[index]}
        if self.noise is None:
            return {"wave": torch.zeros(self.clip.samples), "label": 0}
        numbers = uniform(0, 0, torch.tensor([index - len(self.rows)]), f"speech.silence/{self.part}", (3,))
        return {"wave": self.noise.cut(numbers, self.clip.samples)[0] * numbers[0, 2], "label": 0}


def _label(source: ClipReader, index: int) -> int:
    """Of a row without one -1, which stands for the last class: reading the row names it as broken."""
    try:
        return source.label(index)
    except BrokenSampleError:
        return -1


def _first(source: ClipReader, rows: np.ndarray, count: int) -> np.ndarray:
    """`count` of the rows, by the hash of their names: the same when others come or go."""
    hashed = [hashlib.sha1(source.key(row).encode(), usedforsecurity=False).digest() for row in rows.tolist()]
    return rows[np.argsort(np.array(hashed), kind="stable")[:count]] if len(rows) else rows
