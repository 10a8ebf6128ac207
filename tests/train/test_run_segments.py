"""A run of segmentation is a run like any other: killed and resumed bit for bit, two ranks as one, exported whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from masked import write_ade

from situs.config import from_dict, merge
from situs.measure.hooks import validation_hooks
from situs.measure.segments import evaluate_segments
from situs.models import open_model
from situs.models.export import export_run
from situs.train.assemble import Setup
from situs.train.checkpoint import RunFolder
from situs.train.contract import RunState
from situs.train.run import RunConfig, load_run, make_method, resolve_config, train_run

BASE: dict[str, Any] = {
    "method": {"name": "segmentation", "width": 16, "auxiliary_width": 16},
    "backbone": {
        "name": "vit_tiny_patch16_224",
        "patch_size": 4,
        "drop_path": 0.2,
        "model_args": {"depth": 2, "embed_dim": 16, "num_heads": 2},
    },
    "data": {"img_size": 24, "batch": 4, "workers": 0, "masks": {"first": 1, "void": [0]}},
    "augment": {"crop": "scaled", "interpolation": "bilinear", "jitter": 0.2},
    "optim": {"lr": 1e-3, "warmup_epochs": 0, "layer_decay": 0.7, "ema": 0.9, "clip": 1.0},
    "train": {"epochs": 3, "precision": "fp32", "log_every": 1, "save_every": 2},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ade(tmp_path_factory.mktemp("ade"), {"training": 8, "validation": 3})


def config(data: Path, **tables: Any) -> RunConfig:
    return from_dict(RunConfig, merge(BASE, {"data": {"path": str(data)}, **tables}))


def tensors(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = RunFolder.open(run, writer=False).latest()
    assert checkpoint is not None
    files = ("model", "optimizer", "ema", "generators")
    return {f"{file}/{name}": value for file in files for name, value in checkpoint.tensors(file).items()}


class Killed(BaseException):
    """As sudden as a kill: nothing is saved on the way out."""


class _Killer:
    def after_step(self, state: RunState) -> None:
        if state.step == 3:
            raise Killed

    def after_epoch(self, state: RunState) -> None: ...


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "whole"
    train_run(config(data), Setup(hooks=validation_hooks(3)), out=out, device="cpu", quiet=True)
    return out


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(data: Path, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        train_run(config(data), Setup(hooks=lambda *_: [_Killer()]), out=tmp_path / "killed", device="cpu", quiet=True)
    assert [each.step for each in [RunFolder.open(tmp_path / "killed", writer=False).latest()] if each] == [2]
    train_run(config(data), resume=tmp_path / "killed", device="cpu", quiet=True)
    one, two = tensors(whole), tensors(tmp_path / "killed")
    assert one.keys() == two.keys() and len(one) > 200
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def test_the_log_and_the_config_say_what_was_learned(data: Path, whole: Path) -> None:
    loaded = load_run(whole)
    assert loaded.config.data.target == "mask" and loaded.config.data.masks.classes == ("ground", "disc")
    assert loaded.classes == ("ground", "disc") and loaded.ema
    assert loaded.method.backbone.model.num_classes == 0
    last = RunFolder.open(whole, writer=False).records()[-1]
    assert {"val_miou", "val_accuracy", "val_loss"} <= last.keys() and 0 < last["val_miou"] < 1
    assert evaluate_segments(str(whole), pictures=0).scores.miou == pytest.approx(last["val_miou"], abs=1e-12)
    one = resolve_config(config(data))
    assert make_method(one, one.data.masks.classes).classes == 2


def test_an_export_segments_as_the_run_does(data: Path, whole: Path, tmp_path: Path) -> None:
    import timm

    done = export_run(whole, tmp_path / "exported")
    assert "situs_method.safetensors. Only Situs reads this file" in " ".join(done.notes)
    assert "2, one for each pixel (segmentation)" in (tmp_path / "exported" / "README.md").read_text()
    run, export = (evaluate_segments(str(each), data, pictures=0) for each in (whole, tmp_path / "exported"))
    assert torch.equal(run.scores.answers, export.scores.answers) and export.classes == ("ground", "disc")
    model = timm.create_model(f"local-dir:{tmp_path / 'exported'}", pretrained=True).eval()
    inputs = torch.randn(1, 3, 24, 24)
    wanted = open_model(str(whole)).backbone.model.eval().forward_features(inputs)
    torch.testing.assert_close(model.forward_features(inputs), wanted)
