"""The model that is locked and the data it is fine-tuned on: a run, a model's folder, a name with weights, or our own.

Without a model a small ViT is pretrained on the embedded images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from situs.backbones import BackboneConfig
from situs.backbones.weights import HEADS
from situs.config import from_dict
from situs.data.augment.recipes import AugmentConfig
from situs.data.config import DataConfig
from situs.data.loader import make_loader
from situs.data.open import judged_split, open_source
from situs.data.sources.base import Source, TensorSource
from situs.data.sources.samples import load_samples
from situs.data.sources.subset import Subset
from situs.errors import SitusError, counted
from situs.locks.tuning.result import TuningConfig
from situs.methods import SupervisedConfig
from situs.methods.language import LanguageConfig
from situs.models.beginning import beginning
from situs.models.initialise import taken_from
from situs.models.open import Unlock
from situs.train.assemble import RunConfig, make_method, settled
from situs.train.checkpoint import RunFolder
from situs.train.config import TrainConfig
from situs.train.loop import fit
from situs.train.optim import OptimConfig
from situs.train.run import is_run, load_run

State = dict[str, Tensor]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Pretrained:
    """The model to lock: its recipe, its weights (without a head that is to be new), and the samples for the study.

    about: one line of what it is. notes: what a reader must know of the samples.
    """

    config: RunConfig
    state: State
    train: Source
    test: Source
    about: str
    notes: tuple[str, ...] = ()


def method_of(config: TuningConfig, *, texts: bool) -> Any:
    """The settings of what is learned. Sentences have no label smoothing, as BERT was tuned."""
    if config.method == "language":
        return LanguageConfig()
    return SupervisedConfig(label_smoothing=0.0) if texts else SupervisedConfig()


def from_model(
    source: str | Path, data: str | None, test_data: str | None, config: TuningConfig, unlock: Unlock | None = None
) -> Pretrained:
    """A run, a model's folder or NAME=FILE, with the samples at `data` (of a run by default its own).

    test_data: what the curves are measured on; None: the val split of the data. unlock: what opens a locked folder.
    """
    run = is_run(source)
    if run:
        loaded = load_run(source)
        recipe, about = loaded.config, f"{loaded.config.backbone.name} of a {loaded.config.method_name} run"
        described = recipe.data if data is None else replace(recipe.data, path=data, split=None)
        state = {name: value.clone() for name, value in loaded.method.backbone.model.state_dict().items()}
        begun = None
    else:
        begun = beginning(source)
        if data is None:
            raise SitusError(f"{source}: brings no data; say where the labelled samples are", field="data")
        told = {**begun.data, "path": data, **({"img_size": config.img_size} if config.img_size else {})}
        recipe, described = RunConfig(backbone=begun.backbone), from_dict(DataConfig, told)
        about, state = Path(source).name, {}
    described = replace(described.read_as(about, {"text": config.text}), held_out=described.held_out or 0.0)
    if config.longest is not None:
        described = replace(described, text=replace(described.text, longest=config.longest))
    recipe = settled(replace(recipe, method=method_of(config, texts=False), data=described, init=None))
    described = recipe.data
    backbone = replace(recipe.backbone, name=_bare(recipe.backbone.name))
    recipe = replace(recipe, method=method_of(config, texts=described.modality.ids), backbone=backbone)
    train = Subset(open_source(described, "train"), config.count)
    split = "val" if test_data is None else judged_split(replace(described, path=test_data))
    try:
        test = Subset(open_source(replace(described, path=test_data or described.path), split), config.test)
    except SitusError as error:
        if test_data is not None or "held_out" not in error.fields:
            raise
        said = f"{described.path}: has no split of its own to measure the curves on; say what they are measured on"
        raise SitusError(said, field="test_data") from None
    if begun is not None:
        made = make_method(recipe, train.classes).backbone
        _, fresh = taken_from(made, begun.init, unlock=unlock)
        state = {name: value for name, value in made.model.state_dict().items() if name not in fresh}
    elif config.method == "supervised":
        state = {name: value for name, value in state.items() if not name.startswith(HEADS)}
    alike = Path(test_data or described.path).resolve() == Path(described.path).resolve() and split is None
    return Pretrained(recipe, state, train, test, about, _shared(train, test, alike=alike))


def _shared(train: Source, test: Source, *, alike: bool) -> tuple[str, ...]:
    """A note where samples of the test set are tuned on: equal sentences, or numbers of one set (alike)."""
    if not alike and train.things != "sentences":
        return ()
    known = {train.key(index) for index in range(len(train))}
    count = sum(test.key(index) in known for index in range(len(test)))
    said = f"{count:,} of the {len(test):,} {test.things} of the test set are among those tuned on"
    return (f"{said}, so that the accuracies say less of new ones.",) if count else ()


def _bare(name: str) -> str:
    """The model's name; of a folder its config.json, so that what is made from it has fresh weights."""
    file = Path(name.removeprefix("hf:")) / "config.json"
    return str(file) if file.is_file() else name


def pretrain(config: TuningConfig, folder: Path, say: Say = lambda _: None, device: str = "cpu") -> Pretrained:
    """A small ViT, trained with labels on 8,000 embedded images; the study has the other 1,000."""
    model = {"embed_dim": 64, "depth": 3, "num_heads": 4}
    recipe = RunConfig(
        method=SupervisedConfig(),
        backbone=BackboneConfig("vit_tiny_patch16_224", patch_size=4, model_args=model),
        data=DataConfig(path="samples", img_size=28, channels=1, batch=128, seed=config.seed),
        augment=AugmentConfig(crop="pad", pad=2),
        optim=OptimConfig(lr=2e-3, warmup_epochs=1, clip=1.0),
        train=TrainConfig(epochs=config.pretrain_epochs, log_every=100, seed=config.seed, precision="fp32"),
    )
    samples = load_samples("train")
    parts = [slice(0, 8000), slice(8000, None)]
    first, rest = (TensorSource(samples.images[p], samples.labels[p], samples.classes, "samples") for p in parts)
    loader = make_loader(recipe.data, recipe.augment, device, source=first)
    with torch.random.fork_rng(devices=[]):
        method = make_method(recipe, loader.classes).to(device)
        train(method, loader, recipe, folder / "pretrained")
    say(f"pretrained a small ViT for {counted(config.pretrain_epochs, 'epochs')} on {counted(len(first), 'images')}")
    state = {name: value.cpu().clone() for name, value in method.backbone.model.state_dict().items()}
    state = {name: value for name, value in state.items() if not name.startswith(HEADS)}
    test = Subset(open_source("samples", "test", channels=1), config.test)
    about = f"a ViT of {recipe.backbone.model_args['depth']} blocks, pretrained on {len(first):,} labelled images"
    return Pretrained(recipe, state, Subset(rest, config.count), test, about)


def train(method: Any, loader: Any, recipe: RunConfig, folder: Path, *hooks: Any) -> None:
    """One training in a run of its own; Ctrl-C ends all."""
    run = RunFolder.create(folder, recipe)
    if fit(method, loader, recipe.train, recipe.optim, run, hooks=hooks, quiet=True).interrupted:
        raise KeyboardInterrupt
