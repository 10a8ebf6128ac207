"""Checkpoints in the layouts of the papers' own codes: each opens by its own names, and says what it left out."""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import VIT, small_swin, small_vit
from torch import Tensor

from situs.backbones.base import Backbone
from situs.backbones.weights import read_published
from situs.core.position import resample_table
from situs.errors import SitusError
from situs.models import open_model
from situs.models.start import initialise

SHAPE = {"img_size": 12, "patch_size": 4, "model_args": {"depth": 2, "embed_dim": 16, "num_heads": 2}}


def vit(seed: int, size: int = 12, **fields: Any) -> Backbone:
    """12 pixels are 3 x 3 patches."""
    torch.manual_seed(seed)
    backbone = small_vit(size, **{"num_classes": 0, **fields})
    with torch.no_grad():  # so that no two tensors are equal by being 0 or 1
        for parameter in backbone.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return backbone


def block(prefix: str, width: int = 8) -> dict[str, Tensor]:
    """The tensors of a decoder's block."""
    shapes = {"norm1.weight": (width,), "attn.qkv.weight": (3 * width, width), "mlp.fc1.bias": (4 * width,)}
    return {f"{prefix}.{name}": torch.randn(shape) for name, shape in shapes.items()}


def decoder(prefix: str = "", predicted: int = 48) -> dict[str, Tensor]:
    return {
        f"{prefix}decoder_embed.weight": torch.randn(8, 16),
        f"{prefix}decoder_embed.bias": torch.randn(8),
        **block(f"{prefix}decoder_blocks.0"),
        f"{prefix}decoder_norm.weight": torch.randn(8),
        f"{prefix}decoder_pred.weight": torch.randn(predicted, 8),
    }


def mae(model: dict[str, Tensor]) -> dict[str, Any]:
    """What `main_pretrain.py` of MAE saves: with the arguments of its command line."""
    beside = {"mask_token": torch.randn(1, 1, 8), "decoder_pos_embed": torch.randn(1, 10, 8), **decoder()}
    args = argparse.Namespace(batch_size=64, model="mae_vit_base_patch16", lr=None, output_dir="./output_dir")
    return {"model": {**model, **beside}, "optimizer": {"state": {}}, "epoch": 799, "scaler": {}, "args": args}


def droppos(model: dict[str, Tensor]) -> dict[str, Any]:
    """DropPos with the auxiliary MAE loss: wrapped by DDP, and "model" is the name of the architecture."""
    beside = {
        "mask_pos_token": torch.randn(1, 1, 16),
        "mask_token": torch.randn(1, 1, 8),
        **decoder(predicted=9),
        "aux_decoder_pos_embed": torch.randn(1, 10, 8),
        **decoder("aux_"),
    }
    state = {f"module.{name}": value for name, value in {**model, **beside}.items()}
    return {"epoch": 800, "state_dict": state, "optimizer": {}, "model": "DropPos_mae_vit_base_patch16_dec512d2b"}


