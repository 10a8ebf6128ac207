"""The verbs as functions: names that are refused, layers, what they give back, and a locked model opened."""

from __future__ import annotations

import json
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

import situs
from situs import api, models
from situs.errors import SitusError
from situs.models.export import export_model
from situs.train.run import load_run

TINY: dict[str, Any] = {
    "data": {"path": "samples", "img_size": 28, "channels": 1},
    "backbone": {
        "name": "vit_tiny_patch16_224",
        "patch_size": 7,
        "model_args": {"depth": 1, "embed_dim": 16, "num_heads": 2},
    },
    "optim": {"warmup_epochs": 0},
    "batch": 16,
    "steps": 1,
    "device": "cpu",
    "quiet": True,
}


def refused(**given: Any) -> SitusError:
    with pytest.raises(SitusError) as stop:
        situs.pretrain(**{**TINY, **given})
    return stop.value


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return situs.pretrain(**TINY, out=tmp_path_factory.mktemp("runs") / "mp3")


def recorded(run: Path) -> dict[str, Any]:
    return json.loads((run / "config.json").read_text())


def test_arguments_lie_over_the_file_and_the_file_over_the_preset(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("[optim]\nlr = 0.02\n[data]\nbatch = 8\n")
    given = {**TINY, "preset": "samples-mp3", "config": tmp_path / "own.toml", "seed": 3}
    config = recorded(situs.pretrain(**given, method={"name": "mp3", "mask_ratio": 0.25}, out=tmp_path / "run"))
    assert (config["optim"]["lr"], config["data"]["batch"]) == (0.02, 16)
    assert (config["train"]["seed"], config["data"]["seed"]) == (3, 3)
    assert config["method"]["mask_ratio"] == 0.25
    assert config["train"]["log_every"] == 35  # the preset's


def test_a_word_stands_for_a_table(run: Path, tmp_path: Path) -> None:
    assert recorded(run)["data"]["path"] == "samples"
    held = {**TINY, "data": "samples", "backbone": "vit_tiny_patch16_224"}
    other = situs.pretrain(**held, method="supervised", config=_file(tmp_path), out=tmp_path / "run")
    assert recorded(other)["backbone"] == recorded(run)["backbone"]
    assert recorded(other)["method"]["name"] == "supervised"


def _file(folder: Path) -> Path:
    file = folder / "own.toml"
    shape = "model_args = {depth = 1, embed_dim = 16, num_heads = 2}"
    file.write_text(f"[data]\nimg_size = 28\nchannels = 1\n[backbone]\npatch_size = 7\n{shape}\n")
    return file


@pytest.mark.parametrize(
    ("given", "field", "nearest"),
    [
        ({"epoch": 3}, "epoch", "epochs"),
        ({"optimizer": {"lr": 1}}, "optimizer", "optim"),
        ({"optim": {"lx": 1}}, "optim.lx", "lr"),
        ({"method": {"name": "mp3", "mask_ration": 0.5}}, "method.mask_ration", "mask_ratio"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(given: dict[str, Any], field: str, nearest: str) -> None:
    error = refused(**given)
    assert error.field == field
    assert f"perhaps {nearest};" in str(error)


def test_mistakes_know_their_field(run: Path, tmp_path: Path) -> None:
    assert refused(out=tmp_path / "x", epochs=0).field == "train.epochs"
    assert refused(out=tmp_path / "x", data={"path": "samples", "batch": 8}).args == (
        "data and batch set the same field: give only one of them",
    )
    assert refused().fields == ("out", "resume")
    assert refused(preset="samples-mp3", resume=run).fields == ("resume", "preset", "config")
    assert refused(out=tmp_path / "x", withheld="file", init=str(run)).field == "withheld"
    assert not (tmp_path / "x").exists()


def test_a_fine_tuning_knows_its_mistakes(run: Path, tmp_path: Path) -> None:
    def fields(**given: Any) -> tuple[str, ...]:
        with pytest.raises(SitusError) as stop:
            situs.finetune(**{"device": "cpu", "out": None if "resume" in given else tmp_path / "x", **given})
        return stop.value.fields

    assert fields() == ("source", "init", "backbone.name", "resume")
    assert fields(source=run, init="x.pt") == ("source", "init")
    assert fields(resume=run) == ("resume", "source", "out")
    assert fields(source=run, method="mp3") == ("method",)
    assert not (tmp_path / "x").exists()


def test_from_pretraining_to_an_export(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, Any] = {"batch": 16, "steps": 1, "device": "cpu", "quiet": True, "optim": {"warmup_epochs": 0}}
    tuned = situs.finetune(run, out=tmp_path / "ft", validate_every=0, **asked)
    assert tuned == tmp_path / "ft"
    assert recorded(tuned)["backbone"]["positions"] == "learned"
    longer = situs.finetune(resume=tuned, steps=2, device="cpu", quiet=True)
    assert load_run(longer).run.newest().step == 2
    assert recorded(longer)["probe_every"] == 0  # it began without validation
    assert not any("val_top1" in record for record in load_run(longer).run.records())
    model = situs.open_model(situs.export(tuned, tmp_path / "exported"))
    assert model.classes == load_run(tuned).classes
    assert capfd.readouterr() == ("", "")  # quiet is quiet


def test_an_interrupted_training_is_not_taken_for_a_finished_one(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from situs.train.contract import TrainResult

    monkeypatch.setattr(api, "train_pretraining", lambda config, **place: TrainResult(1, 2, True, {}, None))
    with pytest.raises(KeyboardInterrupt):
        situs.pretrain(**TINY, out=tmp_path / "x")


def test_a_locked_folder_opens_with_its_key_or_the_key_s_file(run: Path, tmp_path: Path) -> None:
    key = situs.new_key(tmp_path / "owner.key")
    exported = situs.export(run, tmp_path / "exported")
    situs.lock(exported, key, tmp_path / "locked")
    images = torch.rand(2, 1, 28, 28)
    with torch.no_grad():
        whole = _features(exported, images)
        for given in (key, tmp_path / "owner.key"):
            assert torch.equal(_features(tmp_path / "locked", images, key=given), whole)
        assert not torch.allclose(_features(tmp_path / "locked", images), whole)
    with pytest.raises(SitusError) as stop:
        situs.open_model(exported, key=key)
    assert stop.value.field == "key"


def _features(source: Path, images: torch.Tensor, **opened: Any) -> torch.Tensor:
    backbone = situs.open_model(source, **opened).backbone
    return backbone.encode(backbone.embed(images), None).patches


def test_pretrained_is_what_timm_publishes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network: what the hub would give stands in."""
    import timm
    import torch

    name, real = "test_vit", timm.create_model
    published = real(name)
    with torch.no_grad():
        published.head.weight.fill_(0.5)
    monkeypatch.setattr(
        timm, "create_model", lambda *a, pretrained=False, **k: published if pretrained else real(*a, **k)
    )
    opened = situs.open_model(name, pretrained=True)
    assert opened.facts["weights"] == "pretrained" and opened.classifier
    tensors = opened.backbone.model.state_dict()
    assert all(torch.equal(value, published.state_dict()[key]) for key, value in tensors.items())
    with pytest.raises(situs.SitusError, match="pretrained=True"):
        situs.open_model(name, pretrained=True, weights="w.pt")


@pytest.mark.parametrize(("ours", "theirs"), [(situs.open_model, models.open_model), (situs.export, export_model)])
def test_a_default_is_that_of_the_function_below(ours: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    below = signature(theirs).parameters
    shared = [name for name in signature(ours).parameters if name in below]
    assert len(shared) > 3
    for name in shared:
        assert signature(ours).parameters[name].default == below[name].default, name


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ('backbone = "vit"', True),
        ('backbone = {name = "vit"}', True),
        ("backbone = {patch_size = 4}", False),
        ("optim = {lr = 1e-3}", False),
    ],
)
def test_weights_give_the_architecture_where_nothing_names_one(
    written: str, names: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("situs.models.start.adopted", lambda init: {"backbone": {"name": init}})
    file = tmp_path / "own.toml"
    file.write_text(written)
    ground = {"train": {"epochs": 3}}
    layers = api.layered(None, str(file), ground=ground, init="weights")
    assert list(layers) == [api.GROUND, str(file)]
    assert layers[api.GROUND] == (ground if names else ground | {"backbone": {"name": "weights"}})
    assert list(api.layered(None, str(file))) == [str(file)]
    assert api.files_of([*layers, api.FLAGGED, "b.toml"]) == f"{file} + b.toml"
