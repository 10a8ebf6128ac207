"""Samples that are in memory: images, arrays, tensors, pairs, dicts, a dataset of torch or of Hugging Face.

`addressed` gives them an address, "memory:48+12-LABELS-IMAGES" (how many, and hashes of the labels and of some images),
which stands wherever a path stands: a config holds it, `open_source` opens it. A run that goes on in another process is
given the data again, and the address tells whether it is the same.
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

from situs.data.sources.base import SPLIT_WORDS, SPLITS, Source, TensorSource, Wanted, choose_split
from situs.data.sources.images import decode, from_array, from_pillow
from situs.data.sources.labels import LABEL_COLUMNS, classes_of, note_unseen, number_names
from situs.errors import BrokenSampleError, DataError, SitusError, counted
from situs.progress import tracked

PREFIX = "memory:"
IMAGE_NAMES = ("image", "img", "pixel_values", "jpg", "png", "webp")
TAKEN = (
    "a list, an array or a dataset (of torch or of Hugging Face) of images, of (image, label) pairs or of dicts with "
    "'image' and 'label', or a dict of them by split ('train', 'val')"
)
"""What is taken, for a sentence."""

_KEPT = 4  # sets that are remembered, so that a run's own data need not be given again in the same process
_PROBES = 8  # images whose pixels are in the address
_reading = threading.Lock()  # a user's dataset need not bear two threads


class _Part(NamedTuple):
    """One split. data: what the user gave. items: its samples by number. images: all of them where they are one array.
    labels: a number, a name or 0/1 for each class, one a sample. names: of the classes, where the data says them."""

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
        parts = {str(name): _part(each, f"the split {name!r}") for name, each in data.items()}
    else:
        parts = {"": _part(data, "the data")}
    address = PREFIX + _mark(parts)
    _known[address] = parts
    _known.move_to_end(address)
    while len(_known) > _KEPT:
        _known.popitem(last=False)
    return address


def spoken(path: str) -> str:
    """A path for a sentence."""
    return "the data in memory" if is_memory(path) else path


def memory_splits(path: str) -> set[str]:
    """The splits of samples in memory; none for one sequence of them."""
    return {*_recall(path)} - {""}


def check_same(recorded: str, address: str) -> None:
    """Refuses to go on with other samples than a run began with, and says what is other."""
    if not (is_memory(recorded) and is_memory(address)) or recorded == address:
        return
    before, now = (each.removeprefix(PREFIX).split("-") for each in (recorded, address))
    if before[0] != now[0]:
        said = f"there were {_counts(before[0])} and now there are {_counts(now[0])}"
    else:
        said = "its labels are others" if before[1] != now[1] else "its images are others"
    raise DataError(f"the data in memory differs from that at the start of the run: {said}; pass the same data")


def open_memory(path: str, wanted: Wanted) -> Source:
    """The samples of one split at an address."""
    parts = _recall(path)
    kind = type(next(iter(parts.values())).data).__name__
    chosen = choose_split({*parts} - {""}, wanted.split, f"{kind} in memory") or ""
    part, name = parts[chosen], f"{kind} in memory" + (f" ({chosen})" if chosen else "")
    numbers, classes = _numbered(parts, part, name, wanted) if wanted.labels else (None, None)
    if part.images is not None:
        source: Source = TensorSource(part.images, numbers, classes, name, wanted.channels)
    else:
        source = MemorySource(part.items, numbers, classes, name, wanted)
    if numbers is not None and not source.multi_label:
        source.notes += note_unseen(name, classes, numbers.tolist())
    return source


class MemorySource(Source):
    """Samples of a user's own sequence. labels: [n] int64, [n, K] int8 where they are multi-label, or None."""

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


# --- what the user gave -> a part ------------------------------------------------------------------------------


class _Pairs:
    """Images and labels side by side, as one sequence of pairs."""

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
        raise DataError(f"{where}: is empty; give {TAKEN}")
    whole = _stacked(images, where) if _is_array(images) else None
    labels = pairs.labels if pairs is not None else None if whole is not None else _labels(data, where)
    if labels is not None:
        labels = _all_or_none([_label(each, index, where) for index, each in enumerate(labels)], where)
    return _Part(data, items, whole, labels, _class_names(data))


