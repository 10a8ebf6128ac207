"""A plain ViT as named tensors: they are the model's own, and what they cannot say is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from builders import small_vit
from torch import nn

from situs.backbones.timm.plain import plain_vit
from situs.errors import SitusError


def test_the_tensors_are_views_of_the_models() -> None:
    backbone = small_vit(num_classes=3, model_args={"qk_norm": True, "init_values": 0.1, "pre_norm": True})
    model: Any = backbone.model
    plain = plain_vit(backbone)
    stored = {value.untyped_storage().data_ptr() for value in backbone.state_dict().values()}
    views = {name for name, value in plain.tensors.items() if value.untyped_storage().data_ptr() in stored}
    assert set(plain.tensors) - views <= {"prefix", "embed.weight"}  # CLS with its place; another order of pixels
    same = {
        "norm.weight": model.norm.weight,
        "enter.bias": model.norm_pre.bias,
        "head.weight": model.head.weight,
        "blocks.1.qkv.weight": model.blocks[1].attn.qkv.weight,
        "blocks.1.q_norm.bias": model.blocks[1].attn.q_norm.bias,
        "blocks.0.k_norm.weight": model.blocks[0].attn.k_norm.weight,
        "blocks.0.scale1": model.blocks[0].ls1.gamma,
        "blocks.0.scale2": model.blocks[0].ls2.gamma,
        "blocks.0.fc2.bias": model.blocks[0].mlp.fc2.bias,
    }
    assert all(torch.equal(plain.tensors[name], value) for name, value in same.items())
    assert plain.eps["norm"] == model.norm.eps and plain.eps["blocks.1.norm2"] == model.blocks[1].norm2.eps
    assert (plain.heads, plain.pool, plain.act) == (2, "token", "gelu")


def replaced(path: str, module: Any) -> Any:
    """The change of a model that puts a module in the place of another."""
    return lambda model: model.set_submodule(path, module)


REFUSED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "norms of all blocks": ({"norm_layer": timm.layers.RmsNorm}, None, r"its blocks\.0\.norm1 is a RmsNorm$"),
    "norm of one block": ({}, replaced("blocks.1.norm2", nn.RMSNorm(16)), r"its blocks\.1\.norm2 is a RMSNorm$"),
    "norm without weights": ({}, replaced("norm", nn.LayerNorm(16, elementwise_affine=False)), "its norm is a Layer"),
    "norm of patches": ({}, replaced("patch_embed.norm", nn.GroupNorm(1, 16)), r"its embed\.norm is a GroupNorm$"),
    "norm of queries": ({}, replaced("blocks.0.attn.q_norm", nn.RMSNorm(8)), r"its blocks\.0\.q_norm is a RMSNorm$"),
    "norm behind attention": ({}, replaced("blocks.0.attn.norm", nn.LayerNorm(16)), "a gate or is followed by a norm$"),
    "norm inside the MLP": ({}, replaced("blocks.1.mlp.norm", nn.LayerNorm(64)), "its MLP is a Mlp with GELU$"),
    "activation": ({}, replaced("blocks.1.mlp.act", nn.SiLU()), "its MLP is a Mlp with SiLU$"),
    "GELU by tanh": ({}, replaced("blocks.1.mlp.act", nn.GELU(approximate="tanh")), "its MLP is a Mlp with GELU$"),
    "gated MLP": ({"mlp_layer": timm.layers.SwiGLU}, None, "its MLP is a SwiGLU with "),
    "other LayerScale": ({}, replaced("blocks.0.ls1", nn.LayerNorm(16)), "a LayerNorm replaces the LayerScale$"),
    "other blocks": ({"block_fn": timm.models.vision_transformer.ResPostBlock}, None, "of the class ResPostBlock$"),
    "pool by attention": ({"global_pool": "map"}, None, "global_pool='map'$"),
    "pool with CLS": ({"global_pool": "avg", "pool_include_prefix": True}, None, "global_pool='avg'$"),
    "pool of both": ({"global_pool": "avgmax"}, None, "global_pool='avgmax'$"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_tensors_alone_cannot_say_is_refused(case: str) -> None:
    options, change, reason = REFUSED[case]
    backbone = small_vit(num_classes=3, model_args=options)
    if change is not None:
        change(backbone.model)
    with pytest.raises(SitusError, match=f"only plain ViTs of timm can be converted, but .*{reason}"):
        plain_vit(backbone)
