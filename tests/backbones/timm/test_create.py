"""Making timm models: which names a mistake is told, which arguments make a module again, what a folder decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from builders import SWIN, VIT, small_vit
from safetensors.torch import save_file
from torch import nn

from situs.backbones import create_backbone
from situs.backbones.timm.create import nearest, remade
from situs.errors import SitusError

KNOWN = [
    "vit_small_patch16_224",
    "vit_base_patch32_clip_224",
    "vit_base_patch32_224",
    "deit_tiny_patch16_224",
    "beit_base_patch16_224",
    "resnet10t",
    "resnet50",
    "resnet50c",
    "resnet50d",
    "seresnet50",
]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ViT-B/32", ["vit_base_patch32_224", "vit_base_patch32_clip_224"]),  # all words of both, the nearer one first
        ("vit_b_32_imagenet21k_augreg_in1k", []),
        ("ViT-B/32 oxford", ["vit_base_patch32_224", "vit_base_patch32_clip_224"]),  # all words but one
        ("vit quux", []),  # of two words one is too few
        ("deit", ["deit_tiny_patch16_224"]),
        ("resnetfifty", ["resnet10t", "resnet50", "resnet50c"]),  # no word, but most letters; at most three
        ("beit_bse", ["beit_base_patch16_224"]),  # one word, and half of the letters
        ("bert", []),  # as many letters, but no word
    ],
)
def test_a_name_near_by_is_proposed(name: str, meant: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timm, "list_models", lambda module: KNOWN)
    assert nearest(name) == meant
    models = f"; did you mean {', '.join(meant)}\\?$" if meant else r"; timm.list_models\(\) lists the names$"
    with pytest.raises(SitusError, match=rf"^'{name}' is neither a timm model nor a folder with a config.json{models}"):
        create_backbone(name)


ARGUMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "as named": ("test_vit", {"in_chans": 1, "num_classes": 4}),
    "of another shape": (
        VIT,
        {"img_size": (8, 12), "patch_size": (2, 4), "depth": 2, "embed_dim": 12, "num_heads": 2, "mlp_ratio": 2},
    ),
    "without CLS": (
        VIT,
        {"img_size": 8, "patch_size": 4, "depth": 1, "embed_dim": 12, "num_heads": 3, "class_token": False}
        | {"global_pool": "avg", "num_classes": 0},
    ),
    "Swin": (SWIN, {"img_size": 32, "embed_dim": 12, "depths": (1, 2), "num_heads": (1, 2), "window_size": 4}),
    "convolutions": ("test_resnet", {"in_chans": 4, "num_classes": 3}),
}


@pytest.mark.parametrize("case", ARGUMENTS)
@torch.no_grad()
def test_a_module_tells_the_arguments_that_make_it_again(case: str) -> None:
    name, arguments = ARGUMENTS[case]
    torch.manual_seed(0)
    module: Any = timm.create_model(name, **arguments).train()
    module.get_submodule(next(iter(dict(module.named_children())))).eval()  # frozen, as some tune
    modes = [part.training for part in module.modules()]
    backbone = create_backbone(module)
    source = remade(backbone)
    assert (source["library"], source["architecture"]) == ("timm", name)
    assert [part.training for part in module.modules()] == modes
    again = timm.create_model(name, **source["model_args"])
    again.load_state_dict(module.state_dict())
    x = torch.randn(2, backbone.input.channels, *(backbone.input.shape or (48, 48)))
    torch.testing.assert_close(again.eval()(x), module.eval()(x))
    backbone.source = {"library": "timm", "architecture": "told", "model_args": {}}
    assert remade(backbone) is backbone.source


def test_a_module_that_no_arguments_make_is_refused() -> None:
    changed: Any = timm.create_model("test_vit")
    changed.blocks[0].mlp.act = nn.ReLU()
    nameless: Any = timm.create_model("test_vit")
    nameless.pretrained_cfg = None
    for module in (changed, nameless):
        with pytest.raises(SitusError, match=r"^VisionTransformer: a run with this module cannot be reopened later, "):
            remade(create_backbone(module))


def test_a_folder_gives_its_weights_unless_others_are_named(tmp_path: Path) -> None:
    shape = {"img_size": 8, "patch_size": 4, "depth": 1, "embed_dim": 8, "num_heads": 2}
    torch.manual_seed(0)
    own, other = (timm.create_model(VIT, num_classes=3, **shape) for _ in range(2))
    (tmp_path / "config.json").write_text(json.dumps({"architecture": VIT, "num_classes": 3, "model_args": shape}))
    save_file(own.state_dict(), tmp_path / "model.safetensors")
    save_file(other.state_dict(), tmp_path / "other.st.safetensors")

    def weight(source: Path, **fields: Any) -> Any:
        backbone = create_backbone(source, **fields)
        assert (backbone.grid, backbone.depth, backbone.num_classes) == ((2, 2), 1, fields.get("num_classes", 3))
        return backbone.model.blocks[0].mlp.fc1.weight

    assert torch.equal(weight(tmp_path), own.blocks[0].mlp.fc1.weight)
    assert torch.equal(weight(tmp_path, num_classes=7), own.blocks[0].mlp.fc1.weight)
    named = weight(tmp_path, weights=tmp_path / "other.st.safetensors")
    assert torch.equal(named, other.blocks[0].mlp.fc1.weight)
    fresh = weight(tmp_path / "config.json")
    assert not torch.equal(fresh, own.blocks[0].mlp.fc1.weight)


@pytest.mark.parametrize(
    "fields",
    [
        dict(img_size=(18, 16), patch_size=4),
        dict(img_size=(16, 18), patch_size=4),
        dict(patch_size=5),  # of the size that timm gives it
        dict(img_size=(225, 224)),  # with the patch that timm gives it
    ],
)
def test_a_size_that_patches_do_not_fill_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(SitusError, match=r"^img_size=\d+x\d+: must be a multiple of the patch size \d+x\d+"):
        create_backbone(VIT, model_args={"depth": 1, "embed_dim": 8, "num_heads": 2}, **fields)
    assert small_vit((16, 20)).grid == (4, 5)
