"""Fine-tuning a part of the weights: what moves, what is saved, resumed, opened and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import small_method, small_vit

import situs
from situs.errors import SitusError
from situs.models import open_model
from situs.models.start import initialise
from situs.train.checkpoint import RunFolder
from situs.train.run import load_run
from situs.train.tuning import TuningConfig, check_start, freeze

SMALL = {"name": "vit_tiny_patch16_224", "patch_size": 14, "model_args": {"depth": 2, "embed_dim": 16, "num_heads": 2}}
IMAGES = {"path": "samples", "img_size": 28, "channels": 1, "count": 64}
OPTIM = {"lr": 1e-2, "warmup_epochs": 0, "ema": 0.5, "schedule": "constant"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("base") / "run"
    asked = {"method": "supervised", "backbone": SMALL, "steps": 2, "batch": 16, "out": out, "quiet": True}
    return situs.pretrain(IMAGES, **asked, optim={"lr": 1e-3, "warmup_epochs": 0})


def tune(base: Path, out: Path, train: str, steps: int = 4, tuning: dict[str, Any] | None = None, **more: Any) -> Path:
    """With a new head: to fit one by a probe takes longer than the run, and has tests of its own."""
    asked = {"data": IMAGES, "batch": 16, "optim": OPTIM, "validate_every": 0, "quiet": True}
    return situs.finetune(
        base, out=out, train=train, steps=steps, tuning={"head": "new"} | (tuning or {}), **asked, **more
    )


def weights(run: Path, kind: str = "model") -> dict[str, torch.Tensor]:
    return RunFolder.open(run, writer=False).newest().tensors(kind)


def test_a_head_that_is_not_known_cannot_be_trained_alone() -> None:
    method = small_method("mp3", small_vit(num_classes=0))
    for parts in ("head", "lora"):
        with pytest.raises(
            SitusError, match=rf"^tuning\.parts='{parts}': must be all, because the head of .* is not kno"
        ):
            freeze(method, TuningConfig(parts=parts), new_positions=False)
    freeze(method, TuningConfig(), new_positions=False)
    assert all(weight.requires_grad for weight in method.parameters())
    with pytest.raises(SitusError, match="targets='': must be one or more names of layers"):
        TuningConfig(targets=())


@pytest.mark.parametrize(("new", "trained"), [(True, {"pos_embed"}), (False, set())])
def test_new_positions_are_trained_beside_the_head(new: bool, trained: set[str]) -> None:
    method = small_method("supervised", small_vit(num_classes=3))
    freeze(method, TuningConfig(parts="head"), new_positions=new)
    names = {name for name, weight in method.backbone.model.named_parameters() if weight.requires_grad}
    assert names == {"head.weight", "head.bias"} | trained


@pytest.mark.parametrize("train", ["head", "lora"])
def test_nothing_moves_but_what_is_trained_and_the_mean_is_of_that(base: Path, tmp_path: Path, train: str) -> None:
    tuned = tune(base, tmp_path / "run", train)
    before, after = weights(base), weights(tuned)
    own = {name.replace(".parametrizations.weight.original", ".weight"): value for name, value in after.items()}
    moved = {name for name, value in before.items() if not torch.equal(value, own[name])}
    assert moved == {"backbone.model.head.weight", "backbone.model.head.bias"}
    added = own.keys() - before.keys()
    assert all(bool(own[name].any()) for name in added)  # `up` was zero before the first step
    trained = {name for name in added if not name.endswith("scale")}
    assert len(trained) == {"head": 0, "lora": 4}[train]  # up and down beside the qkv of two blocks
    assert weights(tuned, "ema").keys() == moved | trained


def test_a_run_that_is_resumed_goes_through_the_same_steps(base: Path, tmp_path: Path) -> None:
    whole, half = tune(base, tmp_path / "whole", "lora"), tune(base, tmp_path / "half", "lora", steps=2)
    situs.finetune(resume=half, steps=4, quiet=True)
    for kind in ("model", "ema", "optimizer"):
        one, other = weights(whole, kind), weights(half, kind)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), kind


def test_a_lora_run_opens_exports_and_starts_others_as_an_ordinary_model(base: Path, tmp_path: Path) -> None:
    tuned, images = (
        tune(base, tmp_path / "run", "lora", tuning={"rank": 2, "targets": ["blocks"]}),
        torch.randn(2, 1, 28, 28),
    )
    trained = load_run(tuned, as_trained=True).method.backbone
    opened = open_model(tuned).backbone
    assert opened.state_dict().keys() == open_model(base).backbone.state_dict().keys()
    assert torch.equal(opened(images), trained(images))
    assert {name for name, p in trained.named_parameters() if p.requires_grad} == {
        name.removeprefix("backbone.") for name in weights(tuned, "ema")
    }
    assert all(p.requires_grad for p in opened.parameters())
    exported = open_model(situs.export(tuned, tmp_path / "export"))
    torch.testing.assert_close(exported.backbone(images), trained(images), rtol=0, atol=0)
    fresh = open_model(base).backbone
    initialise(fresh, str(tuned))
    assert torch.equal(fresh(images), trained(images))


def test_positions_that_are_new_are_trained_whatever_is_frozen(base: Path, tmp_path: Path) -> None:
    tuned = tune(base, tmp_path / "run", "head", positions="learned", steps=1)
    assert "backbone.model.pos_embed" in weights(tuned, "ema")


@pytest.mark.parametrize(
    ("name", "value", "said"), [("rank", 4, "4"), ("alpha", 4.0, "4.0"), ("targets", ["proj"], "proj")]
)
def test_a_setting_of_lora_without_lora_is_refused(tmp_path: Path, name: str, value: Any, said: str) -> None:
    with pytest.raises(SitusError, match=f"tuning.{name}={said}: applies only to LoRA") as error:
        situs.pretrain(IMAGES, out=tmp_path / "run", tuning={name: value})
    assert error.value.fields == (f"tuning.{name}", "tuning.parts")
    assert not (tmp_path / "run").exists()
    check_start(TuningConfig(**{name: value}), None, new=False)  # a run that was begun so goes on


def test_the_flag_stands_beside_the_table_of_the_same_name_and_a_start_is_needed(base: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"method": "supervised", "backbone": SMALL, "batch": 16, "out": tmp_path / "run"}
    with pytest.raises(SitusError, match=r"tuning.parts=head: freezes the other weights") as error:
        situs.pretrain(IMAGES, **asked, tuning={"parts": "head"})
    assert error.value.field == "tuning.parts"
    with pytest.raises(SitusError, match=r"half.*all, head, lora"):
        tune(base, tmp_path / "run", "half")
    assert not (tmp_path / "run").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")
def test_a_recorded_step_of_lora_is_the_step(base: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"data": IMAGES, "batch": 16, "optim": OPTIM, "validate_every": 0, "quiet": True}
    runs = [
        situs.finetune(
            base,
            out=tmp_path / str(graph),
            tuning={"parts": "lora"},
            train={"graph": graph},
            steps=9,
            device="cuda",
            **asked,
        )
        for graph in (False, True)
    ]
    plain, recorded = map(weights, runs)
    assert all(torch.equal(value, recorded[name]) for name, value in plain.items())
