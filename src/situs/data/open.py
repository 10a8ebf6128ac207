"""The entry to whatever a user has on disk: `open_source` looks at the path and asks the modality of what is there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from situs.data.config import DataConfig
from situs.data.modalities import KINDS, MODALITIES, modality_of
from situs.data.modalities.image import one_class
from situs.data.sources.base import SPLIT_WORDS, SPLITS, Source, TensorSource, Wanted, choose_split, list_shards
from situs.data.sources.memory import is_memory, memory_splits, open_memory
from situs.data.sources.parquet import open_parquet
from situs.data.sources.remote import is_remote, mount
from situs.data.sources.samples import load_samples
from situs.data.sources.subset import Joined, hold_out
from situs.data.sources.table import SUFFIXES, has_table
from situs.errors import DataError, SitusError, reason_of

SAMPLES, ALL = "samples", "all"


def open_source(
    data: str | Path | DataConfig,
    split: str | None = None,
    *,
    labels: bool = True,
    channels: int | None = None,
    **fields: Any,
) -> Source:
    """The samples at a path: image folder, parquet, WebDataset tars, CIFAR batches, "samples", clips or text; or those
    in memory, by their address (`situs.data.sources.memory`).

    With `multi_label`: an image folder with a table of labels, that table (csv), or parquet.

    An address of parquet or tar files (https://host/train-{000..099}.tar, s3://bucket/folder) is read through a cache.

    data:     a path, or a config that says where the set is and how it is read.
    split:    train, val or test; by default the training split where there is one. `val` falls back on test and
              `test` on val. `all` joins the splits, and holds nothing out.
    labels:   use the labels where there are some; False reads any layout as a flat set.
    channels: convert every image to so many channels, or refuse it; None leaves each as it is; a config has its own.
    fields:   of `DataConfig`, for a path: kind, target, multi_label, held_out, strict, and tables of modalities.
    """
    config = _config(data, fields)
    if isinstance(data, DataConfig):
        channels = data.channels
    elif channels is not None and channels < 1:
        raise SitusError(field="channels", value=channels, allowed="at least 1")
    with _in_words(config.path):
        config = replace(config, kind=kind_of(config))
        options = (channels, config.strict, config.multi_label, config.modality.settings(config))
        wanted = Wanted(None if split == ALL else split, labels, *options)
        return config.modality.cut(_open_split(config, wanted, split), config)


def _open_split(config: DataConfig, wanted: Wanted, split: str | None) -> Source:
    """One split, all of them joined, or one side of a held-out share."""
    path = config.path
    if split == ALL:
        names = sorted(splits_at(config), key=[*SPLIT_WORDS, "dev"].index)
        parts = [(_prefix(path, name), _open(config, wanted._replace(split=name))) for name in names]
        return Joined(Path(path).name, parts) if len(parts) > 1 else _open(config, wanted)
    if not config.held_out or splits_at(config) & {*SPLITS["val"], *SPLITS["test"]}:
        return _open(config, wanted)
    choose_split(SPLITS, split, path)  # refuses a name that means no split
    whole = _open(config, wanted._replace(split=None))
    return hold_out(whole, config.held_out, test_side=split in {*SPLITS["val"], *SPLITS["test"]})


def _config(data: str | Path | DataConfig, fields: dict[str, Any]) -> DataConfig:
    return replace(data, **fields) if isinstance(data, DataConfig) else DataConfig(str(data), **fields)


def _prefix(path: str | Path, split: str) -> str:
    """The path from the data's folder to a split's files, which goes before their names; empty for shards."""
    folder = not is_remote(path) and (Path(path).expanduser() / split).is_dir()
    return f"{split}/" if folder and not any(list_shards(Path(path), suffix) for suffix in (".parquet", ".tar")) else ""


@contextmanager
def _in_words(path: str | Path) -> Iterator[None]:
    """An OSError as one sentence."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({reason_of(error)})") from error


def judged_split(data: str | Path | DataConfig, held_out: float | None = None, **fields: Any) -> str | None:
    """The default split of an evaluation: val; None, for all of it, where the data is not split."""
    config = _config(data, fields)
    return "val" if held_out or config.held_out or splits_at(config) else None


def kind_of(data: str | Path | DataConfig, **fields: Any) -> str:
    """The kind of a set, by its columns, by the first file that is a sample, or else by tables.

    A kind that is asked for refuses a set of another kind, and decides where the files do not tell.
    """
    config = _config(data, fields)
    path, wanted = config.path, config.kind
    if wanted is not None and KINDS[wanted].low_priority and path != SAMPLES:
        return wanted  # whose reader says what is missing
    detected = None
    for candidate in _kinds_at(path, wanted, config.multi_label):
        detected = detected or candidate
        if wanted in (None, candidate):
            return candidate
    if wanted is not None and detected is not None:
        hint = "; to read a table of labels, set multi_label" if Path(path).suffix in SUFFIXES else ""
        raise DataError(f"{path}: contains {KINDS[detected].things}, but {KINDS[wanted].things} are expected{hint}")
    return wanted or MODALITIES[0].kind