def _check_kind(data: Any, where: str) -> None:
    """Refuses what is no sequence of samples, each with what to give in its place."""
    said = None
    if isinstance(data, DataLoader):
        said = "is a DataLoader; give its dataset (loader.dataset), which Situs shuffles and batches itself"
    elif isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not hasattr(data, "__getitem__")):
        said = "can be read only from its beginning on; give what can be read by number, as list(data)"
    elif _is_picture(data):
        said = "is one image; give a list of them"
    elif isinstance(data, bytes | bytearray) or not hasattr(data, "__getitem__"):
        said = f"is {_kind(data)}"
    elif not hasattr(data, "__len__"):
        said = f"is {_kind(data)} without a length (__len__)"
    elif type(data).__module__.startswith("pandas."):
        said = "is a table of pandas; give a list of its images, or of (image, label) pairs"
    if said is not None:
        raise DataError(f"{where}: {said}; {TAKEN} is taken")


def _pairs(data: Any, where: str) -> _Pairs | None:
    """(images, labels) or {"image": …, "label": …}, where the data is two columns and no sequence of samples."""
    if isinstance(data, Mapping):
        image = next((name for name in IMAGE_NAMES if name in data), None)
        label = next((name for name in LABEL_COLUMNS if name in data), None)
        if image is None:
            raise DataError(f"{where}: is a dict of {_listed(data)}; {TAKEN} is taken")
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
        said = f"has {counted(len(images), 'images')} and {counted(count, 'labels')}; give one label an image"
        raise DataError(f"{where}: {said}")
    return _Pairs(images, labels)


def _is_many(value: Any) -> bool:
    """Whether a value holds images: an array of three sides or more, or a list of pictures."""
    if _is_array(value):
        return value.ndim >= 3
    return isinstance(value, list | tuple) and len(value) > 0 and (_is_picture(value[0]) or _is_array(value[0]))


def _stacked(array: Any, where: str) -> Tensor:
    """Images [n, H, W], [n, C, H, W] or [n, H, W, C] as one tensor [n, C, H, W], uint8 or float32 in [0, 1]."""
    if array.ndim not in {3, 4}:
        raise DataError(f"{where}: is an array {list(array.shape)}; images are [n, H, W], [n, C, H, W] or [n, H, W, C]")
    try:
        return from_array(array, where, many=True)
    except BrokenSampleError as error:
        raise DataError(str(error)) from error


def _labels(data: Any, where: str) -> list[Any] | None:
    """The label of each sample as it is: from a column of its own where there is one, else by reading every sample."""
    probes = {row: _label(_sample(data, row, where)[1], row, where) for row in _probes(len(data))}
    at_hand = isinstance(data, list | tuple)
    if all(label is None for label in probes.values()) and not at_hand:
        return None
    known = [part.labels for parts in _known.values() for part in parts.values() if part.data is data and not at_hand]
    for labels in filter(None, (*known, _beside(data))):  # what was read before, what the dataset tells of itself
        if len(labels) == len(data) and all(_label(labels[row], row, where) == label for row, label in probes.items()):
            return labels
    numbers = tracked(range(len(data)), f"reading the labels of {where}", len(data))
    return [_sample(data, row, where)[1] for row in numbers]


def _beside(data: Any) -> list[Any] | None:
    """The labels that a dataset tells without its images; None where it does not."""
    inner, rows = getattr(data, "dataset", None), getattr(data, "indices", None)
    if inner is not None and rows is not None:  # a torch Subset
        whole = _beside(inner)
        return None if whole is None else [whole[row] for row in rows]
    try:
        names = getattr(data, "column_names", None)
        if isinstance(names, list) and (column := next((name for name in LABEL_COLUMNS if name in names), None)):
            return list(data[column])
        found = getattr(data, "targets", None)
        return None if found is None else found.tolist() if _is_array(found) else list(found)
    except Exception:  # noqa: BLE001  (whatever another library's object raises; then the samples are read)
        return None


def _class_names(data: Any) -> tuple[str, ...]:
    """What a dataset calls its classes; empty where it does not."""
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
    """A part's labels as class numbers, and the classes, which are those of all parts; of names those of training."""
    if part.labels is None:
        return None, None
    every = [each.labels for each in parts.values() if each.labels is not None]
    kinds = {type(label) for labels in every for label in labels}
    if len(kinds) > 1:
        listed = " and ".join(sorted({int: "numbers", str: "names", tuple: "lists"}[kind] for kind in kinds))
        raise DataError(f"{name}: its labels are {listed}; give one kind of them")
    many = kinds == {tuple}
    if many and not wanted.multi_label:
        return None, None  # as of a folder whose table of labels nobody asked for
    if wanted.multi_label and not many:
        said = "has one class an image, and a multi-label set 0 or 1 for each class"
        raise SitusError(f"{name}: {said}", field="multi_label")
    names = next((each.names for each in parts.values() if each.names), ())
    if many:
        count = len(part.labels[0])
        classes = names if len(names) == count else number_names(count - 1, name)
        return torch.tensor(part.labels, dtype=torch.int8), classes
    if kinds == {int}:
        most = max(max(labels) for labels in every)
        return torch.tensor(part.labels), names if len(names) > most else number_names(most, name)
    home = next((parts[word] for word in SPLITS["train"] if word in parts), part)
    classes, number = classes_of(home.labels or (), (), name)
    if stranger := next((each for each in part.labels if each not in number), None):
        raise DataError(f"{name}: class {stranger!r} is not among the {len(number)} of training")
    return torch.tensor([number[each] for each in part.labels]), classes


