"""The data that a model is evaluated on, prepared as in its training: one rule for every verb.

Only a run remembers where its data is; for any other model it must be named.
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
from situs.data.modalities import KINDS
from situs.data.modalities.mask import MaskConfig
from situs.data.open import judged_split, kind_of, open_source
from situs.data.sources.base import Source
from situs.data.sources.memory import addressed
from situs.data.sources.subset import HELD_OUT, Rows, Subset
from situs.data.text import Columns
from situs.errors import SitusError, counted, unknown_name
from situs.files import absolute
from situs.limits import check_value
from situs.models.model import Model, check_classifier
from situs.models.module import in_eval_mode
from situs.models.open import open_model
from situs.results import Provenance
from situs.train import distributed
from situs.train.assemble import own_splits

AnyModel = str | Path | nn.Module | Model
"""What `open_model` takes."""

AnyData = str | Path | Source | Sequence[Any] | Mapping[str, Any] | Dataset[Any] | Tensor | np.ndarray | None
"""A path to images, a source of them, images in memory (`situs.data.sources.memory`), or None: a run's own data."""


class Read(TypedDict, total=False):
    """How samples are read, if not as in the model's training.

    snr_db: signal-to-noise ratio of background noise that is added to clips, from the split's own part of the noise and
    the same every time. masks: the meaning of the numbers in masks. text: the columns of sentences.
    """

    snr_db: float | None
    masks: MaskConfig | None
    text: Columns | Mapping[str, str] | None


class Chosen(Read, total=False):
    """Which samples are taken, for every measurement; see `load_any`."""

    split: str | None
    held_out: float | None
    count: int | None
    batch: int


def opened(model: AnyModel, seed: int = 0) -> Model:
    """The model in eval mode; one that is named is opened on the fastest device.

    seed: of random weights. For other options use `open_model`.
    """
    if not isinstance(model, Model):
        weight = next(model.parameters(), None) if isinstance(model, nn.Module) else None
        model = open_model(model, seed=seed, device=distributed.start().device if weight is None else weight.device)
    backbone = model.backbone if model.method is not None else in_eval_mode(model.backbone)
    return model if backbone is model.backbone else replace(model, backbone=backbone)


def open_several(models: Iterable[AnyModel], seed: int = 0) -> dict[str, Model]:
    """Several models, each `opened`, by unique names: with the folder, or a number, where two have the same name."""
    by_name: dict[str, Model] = {}
    for source in models:
        model = opened(source, seed)
        if model.identity and model.identity in {other.identity for other in by_name.values()}:
            raise SitusError(f"{model.name}: is named twice", field="model")
        homes = (f"{model.name} ({home})" for home in itertools.chain([model.home or 2], itertools.count(2)))
        by_name[next(name for name in itertools.chain([model.name], homes) if name not in by_name)] = model
    return by_name


def load_set(
    model: Model,
    data: AnyData = None,
    *,
    shared: bool = False,
    target: Target = "class",
    **chosen: Unpack[Chosen],
) -> Loader:
    """`load_any` for images and clips alone: a model that reads sentences is refused."""
    assert model.data  # the property refuses a model that reads sentences
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
    """The samples at `data`, prepared as in the model's training, on its device: not augmented, in their own order.

    split: by default val, or the share that the model's data holds out; all of data that is not split. held_out: that
    share, if not the model's own. count: at most so many over all ranks, drawn uniformly and the same every time.
    batch: samples per batch. shared: only this rank's part, for an evaluation that sums over ranks; else each rank has
    them all. target: the class, the mask or the objects of an image; the class of a sentence, or words. read: see
    `Read`.
    """
    for name in read.keys() - Read.__annotations__.keys():
        raise unknown_name("option", name, Chosen.__annotations__)
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
        check_kind(model, config)
        chosen = split or judged_split(config)
        source = _opened(config, chosen, model, read.get(config.modality.reading_option))
        trained_on = absolute(path) == model.samples.path
        if split is None and held_out is None and not trained_on and isinstance(source, Rows):
            whole = counted(len(source.source), source.things)
            taken = (
                f"has no splits, so {len(source):,} of its {whole} were used (the fraction that {model.name} holds out)"
            )
            source.notes.append(f"{source.source.name}: {taken}; held_out=0 uses all")
        if chosen is None:
            training = ", including the training samples" if trained_on else ""
            taken = f"has no splits, so all its {source.things} were used{training}"
            source.notes.append(f"{source.name}: {taken}; set held_out to use only a part")
    else:
        things = config.modality.things
        raise SitusError(
            f"{model.name}: is not a run, so Situs does not know its training data; give the {things}", field="data"
        )
    if count is not None:
        check_value("count", count, ">= 1")
        source = Subset(source, count)
    if world > max(1, len(source)):  # a rank would have no samples
        few = counted(len(source), source.things)
        raise SitusError(
            f"{source.name}: has only {few}, but {world} ranks need at least {world} {source.things}; use more "
            f"{source.things} or fewer ranks",
            field="count",
        )
    loader = make_loader(config, None, model.device, rank=rank, world=world, source=source)
    loader.pipeline.check_model(model.backbone.input.words, model.backbone.name)
    return loader


def check_kind(model: Model, config: DataConfig) -> None:
    """Refuses sentences for a model of images, before a setting of images is blamed."""
    if config.kind is None and KINDS[kind := kind_of(config)].ids and not model.samples.modality.ids:
        things = f"{KINDS[kind].things}, but {model.name} takes {model.samples.modality.things}"
        raise SitusError(f"{config.path}: contains {things}", field="data")