def _kinds_at(path: str, wanted: str | None, multi_label: bool) -> Iterator[str]:
    """The kinds that the set at `path` may have, the surest first; none where the files do not tell."""
    if path == SAMPLES or is_memory(path):
        yield MODALITIES[0].kind
        return
    if is_remote(path):
        return
    place = Path(path).expanduser()  # a missing one is refused by the reader
    kinds = sorted(KINDS.values(), key=lambda modality: modality.low_priority)
    if shards := list_shards(place, ".parquet") if place.is_dir() else [place] * (place.suffix == ".parquet"):
        with suppress(SitusError):  # one that cannot be read is refused later
            schema = open_parquet(shards[0]).schema_arrow
            present = [modality for modality in kinds if modality.in_columns(schema, asked=modality.kind == wanted)]
            sure = [modality for modality in present if not modality.low_priority] or present
            yield from [modality.kind for modality in sure] if len(sure) == 1 else []  # of two what is asked for
        return

    def matching(low_priority: bool) -> Iterator[str]:
        for modality in kinds:
            if modality.low_priority == low_priority and modality.is_at(place, multi_label=multi_label):
                yield modality.kind

    yield from matching(low_priority=False)
    arrays, by_suffix = False, [modality for modality in kinds if not modality.whole_set or modality.kind == wanted]
    for _, folders, names in os.walk(place):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        suffixes = [Path(name).suffix.lower() for name in names]
        arrays = arrays or ".npy" in suffixes  # which may be beside clips, too
        for suffix in suffixes:
            yield from (modality.kind for modality in by_suffix if suffix in modality.suffixes and suffix != ".npy")
    if arrays:
        yield from (modality.kind for modality in by_suffix if ".npy" in modality.suffixes)
    yield from matching(low_priority=True)


def only_images(path: str | Path, refusal: str, multi_label: bool) -> None:
    """Refuses what is no set of pictures. refusal: why, in words."""
    modality = KINDS[kind_of(path, multi_label=multi_label)]
    if not modality.pixels:
        raise DataError(f"{path}: contains {modality.things}, but {refusal}")


def resolve(data: DataConfig) -> DataConfig:
    """The config completed by its data: the kind of the samples, and what their modality reads off them (the names of
    classes, the mean and deviation of clips). The same data always gives the same config."""
    if not data.path:
        return data
    kind = kind_of(data)
    modality = modality_of(kind, data.target)
    if data.kind is None and kind != MODALITIES[0].kind:
        try:
            data = replace(data, kind=kind)
        except SitusError as error:
            raise error.prefixed(f"{data.path}: contains {modality.things}, but images are expected") from error
    return modality.resolve(data, lambda config: open_source(config, config.split))


def splits_at(data: str | Path | DataConfig, **fields: Any) -> set[str]:
    """The splits that a set is divided into; none for one that is not."""
    config = _config(data, fields)
    if config.path == SAMPLES:
        return {"train", "test"}
    if is_memory(config.path):
        return memory_splits(config.path)
    with _in_words(config.path):
        path = _existing(config.path)
        return modality_of(config.kind or kind_of(config), config.target).splits(path, config)


def unread_labels(path: str | Path, *, multi_label: bool) -> list[str]:
    """A sentence on a table of labels that a single-label reading ignores, where there is one."""
    folder = Path(path).expanduser()
    if multi_label or str(path) == SAMPLES or is_remote(path) or not folder.is_dir() or not has_table(folder):
        return []
    return [f"{folder.name}: its table of labels was not read, because it applies only to multi-label data"]


def _existing(path: str | Path) -> Path:
    if is_remote(path):
        return mount(str(path))
    path = Path(path).expanduser()
    if not path.exists():
        raise DataError(f"{path}: no such folder or file")
    return path


def _open(config: DataConfig, wanted: Wanted) -> Source:
    modality = config.modality
    if config.path != SAMPLES and not is_memory(config.path):
        return modality.open(_existing(config.path), wanted, config)
    if modality is not MODALITIES[0]:
        only = f"contains only {MODALITIES[0].things} and their classes"
        content = f"{only}; to read {modality.description}, give a path to files"
        raise DataError(f"{'samples' if config.path == SAMPLES else 'the data in memory'}: {content}")
    if is_memory(config.path):
        return open_memory(config.path, wanted)
    if wanted.multi_label:
        raise one_class(SAMPLES)
    chosen = choose_split(("train", "test"), wanted.split, SAMPLES)
    images, labels, classes = load_samples("test" if chosen == "test" else "train")
    return TensorSource(images, labels if wanted.labels else None, classes, f"samples ({chosen})", wanted.channels)
