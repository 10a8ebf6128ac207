"""Tiny runs that several verbs look at: two classifiers and one MP3 pretraining on 8-pixel images."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Trained(NamedTuple):
    """data: an image folder with train/ and val/ of three classes. The others are run folders."""

    data: Path
    one: Path
    two: Path
    mp3: Path


def write_images(folder: Path, classes: dict[str, int], each: int) -> None:
    """PNG files of 8 × 8 pixels, each class around its own grey."""
    import numpy as np
    from PIL import Image

    chance = np.random.default_rng(len(str(folder.name)))
    for name, grey in classes.items():
        (folder / name).mkdir(parents=True)
        for number in range(each):
            pixels = np.clip(chance.normal(grey, 30, (8, 8, 3)), 0, 255).astype("uint8")
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


@pytest.fixture(autouse=True)
def _undrawn(undrawn: None) -> None:
    """Pages are made and their figures not drawn: tests/pages draws the page of every result."""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a verb writes where nothing is said (results/) is no part of the repository."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    from situs.config import from_dict
    from situs.train.run import RunConfig, train_run

    base = tmp_path_factory.mktemp("trained")
    classes = {"dark": 60, "light": 190, "middle": 125}
    write_images(base / "data" / "train", classes, 8)
    write_images(base / "data" / "val", classes, 5)
    shape = {"depth": 2, "embed_dim": 16, "num_heads": 2}

    def config(method: dict[str, Any], seed: int, **data: Any) -> RunConfig:
        return from_dict(
            RunConfig,
            {
                "method": method,
                "backbone": {"name": "vit_tiny_patch16_224", "patch_size": 4, "model_args": shape},
                "data": {"path": str(base / "data"), "img_size": 8, "batch": 12, "workers": 0, **data},
                "optim": {"lr": 1e-2, "ema": 0.5, "warmup_epochs": 0},
                "train": {"epochs": 3, "seed": seed, "precision": "fp32", "log_every": 2},
            },
        )

    runs = {
        "one": config({"name": "supervised"}, 0),
        "two": config({"name": "supervised"}, 1, mean=[0.5, 0.5, 0.5], std=[0.5, 0.5, 0.5]),
        "mp3": config({"name": "mp3", "mask_ratio": 0.5}, 0),
    }
    for name, each in runs.items():
        train_run(each, out=base / name, device="cpu")
    return Trained(base / "data", *(base / name for name in runs))


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three pictures of noise, which no prior helps to guess."""
    import numpy as np
    from PIL import Image

    folder = tmp_path_factory.mktemp("photographs")
    chance = np.random.default_rng(0)
    for number in range(3):
        Image.fromarray(chance.integers(0, 256, (70, 64, 3), dtype="uint8")).save(folder / f"{number}.png")
    return folder
