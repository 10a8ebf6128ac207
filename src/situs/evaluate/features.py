"""Pooled features of a whole set, for neighbours, probes and other people's tools."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from situs.backbones.base import Backbone, Features
from situs.config import require
from situs.errors import SitusError
from situs.evaluate.inference import evaluating
from situs.methods.base import Batch
from situs.train.step import autocast
from situs.train.tensors import save

Pool = Literal["mean", "cls"]
_METADATA = "situs"


@dataclass(frozen=True)
class FeatureSet:
    """features: [n, D] float32. ids: [n] int64, the samples' numbers in their set. labels: [n] int64, or None."""

    features: Tensor
    ids: Tensor
    labels: Tensor | None


def pool_features(features: Features, pool: Pool = "mean") -> Tensor:
    """One vector an image, [B, D]: the mean of the patches, or the first prefix token (CLS)."""
    require(pool in ("mean", "cls"), "pool", pool, "mean or cls", "--pool")
    if pool == "mean":
        return features.patches.mean(dim=1)
    if not features.prefix.shape[1]:
        raise SitusError("pool='cls': this model has no CLS token; take the mean of the patches (--pool mean)")
    return features.prefix[:, 0]


def pooled(backbone: Backbone, images: Tensor, pool: Pool = "mean", *, positions: bool = True) -> Tensor:
    """Images [B, C, H, W] -> features [B, D]. positions: False leaves every kind of position out (MP3)."""
    tokens = backbone.embed(images)
    return pool_features(backbone.encode(tokens, backbone.positions() if positions else None), pool)


def layer_features(backbone: Backbone, images: Tensor, pool: Pool = "mean", *, positions: bool = True) -> Tensor:
    """Pooled features after each block, [L, B, D], each through the model's final norm."""
    stream = backbone.assemble(backbone.embed(images), backbone.positions() if positions else None)
    return torch.stack([pool_features(backbone.finish(layer), pool) for layer in backbone.layers(stream)])


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
            with autocast(batch.images.device, precision):
                found = pooled(backbone, batch.images, pool, positions=positions)
            features.append(found.float())
            ids.append(batch.ids)
            if batch.labels is not None:
                labels.append(batch.labels)
    if not features:
        raise SitusError("there are no samples to take features of (--data)")
    return FeatureSet(torch.cat(features), torch.cat(ids), torch.cat(labels) if labels else None)


def write_features(path: str | os.PathLike[str], found: FeatureSet, metadata: Mapping[str, Any]) -> None:
    """Writes features, ids, labels and what they were made with as one safetensors file, aside and renamed."""
    path = Path(path)
    tensors = {"features": found.features, "ids": found.ids}
    if found.labels is not None:
        tensors["labels"] = found.labels
    held = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # One entry: the file's own table of entries has no fixed order, so that several would change its bytes.
        save(aside, held, {_METADATA: json.dumps(metadata, sort_keys=True)})
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise SitusError(f"{path}: could not be written: {(error.strerror or str(error)).lower()} (--out)") from error


def read_features(path: str | os.PathLike[str]) -> tuple[FeatureSet, dict[str, Any]]:
    """What `write_features` wrote, on the CPU, and its metadata."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
            metadata = json.loads((file.metadata() or {}).get(_METADATA, "{}"))
    except (OSError, SafetensorError) as error:
        raise SitusError(f"{path}: cannot be read: {error}") from None
    if not {"features", "ids"} <= tensors.keys():
        raise SitusError(f"{path}: holds no features and ids, so `situs features` did not write it")
    return FeatureSet(tensors["features"], tensors["ids"], tensors.get("labels")), metadata
