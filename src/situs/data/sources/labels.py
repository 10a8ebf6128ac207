"""From labels in the data, class numbers or names, to classes from 0 on.

A sample has one class, or in a multi-label set any number of them: as a list of class numbers or names (an empty list
is no class, null is unknown), or as one column for each class, of 1 and 0 (or 1 and -1; null and NaN are unknown).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from situs.data.batch import VOID
from situs.errors import DataError, SitusError, verb

LABEL_COLUMNS = ("label", "labels", "fine_label", "cls", "class")
LISTS = ("labels", "classes", "tags")
"""Columns that hold lists of names or numbers, and are no classes themselves."""

# A label beyond this is an id or a damaged number; each class costs a name and a row of every classifier.
_MOST_CLASSES = 1_000_000


def number_names(most: int, where: str) -> tuple[str, ...]:
    """The class numbers 0 to `most` as names, for data that names none."""
    if most >= _MOST_CLASSES:
        raise DataError(
            f"{where}: the class number {most:,} must be below {_MOST_CLASSES:,}; check that these numbers are classes"
        )
    return tuple(str(number) for number in range(most + 1))


def is_numbered(classes: Sequence[str] | None) -> bool:
    """Whether the names of the classes are the numbers from 0 on."""
    return classes is not None and all(name == str(number) for number, name in enumerate(classes))


def classes_of(
    labels: Iterable[Any], names: tuple[str, ...], where: str
) -> tuple[tuple[str, ...] | None, dict[Any, int]]:
    """The names of the classes, and the number of each label. labels: of the training split, None for an unknown one.
    names: class names in the data's metadata; the labels are then numbers, or these names."""
    distinct = sorted({label for label in labels if not is_missing(label)}, key=lambda label: (str(type(label)), label))
    if not distinct:
        return None, {}
    if isinstance(distinct[0], str) != isinstance(distinct[-1], str):
        raise DataError(f"{where} must contain either numbers or names, but contains both, such as {distinct[-1]!r}")
    if not names and (isinstance(distinct[0], str) or distinct[0] < 0 or not isinstance(distinct[-1], int)):
        return tuple(map(str, distinct)), {label: number for number, label in enumerate(distinct)}
    names = names or number_names(distinct[-1], where)
    values = names if isinstance(distinct[0], str) else range(len(names))
    return names, {label: number for number, label in enumerate(values)}


def is_missing(label: Any) -> bool:
    """Whether a label is null or NaN, as pandas writes a missing one."""
    return label is None or label != label


def some(names: Sequence[Any]) -> str:
    """The first three of some names, for a sentence."""
    return ", ".join(map(repr, names[:3])) + (", …" if len(names) > 3 else "")


def note_unseen(name: str, classes: Sequence[str] | None, labels: Iterable[int] | None, least: int = 0) -> list[str]:
    """A note where classes without names have no sample among the labels. labels: None where they are too many to be
    read; `least` is then the smallest of them."""
    if classes is None or not is_numbered(classes):
        return []
    missing = sorted({*range(len(classes))} - {int(label) for label in labels}) if labels is not None else range(least)
    if labels is not None and not missing:
        return []
    taken = f"{len(classes):,} classes, 0 to {len(classes) - 1}"
    lack = f"{len(missing):,} of them {verb(len(missing), 'have')} no sample ({some(missing)})"
    if labels is None:
        taken += f"; {lack}" if missing else ""
        others = "all other classes have a sample" if missing else "all classes have a sample"
        lack = f"the set is too large to check that {others}"
    return [f"{name}: its labels are used as class numbers: {taken}; {lack}"]


def singleton_classes(classes: Sequence[str], counts: Sequence[int], things: str = "samples") -> tuple[int, str]:
    """How many classes have one sample only, and the sentence on them. counts: the samples of each."""
    single = [name for name, count in zip(classes, counts, strict=True) if count == 1]
    have = f"{verb(len(single), 'have')} only one {things.removesuffix('s')} ({some(single)})"
    return len(single), f"{len(single):,} of its {len(classes):,} classes {have}"


def note_singletons(name: str, classes: Sequence[str], counts: Sequence[int]) -> list[str]:
    """A note where few classes have one sample only, which may be mistyped labels. counts: the samples of each."""
    single, sentence = singleton_classes(classes, counts)
    few = single and 2 * single <= sum(count > 0 for count in counts)
    return [f"{name}: {sentence}; check them, because a mistyped label counts as a class"] if few else []


# --- any number of classes per sample: [n, K] int8, 1, 0 or VOID for unknown ------------------------------------------


