"""The demo's training: MP3 on the embedded images, then a classifier with it and without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from situs.backbones import BackboneConfig
from situs.backbones.config import PositionKind
from situs.cli.demo_sections import GRID, MODEL, PATCH, PLACES, Lines, Stage
from situs.data.augment.recipes import AugmentConfig
from situs.data.loader import DataConfig, Loader, make_loader
from situs.data.sources import open_source
from situs.data.sources.subset import Subset
from situs.evaluate.hooks import Validation
from situs.methods import MP3Config, SupervisedConfig
from situs.methods.base import Method
from situs.models.initialise import initialise
from situs.report import figures
from situs.results import percent
from situs.train.checkpoint import RunFolder
from situs.train.contract import RunState
from situs.train.loop import TrainConfig, fit
from situs.train.optim import OptimConfig
from situs.train.run import RunConfig, make_method

LABELLED = 1000
"""Training images whose labels the classifiers see; MP3 sees all of them without."""


@dataclass(frozen=True)
class Length:
    """How long the section trains."""

    images: int = 9000
    epochs: int = 10
    labelled: int = LABELLED
    finetune_epochs: int = 24
    judged: int = 2000


Curve = tuple[list[int], list[float]]
"""Epochs, and the test accuracy after each."""

QUICK = Length(images=256, epochs=1, labelled=100, finetune_epochs=2, judged=200)


def show_training(stage: Stage) -> Lines:
    """Pretrains, and fine-tunes with it and without it."""
    length = QUICK if stage.quick else Length()
    section = stage.page.section("MP3 learns where patches were")
    section.text(
        f"MP3 takes the positions away from all {PLACES} patches of an image, shows a random half of them to the "
        "others, and asks each patch where it was. No label is needed. Below, a small ViT is trained so on "
        f"{length.images:,} images; then a classifier learns from {length.labelled:,} labelled ones, once on top of it "
        "and once from random weights, everything else being equal."
    )
    with torch.random.fork_rng(devices=[]):
        history = _pretrain(stage, length)
        curves = {
            name: _finetune(stage, length, name, source)
            for name, source in (("after MP3", stage.runs / "mp3"), ("from random weights", None))
        }
    steps = [row["step"] for row in history]
    right = {
        "MP3": (steps, [100 * row["position_accuracy"] for row in history]),
        "chance": (steps, [100 / PLACES for _ in steps]),
    }
    drawn = figures.curves(right, "update", "patches placed right, %", title="Pretraining: where was each patch?")
    section.figure(
        figures.png(drawn), f"{length.epochs} epochs with a context of half the patches; chance is 1/{PLACES}."
    )
    tops = {name: (epochs, [100 * top for top in found]) for name, (epochs, found) in curves.items()}
    drawn = figures.curves(tops, "epoch", "test images classified right, %", title="Fine-tuning with few labels")
    section.figure(figures.png(drawn), f"{length.labelled:,} labelled images, the same recipe and order for both.")
    final = {name: found[-1] for name, (_, found) in curves.items()}
    if final["after MP3"] > final["from random weights"]:  # not after the few steps of --quick
        section.title += ", and that helps"
    section.table(
        ["classifier", "test accuracy"],
        [[name, percent(top)] for name, top in final.items()],
        f"On {length.judged:,} test images that neither training saw.",
    )
    return [
        ("MP3, patches placed right", f"{percent(history[-1]['position_accuracy'])} (chance {percent(1 / PLACES)})"),
        *((f"top-1 {name}", percent(top)) for name, top in final.items()),
    ]


def config_of(stage: Stage, method: Any, positions: PositionKind | None = None, **fields: Any) -> RunConfig:
    """A run of the demo's small ViT on the embedded images."""
    shape = {"embed_dim": 64, "depth": 3, "num_heads": 4}
    return RunConfig(
        method=method,
        backbone=BackboneConfig(MODEL, patch_size=PATCH, positions=positions, model_args=shape),
        data=DataConfig(path="samples", img_size=GRID[0] * PATCH, channels=1, batch=128, seed=stage.seed),
        augment=AugmentConfig(crop="pad", pad=2),
        **fields,
    )


def load(config: RunConfig, count: int, split: str = "train", batch: int | None = None) -> Loader:
    """`count` images: augmented for training, as they are for tests."""
    data = config.data if batch is None else replace(config.data, batch=batch)
    source = Subset(open_source("samples", split, channels=1), count)
    return make_loader(data, config.augment if split == "train" else None, source=source)


def _pretrain(stage: Stage, length: Length) -> list[dict[str, Any]]:
    config = config_of(
        stage,
        MP3Config(mask_ratio=0.5),
        optim=OptimConfig(lr=2e-3, warmup_epochs=1, min_lr=1e-5, clip=1.0),
        train=TrainConfig(epochs=length.epochs, log_every=2 if stage.quick else 35, seed=stage.seed),
    )
    stage.models["mp3"] = method = make_method(config, None)
    history = train(stage, "pretraining", config, method, load(config, length.images), "mp3")
    return [row for row in history if "position_accuracy" in row]


def _finetune(stage: Stage, length: Length, name: str, source: Path | None) -> tuple[list[int], list[float]]:
    """Epochs and test accuracies."""
    config = config_of(
        stage,
        SupervisedConfig(),
        optim=OptimConfig(lr=1e-3, warmup_epochs=2, clip=1.0),
        train=TrainConfig(epochs=length.finetune_epochs, log_every=100, seed=stage.seed),
    )
    loader = load(config, length.labelled, batch=50)
    stage.models[name] = method = make_method(config, loader.classes)
    if source is not None:
        initialise(method.backbone, str(source), positions=False)
    test = load(config, length.judged, "test", batch=min(length.judged, 500))
    every = max(1, length.finetune_epochs // 6)
    look = Validation(test, every, "fp32")
    history = train(stage, f"classifier {name}", config, method, loader, name.replace(" ", "-"), look)
    rows = [row for row in history if "val_top1" in row]
    return [round(row["epoch"]) for row in rows], [row["val_top1"] for row in rows]


def train(
    stage: Stage, what: str, config: RunConfig, method: Method, loader: Loader, name: str, *hooks: Any
) -> list[dict[str, Any]]:
    """Trains through the engine, quietly, as the run `name`, and gives the log."""
    run = RunFolder.create(
        stage.runs / name, config, classes=loader.classes if "label" in method.needs_targets else None
    )
    told = _Told(lambda state: stage.say(f"{what}, epoch {state.epoch + 1} of {config.train.epochs}"))
    result = fit(method, loader, config.train, config.optim, run, hooks=(*hooks, told), quiet=True)
    if result.interrupted:
        raise KeyboardInterrupt
    method.eval()
    return run.records()


@dataclass(frozen=True)
class _Told:
    """A hook that says how far it is, a few times."""

    tell: Callable[[RunState], None]

    def after_step(self, state: RunState) -> None:
        """Nothing."""

    def after_epoch(self, state: RunState) -> None:
        epochs = max(1, state.total // state.steps_per_epoch)
        if (state.epoch + 1) % max(1, epochs // 4) == 0:
            self.tell(state)
