"""Pooled features of a whole set, for neighbours, probes and other people's tools."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from situs.backbones.base import Backbone, Features
from situs.errors import SitusError
from situs.evaluate.inference import evaluating
from situs.methods.base import Batch
from situs.train.step import autocast
from situs.train.tensors import save

Pool = Literal["mean", "cls"]
_METADATA = "situs"


@dataclass(frozen=True)
class FeatureSet:
    """features: [n, D] float32. ids: [n] int64, the samples' numbers in their set. labels: [n] int64, or None.

    names: the images' own names, n of them, such as their paths below the data's folder.
    """

    features: Tensor
    ids: Tensor
    labels: Tensor | None
    names: tuple[str, ...] | None = None


def pool_features(features: Features, pool: Pool = "mean") -> Tensor:
    """One vector an image, [B, D]: the mean of the patches, or the first prefix token (CLS)."""
    if pool not in ("mean", "cls"):
        raise SitusError(field="pool", value=pool, allowed="mean or cls")
    if pool == "mean":
        return features.patches.mean(dim=1)
    if not features.prefix.shape[1]:
        raise SitusError("pool='cls': this model has no CLS token; take the mean of the patches", field="pool")
    return features.prefix[:, 0]


def pooled(backbone: Backbone, images: Tensor, pool: Pool = "mean", *, positions: bool = True) -> Tensor:
    """Images [B, C, H, W] -> features [B, D]. positions: False leaves every kind of position out (MP3)."""
    tokens = backbone.embed(images)
    return pool_features(backbone.encode(tokens, backbone.positions() if positions else None), pool)


def layer_features(
    backbone: Backbone, images: Tensor, pools: Sequence[Pool] = ("mean",), *, positions: bool = True
) -> Tensor:
    """Pooled features after each block, [pools, L, B, D], each through the model's final norm.

    After the last block alone where the model refuses "depths".
    """
    stream = backbone.assemble(backbone.embed(images), backbone.positions() if positions else None)
    found: list[Tensor] = []

    def pool_layer(_: int, z: Tensor) -> None:
        features = backbone.finish(replace(stream, z=z))
        found.append(torch.stack([pool_features(features, pool) for pool in pools]))

    if "depths" in backbone.refusals:
        pool_layer(backbone.depth, backbone.run_layers(stream, None))
    else:
        backbone.run_layers(stream, None, (pool_layer,))
    return torch.stack(found, dim=1)


def extract(
    backbone: Backbone,
    batches: Iterable[Batch],
    pool: Pool = "mean",
    *,
    positions: bool = True,
    precision: str = "fp32",
) -> FeatureSet:
    """The pooled features of every sample, on the batches' device."""
    features, ids, labels = [], [], []
    with evaluating(backbone):
        for batch in batches:
            with autocast(batch.inputs.device, precision):
                found = pooled(backbone, batch.inputs, pool, positions=positions)
            features.append(found.float())
            ids.append(batch.ids)
            if "label" in batch.targets:
                labels.append(batch.targets["label"])
    if not features:
        raise SitusError("there are no samples to take features of", field="data")
    return FeatureSet(torch.cat(features), torch.cat(ids), torch.cat(labels) if labels else None)


SUFFIXES = (".safetensors", ".npz", ".npy")
"""Forms that features are written in: everything in one file, the same for NumPy, and the features alone."""


def check_form(path: str | os.PathLike[str]) -> None:
    """Refuses a file whose ending names no form that features are written in."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise SitusError(field="out", value=str(path), allowed=f"a file ending in {', '.join(SUFFIXES)}")


def write_features(
    path: str | os.PathLike[str],
    found: FeatureSet,
    metadata: Mapping[str, Any],
    classes: Sequence[str] | None = None,
) -> None:
    """Writes features, ids, labels and what they were made with as one file, in the form that its ending names.

    Where the images have names, a table NAME.names.csv says which row is which image, and of which
    class. Both are written aside and renamed.
    """
    check_form(path)
    path = Path(path)
    tensors = {"features": found.features, "ids": found.ids}
    if found.labels is not None:
        tensors["labels"] = found.labels
    held = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    pairs = [(path, path.with_name(f".{path.name}.{os.getpid()}.tmp{path.suffix}"))]
    if found.names is not None:
        pairs.append((path.with_suffix(".names.csv"), path.with_name(f".{path.name}.{os.getpid()}.csv")))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # One entry: the file's own table of entries has no fixed order, so that several would change its bytes.
        _write_arrays(pairs[0][1], held, json.dumps(metadata, sort_keys=True))
        if found.names is not None:
            _write_names(pairs[1][1], found, classes)
        for final, aside in reversed(pairs):  # the names first: features without them would be numbers alone
            aside.replace(final)
    except OSError as error:
        for _, aside in pairs:
            aside.unlink(missing_ok=True)
        raise SitusError(
            f"{path}: could not be written: {(error.strerror or str(error)).lower()}", field="out"
        ) from error


def _write_arrays(path: Path, held: Mapping[str, Tensor], described: str) -> None:
    import numpy as np

    if path.suffix.lower() == ".safetensors":
        save(path, dict(held), {_METADATA: described})
        return
    arrays: dict[str, Any] = {name: each.numpy() for name, each in held.items()}
    with path.open("wb") as file:  # of a name, NumPy adds its own ending
        if path.suffix.lower() == ".npy":
            np.save(file, arrays["features"])
        else:
            np.savez(file, metadata=np.array(described), **arrays)


def _write_names(path: Path, found: FeatureSet, classes: Sequence[str] | None) -> None:
    assert found.names is not None
    labels = [None] * len(found.names) if found.labels is None else found.labels.tolist()
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("row", "id", "name", "label", "class"))
        for row, (number, name, label) in enumerate(zip(found.ids.tolist(), found.names, labels, strict=True)):
            table.writerow((row, number, name, label, classes[label] if classes and label is not None else ""))


def read_features(path: str | os.PathLike[str]) -> tuple[FeatureSet, dict[str, Any]]:
    """What `write_features` wrote as safetensors, on the CPU, with the names beside it, and its metadata."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
            metadata = json.loads((file.metadata() or {}).get(_METADATA, "{}"))
    except (OSError, SafetensorError) as error:
        raise SitusError(f"{path}: cannot be read: {error}") from None
    if not {"features", "ids"} <= tensors.keys():
        raise SitusError(f"{path}: holds no features and ids, so `situs features` did not write it")
    return FeatureSet(tensors["features"], tensors["ids"], tensors.get("labels"), _read_names(Path(path))), metadata


def _read_names(path: Path) -> tuple[str, ...] | None:
    table = path.with_suffix(".names.csv")
    if not table.is_file():
        return None
    try:
        with table.open(encoding="utf-8", newline="") as file:
            return tuple(row["name"] for row in csv.DictReader(file))
    except (OSError, ValueError, KeyError, csv.Error) as error:
        raise SitusError(f"{table}: is not the table of names that `situs features` wrote: {error}") from None
