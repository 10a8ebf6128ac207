"""Features of a whole set, pooled or of every patch, for kNN, probes and other tools."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from safetensors.torch import save
from torch import Tensor

from situs import __version__
from situs.backbones.base import Backbone, Features
from situs.config import checks_arguments
from situs.core.position import Positions
from situs.core.tokens import fill
from situs.data.sampler import sample_of
from situs.data.text import Columns
from situs.errors import SitusError
from situs.files import write_result
from situs.methods.base import Batch
from situs.models.data import AnyData, AnyModel, load_any, opened
from situs.models.inference import evaluating
from situs.train.distributed import Precision
from situs.train.step import autocast

Pool = Literal["mean", "cls"]
Tokens = Literal["pooled", "patches"]
_LARGEST = 32 << 30  # bytes of one file of features


@dataclass(frozen=True)
class FeatureSet:
    """features: [n, D] float32, or of every patch [n, N, D]. ids: [n] int64, the samples' numbers in their set.

    labels: [n] int64, or of a multi-label set [n, K] int8 (1, 0, and -1 for unknown), or None.

    names: of the n samples, such as their paths below the data's folder. classes: names of the labels. facts: how they
    were made. left_out: sentences on the samples that could not be read.
    """

    features: Tensor
    ids: Tensor
    labels: Tensor | None
    names: tuple[str, ...] | None = None
    classes: Sequence[str] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    left_out: Sequence[str] = ()


def pool_features(features: Features, pool: Pool = "mean") -> Tensor:
    """One vector per sample, [B, D]: the mean of the patches, or the first prefix token (CLS)."""
    if pool not in ("mean", "cls"):
        raise SitusError(field="pool", value=pool, allowed="mean or cls")
    if pool == "mean":
        return features.patches.mean(dim=1)
    if not features.prefix.shape[1]:
        raise SitusError(
            "pool='cls': this model has no CLS token; use pool='mean', the mean of the patches", field="pool"
        )
    return features.prefix[:, 0]


def encoded(backbone: Backbone, inputs: Tensor, mask: Tensor | None = None, *, positions: bool) -> Features:
    """Inputs [B, …] -> features of every token.

    mask: [B, N], False for padding, which is then filled so that a mean over all tokens is that of the real ones.
    """
    features = backbone.encode(backbone.embed(inputs), backbone.positions() if positions else None, mask=mask)
    return features if mask is None else features._replace(patches=fill(features.patches, mask))


def layer_features(
    backbone: Backbone,
    inputs: Tensor,
    pools: Sequence[Pool] = ("mean",),
    *,
    positions: bool = True,
    last_alone: bool = False,
) -> Tensor:
    """Pooled features after each block, through the model's final norm: [pools, L, B, D].

    Only after the last block with `last_alone`, and where the model refuses "depths".
    """
    stream = backbone.assemble(backbone.embed(inputs), backbone.positions() if positions else None)
    layers: list[Tensor] = []

    def pool_layer(_: int, z: Tensor) -> None:
        features = backbone.finish(replace(stream, z=z))
        layers.append(torch.stack([pool_features(features, pool) for pool in pools]))

    if last_alone or "depths" in backbone.refusals:
        pool_layer(backbone.depth, backbone.run_layers(stream, None))
    else:
        backbone.run_layers(stream, None, (pool_layer,))
    return torch.stack(layers, dim=1)


def extract(
    backbone: Backbone,
    batches: Iterable[Batch],
    pool: Pool = "mean",
    *,
    positions: bool = True,
    precision: str = "fp32",
    tokens: Tokens = "pooled",
) -> FeatureSet:
    """The features of every sample: pooled, on the batches' device; or of every patch, on the CPU to save memory."""
    if tokens not in get_args(Tokens):
        raise SitusError(field="tokens", value=tokens, allowed="pooled or patches")
    features, ids, labels = [], [], []
    with evaluating(backbone):
        for batch in batches:
            with autocast(batch.inputs.device, precision):
                encoding = encoded(backbone, batch.inputs, batch.mask, positions=positions)
            vectors = pool_features(encoding, pool) if tokens == "pooled" else encoding.patches.cpu()
            features.append(vectors.float())
            ids.append(batch.ids)
            labels += [batch.targets[name] for name in ("label", "labels") if name in batch.targets]
    if not features:
        raise SitusError("there are no samples to extract features from", field="data")
    return FeatureSet(torch.cat(features), torch.cat(ids), torch.cat(labels) if labels else None)


