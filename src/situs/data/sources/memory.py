"""Samples that are in memory: images, arrays, tensors, pairs, dicts, a dataset of torch or of Hugging Face.

`addressed` gives them an address, "memory:48+12-LABELS-IMAGES" (how many, and hashes of the labels and of some images),
which is used like a path: a config holds it, `open_source` opens it. A run that is resumed in another process is given
the data again, and the address shows whether it is the same.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from situs.data.sources.base import SPLIT_WORDS, SPLITS, Source, TensorSource, Wanted, choose_split, split_name
from situs.data.sources.images import decode, from_array, from_pillow
from situs.data.sources.labels import LABEL_COLUMNS, classes_of, note_unseen, number_names
from situs.errors import BrokenSampleError, DataError, SitusError, counted, first_line
from situs.progress import tracked

PREFIX = "memory:"
IMAGE_NAMES = ("image", "img", "pixel_values", "jpg", "png", "webp")
ACCEPTED = (
    "pass images, (image, label) pairs or dicts with 'image' and 'label', as a list, an array or a dataset (of torch "
    "or Hugging Face); for several splits, pass a dict with the keys 'train' and 'val'"
)

_REMEMBERED = 4  # sets, so that a run's own data need not be passed again in the same process
_PROBES = 8  # images whose pixels are hashed for the address
_reading = threading.Lock()  # a user's dataset need not be thread-safe


class _Part(NamedTuple):
    """One split. data: the user's object. items: its samples by number. images: all of them where they are one array.
    labels: for each sample a number, a name, or 0/1 for each class. names: of the classes, where the data has them."""

    data: Any
    items: Any
    images: Tensor | None
    labels: list[Any] | None
    names: tuple[str, ...]


_known: OrderedDict[str, dict[str, _Part]] = OrderedDict()


def is_memory(path: str | Path) -> bool:
    """Whether a path is the address of samples in memory."""
    return str(path).startswith(PREFIX)


def addressed(data: Any) -> Any:
    """The address of samples in memory; a path, a source and None as they are."""
    if data is None or isinstance(data, str | Path | Source):
        return data
    if isinstance(data, Mapping) and {*data} <= {*SPLIT_WORDS, "dev"} and data:
        parts = {str(name): _part(split, f"the split {name!r}") for name, split in data.items()}
    else:
        parts = {"": _part(data, "the data")}
    address = PREFIX + _mark(parts)
    _known[address] = parts
    _known.move_to_end(address)
    while len(_known) > _REMEMBERED:
        _known.popitem(last=False)
    return address


def display_path(path: str) -> str:
    """A path or an address for a sentence."""
    return "the data in memory" if is_memory(path) else path


def memory_splits(path: str) -> set[str]:
    """The splits of samples in memory; none for one sequence of them."""
    return {*_recall(path)} - {""}


def check_same(recorded: str, address: str) -> None:
    """Refuses to resume a run with other samples than it began with, and says what differs."""
    if not (is_memory(recorded) and is_memory(address)) or recorded == address:
        return
    before, now = (part.removeprefix(PREFIX).split("-") for part in (recorded, address))
    if before[0] != now[0]:
        reason = f"there were {_counts(before[0])}, and now there are {_counts(now[0])}"
    else:
        reason = "its labels differ" if before[1] != now[1] else "its images differ"
    raise DataError(f"the data in memory differs from the data at the start of the run: {reason}; pass the same data")


def open_memory(path: str, wanted: Wanted) -> Source:
    """The samples of one split at an address."""
    parts = _recall(path)
    kind = type(next(iter(parts.values())).data).__name__
    chosen = choose_split({*parts} - {""}, wanted.split, f"{kind} in memory") or ""
    part, name = parts[chosen], split_name(f"{kind} in memory", chosen)
    numbers, classes = _numbered(parts, part, name, wanted) if wanted.labels else (None, None)
    if part.images is not None:
        source: Source = TensorSource(part.images, numbers, classes, name, wanted.channels)
    else:
        source = MemorySource(part.items, numbers, classes, name, wanted)
    if numbers is not None and not source.multi_label:
        source.notes += note_unseen(name, classes, numbers.tolist())
    return source


class MemorySource(Source):
    """Samples of a user's own sequence. labels: [n] int64, [n, K] int8 of a multi-label set, or None."""

    def __init__(
        self, items: Any, labels: Tensor | None, classes: tuple[str, ...] | None, name: str, wanted: Wanted
    ) -> None:
        many = labels is not None and labels.dim() == 2
        super().__init__(name, classes, wanted.channels, wanted.strict, multi_label=many)
        self.items, self.labels = items, labels

    def __len__(self) -> int:
        return len(self.items)

    def read(self, index: int) -> dict[str, Any]:
        image = _image(_sample(self.items, index, self.name)[0], f"{self.name}, sample {index}", self.channels)
        return self.labelled({"image": image}, index)

    def label(self, index: int) -> int | Tensor | None:
        if self.labels is None:
            return None
        return self.labels[index] if self.multi_label else int(self.labels[index])


