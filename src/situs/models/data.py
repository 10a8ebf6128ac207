"""The data that a model is looked at with, prepared as it was trained: one rule for every verb.

Only a run remembers where its images are; for any other model they must be named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from situs.data.augment.recipes import denormalise
from situs.data.loader import Loader, make_loader
from situs.data.sources import judged_split, open_source
from situs.data.sources.subset import Subset
from situs.errors import SitusError
from situs.limits import check_value
from situs.models.model import Model, check_classifier
from situs.results import Provenance
from situs.train import distributed


def load_set(
    model: Model,
    path: str | None,
    split: str | None,
    batch: int,
    device: torch.device | str,
    *,
    count: int | None = None,
    shared: bool = False,
) -> Loader:
    """The images at `path` as the model was trained to see them: not augmented, in their own order.

    split: where none is named, val, or the share that the model's data holds out; all of data that is not split.
    count: at most so many over all ranks, a uniform choice that is the same every time. shared: only this rank's part
    of them, for an evaluation that sums over the ranks; else each rank has them all.
    """
    rank, world = (distributed.rank(), distributed.world()) if shared else (0, 1)
    if not (path or model.data.path):
        raise SitusError(f"{model.name}: only a run knows its data; say where the images are", field="data")
    if world > 1:  # each rank takes the same share of a batch
        batch = max(world, batch - batch % world)
    data = replace(model.data, path=path or model.data.path, split=split, batch=batch)
    chosen = split or judged_split(data.path, data.held_out)
    source = open_source(data.path, chosen, channels=data.channels, strict=data.strict, held_out=data.held_out)
    if chosen is None:
        told = ", those of the training too" if path is None else ""
        source.notes.append(
            f"{source.name}: is not split, so that all its images were taken{told}; a share can be held out"
        )
    if count is not None:
        check_value("count", count, ">= 1")
        source = Subset(source, count)
    if world > max(1, len(source)):  # which would leave a rank with nothing to add to the sums
        raise SitusError(f"{source.name}: {len(source)} images are too few for {world} ranks", field="count")
    return make_loader(data, None, device, rank=rank, world=world, source=source)


def load_bank(
    model: Model,
    path: str | None,
    split: str | None,
    batch: int,
    *,
    bank_count: int | None = None,
    count: int | None = None,
    field: str = "bank_count",
) -> tuple[Loader, Loader]:
    """The training split to learn from, at most `bank_count` images of it, and another split to be judged on.

    Refuses to judge on what was learned from, and splits whose classes differ.
    """
    if split in ("train", "training"):
        raise SitusError(
            f"split={split!r}: is what the classifier is fitted to; judge it on val or test", field="split"
        )
    if bank_count is not None:
        check_value(field, bank_count, ">= 1")
    bank = load_set(model, path, "train", batch, model.device, count=bank_count)
    test = load_set(model, path, split or "val", batch, model.device, count=count)
    if bank.classes != test.classes:
        raise SitusError(f"{test.source.name}: its classes are not those of the training split", field="data")
    return bank, test


def check_labels(loader: Loader) -> tuple[str, ...]:
    """The classes of data that must have labels."""
    if loader.classes is None:
        raise SitusError(f"{loader.source.name}: has no labels to compare with", field="data")
    return loader.classes


def check_classes(model: Model, loader: Loader) -> None:
    """Refuses data whose labels do not mean what the classifier's outputs mean."""
    check_classifier(model)
    classes = check_labels(loader)
    if model.classes is not None and model.classes != classes:
        pairs = zip(model.classes, classes, strict=False)
        first = next((pair for pair in pairs if pair[0] != pair[1]), None)
        counts = f"there are {len(classes)}, not {len(model.classes)}"
        said = f"{first[0]!r} there is {first[1]!r} here" if first else counts
        raise SitusError(
            f"{loader.source.name}: its classes are not those {model.name} was trained on: {said}", field="data"
        )


def top1_reason(model: Model, loader: Loader) -> str | None:
    """Why the data's labels cannot be compared with the classifier's answers, or None where they can."""
    if loader.classes is None:
        return "the data has no labels"
    if model.classes not in (None, loader.classes):
        return "the data's classes are not those the model was trained on"
    return None


def examples(loader: Loader, count: int) -> Tensor:
    """The first images as the model sees them, [n, C, H, W] in [0, 1] on the CPU, for pictures."""
    batch = next(iter(loader), None)
    if batch is None:
        raise SitusError(f"{loader.source.name}: has no images", field="data")
    return denormalise(batch.inputs[:count], loader.mean, loader.std).cpu()


def made_with(
    model: Model,
    loader: Loader,
    seed: int,
    precision: str = "fp32",
    *,
    beside: Sequence[Loader] = (),
    more: Mapping[str, str] | None = None,
) -> Provenance:
    """What a result must say of its making, asked for when its images have been gone through.

    beside: other data that was looked at. more: further facts.
    """
    from situs import __version__

    size = "x".join(map(str, model.data.size))
    made = {"data": loader.source.name, "img_size": size, "seed": seed, "precision": precision, "situs": __version__}
    said = loader.source.left_out()
    facts = {
        "name": model.name,
        **model.facts,
        **made,
        **({"left out": " ".join(said)} if said else {}),
        **(more or {}),
    }
    return Provenance(
        facts, (model.origin,), tuple(text for each in (*beside, loader) for text in each.source.left_out())
    )
