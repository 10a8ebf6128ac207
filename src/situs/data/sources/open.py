"""One door to whatever a user has on disk: `open_source` looks at the path and picks the reader."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict, Unpack

from situs.data.audio import AUDIO, AudioConfig
from situs.data.masks import MaskConfig
from situs.data.objects import ObjectConfig
from situs.data.sources.audio import AUDIO_SUFFIXES, NOISE_FOLDER
from situs.data.sources.base import (
    SPLIT_WORDS,
    SPLITS,
    Kind,
    Source,
    TensorSource,
    Wanted,
    choose_split,
    list_shards,
    splits_of,
)
from situs.data.sources.cifar import find_cifar, open_cifar
from situs.data.sources.coco import CocoSource, coco_splits
from situs.data.sources.folder import TABLES, FolderSource, split_folders
from situs.data.sources.images import IMAGE_SUFFIXES
from situs.data.sources.memory import is_memory, memory_splits, open_memory
from situs.data.sources.parquet import ParquetSource, column_kind
from situs.data.sources.remote import is_remote, mount
from situs.data.sources.rows import SUFFIXES as ROWS
from situs.data.sources.samples import load_samples
from situs.data.sources.segments import mask_splits, open_masks
from situs.data.sources.speech import open_speech, speech_splits
from situs.data.sources.subset import Joined, hold_out
from situs.data.sources.table import SUFFIXES, TableSource, has_table, table_splits
from situs.data.sources.text import PLAIN, open_text, text_splits
from situs.data.sources.webdataset import TarSource
from situs.data.text import TEXT, TextConfig
from situs.errors import SitusError

SAMPLES, ALL = "samples", "all"


class Reading(TypedDict, total=False):
    """How each kind of sample is read; `open_source` says what each means."""

    audio: AudioConfig
    masks: MaskConfig | None
    objects: ObjectConfig | None
    text: TextConfig
    words: bool


def open_source(
    path: str | Path,
    split: str | None = None,
    *,
    labels: bool = True,
    channels: int | None = None,
    strict: bool = False,
    held_out: float | None = None,
    multi_label: bool = False,
    kind: Kind | None = None,
    **reading: Unpack[Reading],
) -> Source:
    """The samples at `path`: image folder, parquet, WebDataset tars, CIFAR batches, "samples", clips or text; or those
    in memory, by their address (`situs.data.sources.memory`).

    With `multi_label` an image folder with a table of labels, that table (csv), or parquet.

    An address of parquet or tar files (https://host/train-{000..099}.tar, s3://bucket/folder) is read through a cache.

    split:    train, val or test; without one the training split is taken where the data is split. `val`
              falls back on test and `test` on val. `all` joins the splits, and holds nothing out.
    labels:   use the labels where there are some; False reads any layout as a flat set.
    channels: convert every image to so many channels, or refuse it; None leaves each as it is.
    strict:   a broken image is an error for the loaders, not skipped.
    held_out: share of data without a val or test split that is held out as both; train is the rest. None: nothing.
    multi_label: read the labels as any number of classes an image.
    kind:     image, audio or text; None looks at the path. audio: how clips are read (`situs.data.sources.speech`).
    masks:    read a mask with each image, in this way (`situs.data.sources.segments`).
    objects:  read the objects of each image, in this way (`situs.data.sources.coco`).
    text:     how sentences are read (`situs.data.sources.text`). words: as blocks of words, without labels.
    """
    if channels is not None and channels < 1:
        raise SitusError(field="channels", value=channels, allowed="at least 1")
    if held_out is not None and not 0 <= held_out < 1:
        raise SitusError(field="held_out", value=held_out, allowed="in [0, 1)")
    with _told(path):
        kind = kind_of(path, kind, multi_label=multi_label)
        dense = reading.get("masks"), reading.get("objects")
        wanted = Wanted(split, labels, channels, strict, multi_label, kind, *dense)
        told = {
            "multi_label": multi_label,
            "kind": kind,
            "masks": wanted.masks is not None,
            "objects": wanted.objects is not None,
            "words": reading.get("words", False),
        }
        if split == ALL:
            wanted = wanted._replace(split=None)
            names = sorted(splits_at(path, **told), key=[*SPLIT_WORDS, "dev"].index)
            parts = [(_prefix(path, name), _open(path, wanted._replace(split=name), reading)) for name in names]
            return Joined(Path(path).name, parts) if len(parts) > 1 else _open(path, wanted, reading)
        if not held_out or splits_at(path, **told) & {*SPLITS["val"], *SPLITS["test"]}:
            return _open(path, wanted, reading)
        choose_split(SPLITS, split, str(path))  # refuses a name that means no split
        whole = _open(path, wanted._replace(split=None), reading)
    return hold_out(whole, held_out, held=split in {*SPLITS["val"], *SPLITS["test"]})


def _prefix(path: str | Path, split: str) -> str:
    """What stands before the names of a split's files, seen from the data's folder."""
    folder = not is_remote(path) and (Path(path).expanduser() / split).is_dir()
    return f"{split}/" if folder and not any(list_shards(Path(path), each) for each in (".parquet", ".tar")) else ""


@contextmanager
def _told(path: str | Path) -> Iterator[None]:
    """What the system refuses, in one sentence."""
    try:
        yield
    except OSError as error:
        raise SitusError(f"{path}: cannot be read ({(error.strerror or str(error)).lower()})", field="data") from error


def judged_split(path: str | Path, held_out: float | None = None, **told: Any) -> str | None:
    """The split that an evaluation takes where none is named: val; None, for all of it, where the data is not split.

    told: see `splits_at`.
    """
    return "val" if held_out or splits_at(path, **told) else None


def kind_of(path: str | Path, wanted: Kind | None = None, *, multi_label: bool = False) -> Kind:
    """What the set at `path` holds, by its columns, by the first file that is an image or a clip, or else by tables.

    wanted: what is asked for; refuses a set that holds another, and is believed of one that does not tell. multi_label:
    a table is one of labels.
    """
    if wanted == "text" and str(path) != SAMPLES:
        return wanted  # whose reader says what it misses
    found = _kind_at(path, wanted, multi_label)
    if wanted is not None and found not in (None, wanted):
        things = {"image": "images", "audio": "clips", "text": "sentences"}
        more = "; a table of labels is for multi-label training" if Path(path).suffix in SUFFIXES else ""
        raise SitusError(f"{path}: holds {things[found]}, and {things[wanted]} are asked for{more}", field="data")
    return found or wanted or "image"


def _kind_at(path: str | Path, wanted: Kind | None, multi_label: bool) -> Kind | None:
    """What the set at `path` tells of itself, of a folder of both what is wanted; None where it does not."""
    if str(path) == SAMPLES or is_memory(path):
        return "image"
    if is_remote(path):
        return None
    path = Path(path).expanduser()  # where nothing is, the reader says so
    if shards := list_shards(path, ".parquet") if path.is_dir() else [path] * (path.suffix == ".parquet"):
        return column_kind(shards[0])
    if not path.is_dir():
        return "text" if path.suffix in (*ROWS, PLAIN) and not multi_label and path.is_file() else None
    if (path / NOISE_FOLDER).is_dir():
        return "audio"
    found: Kind | None = "image" if find_cifar(path) or list_shards(path, ".tar") else None
    for _, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for suffix in (Path(name).suffix.lower() for name in names):
            if suffix in AUDIO_SUFFIXES or suffix in IMAGE_SUFFIXES:
                found = "audio" if suffix in AUDIO_SUFFIXES else "image"
                if wanted in (None, found):
                    return found
    if found is None and not multi_label and any(list_shards(path, each) for each in ROWS):
        return "text"
    return found


def splits_at(
    path: str | Path,
    *,
    multi_label: bool = False,
    kind: Kind | None = None,
    masks: bool = False,
    objects: bool = False,
    words: bool = False,
) -> set[str]:
    """The splits that the data at `path` is divided into; none for one that is not."""
    if str(path) == SAMPLES:
        return {"train", "test"}
    if is_memory(path):
        return memory_splits(str(path))
    with _told(path):
        path, kind = _existing(path), kind or kind_of(path, multi_label=multi_label)
        if kind == "audio":
            return speech_splits(path)
        if kind == "text":
            return text_splits(path, words=words)
        if masks or objects:
            return mask_splits(path) if masks else coco_splits(path)
        if _has_table(path, multi_label):
            return table_splits(path)
        for suffix in (".parquet", ".tar"):
            if shards := list_shards(path, suffix):
                return splits_of(shards)
        return {"train", "test"} if find_cifar(path) else set(split_folders(path))


def unread_labels(path: str | Path, *, multi_label: bool) -> list[str]:
    """A sentence on a table of labels that nobody reads who asks for one class an image, where there is one."""
    if multi_label or str(path) == SAMPLES or is_remote(path) or not Path(path).expanduser().is_dir():
        return []
    folder = Path(path).expanduser()
    if not has_table(folder):
        return []
    return [f"{folder.name}: its table of labels was not read: it is for any number of classes an image (multi-label)"]


def _existing(path: str | Path) -> Path:
    if is_remote(path):
        return mount(str(path))
    path = Path(path).expanduser()
    if not path.exists():
        raise SitusError(f"{path}: no such folder or file", field="data")
    return path


def _open(path: str | Path, wanted: Wanted, reading: Reading) -> Source:
    if is_memory(path):
        return open_memory(str(path), wanted)
    return _open_images(path, wanted) if wanted.kind == "image" else _open_other(path, wanted, reading)


def _open_other(path: str | Path, wanted: Wanted, reading: Reading) -> Source:
    things = "clips" if wanted.kind == "audio" else "sentences"
    if str(path) == SAMPLES:
        raise SitusError(f"{SAMPLES}: are images, and {things} are asked for", field="data")
    if wanted.multi_label or wanted.masks is not None or wanted.objects is not None:
        raise SitusError(
            f"{path}: {things} have one class each, and not any number of them, nor masks or objects",
            field=("multi_label", "target"),
        )
    if wanted.kind == "text":
        return open_text(_existing(path), wanted, reading.get("text", TEXT), words=reading.get("words", False))
    told = {"labels": wanted.labels, "strict": wanted.strict, "audio": reading.get("audio", AUDIO)}
    return open_speech(_existing(path), wanted.split, **told)


def _open_images(path: str | Path, wanted: Wanted) -> Source:
    dense = "masks" if wanted.masks is not None else "objects" if wanted.objects is not None else None
    if dense is not None and str(path) != SAMPLES:
        return (open_masks if dense == "masks" else CocoSource)(_existing(path), wanted)
    if str(path) == SAMPLES and not wanted.multi_label and dense is None:
        chosen = choose_split(("train", "test"), wanted.split, SAMPLES)
        images, labels, classes = load_samples("test" if chosen == "test" else "train")
        return TensorSource(images, labels if wanted.labels else None, classes, f"samples ({chosen})", wanted.channels)
    if str(path) == SAMPLES:
        raise _one_class(SAMPLES) if wanted.multi_label else SitusError(f"{SAMPLES}: has no {dense}", field="data")
    path = _existing(path)
    if _has_table(path, wanted.multi_label):
        return TableSource(path, wanted)
    # Shards of any split: what decides the kind of a folder must not depend on the split asked for.
    for suffix, kind in ((".parquet", ParquetSource), (".tar", TarSource)):
        if path.suffix == suffix if path.is_file() else list_shards(path, suffix):
            if wanted.multi_label and kind is TarSource:
                raise _one_class(path)
            return kind(path, wanted)
    if not path.is_dir():
        more = "; a table of labels is for multi-label training" if path.suffix in SUFFIXES else ""
        raise SitusError(f"{path}: must be a folder, a .parquet or a .tar file{more}", field="data")
    if wanted.multi_label:
        raise _one_class(path)
    return open_cifar(path, wanted) if find_cifar(path) else FolderSource(path, wanted)


def _has_table(path: Path, multi_label: bool) -> bool:
    """Whether the labels are a table among files, and asked for as many an image."""
    return multi_label and (path.suffix in SUFFIXES if path.is_file() else has_table(path))


def _one_class(path: str | Path) -> SitusError:
    return SitusError(
        f"{path}: has at most one class an image, and a multi-label set is parquet, or image files with a table of "
        f"their labels ({', '.join(TABLES)})",
        field="multi_label",
    )