@checks_arguments("data")
def extract_features(
    model: AnyModel,
    data: AnyData = None,
    *,
    split: str = "train",
    held_out: float | None = None,
    count: int | None = None,
    batch: int = 256,
    tokens: Tokens = "pooled",
    pool: Pool = "mean",
    precision: Precision = "fp32",
    text: Columns | Mapping[str, str] | None = None,
) -> FeatureSet:
    """Extracts the features of every sample of a split, with the samples' names and labels.

    model: whatever `open_model` takes. data: a path or a source; None for the samples that a run was trained on.
    split: train, val, test or all. tokens: "pooled", one vector per sample by `pool`, or "patches", one per patch, row
    by row of the grid in `facts`. text: the columns of sentences. held_out: the share of val and test, where the
    data has no such splits. count: at most so many samples, the same every time. batch: samples per batch. precision:
    fp32, or bf16 for autocast.

    >>> features = situs.extract_features("runs/mp3", count=20).features
    >>> features.shape
    torch.Size([20, 48])
    """
    model = opened(model)
    words = model.samples.modality.ids
    if words and tokens == "patches":
        reason = "does not apply to sentences, which differ in their number of tokens; use tokens='pooled'"
        raise SitusError(f"tokens='patches': {reason}", field="tokens")
    chosen = {"split": split, "held_out": held_out, "count": count, "batch": batch}
    loader = load_any(model, data, **chosen, **({} if text is None else {"text": text}))
    backbone = model.backbone
    grid = backbone.out_grid if tokens == "patches" else None
    if grid and (needed := 4 * loader.plan.n * math.prod(grid) * backbone.out_dim) > _LARGEST:
        reason = f"the patch features of {loader.plan.n:,} {loader.source.things} take {needed / 2**30:,.0f} GiB"
        limit = f"but one file can have at most {_LARGEST >> 30} GiB"
        raise SitusError(f"{reason}, {limit}; use fewer {loader.source.things}", field="count")
    features = extract(backbone, loader, pool, positions=model.positions, precision=precision, tokens=tokens)
    mean, std = ((), ()) if words else model.data.normalisation
    preparation = {"img_size": model.samples.size, "mean": mean, "std": std}
    facts = {
        **model.facts,
        "data": loader.source.name,
        **({"pool": pool} if grid is None else {"tokens": tokens, "grid": grid}),
        "positions": model.positions,
        "precision": precision,
        **(loader.pipeline.facts if words else preparation),
        "situs": __version__,
    }
    names = tuple(loader.source.key(row) for row in sample_of(features.ids).tolist())
    return replace(features, names=names, classes=loader.classes, facts=facts, left_out=loader.source.left_out())


SUFFIXES = (".safetensors", ".npz", ".npy")
"""File formats: everything in one safetensors file, the same for NumPy, or the features alone."""


def check_form(path: str | os.PathLike[str]) -> None:
    """Refuses a file whose ending is none of `SUFFIXES`."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise SitusError(field="out", value=str(path), allowed=f"a file ending in {', '.join(SUFFIXES)}")


def write_features(path: str | os.PathLike[str], features: FeatureSet) -> None:
    """Writes features, ids, labels and facts as one file, in the format of its ending.

    Where the samples have names, a table NAME.names.csv gives the sample and the class of each row.
    """
    check_form(path)
    path = Path(path)
    if features.names is not None:  # names first: features without them could not be matched to samples
        write_result(path.with_suffix(".names.csv"), _names(features))
    write_result(path, _arrays(features, path.suffix.lower()))


def _arrays(features: FeatureSet, suffix: str) -> bytes:
    import numpy as np

    tensors = {"features": features.features, "ids": features.ids, "labels": features.labels}
    present = {name: tensor.cpu().contiguous() for name, tensor in tensors.items() if tensor is not None}
    # One entry: several would be written in no fixed order, and the file's bytes would differ.
    described = json.dumps(features.facts, sort_keys=True)
    if suffix == ".safetensors":
        return save(present, {"situs": described})
    file, arrays = io.BytesIO(), {name: tensor.numpy() for name, tensor in present.items()}
    if suffix == ".npy":
        np.save(file, arrays["features"])
    else:
        np.savez(file, metadata=np.array(described), **arrays)
    return file.getvalue()


def _names(features: FeatureSet) -> bytes:
    assert features.names is not None
    labels = [None] * len(features.names) if features.labels is None else features.labels.tolist()
    classes = features.classes or ()
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow(("row", "id", "name", "label", "class"))
    for row, (number, name, label) in enumerate(zip(features.ids.tolist(), features.names, labels, strict=True)):
        numbers: list[int] = [] if label is None else [label]
        if isinstance(label, list):
            numbers = [at for at, has in enumerate(label) if has == 1]
        names = ";".join(classes[at] for at in numbers) if classes else ""
        table.writerow((row, number, name, ";".join(map(str, numbers)), names))
    return file.getvalue().encode("utf-8", "backslashreplace")


FIRST, LAST = "embedding", "norm"
"""The depths before and after the blocks; a block's depth is its number, from 1 on."""


class Layer(NamedTuple):
    """depth: "embedding", "1", "2", …, "norm". grid: of these patches. patches: [B, N, D]."""

    depth: str
    grid: tuple[int, ...]
    patches: Tensor


def patch_layers(backbone: Backbone, tokens: Tensor, positions: Positions | None, see: Callable[[Layer], None]) -> None:
    """Calls `see` with the patch tokens [B, N, D] at every depth of the model.

    A model whose depths have different shapes (Swin) gives its embedding and its end, the latter on a coarser grid.
    """
    stream = backbone.assemble(tokens, positions)
    see(Layer(FIRST, backbone.grid, stream.z[:, stream.prefix :]))

    def tap(number: int, z: Tensor) -> None:
        see(Layer(str(number), backbone.grid, z[:, stream.prefix :]))

    z = backbone.run_layers(stream, None, () if "depths" in backbone.refusals else (tap,))
    see(Layer(LAST, backbone.out_grid, backbone.finish(replace(stream, z=z)).patches))
