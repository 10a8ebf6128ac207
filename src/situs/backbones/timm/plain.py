"""A plain ViT as a list of named tensors, to run it without torch; any other model is refused by name.

    embed  prefix  table  enter  blocks.N.(norm1 qkv q_norm k_norm proj scale1 norm2 fc1 fc2 scale2)  norm  pool  head

A layer has .weight [out, in] and, where it has one, .bias [out]; so has a norm, whose epsilon is in `eps`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from timm.models import vision_transformer
from torch import Tensor, nn

from situs.backbones.base import Backbone
from situs.backbones.block import Block
from situs.backbones.timm.backbone import VitBackbone
from situs.errors import SitusError

_POOLS = ("token", "avg")


class PlainVit(NamedTuple):
    """tensors: by the names above, where the model has them. eps: of each norm. pool: the head's input, "token", "avg"
    or "both" (CLS and the distillation token, a head for each). act: of the MLPs, "gelu" or "relu"."""

    tensors: dict[str, Tensor]
    eps: dict[str, float]
    heads: int
    pool: str
    act: str


def plain_vit(backbone: Backbone) -> PlainVit:
    """The tensors of a backbone around timm's VisionTransformer: views, but for the patch embedding and the prefix."""
    if type(backbone) is not VitBackbone:
        _refuse(backbone, f"{type(backbone.model).__name__} is not a plain ViT")
    model: Any = backbone.model
    stem, writer = model.patch_embed, _Writer(backbone)
    writer.tensors["embed.weight"] = stem.proj.weight.permute(0, 2, 3, 1).flatten(1)  # as `patchify` lays pixels out
    writer.add("embed.bias", stem.proj.bias)
    writer.norm("embed.norm", stem.norm)
    prefix = backbone.prefix_tokens() if backbone.num_prefix else None
    writer.add("prefix", None if prefix is None else prefix[0])
    writer.add("table", backbone.positions().table)
    writer.norm("enter", model.norm_pre)
    blocks = backbone.parts()
    for depth, block in enumerate(blocks):
        writer.block(f"blocks.{depth}", block)
    writer.norm("norm", model.norm)
    both = getattr(model, "head_dist", None) is not None
    if not both:
        writer.norm("pool", model.fc_norm)
        if model.attn_pool is not None or model.global_pool not in _POOLS or model.pool_include_prefix:
            _refuse(backbone, f"its features are pooled with global_pool={model.global_pool!r}")
    for name in ("head", "head_dist") if both else ("head",):
        if isinstance(layer := getattr(model, name), nn.Linear):
            writer.linear(name, layer)
    acts, pool = {_act(block.mlp.act) for block in blocks}, "both" if both else model.global_pool
    if len(acts) > 1:
        _refuse(backbone, f"its blocks differ in their activation ({', '.join(sorted(acts))})")
    return PlainVit(writer.tensors, writer.eps, blocks[0].attention.heads, pool, acts.pop())


def _act(module: Any) -> str:
    """The activation of an MLP; "" where it is not known."""
    exact = isinstance(module, nn.GELU) and module.approximate == "none"
    return "gelu" if exact else "relu" if type(module) is nn.ReLU else ""


def _refuse(backbone: Backbone, why: str) -> None:
    raise SitusError(f"{backbone.name}: only plain ViTs of timm can be converted, but {why}", field="model")


class _Writer:
    """Collects the tensors of known layers."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone
        self.tensors: dict[str, Tensor] = {}
        self.eps: dict[str, float] = {}

    def add(self, name: str, value: Tensor | None) -> None:
        if value is not None:
            self.tensors[name] = value

    def linear(self, name: str, layer: Any) -> None:
        self.add(f"{name}.weight", layer.weight)
        self.add(f"{name}.bias", layer.bias)

    def norm(self, name: str, layer: nn.Module) -> None:
        if isinstance(layer, nn.Identity):
            return
        if not isinstance(layer, nn.LayerNorm) or not layer.elementwise_affine:
            _refuse(self.backbone, f"its {name} is a {type(layer).__name__}")
        assert isinstance(layer, nn.LayerNorm)
        self.add(f"{name}.weight", layer.weight)
        self.add(f"{name}.bias", layer.bias)
        self.eps[name] = layer.eps

    def block(self, name: str, block: Block) -> None:
        a, mlp = block.attention, block.mlp
        if type(block.module) is not vision_transformer.Block:
            _refuse(self.backbone, f"its blocks are of the class {type(block.module).__name__}")
        if not isinstance(a.norm, nn.Identity) or a.gate is not None:
            _refuse(self.backbone, "its attention has a gate or is followed by a norm")
        if (len(mlp.up), mlp.packed) != (1, 1) or not _act(mlp.act) or not isinstance(mlp.norm, nn.Identity):
            _refuse(self.backbone, f"its MLP is a {type(mlp.run).__name__} with {type(mlp.act).__name__}")
        (q_norm, k_norm), layers = a.head_norms, {"qkv": a.qkv[0], "proj": a.out, "fc1": mlp.up[0], "fc2": mlp.down}
        norms = {"norm1": block.norm1, "q_norm": q_norm, "k_norm": k_norm, "norm2": block.norm2}
        for part, layer in norms.items():
            self.norm(f"{name}.{part}", layer)
        for part, layer in layers.items():
            self.linear(f"{name}.{part}", layer)
        for part, gamma in zip(("scale1", "scale2"), block.gammas, strict=True):
            if isinstance(gamma, nn.Module):
                _refuse(self.backbone, f"a {type(gamma).__name__} replaces the LayerScale")
            else:
                self.add(f"{name}.{part}", gamma)