class CfgNode(dict):
    """Stands for yacs' settings, which MJP and Swin keep in their checkpoints: a dict with attributes beside."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__({name: CfgNode(v) if isinstance(v, dict) else v for name, v in values.items()})
        self.__dict__["__immutable__"] = True


CfgNode.__module__, CfgNode.__qualname__ = "yacs.config", "CfgNode"


def mjp(model: dict[str, Tensor]) -> dict[str, Any]:
    """MJP: the table is an nn.Embedding with a last row for unknown places; a regressor of places beside it."""
    state = dict(model)
    rows = state.pop("pos_embed")[0]
    state["pos_embed.weight"] = torch.cat([rows, torch.randn(1, rows.shape[1])])
    for number in (0, 2):
        state |= {f"dlocr.layers.{number}.weight": torch.randn(16, 16), f"dlocr.layers.{number}.bias": torch.randn(16)}
    config = CfgNode({"MODEL": {"TYPE": "vit", "NAME": "vit_s_16"}, "TRAIN": {"MASK_RATIO": 0.1}})
    return {"model": state, "max_accuracy": 80.5, "epoch": 299, "config": config}


LAYOUTS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Any]], list[str]]] = {
    "mae": (mae, ["mask_token", "decoder_blocks (3)", "decoder_embed (2)"]),
    "droppos": (droppos, ["mask_pos_token", "mask_token", "decoder_blocks (3)", "aux_decoder_blocks (3)"]),
    "mjp": (mjp, ["dlocr (4)", "unknown position"]),
}


@pytest.fixture
def save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], Path]:
    """Writes a checkpoint as the papers' codes do, with yacs there; it is gone when the file is read."""

    def write(checkpoint: dict[str, Any]) -> Path:
        with monkeypatch.context() as patch:
            module = types.ModuleType("yacs.config")
            module.CfgNode = CfgNode
            patch.setitem(sys.modules, "yacs", types.ModuleType("yacs"))
            patch.setitem(sys.modules, "yacs.config", module)
            torch.save(checkpoint, tmp_path / "checkpoint.pth")
        return tmp_path / "checkpoint.pth"

    return write


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_model_and_says_what_it_left_out(layout: str, save) -> None:
    source, target = vit(0), vit(1)
    make, parts = LAYOUTS[layout]
    path = save(make(source.model.state_dict()))
    first, *lines = initialise(target, str(path))
    state = source.model.state_dict()
    assert first == f"started from {path}: {len(state)} tensors"
    assert all(torch.equal(value, state[name]) for name, value in target.model.state_dict().items())
    images = torch.randn(2, 3, 12, 12)
    assert torch.equal(target.eval()(images), source.eval()(images))
    assert len(lines) == 1 and lines[0].startswith("left out (parts of the method, not of the model): ")
    assert all(part in lines[0] for part in parts), lines


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_opens_by_name_and_file(layout: str, save) -> None:
    source = vit(0)
    path = save(LAYOUTS[layout][0](source.model.state_dict()))
    model = open_model(f"{VIT}={path}", num_classes=0, **SHAPE)
    images = torch.randn(2, 3, 12, 12)
    assert torch.equal(model.backbone(images), source.eval()(images))
    assert all(part in model.notes["left out"] for part in LAYOUTS[layout][1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_its_table_resampled_for_another_size(layout: str, save) -> None:
    source, target = vit(0), vit(1, size=24)
    initialise(target, str(save(LAYOUTS[layout][0](source.model.state_dict()))))
    rows, resampled = source.model.pos_embed[0].detach(), target.model.pos_embed[0].detach()
    assert torch.equal(resampled[0], rows[0])  # the row of CLS has no place on the grid
    torch.testing.assert_close(resampled[1:], resample_table(rows[1:], (3, 3), (6, 6)))


def test_the_command_line_says_what_it_left_out(save, capsys: pytest.CaptureFixture[str]) -> None:
    from situs.cli.main import main

    path = save(droppos(vit(0).model.state_dict()))
    shape = ["--model-args.depth", "2", "--model-args.embed_dim", "16", "--model-args.num_heads", "2"]
    assert main(["info", f"{VIT}={path}", "--img-size", "12", "--patch-size", "4", *shape]) == 0
    assert (
        "checkpoint.pth: these tensors of the file are not used: mask_pos_token, mask_token, decoder_embed"
        in capsys.readouterr().err
    )


def test_fine_tuning_keeps_a_new_head_and_says_so(save) -> None:
    target = vit(1, num_classes=5, model_args={"global_pool": "avg"})
    lines = initialise(target, str(save(droppos(vit(0).model.state_dict()))))
    assert lines[1] == "left as initialised: fc_norm.bias, fc_norm.weight, head.bias, head.weight"


def test_a_classifier_that_pools_by_the_mean_needs_that_pooling(save) -> None:
    """MAE and DropPos fine-tune so; without it the file is refused, not half loaded."""
    source = vit(0, num_classes=5, model_args={"global_pool": "avg"})
    path = save({"model": source.model.state_dict(), "args": argparse.Namespace(global_pool=True)})
    shape = {**SHAPE, "model_args": {**SHAPE["model_args"], "global_pool": "avg"}}
    images = torch.randn(2, 3, 12, 12)
    model = open_model(f"{VIT}={path}", num_classes=5, **shape)
    assert torch.equal(model.backbone(images), source.eval()(images))
    with pytest.raises(
        SitusError, match=r"does not fit the model: 2 tensors missing \(first: norm.weight, norm.bias\)"
    ):
        open_model(f"{VIT}={path}", num_classes=5, **SHAPE)


def test_the_second_table_of_mjp_is_added_to_the_first() -> None:
    rows, index = torch.randn(11, 16), torch.randn(1, 10, 16)
    state, left_out = read_published({"pos_embed.weight": rows, "index_embed": index})
    torch.testing.assert_close(state["pos_embed"], rows[None, :10] + index)
    assert [*state] == ["pos_embed"] and left_out == ("unknown position",)


def test_a_swin_of_the_published_code_opens(save) -> None:
    """Its merges stand at the end of a stage, its head has no fc, and it stores buffers that timm makes itself."""
    torch.manual_seed(0)
    source, target = (small_swin(num_classes=3, positions="learned") for _ in range(2))
    state = {}
    for name, value in source.model.state_dict().items():
        name = name.replace("layers.1.downsample", "layers.0.downsample").replace("head.fc.", "head.")
        state[name] = value
    state["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(49, 49, dtype=torch.long)
    state["layers.0.blocks.0.attn_mask"] = torch.zeros(4, 49, 49)
    state["absolute_pos_embed.weight"] = torch.cat([source.table.detach(), torch.randn(1, source.dim)])
    lines = initialise(target, str(save({"model": state, "config": CfgNode({})})))
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(target.eval()(images), source.eval()(images))
    assert lines[1].endswith("unknown position")


def test_a_state_dict_of_timm_is_unchanged() -> None:
    for backbone in (vit(0), small_swin()):
        state = backbone.model.state_dict()
        same, left_out = read_published(state)
        assert left_out == () and [*same] == [*state] and all(same[name] is state[name] for name in state)


def test_another_architecture_is_refused_in_one_sentence(save) -> None:
    """vit-pytorch's MP3: a norm of the patches, and other names."""
    state = {
        "vit.to_patch_embedding.1.weight": torch.randn(48),
        "vit.transformer.layers.0.0.to_qkv.weight": torch.ones(3),
    }
    with pytest.raises(SitusError, match=r"^init=.*does not fit the model: [^\n]*$"):
        initialise(vit(1), str(save(state)))


def test_other_classes_in_a_file_are_still_refused(tmp_path: Path) -> None:
    torch.save({"model": {}, "config": types.SimpleNamespace(a=1)}, tmp_path / "evil.pth")
    with pytest.raises(SitusError, match=r"is not a torch file that can be loaded without running code from it$"):
        initialise(vit(1), str(tmp_path / "evil.pth"))