# --- one sample ------------------------------------------------------------------------------------------------


def _sample(items: Any, index: int, where: str) -> tuple[Any, Any]:
    """The image and the label (or None) of sample `index`, as the user has them."""
    try:
        with _reading:
            sample = items[index]
    except Exception as error:  # whatever the user's own code raises
        said = str(error).strip().splitlines()
        told = f"{type(error).__name__}{f': {said[0][:120]}' if said else ''}"
        raise BrokenSampleError(f"{where}, sample {index}: its own code ends with {told}", field="data") from error
    if isinstance(sample, Mapping):
        image = next((name for name in IMAGE_NAMES if name in sample), None)
        if image is None:
            raise DataError(f"{where}, sample {index}: is a dict of {_listed(sample)}; {TAKEN} is taken")
        return sample[image], next((sample[name] for name in LABEL_COLUMNS if name in sample), None)
    if isinstance(sample, tuple | list):
        if len(sample) not in {1, 2}:
            said = f"{where}, sample {index}: is a list of {len(sample)}"
            raise DataError(f"{said}; give images or (image, label) pairs")
        return sample[0], sample[1] if len(sample) == 2 else None
    return sample, None


def _image(value: Any, name: str, channels: int | None = None) -> Tensor:
    """An image [C, H, W] of whatever form."""
    if _is_array(value):
        return from_array(value, name, channels)
    if _is_picture(value):
        return from_pillow(value, name, channels)
    if isinstance(value, Mapping) and "bytes" in value and value["bytes"]:  # as Hugging Face has one not decoded
        value = value["bytes"]
    if isinstance(value, bytes | bytearray):
        return decode(bytes(value), name, channels)
    more = "; of sentences and of files give the folder or the table they are in" if isinstance(value, str) else ""
    raise DataError(f"{name}: is {_kind(value)}, and no image of Pillow, array or tensor{more}")


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
    if isinstance(value, list | tuple) and value and all(each in (-1, 0, 1) for each in value):
        return tuple(int(each) for each in value)
    allowed = "a class number from 0 on, a name, or in a multi-label set 0 or 1 for each class"
    raise DataError(f"{where}, sample {index}: has the label {shown}; a label is {allowed}")


def _all_or_none(labels: list[Any], where: str) -> list[Any] | None:
    without = [index for index, label in enumerate(labels) if label is None]
    if len(without) == len(labels):
        return None
    if without:
        other = next(index for index, label in enumerate(labels) if label is not None)
        said = f"sample {without[0]} has no label and sample {other} has one; give all of them or none"
        raise DataError(f"{where}: {said}")
    if len(sizes := {len(label) for label in labels if isinstance(label, tuple)}) > 1:
        raise DataError(f"{where}: its labels tell of {min(sizes)} and of {max(sizes)} classes")
    return labels


# --- the address -----------------------------------------------------------------------------------------------


def _recall(path: str) -> dict[str, _Part]:
    if path not in _known:
        counts = _counts(path.removeprefix(PREFIX).split("-")[0])
        raise DataError(f"the data was {counts} in memory, which is there no more; give it again")
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
    """Some images as bytes, each read twice: refused are those that most often cannot be read, or are never alike."""
    broken: list[SitusError] = []
    rows = _probes(len(part.items))
    for row in rows:
        try:
            twice = [_read_probe(part, row, where) for _ in range(2)]
        except BrokenSampleError as error:
            broken.append(error)
            continue
        if twice[0].shape != twice[1].shape or not torch.equal(*twice):
            said = f"sample {row} is another each time it is read, as by a random transform"
            raise DataError(f"{where}: {said}; leave it out, since Situs does the augmentation (augment)")
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
    """An image of Pillow, told without importing it."""
    return any(kind.__module__ == "PIL.Image" and kind.__name__ == "Image" for kind in type(value).__mro__)


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


def _listed(names: Mapping[Any, Any]) -> str:
    return ", ".join(map(repr, list(names)[:6]))