# --- a user's object -> a part ---------------------------------------------------------------------------------


class _Pairs:
    """Two sequences, images and labels, as one sequence of pairs."""

    def __init__(self, images: Any, labels: Any) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.images[index], self.labels[index]


def _part(data: Any, where: str) -> _Part:
    _check_kind(data, where)
    pairs = _pairs(data, where)
    images, items = (data, data) if pairs is None else (pairs.images, pairs)
    if len(items) == 0:
        raise DataError(f"{where}: is empty; {ACCEPTED}")
    stacked = _stacked(images, where) if _is_array(images) else None
    labels = pairs.labels if pairs is not None else None if stacked is not None else _labels(data, where)
    if labels is not None:
        labels = _all_or_none([_label(label, index, where) for index, label in enumerate(labels)], where)
    return _Part(data, items, stacked, labels, _class_names(data))


def _check_kind(data: Any, where: str) -> None:
    """Refuses what is no sequence of samples, with what to pass instead."""
    reason = None
    if isinstance(data, DataLoader):
        reason = "is a DataLoader; pass its dataset (loader.dataset), because Situs shuffles and makes batches"
    elif isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not hasattr(data, "__getitem__")):
        reason = "can be read only from its start; pass data that can be indexed, such as list(data)"
    elif _is_picture(data):
        reason = "is one image; pass a list of them"
    elif _is_array(data) and data.ndim == 3 and (3 in (data.shape[0], data.shape[2]) or data.shape[2] == 4):
        reason = (
            f"has the shape {list(data.shape)}: it is either one colour image or several grey images; pass an "
            "array of four axes, "
            f"[n, C, H, W] or [n, H, W, C]"
        )
    elif isinstance(data, bytes | bytearray) or not hasattr(data, "__getitem__"):
        reason = f"is {_kind(data)}"
    elif not hasattr(data, "__len__"):
        reason = f"is {_kind(data)} without a length (__len__)"
    elif type(data).__module__.startswith("pandas."):
        reason = "is a pandas table; pass a list of its images, or of (image, label) pairs"
    if reason is not None:
        raise DataError(f"{where}: {reason}; {ACCEPTED}")


def _pairs(data: Any, where: str) -> _Pairs | None:
    """The pairs of (images, labels) or {"image": …, "label": …}; None for a sequence of samples."""
    if isinstance(data, Mapping):
        image = next((name for name in IMAGE_NAMES if name in data), None)
        label = next((name for name in LABEL_COLUMNS if name in data), None)
        if image is None:
            raise DataError(f"{where}: is a dict of {_listed(data)}; {ACCEPTED}")
        images, labels = data[image], None if label is None else data[label]
    elif isinstance(data, tuple) and len(data) == 2 and _is_many(data[0]) and not _is_many(data[1]):
        images, labels = data
    else:
        return None
    _check_kind(images, where)
    if labels is None:
        return _Pairs(images, [None] * len(images))
    count = len(labels) if hasattr(labels, "__len__") else 1
    if count != len(images):
        sizes = f"has {counted(len(images), 'images')} and {counted(count, 'labels')}; pass one label per image"
        raise DataError(f"{where}: {sizes}")
    return _Pairs(images, labels)


def _is_many(value: Any) -> bool:
    """Whether a value holds images: an array of three or more dimensions, or a list of images."""
    if _is_array(value):
        return value.ndim >= 3
    return isinstance(value, list | tuple) and len(value) > 0 and (_is_picture(value[0]) or _is_array(value[0]))


def _stacked(array: Any, where: str) -> Tensor:
    """Images [n, H, W], [n, C, H, W] or [n, H, W, C] as one tensor [n, C, H, W], uint8 or float32 in [0, 1]."""
    if array.ndim not in {3, 4}:
        shapes = "images must be [n, H, W], [n, C, H, W] or [n, H, W, C]"
        raise DataError(f"{where}: is an array {list(array.shape)}; {shapes}")
    try:
        return from_array(array, where, many=True)
    except BrokenSampleError as error:
        raise DataError(str(error)) from error


