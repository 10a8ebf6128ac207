"""Small models of every family that the attack on tokens takes, in float64 with biases as after training."""

from __future__ import annotations

from functools import partial
from typing import Any

import timm.layers
import timm.models
import torch
import transformers
from builders import small_vit
from torch import nn

from situs.backbones import create_backbone

HEADS, WIDTH, CLASSES = 4, 96, 5


def vit(size: int = 16, trained: bool = True, name: str = "vit_tiny_patch16_224", **fields: Any) -> Any:
    """4 x 4 patches of 4 pixels at 16 px, 96 channels. trained: biases and the prefix are not where models begin."""
    torch.manual_seed(0)
    given = {"img_size": size, "width": WIDTH, "heads": HEADS, "patch_size": 4, "num_classes": CLASSES, **fields}
    return (
        as_trained(small_vit(name=name, **given).eval().double()) if trained else small_vit(name=name, **given).eval()
    )


def as_trained(backbone: Any) -> Any:
    """Biases and prefix tokens as after training: at 0, where models begin, much that is wrong would go unseen."""
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            if name.endswith("bias") or any(part in name for part in ("cls_token", "reg_token")):
                parameter.normal_(std=0.1)
            if name.endswith(("norm1.weight", "norm2.weight", "norm_pre.weight")):
                parameter.uniform_(0.5, 1.5)
            if name.endswith(("gamma", "gamma_1", "gamma_2")):
                parameter.uniform_(0.1, 1.0)
    return backbone


def odd(**fields: Any) -> Any:
    """A ViT of timm with parts that no name has: classes of norms, MLPs and activations."""
    torch.manual_seed(0)
    shape = {"img_size": 16, "patch_size": 4, "embed_dim": WIDTH, "depth": 2, "num_heads": HEADS}
    model = timm.models.VisionTransformer(**shape, num_classes=CLASSES, **fields)
    return as_trained(create_backbone(model).eval().double())


def hugging_face() -> Any:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=192,
        image_size=16,
        patch_size=4,
    )
    backbone = as_trained(create_backbone(config, num_classes=CLASSES).eval().double())
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            if "position_embeddings" in name:
                parameter.normal_(std=0.3)
    return backbone


LEARNED = {
    "ViT": vit,
    "no CLS": partial(vit, model_args={"class_token": False, "global_pool": "avg"}),
    "norms without bias": partial(odd, norm_layer=partial(nn.LayerNorm, bias=False)),
    "RMS norms": partial(odd, norm_layer=partial(timm.layers.RmsNorm, eps=1e-5)),
    "SwiGLU": partial(odd, mlp_layer=timm.layers.SwiGLU),
    "ReLU, no qkv bias": partial(odd, act_layer=nn.ReLU, qkv_bias=False),
    "registers, LayerScale": partial(vit, name="vit_small_patch14_reg4_dinov2"),
    "Hugging Face": hugging_face,
    "a norm before the first block": partial(vit, name="vit_base_patch16_clip_224"),
    "norms before it without bias": partial(odd, pre_norm=True, norm_layer=partial(nn.LayerNorm, bias=False)),
}
"""One image is solved by linear equations alone."""
