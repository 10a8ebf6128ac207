"""The data that a model is looked at with, prepared as it was trained: one rule for every verb.

Only a run remembers where its images are; for any other model they must be named.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset

from situs.data.config import DataConfig, Target
from situs.data.loader import Loader, make_loader
from situs.data.masks import MaskConfig
from situs.data.open import addressed, judged_split, open_source
from situs.data.sources.base import Source
from situs.data.sources.subset import HELD_OUT, Rows, Subset
from situs.data.text import Columns
from situs.errors import SitusError, counted, verb
from situs.files import absolute
from situs.limits import check_value
from situs.models.model import Model, check_classifier
from situs.models.module import in_eval_mode
from situs.models.open import open_model
from situs.results import Provenance
from situs.train import distributed
from situs.train.inputs import own_splits

AnyModel = str | Path | nn.Module | Model
"""What `open_model` takes."""

AnyData = str | Path | Source | Sequence[Any] | Mapping[str, Any] | Dataset[Any] | Tensor | np.ndarray | None
"""A path to images, a source of them, images in memory (`situs.data.sources.memory`), or None for those that a run was
trained on."""


class Read(TypedDict, total=False):
    """How samples are read, where not as the model remembers.

    snr_db: clips with background noise so many decibels below each, cut from the split's own part of the noise and the
    same every time. masks: what the numbers in masks mean. text: the columns of sentences.
    """

    snr_db: float | None
    masks: MaskConfig | None
    text: Columns | Mapping[str, str] | None


class Chosen(Read, total=False):
    """Which of the samples, for every measurement; `load_any` says what each means."""

    split: str | None
    held_out: float | None
    count: int | None
    batch: int


def opened(model: AnyModel, seed: int = 0) -> Model:
    """The model itself, or the one that is named, opened where it can be computed quickest; in eval mode.

    seed: of random weights. What else can be said of a model that is not open yet, `open_model` is told.
    """
    if not isinstance(model, Model):
        own = next(model.parameters(), None) if isinstance(model, nn.Module) else None
        model = open_model(model, seed=seed, device=distributed.start().device if own is None else own.device)
    backbone = model.backbone if model.method is not None else in_eval_mode(model.backbone)
    return model if backbone is model.backbone else replace(model, backbone=backbone)


def open_several(models: Iterable[AnyModel], seed: int = 0) -> dict[str, Model]:
    """Several models, each `opened`, by a name of its own: with its home, or a number, where another has the same."""
    found: dict[str, Model] = {}
    for each in models:
        model = opened(each, seed)
        if model.identity and model.identity in {other.identity for other in found.values()}:
            raise SitusError(f"{model.name}: is named twice", field="model")
        homes = (f"{model.name} ({home})" for home in itertools.chain([model.home or 2], itertools.count(2)))
        found[next(name for name in itertools.chain([model.name], homes) if name not in found)] = model
    return found


def load_set(
    model: Model,
    data: AnyData = None,
    *,
    shared: bool = False,
    target: Target = "class",
    **chosen: Unpack[Chosen],
) -> Loader:
    """`load_any`, for what looks at images or clips alone: a model that reads sentences is refused."""
    assert model.data  # which refuses one that reads sentences
    return load_any(model, data, shared=shared, target=target, **chosen)


def load_any(
    model: Model,
    data: AnyData = None,
    *,
    split: str | None = None,
    held_out: float | None = None,
    count: int | None = None,
    batch: int = 256,
    shared: bool = False,
    target: Target = "class",
    **read: Unpack[Read],
) -> Loader:
    """The samples at `data` as the model was trained to see them, on its device: not augmented, in their own order.

    split: where none is named, val, or the share that the model's data holds out; all of data that is not split.
    held_out: that share, where it is not the model's own. count: at most so many over all ranks, a uniform choice that
    is the same every time. batch: so many at a time. shared: only this rank's part of them, for an evaluation that sums
    over the ranks; else each rank has them all. target: what is asked of an image, its class, its mask or its objects;
    of text the class of a sentence, or words. read: see `Read`.
    """
    data = addressed(data)
    rank, world = (distributed.rank(), distributed.world()) if shared else (0, 1)
    if world > 1:  # each rank takes the same share of a batch
        batch = max(world, batch - batch % world)
    model = model.holding_out(held_out)
    config = replace(model.samples, split=split, batch=batch)
    if target != config.target:
        config = replace(config, target=target, multi_label=config.multi_label and target == "class")
    config = config.read_as(model.name, read)
    if isinstance(data, Source):
        source = data
    elif data or config.path:
        path = str(data or config.path)
        config = replace(config, path=path)
        chosen = split or judged_split(config)
        source = _opened(config, chosen, model, read.get(config.modality.reading_option))
        trained_on = absolute(path) == model.samples.path
        if split is None and held_out is None and not trained_on and isinstance(source, Rows):
            whole = counted(len(source.source), source.things)
            taken = (
                f"is not split, so that {len(source):,} of its {whole} were taken, the share that {model.name} holds"
            )
            source.notes.append(f"{source.source.name}: {taken} out of such data; held_out=0 takes all")
        if chosen is None:
            told = ", those of the training too" if trained_on else ""
            taken = f"is not split, so that all its {source.things} were taken{told}"
            source.notes.append(f"{source.name}: {taken}; a share can be held out")
    else:
        things = config.modality.things
        raise SitusError(f"{model.name}: only a run knows its data; say where the {things} are", field="data")
    if count is not None:
        check_value("count", count, ">= 1")
        source = Subset(source, count)
    if world > max(1, len(source)):  # which would leave a rank with nothing to add to the sums
        held = f"{counted(len(source), source.things)} {verb(len(source), 'are')}"
        raise SitusError(f"{source.name}: {held} too few for {world} ranks", field="count")
    loader = make_loader(config, None, model.device, rank=rank, world=world, source=source)
    loader.pipeline.check_model(model.backbone.input.words, model.backbone.name)
    return loader


def _opened(config: DataConfig, split: str | None, model: Model, asked: Any) -> Source:
    """The set; where it lacks a column that the model remembers and nobody named, the sentence says whose it is.

    asked: how it is to be read, where that was said.
    """
    try:
        return open_source(config, split)
    except SitusError as error:
        table, _, name = (error.field or "").partition(".")
        remembered = (
            table and table == config.modality.table and getattr(model.samples.modality.settings(config), name, None)
        )
        if not remembered or (asked.get(name) if isinstance(asked, Mapping) else getattr(asked, name, None)):
            raise
        said = f"{error}; {model.name} was trained on columns of these names: say which they are here"
        raise SitusError(said, field=error.fields) from error


def load_bank(
    model: Model,
    data: AnyData = None,
    *,
    train_count: int | None = None,
    split: str | None = None,
    held_out: float | None = None,
    count: int | None = None,
    batch: int = 256,
    target: Target = "class",
    **read: Unpack[Read],
) -> tuple[Loader, Loader]:
    """The training split to learn from, at most `train_count` images of it, and another split to be judged on.

    A fifth of data that has no such split is held out, where nobody says another share, and a note says so. Refuses to
    judge on what was learned from, and splits whose classes differ.
    """
    if split in ("train", "training", "all"):
        raise SitusError(
            f"split={split!r}: has what the classifier is fitted to; judge it on val or test", field="split"
        )
    data = addressed(data)
    if isinstance(data, Source):
        raise SitusError(
            f"{data.name}: is one set, and one to learn from and one to be judged on are needed", field="data"
        )
    if train_count is not None:
        check_value("train_count", train_count, ">= 1")
    model = model.holding_out(held_out)
    own = replace(model.samples, path=str(data or model.samples.path), target=target)
    alone = own.path and not own.held_out and not own_splits(own)
    model = model.holding_out(HELD_OUT if alone else None)
    noisy: dict[str, Any] = {**read, "batch": batch, "target": target}
    quiet: dict[str, Any] = {**noisy, "snr_db": None}
    bank = load_set(model, data, split="train", count=train_count, **quiet)
    test = load_set(model, data, split=split or "val", count=count, **noisy)
    if bank.classes != test.classes:
        raise SitusError(f"{test.source.name}: its classes are not those of the training split", field="data")
    if alone:
        said = f"{own.path}: has no split to be judged on, so that {HELD_OUT:g} of it, by names, is held out"
        learned = model.method is not None and model.method.needs_targets and absolute(own.path) == model.samples.path
        more = ", whose labels the training has seen too" if learned else ""
        test.source.notes.append(f"{said}{more}; held_out says another share")
    return bank, test


def check_labels(loader: Loader, *, multi_label: bool = False) -> tuple[str, ...]:
    """The classes of data that must have labels: one an image, or any number where `multi_label` allows it."""
    if loader.classes is None:
        field = ("data", "text.label") if loader.source.things == "sentences" else "data"
        raise SitusError(f"{loader.source.name}: has no labels to compare with", field=field)
    if loader.source.multi_label and not multi_label:
        raise SitusError(
            f"{loader.source.name}: is multi-label, and one class an image is asked for here", field="data"
        )
    return loader.classes


def check_classes(model: Model, loader: Loader, *, multi_label: bool = False) -> None:
    """Refuses data whose labels do not mean what the classifier's outputs mean. multi_label: any number is allowed."""
    check_classifier(model, multi_label=multi_label)
    classes = check_labels(loader, multi_label=multi_label)
    if model.classes is not None and model.multi_label != loader.source.multi_label:
        said = ("one class", "any number of classes")
        here, there = said[loader.source.multi_label], said[model.multi_label]
        raise SitusError(f"{loader.source.name}: has {here} an image, and {model.name} tells {there}", field="data")
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
    if loader.source.multi_label:
        return "the data has any number of classes an image"
    if model.classes not in (None, loader.classes):
        return "the data's classes are not those the model was trained on"
    return None


def examples(loader: Loader, count: int) -> Tensor:
    """The first images as the model sees them, [n, C, H, W] in [0, 1] on the CPU, for pictures."""
    batch = next(iter(loader), None)
    if batch is None:
        raise SitusError(f"{loader.source.name}: has no {loader.source.things}", field="data")
    return loader.shown(batch.inputs[:count]).cpu()


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

    size = {} if model.samples.modality.ids else {"img_size": "x".join(map(str, model.data.size))}
    made = {"data": loader.source.name, **size, "seed": seed, "precision": precision, "situs": __version__}
    said = tuple(dict.fromkeys(text for each in (*beside, loader) for text in each.source.left_out()))
    left = {"left out": " ".join(said)} if said else {}
    return Provenance(
        {"name": model.name, **model.facts, **made, **loader.pipeline.facts, **left, **(more or {})},
        (model.origin,),
        said,
        loader.source.things,
    )