def _labels(data: Any, where: str) -> list[Any] | None:
    """The label of each sample, unchanged: from the dataset's own list of labels, or by reading every sample."""
    probes = {row: _label(_sample(data, row, where)[1], row, where) for row in _probes(len(data))}
    in_list = isinstance(data, list | tuple)
    if all(label is None for label in probes.values()) and not in_list:
        return None
    before = [part.labels for parts in _known.values() for part in parts.values() if part.data is data and not in_list]
    for labels in filter(None, (*before, _label_list(data))):  # read before, or listed by the dataset
        if len(labels) == len(data) and all(_label(labels[row], row, where) == label for row, label in probes.items()):
            return labels
    numbers = tracked(range(len(data)), f"reading the labels of {where}", len(data))
    return [_sample(data, row, where)[1] for row in numbers]


def _label_list(data: Any) -> list[Any] | None:
    """The labels that a dataset lists apart from its images; None where it does not."""
    inner, rows = getattr(data, "dataset", None), getattr(data, "indices", None)
    if inner is not None and rows is not None:  # a torch Subset
        whole = _label_list(inner)
        return None if whole is None else [whole[row] for row in rows]
    try:
        names = getattr(data, "column_names", None)
        if isinstance(names, list) and (column := next((name for name in LABEL_COLUMNS if name in names), None)):
            return list(data[column])
        targets = getattr(data, "targets", None)
        return None if targets is None else targets.tolist() if _is_array(targets) else list(targets)
    except Exception:  # noqa: BLE001  (whatever another library's object raises; then the samples are read)
        return None


def _class_names(data: Any) -> tuple[str, ...]:
    """A dataset's names of its classes; empty where it has none."""
    features = getattr(data, "features", None)
    column = next((name for name in LABEL_COLUMNS if isinstance(features, Mapping) and name in features), None)
    names = getattr(features[column], "names", None) if column and features else getattr(data, "classes", None)
    if names is None and hasattr(data, "indices") and hasattr(data, "dataset"):
        return _class_names(data.dataset)
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return ()
    return tuple(names)


def _numbered(
    parts: Mapping[str, _Part], part: _Part, name: str, wanted: Wanted
) -> tuple[Tensor | None, tuple[str, ...] | None]:
    """A part's labels as class numbers, and the classes: of numbers those of all parts, of names those of training."""
    if part.labels is None:
        return None, None
    every = [other.labels for other in parts.values() if other.labels is not None]
    kinds = {type(label) for labels in every for label in labels}
    if len(kinds) > 1:
        listed = " and ".join(sorted({int: "numbers", str: "names", tuple: "lists"}[kind] for kind in kinds))
        raise DataError(f"{name}: its labels are {listed}; pass labels of one kind")
    many = kinds == {tuple}
    if many and not wanted.multi_label:
        return None, None  # as for a folder whose multi-label table is not read
    if wanted.multi_label and not many:
        reason = "has one class per image; multi-label data needs a 0 or 1 for each class"
        raise SitusError(f"{name}: {reason}", field="multi_label")
    names = next((other.names for other in parts.values() if other.names), ())
    if many:
        count = len(part.labels[0])
        classes = names if len(names) == count else number_names(count - 1, name)
        return torch.tensor(part.labels, dtype=torch.int8), classes
    if kinds == {int}:
        most = max(max(labels) for labels in every)
        return torch.tensor(part.labels), names if len(names) > most else number_names(most, name)
    training = next((parts[word] for word in SPLITS["train"] if word in parts), part)
    classes, number = classes_of(training.labels or (), (), name)
    if unknown := next((label for label in part.labels if label not in number), None):
        raise DataError(f"{name}: class {unknown!r} is not among the {len(number)} classes of the training split")
    return torch.tensor([number[label] for label in part.labels]), classes


# --- one sample ------------------------------------------------------------------------------------------------


def _sample(items: Any, index: int, where: str) -> tuple[Any, Any]:
    """The image and the label (or None) of sample `index`, unchanged."""
    try:
        with _reading:
            sample = items[index]
    except Exception as error:  # whatever the user's own code raises
        kind, message = type(error).__name__, first_line(error)
        reason = f"reading this sample raises {kind}{f': {message}' if str(error).strip() else ''}"
        raise BrokenSampleError(f"{where}, sample {index}: {reason}", field="data") from error
    if isinstance(sample, Mapping):
        image = next((name for name in IMAGE_NAMES if name in sample), None)
        if image is None:
            raise DataError(f"{where}, sample {index}: is a dict of {_listed(sample)}; {ACCEPTED}")
        return sample[image], next((sample[name] for name in LABEL_COLUMNS if name in sample), None)
    if isinstance(sample, tuple | list):
        if len(sample) not in {1, 2}:
            size = f"{where}, sample {index}: is a list of {len(sample)} items"
            raise DataError(f"{size}; pass images or (image, label) pairs")
        return sample[0], sample[1] if len(sample) == 2 else None
    return sample, None


