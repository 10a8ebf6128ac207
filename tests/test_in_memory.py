"""Images in memory: six kinds of them in six functions, to the numbers of the same images in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from memory_kinds import CLASSES, KINDS, SIDE, TorchSet, pictures, write_folder

import situs
from situs.errors import SitusError
from situs.measure.features import extract_features

TINY: dict[str, Any] = {
    "backbone": {
        "name": "vit_tiny_patch16_224",
        "patch_size": 8,
        "model_args": {"depth": 1, "embed_dim": 16, "num_heads": 2},
    },
    "optim": {"warmup_epochs": 0, "lr": 1e-3},
    "batch": 9,
    "steps": 3,
    "device": "cpu",
    "quiet": True,
}
TUNED = {**{name: TINY[name] for name in ("batch", "device", "quiet", "optim")}, "steps": 2, "validate_every": 0}


def ordered(count: int, seed: int) -> tuple[np.ndarray, list[int]]:
    """By class, as the files of a folder are."""
    pixels, labels = pictures(count, seed)
    order = np.argsort(labels, kind="stable")
    return pixels[order], [labels[index] for index in order]


TRAIN, VAL = ordered(18, 0), ordered(9, 1)


def used(folder: Path, data: Any) -> dict[str, Any]:
    """What six functions make of the data."""
    run = situs.pretrain({"path": data, "img_size": SIDE}, out=folder / "run", **TINY)
    tuned = situs.finetune(run, data=data, out=folder / "tuned", **TUNED)
    accuracy: Any = situs.evaluate_accuracy(tuned, data)
    features = extract_features(run, data)
    audit = situs.audit_gradients(tuned, data, count=2, attacks=["april"], defences=["none"])
    return {
        "pretrain": weights(run),
        "finetune": weights(tuned),
        "evaluate_accuracy": (accuracy.accuracy, accuracy.answers.tolist()),
        "features": features.features,
        "predict": [row.probability for row in situs.predict(tuned, data).rows],
        "audit_gradients": [pair.scores["psnr"] for pair in audit.pairs],
        "classes": features.classes,
    }


def weights(run: Path) -> torch.Tensor:
    backbone = situs.open_model(run).backbone
    return torch.cat([each.detach().flatten() for each in backbone.parameters()])


@pytest.fixture(scope="module")
def filed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same of the files."""
    root = tmp_path_factory.mktemp("files")
    write_folder(root / "images/train", *TRAIN)
    write_folder(root / "images/val", *VAL)
    return used(root, root / "images")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_numbers_of_the_files(kind: str, filed: dict[str, Any], tmp_path: Path) -> None:
    found = used(tmp_path, {"train": KINDS[kind](*TRAIN), "val": KINDS[kind](*VAL)})
    assert found.pop("classes") == (("0", "1", "2") if kind == "tensors" else CLASSES)
    for name, value in found.items():
        same = torch.equal(value, filed[name]) if isinstance(value, torch.Tensor) else value == filed[name]
        assert same, name


@pytest.mark.parametrize("kind", KINDS)
def test_one_sequence_is_held_out_like_a_folder_without_splits(kind: str, tmp_path: Path) -> None:
    data = KINDS[kind](*ordered(24, 0))
    run = situs.pretrain({"path": data, "img_size": SIDE, "held_out": 0.3}, out=tmp_path / "run", **TINY)
    assert json.loads((run / "config.json").read_text())["data"]["path"].startswith("memory:24-")
    parts = [{*(extract_features(run, data, split=split).names or ())} for split in ("train", "val")]
    assert parts[0] | parts[1] == {str(index) for index in range(24)}
    assert not parts[0] & parts[1]
    assert len(parts[1]) in range(3, 13)


def test_a_run_knows_its_data_in_memory_and_says_when_it_is_gone(tmp_path: Path) -> None:
    data = {"train": TorchSet(*TRAIN), "val": TorchSet(*VAL)}
    run = situs.pretrain({"path": data, "img_size": SIDE}, out=tmp_path / "run", **TINY)
    assert len(extract_features(run).features) == 18
    for seed in range(2, 7):  # others are remembered in its place
        extract_features(run, TorchSet(*ordered(6, seed)))
    with pytest.raises(
        SitusError,
        match=r"the data \(18 \+ 9 images in memory\) no longer exists; pass the "
        r"data again",
    ):
        extract_features(run)
    assert len(extract_features(run, data).features) == 18


def test_a_run_goes_on_with_the_same_data_alone(tmp_path: Path) -> None:
    pixels, labels = ordered(18, 0)
    once = situs.pretrain({"path": TorchSet(pixels, labels), "img_size": SIDE}, out=tmp_path / "once", **TINY)
    held = {**TINY, "steps": 2}
    run = situs.pretrain({"path": TorchSet(pixels, labels), "img_size": SIDE}, out=tmp_path / "run", **held)
    more: dict[str, Any] = {"resume": run, "steps": 3, "quiet": True, "device": "cpu"}
    for other, said in (
        ((pixels[:-1], labels[:-1]), "there were 18 images, and now there are 17 images"),
        ((pixels, [*labels[:-1], 0]), "its labels differ"),
        ((pixels ^ 1, labels), "its images differ"),
    ):
        with pytest.raises(SitusError, match=said):
            situs.pretrain(TorchSet(*other), **more)
    situs.pretrain(TorchSet(pixels, labels), **more)
    # The schedule of the first two steps was that of a shorter run, so that only a run of equal length has equal bits;
    # the slow test holds that one.
    assert weights(run).shape == weights(once).shape
    assert json.loads((run / "config.json").read_text())["train"]["max_steps"] == 3


def test_labels_that_are_missing_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(SitusError, match=r"the data in memory has no labels; .* pass \(image, label\) pairs"):
        situs.pretrain({"path": TRAIN[0], "img_size": SIDE}, method="supervised", out=tmp_path / "run", **TINY)
    assert not (tmp_path / "run").exists()


def test_workers_read_a_dataset_to_the_same_bits(tmp_path: Path) -> None:
    data = {"path": TorchSet(*TRAIN), "img_size": SIDE, "resident": "never"}
    runs = [situs.pretrain({**data, "workers": workers}, out=tmp_path / f"{workers}", **TINY) for workers in (0, 2)]
    assert torch.equal(weights(runs[0]), weights(runs[1]))
