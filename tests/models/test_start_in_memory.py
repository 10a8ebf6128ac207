"""Models in memory as what a training starts from, and the architecture that weights bring with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from memory_kinds import SIDE, pictures
from torch import nn

import situs
from situs.backbones import create_backbone
from situs.errors import SitusError
from situs.models.start import addressed_model, model_in_memory

SHAPE = {"depth": 2, "embed_dim": 24, "num_heads": 3}
SMALL: dict[str, Any] = {"img_size": SIDE, "patch_size": 4, **SHAPE}
ONE_STEP: dict[str, Any] = {"steps": 1, "batch": 6, "device": "cpu", "quiet": True, "optim": {"lr": 1e-9}}
DATA = pictures(12)


def vit(**more: Any) -> nn.Module:
    torch.manual_seed(1)
    return timm.create_model("vit_tiny_patch16_224", **SMALL, **more)


def config_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "config.json").read_text())


def shares(run: Path, module: nn.Module) -> bool:
    """Whether the run's weights are the module's, but for a step of almost no length."""
    own, found = module.state_dict(), situs.open_model(run).backbone.model.state_dict()
    names = [name for name in own if not name.startswith("head.")]
    return all(torch.allclose(own[name], found[name], atol=1e-6) for name in names)


MODULES = {
    "vit": vit,
    "without cls, mean": lambda: vit(class_token=False, global_pool="avg"),
    "wide mlp": lambda: vit(mlp_ratio=2),
    "swin": lambda: timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, embed_dim=12, depths=(1, 1), num_heads=(1, 2), window_size=4
    ),
    "resnet": lambda: timm.create_model("resnet10t", num_classes=5),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_made_again_by_its_name_and_arguments(name: str) -> None:
    from situs.backbones.timm.create import remade

    module = MODULES[name]().train()
    own = remade(create_backbone(module))
    again = timm.create_model(own["architecture"], **own["model_args"])
    again.load_state_dict(module.state_dict())
    assert module.training
    images = torch.randn(1, 3, *((16, 16) if "patch_size" in own["model_args"] and name != "swin" else (32, 32)))
    with torch.no_grad():
        assert torch.equal(module.eval()(images), again.eval()(images))


def test_what_no_name_makes_again_is_refused() -> None:
    changed: Any = vit()
    changed.blocks[0].mlp.act = nn.ReLU()  # the same tensors, other outputs
    with pytest.raises(SitusError, match="cannot build the module again"):
        situs.finetune(changed, data=DATA, out="never")
    with pytest.raises(SitusError, match="is your own module; a run cannot start from"):
        situs.finetune(
            situs.open_model(nn.Sequential(nn.Flatten(), nn.Linear(768, 3)), img_size=16), data=DATA, out="n"
        )
    with pytest.raises(SitusError, match="must be a run, a model's folder, a name"):
        situs.finetune(7, data=DATA, out="never")  # pyright: ignore[reportArgumentType]
    with pytest.raises(SitusError, match="do not set init"):
        situs.pretrain(DATA, backbone=vit(), init="runs/a", out="never")


def test_a_module_as_backbone_as_init_and_fine_tuned(tmp_path: Path) -> None:
    module = vit().train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for name, given in (("backbone", {"backbone": module}), ("init", {"init": situs.open_model(module)})):
        run = situs.pretrain(DATA, out=tmp_path / name, method="mp3", **given, **ONE_STEP)
        config = config_of(run)
        assert config["backbone"]["name"] == "vit_tiny_patch16_224"
        assert config["backbone"]["model_args"] == {**SHAPE, "patch_size": 4}
        assert config["data"]["img_size"] == [SIDE, SIDE]
        assert config["init"].startswith("memory:VisionTransformer-")
        assert shares(run, module)
    tuned = situs.finetune(module, data=DATA, validate_every=0, out=tmp_path / "tuned", **ONE_STEP)
    assert shares(tuned, module)
    assert situs.open_model(tuned).classes == ("0", "1", "2")
    again = situs.finetune(situs.open_model(tuned), validate_every=0, out=tmp_path / "again", **ONE_STEP)
    assert config_of(again)["data"]["path"] == config_of(tuned)["data"]["path"]  # the run's own data
    assert module.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_an_address_is_of_names_and_values_alone() -> None:
    """Two weights of one shape: the same numbers under other names are another model, and so are others under these."""

    def address(names: str, first: float = 0.0) -> str | None:
        made = small_module(names)
        with torch.no_grad():
            for number, name in enumerate(names):
                getattr(made, name).weight.fill_(first + number)
        return addressed_model(made)

    assert address("ab") == address("ab")
    assert len({address("ab"), address("ba"), address("ac"), address("ab", 0.5)}) == 4
    assert addressed_model(None) is None and addressed_model(Path("run")) == "run"
    with pytest.raises(SitusError, match="source='int': must be a run, a model's folder"):
        addressed_model(3)


def small_module(names: str) -> nn.Module:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.img_size = 8
            for name in names:
                self.add_module(name, nn.Linear(3, 3, bias=False))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.mean(dim=(2, 3))
            for part in self.children():
                x = part(x)
            return x

    return Named()


def test_a_model_that_is_gone_is_told() -> None:
    """The two that were used last are kept."""

    def another(seed: int) -> str:
        torch.manual_seed(seed)
        return str(addressed_model(timm.create_model("vit_tiny_patch16_224", **SMALL)))

    first, second = str(addressed_model(vit())), another(2)
    assert addressed_model(vit()) == first
    third = another(3)
    assert all(model_in_memory(address) is not None for address in (first, third))
    with pytest.raises(SitusError, match="VisionTransformer: the model in memory no longer exists"):
        situs.finetune(second, data=DATA, out="never")


def test_weights_bring_their_architecture(tmp_path: Path) -> None:
    run = situs.pretrain(DATA, backbone=vit(), method="mp3", out=tmp_path / "run", **ONE_STEP)
    exported = situs.export(run, tmp_path / "exported")
    for source in (run, exported):
        went = situs.pretrain(DATA, init=str(source), method="mp3", out=tmp_path / f"{source.name}2", **ONE_STEP)
        assert config_of(went)["backbone"]["model_args"] == {**SHAPE, "patch_size": 4}
        assert config_of(went)["data"]["img_size"] == [SIDE, SIDE]
    tuned = situs.finetune(init=str(run), data=DATA, validate_every=0, out=tmp_path / "ft", **ONE_STEP)
    assert config_of(tuned)["backbone"]["name"] == "vit_tiny_patch16_224"
    named = {"name": "vit_tiny_patch16_224", "patch_size": 4, "model_args": SHAPE}
    table = {"path": DATA, "img_size": SIDE}
    other = situs.pretrain(table, init=str(run), backbone=named, method="mp3", out=tmp_path / "named", **ONE_STEP)
    assert config_of(other)["backbone"]["patch_size"] == 4  # as it was named
    with pytest.raises(SitusError, match="could not be fetched"):
        situs.pretrain(DATA, init="vit_tiny_patch16_224", out=tmp_path / "no", **ONE_STEP)
