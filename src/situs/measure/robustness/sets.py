"""The sets for robustness: published corruption sets as folders or arrays, and the matching of their classes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from situs.data.open import judged_split, open_source
from situs.data.sources.base import EncodedSource, Source, TensorSource
from situs.data.sources.subset import Rows
from situs.errors import BrokenSampleError, SitusError, counted
from situs.measure.corruptions import GROUPS

_WNID = re.compile(r"n\d{8}")
_LABELS = "labels.npy"


def row_numbers(source: Source) -> Tensor | None:
    """The rows of a subset in its whole set, so that an image gets the same corruption in both; None for a whole."""
    if not isinstance(source, Rows):
        return None
    rows, whole = torch.tensor(source.rows), row_numbers(source.source)
    return rows if whole is None else whole[rows]


def class_numbers(source: Source) -> list[int | None]:
    """The label of every image, without decoding where possible."""
    if isinstance(source, EncodedSource):
        return [_label(source, index) for index in range(len(source))]
    if isinstance(source, TensorSource):
        return [None] * len(source) if source.labels is None else source.labels.tolist()
    if isinstance(source, Rows):
        whole = class_numbers(source.source)
        return [whole[row] for row in source.rows]
    return [source.read(index).get("label") for index in range(len(source))]


def _label(source: EncodedSource, index: int) -> int | None:
    try:
        return source.label(index)
    except BrokenSampleError:  # it is skipped and counted when it is read
        return None


def read_class_list(path: Path) -> tuple[str, ...]:
    """Class names in the order of a classifier's outputs, one per line; from "n01440764 tench" the wnid is taken."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SitusError(f"{path}: cannot be read ({reason})", field="class_list") from error
    stripped = [line.strip() for line in lines if line.strip()]
    names = tuple(match[0] if (match := _WNID.match(line)) else line for line in stripped)
    if not names:
        raise SitusError(f"{path}: holds no class names", field="class_list")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SitusError(f"{path}: names {twice!r} twice", field="class_list")
    return names


def match_classes(classes: Sequence[str] | None, names: Sequence[str] | None, outputs: int, what: str) -> list[int]:
    """The output of the classifier for each class of a set. classes: the set's. names: the outputs', where known."""
    if classes is None:
        raise SitusError(f"{what}: has no labels; its images must be in one folder per class")
    if names is not None and len(names) != outputs:
        raise SitusError(
            f"{len(names)} class names are given and the classifier has {outputs} outputs", field="class_list"
        )
    if names is None:
        if len(classes) != outputs:
            raise SitusError(
                f"{what}: has {counted(len(classes), 'classes')}, and the classifier {outputs} outputs without names; "
                "give the names in their order",
                field="class_list",
            )
        return list(range(outputs))
    number = {name: index for index, name in enumerate(names)}
    stranger = next((name for name in classes if name not in number), None)
    if stranger is not None:
        raise SitusError(
            f"{what}: class {stranger!r} is unknown to the classifier, which has {outputs} classes, as {names[0]!r}",
            field="class_list",
        )
    return [number[name] for name in classes]


def open_corrupted(root: Path, name: str, severity: int, channels: int) -> tuple[Source, bool]:
    """One corruption at one severity of a published set, and whether its labels are numbers without names.

    Folders as in ImageNet-C, ROOT/CORRUPTION/SEVERITY/CLASS/IMAGE (or below the kind: ROOT/blur/defocus_blur/…), or
    arrays as in CIFAR-C, ROOT/CORRUPTION.npy with the five severities one after the other and ROOT/labels.npy.
    """
    if not root.is_dir():
        raise SitusError(f"{root}: no such folder", field="imagenet_c")
    if (root / f"{name}.npy").is_file():
        return _open_array(root, name, severity, channels), True
    kind = next(kind for kind, members in GROUPS.items() if name in members)
    home = next((folder for folder in (root / name, root / kind / name) if folder.is_dir()), None)
    if home is None:
        raise SitusError(f"{root}: has no folder {name!r}; choose from those it has", field="corruptions")
    folder = home / str(severity)
    if not folder.is_dir():
        raise SitusError(f"{home}: has no folder for severity {severity}; choose from those it has", field="severities")
    return open_folder(folder, channels, "imagenet_c"), False


def open_folder(root: Path, channels: int, field: str) -> Source:
    """The images of a folder that is one set, not split."""
    if not root.is_dir():
        raise SitusError(f"{root}: no such folder", field=field)
    try:
        return open_source(root, None, channels=channels)
    except SitusError as error:
        raise SitusError(str(error), field=field) from None


def open_normal(path: str, split: str | None, channels: int, held_out: float | None = None) -> Source:
    """In-distribution images: of the split named, or of the default split of an evaluation."""
    return open_source(path, split or judged_split(path, held_out), channels=channels, held_out=held_out)


def _open_array(root: Path, name: str, severity: int, channels: int) -> TensorSource:
    import numpy as np

    try:
        images, labels = (np.load(root / file, mmap_mode="r", allow_pickle=False) for file in (f"{name}.npy", _LABELS))
    except (OSError, ValueError, EOFError) as error:
        raise SitusError(f"{root}: {name}.npy and {_LABELS} cannot be read ({error})", field="imagenet_c") from error
    count, rest = divmod(len(images), 5)
    if images.ndim != 4 or images.dtype != np.uint8 or rest or not count or len(labels) != len(images):
        raise SitusError(
            f"{root / name}.npy: holds {images.dtype} {images.shape} and {_LABELS} {labels.shape}; must be uint8 "
            "[5 n, H, W, C] and [5 n]",
            field="imagenet_c",
        )
    part = slice((severity - 1) * count, severity * count)
    pixels = torch.from_numpy(np.ascontiguousarray(images[part].transpose(0, 3, 1, 2)))
    numbers = torch.from_numpy(labels[part].astype("int64"))
    classes = tuple(str(number) for number in range(int(numbers.max()) + 1))
    return TensorSource(pixels, numbers, classes, f"{root.name}/{name}/{severity}", channels=channels)
