"""A plain ViT of timm as transformers' own ViT: the same values under its names; what does not fit is refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from situs.backbones.base import Backbone
from situs.backbones.config import BackboneConfig
from situs.backbones.hf.create import create_hf_backbone
from situs.backbones.timm.plain import PlainVit, plain_vit
from situs.errors import SitusError, missing_extra

_NORMS = {"norm1": "layernorm_before", "norm2": "layernorm_after"}
_LINEARS = {"proj": "attention.o_proj", "fc1": "mlp.fc1", "fc2": "mlp.fc2"}


def as_transformers(backbone: Backbone) -> Backbone:
    """The backbone itself if it is of transformers, otherwise one around a ViTModel or ViTForImageClassification."""
    if backbone.source.get("library") == "transformers":
        return backbone
    try:
        import transformers
    except ImportError as error:
        raise missing_extra("transformers", "hf", "An export to transformers") from error
    vit = plain_vit(backbone)
    _check(backbone, vit)
    tensors, classes = vit.tensors, backbone.num_classes
    assert backbone.input.shape is not None
    assert backbone.input.patch is not None
    (height, width), (ph, pw) = backbone.input.shape, backbone.input.patch
    entries: dict[str, Any] = {
        "hidden_size": backbone.dim,
        "num_hidden_layers": backbone.depth,
        "num_attention_heads": vit.heads,
        "intermediate_size": tensors["blocks.0.fc1.weight"].shape[0],
        "hidden_act": vit.act,
        "layer_norm_eps": vit.eps["norm"],
        "image_size": height if height == width else (height, width),
        "patch_size": ph if ph == pw else (ph, pw),
        "num_channels": backbone.input.channels,
        "qkv_bias": "blocks.0.qkv.bias" in tensors,
    }
    if classes:
        entries["num_labels"] = classes
    config = transformers.ViTConfig(**entries)
    model: Any = (
        transformers.ViTForImageClassification(config)
        if classes
        else transformers.ViTModel(config, add_pooling_layer=False)
    )
    model.load_state_dict(_state(backbone, vit, "vit." if classes else ""))
    return create_hf_backbone(model.eval(), BackboneConfig(backbone.name))


def _check(backbone: Backbone, vit: PlainVit) -> None:
    """transformers' ViT has CLS, one epsilon, biases, and none of what came later."""
    extra = {
        "enter": "a norm before its blocks",
        "embed.norm": "a norm after its patch embedding",
        "pool": "a norm after pooling",
    }
    extra |= {"blocks.0.q_norm": "norms of queries and keys", "blocks.0.scale1": "LayerScale"}
    reasons = [reason for name, reason in extra.items() if any(tensor.startswith(name) for tensor in vit.tensors)]
    if backbone.num_prefix != 1:
        reasons.append(f"{backbone.num_prefix} prefix tokens instead of CLS alone")
    if vit.pool != "token":
        reasons.append("a head whose input is not only the CLS token")
    biased = ("embed", "blocks.0.proj", "blocks.0.fc1", "norm")
    if len({*vit.eps.values()}) != 1:
        reasons.append("norms with different epsilons")
    if not all(f"{name}.bias" in vit.tensors for name in biased):
        reasons.append("layers without a bias")
    if reasons:
        raise SitusError(
            f"{backbone.name}: has {' and '.join(reasons)}, which transformers' ViT does not have; export the model "
            "for timm, or as ONNX",
            field="form",
        )


def _state(backbone: Backbone, vit: PlainVit, inside: str) -> dict[str, Tensor]:
    """The tensors under transformers' names. inside: prefix of names in the model without its head."""
    tensors, dim = vit.tensors, backbone.dim
    table = tensors.get("table", torch.zeros(backbone.num_tokens, dim))
    assert backbone.input.patch is not None
    patches = tensors["embed.weight"].unflatten(1, (*backbone.input.patch, backbone.input.channels))
    state = {
        "embeddings.cls_token": tensors["prefix"][None],  # with its row of the table
        "embeddings.position_embeddings": torch.cat([torch.zeros(1, dim), table.detach()])[None],
        "embeddings.patch_embeddings.projection.weight": patches.permute(0, 3, 1, 2),
        "embeddings.patch_embeddings.projection.bias": tensors["embed.bias"],
        "layernorm.weight": tensors["norm.weight"],
        "layernorm.bias": tensors["norm.bias"],
    }
    for depth in range(backbone.depth):
        ours, theirs = f"blocks.{depth}", f"layers.{depth}"
        for kind in ("weight", "bias"):
            if f"{ours}.qkv.{kind}" in tensors:
                thirds = tensors[f"{ours}.qkv.{kind}"].chunk(3)
                for letter, part in zip("qkv", thirds, strict=True):
                    state[f"{theirs}.attention.{letter}_proj.{kind}"] = part
            for name, other in (_NORMS | _LINEARS).items():
                state[f"{theirs}.{other}.{kind}"] = tensors[f"{ours}.{name}.{kind}"]
    state = {f"{inside}{name}": value for name, value in state.items()}
    if inside:
        state |= {f"classifier.{kind}": tensors[f"head.{kind}"] for kind in ("weight", "bias")}
    return state