def _image(value: Any, name: str, channels: int | None = None) -> Tensor:
    """An image of any form as a tensor [C, H, W]."""
    if _is_array(value):
        return from_array(value, name, channels)
    if _is_picture(value):
        return from_pillow(value, name, channels)
    if isinstance(value, Mapping) and "bytes" in value and value["bytes"]:  # an undecoded image of Hugging Face
        value = value["bytes"]
    if isinstance(value, bytes | bytearray):
        return decode(bytes(value), name, channels)
    if isinstance(value, np.ndarray):
        raise DataError(f"{name}: is an array of objects; pass a list")
    hint = "; for sentences or files, pass their folder or table" if isinstance(value, str) else ""
    raise DataError(f"{name}: is {_kind(value)}, not a Pillow image, an array or a tensor{hint}")


def _label(value: Any, index: int, where: str) -> int | str | tuple[int, ...] | None:
    """A label as a class number, a name, or 0, 1 or -1 (unknown) for each class."""
    shown = f"of shape {list(value.shape)}" if _is_array(value) else repr(value)[:80]
    if _is_array(value) and value.ndim <= 1:
        value = value.tolist()
    elif isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | bool) and value >= 0:
        return int(value)
    if isinstance(value, list | tuple) and value and all(flag in (-1, 0, 1) for flag in value):
        return tuple(map(int, value))
    allowed = "a class number (0 or larger), a name, or in multi-label data a 0 or 1 for each class"
    raise DataError(f"{where}, sample {index}: has the label {shown}; a label must be {allowed}")


def _all_or_none(labels: list[Any], where: str) -> list[Any] | None:
    without = [index for index, label in enumerate(labels) if label is None]
    if len(without) == len(labels):
        return None
    if without:
        other = next(index for index, label in enumerate(labels) if label is not None)
        reason = (
            f"sample {without[0]} has no label, but sample {other} has a label; pass labels for all samples or for none"
        )
        raise DataError(f"{where}: {reason}")
    if len(sizes := {len(label) for label in labels if isinstance(label, tuple)}) > 1:
        raise DataError(f"{where}: its labels have different numbers of classes ({min(sizes)} and {max(sizes)})")
    return labels


# --- the address -----------------------------------------------------------------------------------------------


def _recall(path: str) -> dict[str, _Part]:
    if path not in _known:
        counts = _counts(path.removeprefix(PREFIX).split("-")[0])
        raise DataError(f"the data ({counts} in memory) no longer exists; pass the data again")
    return _known[path]


def _mark(parts: Mapping[str, _Part]) -> str:
    """How many samples, a hash of all labels, and one of some images; the same for the same data in any process."""
    counts, labels, images = [], hashlib.blake2b(digest_size=5), hashlib.blake2b(digest_size=5)
    for name, part in parts.items():
        counts.append(str(len(part.items)))
        labels.update(json.dumps([name, part.names, part.labels]).encode())
        for pixels in _pixels(part, f"the split {name!r}" if name else "the data"):
            images.update(pixels)
    return f"{'+'.join(counts)}-{labels.hexdigest()}-{images.hexdigest()}"


def _pixels(part: _Part, where: str) -> Iterator[bytes]:
    """Some images as bytes, each read twice; refused where most of them cannot be read, or one changes."""
    broken: list[SitusError] = []
    rows = _probes(len(part.items))
    for row in rows:
        try:
            twice = [_read_probe(part, row, where) for _ in range(2)]
        except BrokenSampleError as error:
            broken.append(error)
            continue
        if twice[0].shape != twice[1].shape or not torch.equal(*twice):
            reason = f"sample {row} differs each time it is read, for example by a random transform"
            raise DataError(f"{where}: {reason}; remove this transform, because Situs does the augmentation (augment)")
        yield f"{row} {twice[0].dtype} {list(twice[0].shape)}".encode()
        yield twice[0].contiguous().numpy().tobytes()
    if 2 * len(broken) > len(rows):
        raise DataError(str(broken[0]))


def _read_probe(part: _Part, row: int, where: str) -> Tensor:
    if part.images is not None:
        return part.images[row]
    return _image(_sample(part.items, row, where)[0], f"{where}, sample {row}")


def _probes(count: int) -> list[int]:
    return sorted({round(at * (count - 1) / max(1, _PROBES - 1)) for at in range(_PROBES)})


def _counts(text: str) -> str:
    return " + ".join(text.split("+")) + " images"


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.dtype != object)


def _is_picture(value: Any) -> bool:
    """Whether a value is an image of Pillow, without importing it."""
    return any(kind.__module__ == "PIL.Image" and kind.__name__ == "Image" for kind in type(value).__mro__)


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


def _listed(names: Mapping[Any, Any]) -> str:
    return ", ".join(map(repr, list(names)[:6]))