def _opened(config: DataConfig, split: str | None, model: Model, columns: Any) -> Source:
    """The set; the error for a missing column says so where its name comes from the model's training.

    columns: those that the user named.
    """
    try:
        return open_source(config, split)
    except SitusError as error:
        table, _, name = (error.field or "").partition(".")
        remembered = (
            table and table == config.modality.table and getattr(model.samples.modality.settings(config), name, None)
        )
        if not remembered or (columns.get(name) if isinstance(columns, Mapping) else getattr(columns, name, None)):
            raise
        trained = f"{model.name} was trained on data with the column {remembered!r}"
        reason = f"{error}; {trained}; name the columns of this set"
        raise SitusError(reason, field=error.fields) from error


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
    """The training split to fit to, at most `train_count` samples of it, and another split to evaluate on.

    By default a fifth of data without an evaluation split is held out, and a note says so. Refuses to evaluate on
    training data, and splits whose classes differ.
    """
    if split in ("train", "training", "all"):
        raise SitusError(
            f"split={split!r}: the classifier is fitted to this split; evaluate on val or test", field="split"
        )
    data = addressed(data)
    if isinstance(data, Source):
        raise SitusError(f"{data.name}: is only one set; give a training set and an evaluation set", field="data")
    if train_count is not None:
        check_value("train_count", train_count, ">= 1")
    model = model.holding_out(held_out)
    config = replace(model.samples, path=str(data or model.samples.path), target=target)
    unsplit = config.path and not config.held_out and not own_splits(config)
    model = model.holding_out(HELD_OUT if unsplit else None)
    options: dict[str, Any] = {**read, "batch": batch, "target": target}
    noiseless: dict[str, Any] = {**options, "snr_db": None}
    bank = load_set(model, data, split="train", count=train_count, **noiseless)
    test = load_set(model, data, split=split or "val", count=count, **options)
    if bank.classes != test.classes:
        raise SitusError(f"{test.source.name}: its classes differ from those of the training split", field="data")
    if unsplit:
        note = (
            f"{config.path}: has no split for evaluation, so a fraction of {HELD_OUT:g} of the samples is held out, "
            "chosen by their names"
        )
        learned = model.method is not None and model.method.needs_targets
        trained = "; the training has already seen the labels of these samples" * (
            bool(learned) and absolute(config.path) == model.samples.path
        )
        test.source.notes.append(f"{note}{trained}; held_out sets the fraction")
    return bank, test


def check_labels(loader: Loader, *, multi_label: bool = False) -> tuple[str, ...]:
    """The classes of data that must have labels: one per image, or any number with `multi_label`."""
    if loader.classes is None:
        field = ("data", "text.label") if loader.source.things == "sentences" else "data"
        raise SitusError(f"{loader.source.name}: has no labels to compare with", field=field)
    if loader.source.multi_label and not multi_label:
        raise SitusError(
            f"{loader.source.name}: is multi-label, but only single-label classification is supported here",
            field="data",
        )
    return loader.classes


def check_classes(model: Model, loader: Loader, *, multi_label: bool = False) -> None:
    """Refuses data whose classes are not the classifier's. multi_label: several classes per image are allowed."""
    check_classifier(model, multi_label=multi_label)
    classes = check_labels(loader, multi_label=multi_label)
    if model.classes is not None and model.multi_label != loader.source.multi_label:
        kinds = ("single-label", "multi-label")
        here, trained = kinds[loader.source.multi_label], kinds[model.multi_label]
        raise SitusError(
            f"{loader.source.name}: the data is {here}, but {model.name} is a {trained} model", field="data"
        )
    if model.classes is not None and model.classes != classes:
        pairs = enumerate(zip(model.classes, classes, strict=False))
        first = next(((number, *pair) for number, pair in pairs if pair[0] != pair[1]), None)
        counts = f"the data has {len(classes)} classes, but the model has {len(model.classes)}"
        difference = f"class {first[0]} is {first[1]!r} in the model, but {first[2]!r} in the data" if first else counts
        raise SitusError(
            f"{loader.source.name}: its classes differ from the classes that {model.name} was trained on: {difference}",
            field="data",
        )


def top1_reason(model: Model, loader: Loader) -> str | None:
    """Why the data's labels cannot be compared with the classifier's outputs; None where they can."""
    if loader.classes is None:
        return "the data has no labels"
    if loader.source.multi_label:
        return "the data is multi-label"
    if model.classes not in (None, loader.classes):
        return "the data's classes differ from those that the model was trained on"
    return None


def examples(loader: Loader, count: int) -> Tensor:
    """The first images as the model sees them, [n, C, H, W] in [0, 1] on the CPU, for figures."""
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
    """The provenance of a result; called after its samples have been read.

    beside: other data that was used. more: further facts.
    """
    from situs import __version__

    size = {} if model.samples.modality.ids else {"img_size": "x".join(map(str, model.data.size))}
    settings = {"data": loader.source.name, **size, "seed": seed, "precision": precision, "situs": __version__}
    notes = tuple(dict.fromkeys(line for other in (*beside, loader) for line in other.source.left_out()))
    skipped = {"left out": " ".join(notes)} if notes else {}
    return Provenance(
        {"name": model.name, **model.facts, **settings, **loader.pipeline.facts, **skipped, **(more or {})},
        (model.origin,),
        notes,
        loader.source.things,
    )
