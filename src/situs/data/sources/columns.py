"""Labels in the columns of parquet files where an image has any number of the classes.

A list column of class numbers or names: an empty list is no class, null is unknown. Or a column a class, of 1 and 0 (or
1 and -1): null and NaN are unknown.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from situs.data.batch import VOID
from situs.data.sources.table import BOTH
from situs.errors import DataError, SitusError


def label_columns(file: Path, schema: Any, names: Iterable[str]) -> tuple[str, ...]:
    """The list column, by one of its usual names; else every bool column, else every column of numbers."""
    import pyarrow as pa

    kinds = dict(zip(schema.names, schema.types, strict=True))
    usual = [name for name in names if name in kinds]
    if listed := next((name for name in usual if _is_list(kinds[name])), None):
        inner = kinds[listed].value_type
        if not (pa.types.is_integer(inner) or is_text(inner)):
            raise SitusError(f"{file}: column {listed!r} holds lists of {str(inner)[:80]}, not of numbers or names")
        return (listed,)
    flags = tuple(name for name, kind in kinds.items() if pa.types.is_boolean(kind))
    if usual and not flags:
        raise SitusError(
            f"{file}: column {usual[0]!r} holds one class an image, and a multi-label set has a list of them or 0/1 "
            "columns",
            field="multi_label",
        )
    found = flags or tuple(n for n, kind in kinds.items() if pa.types.is_integer(kind) or pa.types.is_floating(kind))
    if not found:
        raise SitusError(f"{file}: has neither a list of labels nor 0/1 columns", field="multi_label")
    return found


def classes_in(column: Any) -> set[Any]:
    """The numbers or names that a list column holds."""
    return {each for part in column.chunks for each in part.flatten().unique().to_pylist()} - {None}


def multi_hot(columns: Sequence[Any], names: Sequence[str], classes: Sequence[str], where: str) -> Tensor:
    """The labels [n, K] int8 of some rows: 1, 0 or VOID. where: what an error calls these rows."""
    import pyarrow as pa

    if not pa.types.is_nested(columns[0].type):
        return _from_columns(columns, names, where)
    return _from_list(columns[0].combine_chunks(), classes, where)


def _from_list(column: Any, classes: Sequence[str], where: str) -> Tensor:
    labels = np.zeros((len(column), len(classes)), np.int8)
    rows, held = column.value_parent_indices().to_numpy(), column.flatten()
    number = {name: at for at, name in enumerate(classes if is_text(held.type) else range(len(classes)))}
    numbers = np.array([number.get(each, -1) for each in held.to_pylist()], np.int64)
    strange = np.flatnonzero(numbers < 0)
    if strange.size:
        said = f"class {held[strange[0]].as_py()!r} is not among the {len(classes):,}"
        raise DataError(f"{where}, row {rows[strange[0]]}: {said}")
    labels[rows, numbers] = 1
    labels[column.is_null().to_numpy(zero_copy_only=False)] = VOID
    return torch.from_numpy(labels)


def _from_columns(columns: Sequence[Any], names: Sequence[str], where: str) -> Tensor:
    import pyarrow as pa

    values = np.stack([column.cast(pa.int8() if pa.types.is_boolean(column.type) else column.type)
                       .cast(pa.float64()).to_numpy() for column in columns], axis=1)  # fmt: skip
    known = ~np.isnan(values)
    strange = np.argwhere(known & ~np.isin(values, (-1, 0, 1)))
    if strange.size:
        row, at = strange[0]
        said = f"column {names[at]!r} holds {values[row, at]:g}, and a label is 0 or 1, or -1 or 1"
        raise DataError(f"{where}, row {row}: {said}")
    minus, zero = (values == -1).any(1), (values == 0).any(1)
    if minus.any() and zero.any():
        raise DataError(f"{where}, row {max(minus.argmax(), zero.argmax())}: {BOTH}")
    return torch.from_numpy(np.where(known, values > 0, VOID).astype(np.int8))


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def is_text(kind: Any) -> bool:
    """Whether a column of this type holds words; a category, as pandas writes them, is what it stands for."""
    import pyarrow as pa

    own = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(own) or pa.types.is_large_string(own) or pa.types.is_string_view(own)


def class_names(file: Path, schema: Any, label: str) -> tuple[str, ...]:
    """The names that Hugging Face writes beside the schema; none where it wrote none."""
    written = (schema.metadata or {}).get(b"huggingface")
    if written is None:
        return ()
    try:
        described: Any = json.loads(written)
        for key in ("info", "features", label):
            described = described.get(key) or {}
        described = described[0] if isinstance(described, list) else described.get("feature") or described
        described = described.get("names") or {}
        return tuple(str(name) for name in described)
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise DataError(f"{file}: its 'huggingface' metadata is damaged ({str(error)[:80]})") from error