def from_lists(lists: Sequence[Sequence[Any] | None], number: Mapping[Any, int], where: Callable[[int], str]) -> Tensor:
    """The labels of lists of classes. where: what an error calls a row."""
    labels = np.zeros((len(lists), len(number)), np.int8)
    for row, classes in enumerate(lists):
        if classes is None:
            labels[row] = VOID
        for label in classes or ():
            if label not in number:
                raise DataError(f"{where(row)}: class {label!r} is not among the {len(number):,} classes")
            labels[row, number[label]] = 1
    return torch.from_numpy(labels)


def from_flags(values: np.ndarray, names: Sequence[str], where: Callable[[int], str]) -> Tensor:
    """The labels of one column for each class. values: [n, K] floats, NaN for unknown."""
    known = ~np.isnan(values)
    invalid = np.argwhere(known & ~np.isin(values, (-1, 0, 1)))
    if invalid.size:
        row, column = invalid[0]
        reason = f"column {names[column]!r} contains {values[row, column]:g}; labels must be 0 and 1, or -1 and 1"
        raise DataError(f"{where(row)}: {reason}")
    minus, zero = (values == -1).any(1), (values == 0).any(1)
    if minus.any() and zero.any():
        both = "the labels contain -1 and 0, but only one of the two can mean 'no'; leave unknown values empty"
        raise DataError(f"{where(max(minus.argmax(), zero.argmax()))}: {both}")
    return torch.from_numpy(np.where(known, values > 0, VOID).astype(np.int8))


# --- columns of parquet files -------------------------------------------------------------------------------------


def is_text(kind: Any) -> bool:
    """Whether a column of this type holds text; a category, as pandas writes it, counts as its values."""
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def is_list(kind: Any) -> bool:
    """Whether each row of a column of this type is a list."""
    import pyarrow as pa

    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def class_names(file: Path, schema: Any, label: str) -> tuple[str, ...]:
    """The class names in Hugging Face's metadata of the schema; empty where there are none."""
    written = (schema.metadata or {}).get(b"huggingface")
    if written is None:
        return ()
    try:
        described: Any = json.loads(written)
        for key in ("info", "features", label):
            described = described.get(key) or {}
        described = described[0] if isinstance(described, list) else described.get("feature") or described
        return tuple(str(name) for name in described.get("names") or {})
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise DataError(f"{file}: its 'huggingface' metadata is damaged ({str(error)[:80]})") from error


def multi_label_columns(file: Path, schema: Any) -> tuple[str, ...]:
    """The list column, by one of its usual names; else every bool column, else every column of numbers."""
    import pyarrow as pa

    kinds = dict(zip(schema.names, schema.types, strict=True))
    usual = [name for name in (*LISTS, *LABEL_COLUMNS) if name in kinds]
    if listed := next((name for name in usual if is_list(kinds[name])), None):
        inner = kinds[listed].value_type
        if not (pa.types.is_integer(inner) or is_text(inner)):
            raise SitusError(f"{file}: column {listed!r} contains lists of {str(inner)[:80]}, not of numbers or names")
        return (listed,)
    flags = tuple(name for name, kind in kinds.items() if pa.types.is_boolean(kind))
    if usual and not flags:
        needed = "a column of lists, or 0/1 columns"
        reason = f"column {usual[0]!r} contains one class per image; a multi-label set needs {needed}"
        raise SitusError(f"{file}: {reason}", field="multi_label")
    numbers = (name for name, kind in kinds.items() if pa.types.is_integer(kind) or pa.types.is_floating(kind))
    columns = flags or tuple(numbers)
    if not columns:
        reason = "a multi-label set needs a column that contains lists of labels, or columns of 0 and 1"
        raise SitusError(f"{file}: {reason}", field="multi_label")
    return columns


def multi_label_rows(columns: Sequence[Any], names: Sequence[str], classes: Sequence[str], where: str) -> Tensor:
    """The labels of some rows of these columns. where: what an error calls them."""
    import pyarrow as pa

    def place(row: int) -> str:
        return f"{where}, row {row}"

    kind = columns[0].type
    if is_list(kind):
        known = classes if is_text(kind.value_type) else range(len(classes))
        return from_lists(columns[0].to_pylist(), {label: number for number, label in enumerate(known)}, place)
    whole = [column.cast(pa.int8()) if pa.types.is_boolean(column.type) else column for column in columns]
    return from_flags(np.stack([column.cast(pa.float64()).to_numpy() for column in whole], axis=1), names, place)
