"""Which of timm's blocks `core.joined` may run: plain ones, to which nothing listens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import timm.layers.norm
import torch
from timm.layers.attention import Attention
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from situs.backbones.base import Stream
from situs.backbones.timm.mlp import Mlp, plain
from situs.core.compiled import takes_kernels
from situs.core.joined import Layer, Norm, Parts, heard
from situs.core.norm import norm_suits

_NORMS = (nn.LayerNorm, timm.layers.norm.LayerNorm)


def joined_parts(blocks: Iterable[nn.Module], stream: Stream) -> list[Parts] | None:
    """The tensors of all blocks; None where one is not plain, or nothing is compiled that has kernels."""
    if not takes_kernels(stream.z) or not norm_suits(stream.z.shape[-1]):
        return None
    if stream.rotary is not None or stream.bias is not None or stream.mask is not None:
        return None
    blocks = list(blocks)
    if not all(_joins(block) for block in blocks):
        return None
    return [_parts(block, stream.z) for block in blocks]


def _joins(block: Any) -> bool:
    attn, mlp = block.attn, block.mlp
    if not plain(block, Block) or not plain(attn, Attention) or not plain(mlp, Mlp):
        return False
    layers = (attn.qkv, attn.proj, mlp.fc1, mlp.fc2)
    norms = (block.norm1, block.norm2)
    nothing = (block.ls1, block.ls2, attn.q_norm, attn.k_norm, attn.norm, mlp.norm)
    drops = (attn.attn_drop, attn.proj_drop, mlp.drop1, mlp.drop2)
    others = (*drops, mlp.act, block.drop_path1, block.drop_path2)
    return (
        all(plain(layer, nn.Linear) for layer in layers)
        and all(plain(norm, *_NORMS) and norm.weight is not None and norm.bias is not None for norm in norms)
        and all(plain(each, nn.Identity) for each in nothing)
        and not any(drop.training and drop.p > 0 for drop in drops)
        and not any(heard(each) for each in others)
        and attn.gate is None
    )


def _parts(block: Any, z: Tensor) -> Parts:
    attn, mlp = block.attn, block.mlp
    scales = [_scale(drop, z) for drop in (block.drop_path1, block.drop_path2)]
    norm1, norm2 = (Norm(norm.weight, norm.bias, norm.eps) for norm in (block.norm1, block.norm2))
    qkv, proj, fc1, fc2 = (Layer(layer.weight, layer.bias) for layer in (attn.qkv, attn.proj, mlp.fc1, mlp.fc2))
    return Parts(norm1, qkv, attn.num_heads, proj, norm2, fc1, fc2, *scales)


def _scale(drop_path: Any, z: Tensor) -> Tensor | None:
    """What drop path makes of each sample's 1; drawn as it would be for the branch itself."""
    if isinstance(drop_path, nn.Identity) or not drop_path.training or not drop_path.drop_prob:
        return None
    return drop_path(torch.ones(z.shape[0], 1, 1, device=z.device)).view(-1)
