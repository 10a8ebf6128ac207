"""What the findings of `situs demo` share: images, the small ViT, and its training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import situs
from situs.report.html import Finding, Page
from situs.train.checkpoint import RunFolder

PATCH = 7
GRID = (4, 4)
PLACES = GRID[0] * GRID[1]
MODEL = "vit_tiny_patch16_224"
MODEL_ARGS = {"embed_dim": 64, "depth": 3, "num_heads": 4, "mlp_ratio": 2, "act_layer": "relu"}
"""As small as possible; relu, because on a CPU the backward pass of gelu takes a quarter of a step."""

AUGMENT = {"crop": "pad", "pad": 2}
AFTER, ALONE = "after-MP3", "from-random-weights"
"""The runs of the two classifiers."""


@dataclass(frozen=True)
class Length:
    """The length of the trainings. images: for pretraining; labelled: for fine-tuning. evaluations: of a classifier
    during training. test_images: those that findings are measured on."""

    images: int = 9000
    epochs: int = 9
    labelled: int = 300
    finetune_epochs: int = 30
    evaluations: int = 3
    test_images: int = 500


QUICK = Length(images=256, epochs=1, labelled=100, finetune_epochs=2, evaluations=1, test_images=50)


@dataclass(frozen=True)
class Stage:
    """What the findings share. runs: the folder of the trained runs."""

    seed: int
    quick: bool
    runs: Path
    page: Page = field(default_factory=lambda: Page("situs demo"))

    @property
    def length(self) -> Length:
        """The full length, or that of --quick."""
        return QUICK if self.quick else Length()

    @property
    def test_images(self) -> dict[str, Any]:
        """Arguments of a measurement that choose the test images."""
        return {"split": "test", "count": self.length.test_images, "batch": self.length.test_images}

    def add(self, finding: Finding) -> Finding:
        """Puts the finding on the page."""
        self.page.findings.append(finding)
        return finding


def train(stage: Stage, name: str, images: int, **options: Any) -> list[dict[str, Any]]:
    """Trains the small ViT on some of the embedded images, as the run `name`, and gives its log."""
    backbone = {"name": MODEL, "patch_size": PATCH, "model_args": MODEL_ARGS}
    data = {"path": "samples", "img_size": GRID[0] * PATCH, "channels": 1, "count": images}
    fixed: dict[str, Any] = {"augment": AUGMENT, "device": "cpu", "quiet": True, "seed": stage.seed}
    with torch.random.fork_rng(devices=[]):
        run = situs.pretrain(data, out=stage.runs / name, backbone=backbone, **fixed, **options)
    return RunFolder.open(run, writer=False).records()


def pretrain(stage: Stage) -> list[dict[str, Any]]:
    """Trains MP3 on all images without labels, and gives its log."""
    how: dict[str, Any] = {
        "method": {"name": "mp3", "mask_ratio": 0.5},
        "optim": {"lr": 4e-3, "warmup_epochs": 1, "min_lr": 1e-5, "clip": 1.0},
        "train": {"log_every": 2 if stage.quick else 35},
        "batch": 128,
    }
    return train(stage, "mp3", stage.length.images, epochs=stage.length.epochs, **how)


def classify(stage: Stage, name: str) -> None:
    """Trains a classifier with few labels; AFTER starts from the weights of MP3."""
    start = {"init": str(stage.runs / "mp3"), "init_positions": False} if name == AFTER else {}
    how: dict[str, Any] = {
        "method": "supervised",
        "optim": {"lr": 1e-3, "warmup_epochs": 2, "clip": 1.0},
        "train": {"log_every": 100},
        "batch": 50,
        "probe_every": stage.length.finetune_epochs // stage.length.evaluations,
    }
    train(stage, name, stage.length.labelled, epochs=stage.length.finetune_epochs, **how, **start)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread, so that the number of cores changes no figure."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
