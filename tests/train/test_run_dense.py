"""Runs of dense tasks are runs like any other: killed by SIGKILL and resumed bit for bit, two ranks as one; objects are
learned by heart."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from figures import write_coco
from launch import torchrun
from masked import write_ade
from warm import warm

from situs.config import from_dict, merge, to_dict
from situs.measure.objects import evaluate_objects
from situs.models.export import export_run
from situs.train.checkpoint import RunFolder
from situs.train.run import RunConfig, train_run

BACKBONE: dict[str, Any] = {
    "name": "vit_tiny_patch16_224",
    "patch_size": 4,
    "model_args": {"depth": 2, "embed_dim": 16, "num_heads": 2},
}
BASE: dict[str, Any] = {
    "backbone": BACKBONE,
    "data": {"img_size": 32, "batch": 4, "workers": 0},
    "optim": {"lr": 1e-3, "warmup_epochs": 0, "layer_decay": 0.7, "ema": 0.9, "clip": 1.0},
    "train": {"epochs": 3, "precision": "fp32", "log_every": 1, "save_every": 2},
}
TASKS: dict[str, dict[str, Any]] = {
    "segmentation": {
        "method": {"name": "segmentation", "width": 16, "auxiliary_width": 16, "dropout": 0.0},
        "data": {"masks": {"first": 1, "void": [0]}},
        "augment": {"crop": "scaled", "interpolation": "bilinear", "jitter": 0.2},
    },
    "detection": {
        "method": {"name": "detection", "width": 16, "hidden": 16, "anchor": 2.0, "proposals": 32, "anchors": 32,
                   "regions": 16},
        "augment": {"crop": "fitted", "scales": [0.6, 1.5], "interpolation": "bilinear"},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("dense")
    ade = write_ade(root / "ade", {"training": 8, "validation": 3})
    return {"segmentation": ade, "detection": write_coco(root / "coco", {"train": 8, "val": 3})}


def config(task: str, sets: Mapping[str, Path], /, **tables: Any) -> RunConfig:
    found = merge(merge(BASE, TASKS[task]), {"data": {"path": str(sets[task])}})
    return from_dict(RunConfig, merge(found, tables))


def tensors(run: Path, step: int = 6) -> dict[str, torch.Tensor]:
    checkpoint = RunFolder.open(run, writer=False).chosen(step)
    files = ("model", "optimizer", "ema", "generators")
    return {f"{file}/{name}": value for file in files for name, value in checkpoint.tensors(file).items()}


SCRIPT = """
import json, os, signal, sys
from situs.config import from_dict
from situs.train.assemble import Setup
from situs.train.run import RunConfig, train_run

class Killer:
    def after_step(self, state):
        if state.step == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
    def after_epoch(self, state): ...

asked = from_dict(RunConfig, json.loads(sys.argv[2]))
train_run(asked, Setup(hooks=lambda *_: [Killer()]), out=sys.argv[1], device="cpu", quiet=True)
"""
"""Trains, and is killed after a step; never where there is no such step."""


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_run_killed_by_sigkill_goes_on_to_the_same_bits(task: str, data: dict[str, Path], tmp_path: Path) -> None:
    asked = config(task, data, backbone={"drop_path": 0.2})
    train_run(asked, out=tmp_path / "whole", device="cpu", quiet=True)
    status, _, complaints = warm("-c", SCRIPT, tmp_path / "killed", json.dumps(to_dict(asked)), 3)
    assert status == -signal.SIGKILL, complaints
    found = RunFolder.open(tmp_path / "killed", writer=False).latest()
    assert found is None or found.step == 2  # the third step is lost, and what was being written may be
    train_run(asked, resume=tmp_path / "killed", device="cpu", quiet=True)
    one, two = tensors(tmp_path / "whole"), tensors(tmp_path / "killed")
    assert one.keys() == two.keys() and len(one) > 200
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
    losses = [[record["loss"] for record in RunFolder.open(tmp_path / run, writer=False).records()]
              for run in ("whole", "killed")]  # fmt: skip
    assert losses[0] == losses[1] and len(losses[0]) == 6


@pytest.mark.slow
@pytest.mark.parametrize(("task", "parallel"), [("segmentation", "ddp"), ("detection", "ddp"), ("detection", "fsdp")])
def test_two_ranks_are_one(task: str, parallel: str, data: dict[str, Path], tmp_path: Path) -> None:
    """Detection two updates long: then rounding decides which of two like proposals stays."""
    train_run(config(task, data, train={"keep_at": [2]}), out=tmp_path / "one", device="cpu", quiet=True)
    (tmp_path / "two.py").write_text(SCRIPT)
    spread = to_dict(config(task, data, train={"keep_at": [2], "parallel": parallel}))
    torchrun(tmp_path / "two.py", tmp_path / "two", json.dumps(spread), 100)
    losses = [[record["loss"] for record in RunFolder.open(tmp_path / run, writer=False).records()]
              for run in ("one", "two")]  # fmt: skip
    assert losses[1][:2] == pytest.approx(losses[0][:2], rel=1e-6) and losses[1] == pytest.approx(losses[0], rel=5e-3)
    step = 2 if task == "detection" else 6
    one, two = tensors(tmp_path / "one", step), tensors(tmp_path / "two", step)
    names = [name for name in one if not name.startswith("generators")]
    assert names and {*names} <= two.keys()
    for name in names:
        torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=2e-6, msg=lambda said, n=name: f"{n}: {said}")


@pytest.mark.slow
def test_eight_images_of_objects_are_learned_by_heart_and_found_by_the_export(tmp_path: Path) -> None:
    sets = {"detection": write_coco(tmp_path / "coco", {"train": 8})}
    asked = config(
        "detection", sets,
        method={"width": 32, "hidden": 64, "anchor": 4.0, "proposals": 64, "anchors": 64, "regions": 32},
        backbone={"patch_size": 8, "model_args": {"embed_dim": 32}},
        data={"img_size": 64, "batch": 8, "held_out": 0.0},
        augment={"crop": "none", "scales": [1.0, 1.0], "flip": 0.0},
        optim={"lr": 3e-3, "weight_decay": 0.0, "layer_decay": 1.0, "ema": None, "warmup_steps": 10},
        train={"epochs": 120, "save_every": 1000, "log_every": 50},
    )  # fmt: skip
    train_run(asked, out=tmp_path / "run", device="cpu", quiet=True)
    export_run(tmp_path / "run", tmp_path / "export")
    told = {"split": "train", "pictures": 0}
    run, export = (evaluate_objects(str(tmp_path / name), sets["detection"], **told) for name in ("run", "export"))
    for one, two in ((run.boxes, export.boxes), (run.masks, export.masks)):
        assert one.ap50 > 0.9 and (one.ap, one.ap50, one.ap75) == (two.ap, two.ap50, two.ap75)
