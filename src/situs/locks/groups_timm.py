"""The groups of timm's transformers. Names of classes are compared, so that this room imports no timm."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from situs.errors import SitusError, unknown_name
from situs.locks.ledger import Attention, Ledger, Projection
from situs.locks.members import Group, Member

if TYPE_CHECKING:
    from situs.backbones.base import Backbone

FLAT = ("VisionTransformer", "VisionTransformerDistilled", "Eva", "VisionTransformerRelPos")


def timm_groups(backbone: Backbone) -> tuple[Group, ...]:
    """The groups of a timm model that Situs runs."""
    kind = type(backbone.model).__name__
    if kind == "SwinTransformer":
        return _swin(backbone)
    if kind not in FLAT:
        raise unknown_name("lockable timm class", kind, (*FLAT, "SwinTransformer"))
    ledger = Ledger(backbone.model)
    ledger.open("residual", "residual", backbone.dim)
    for depth, block in enumerate(backbone.model.blocks):
        name = f"blocks.{depth}"
        _norms_and_scales(ledger, "residual", block)
        ledger.attention(name, "residual", _attention(ledger, backbone.model, block.attn, depth))
        _mlp(ledger, name, "residual", block.mlp)
    return ledger.groups()


def _norms_and_scales(ledger: Ledger, residual: str, block: Any) -> None:
    """Pre-norms read the stream; post-norms write to it: either way they are as wide as it and move with it."""
    for layer in (block.norm1, block.norm2):
        ledger.norm(residual, layer)
    names = ("gamma_1", "gamma_2", "ls1.gamma", "ls2.gamma")
    ledger.vectors(residual, [ledger.path(block, name) for name in names])


def _attention(ledger: Ledger, model: Any, attn: Any, depth: int) -> Attention:
    heads = attn.num_heads
    share = getattr(attn, "num_kv_groups", 1)
    q, k, v = _qkv(ledger, attn)
    o = ledger.projection(attn.proj)
    relative = type(attn).__name__ == "RelPosAttention"
    rope = None if relative else getattr(model, "rope", None)
    return Attention(
        q=q,
        k=k,
        v=v,
        o=o,
        heads=heads,
        kv_heads=heads // share,
        width=ledger.state[o.weight].shape[o.into] // heads,
        rotary=rope is not None,
        head_norms=(attn.q_norm, attn.k_norm),
        inner_norm=None if relative else attn.norm,
        gates=() if relative or attn.gate is None else (ledger.projection(attn.gate),),
        head_tables=_relative_tables(ledger, model, attn) if relative else _rotary_tables(ledger, model, rope, depth),
        shared_heads=relative and model.shared_rel_pos is not None,
    )


def _qkv(ledger: Ledger, attn: Any) -> tuple[Projection, Projection, Projection]:
    if getattr(attn, "qkv", None) is None:
        q, k, v = (ledger.projection(layer) for layer in (attn.q_proj, attn.k_proj, attn.v_proj))
        return q, k, v
    width = attn.qkv.out_features // 3
    q, k, v = (ledger.projection(attn.qkv, third * width, width) for third in range(3))
    if getattr(attn, "q_bias", None) is not None:
        # EVA keeps the biases beside the fused weight, and the keys' as a buffer of zeros that no state dict holds.
        q = replace(q, bias=ledger.path(attn, "q_bias"), own_bias=True)
        v = replace(v, bias=ledger.path(attn, "v_bias"), own_bias=True)
    return q, k, v


def _rotary_tables(ledger: Ledger, model: Any, rope: Any, depth: int) -> list[Member]:
    """Learned frequencies [2, L, H, d / 2], one for each layer and head; axial rotations are the same for all."""
    if rope is None or not model.rope_mixed:
        return []
    return [Member(ledger.path(rope, "freqs"), 2, at=(1, depth))]


def _relative_tables(ledger: Ledger, model: Any, attn: Any) -> list[Member]:
    source = attn.rel_pos if model.shared_rel_pos is None else model.shared_rel_pos
    kind = type(source).__name__
    if kind == "RelPosBias":
        return [Member(ledger.path(source, "relative_position_bias_table"), 1)]
    if kind == "RelPosMlp":
        last = ledger.projection(source.mlp.fc2)
        return [Member(last.weight, 0)] + ([] if last.bias is None else [Member(last.bias, 0)])
    raise unknown_name("relative position class", kind, ("RelPosBias", "RelPosMlp"))


def _mlp(ledger: Ledger, block: str, residual: str, mlp: Any) -> None:
    kind = type(mlp).__name__
    down = ledger.projection(mlp.fc2)
    if kind == "SwiGLU":
        up = [ledger.projection(layer) for layer in (mlp.fc1_g, mlp.fc1_x)]
        hidden = ledger.mlp(block, residual, up, down)
    elif kind in ("Mlp", "GluMlp"):
        packed = 2 if kind == "GluMlp" else 1
        hidden = ledger.mlp(block, residual, [ledger.projection(mlp.fc1)], down, packed)
    else:
        raise unknown_name("lockable MLP class", kind, ("GluMlp", "Mlp", "SwiGLU"))
    ledger.norm(hidden, mlp.norm)


def _swin(backbone: Backbone) -> tuple[Group, ...]:
    """One residual key for each stage; a merge joins 4 tokens, so that it sees its stage's key 4 times over."""
    ledger = Ledger(backbone.model)
    depth = 0
    for stage, layer in enumerate(backbone.model.layers):
        residual = f"residual.{stage}"
        ledger.open(residual, "residual", layer.blocks[0].dim)
        if not isinstance(layer.downsample, nn.Identity):
            before, merge = f"residual.{stage - 1}", layer.downsample
            if type(merge).__name__ != "PatchMerging":
                raise SitusError(f"{backbone.name}: its {type(merge).__name__} between stages is not known")
            reduction = ledger.projection(merge.reduction)
            ledger.norm(before, merge.norm, outer=4)
            ledger.reads(before, reduction, outer=4)
            ledger.writes(residual, reduction)
        for block in layer.blocks:
            _swin_block(ledger, f"blocks.{depth}", residual, block)
            depth += 1
    return ledger.groups()


def _swin_block(ledger: Ledger, name: str, residual: str, block: Any) -> None:
    attn = block.attn
    if (type(block).__name__, type(attn).__name__) != ("SwinTransformerBlock", "WindowAttention"):
        raise SitusError(f"{type(block).__name__} with {type(attn).__name__} is no Swin block that Situs has read")
    _norms_and_scales(ledger, residual, block)
    q, k, v = _qkv(ledger, attn)
    o = ledger.projection(attn.proj)
    table = Member(ledger.path(attn, "relative_position_bias_table"), 1)
    width = ledger.state[o.weight].shape[o.into] // attn.num_heads
    heads = attn.num_heads
    ledger.attention(name, residual, Attention(q, k, v, o, heads, heads, width, rotary=False, head_tables=[table]))
    _mlp(ledger, name, residual, block.mlp)
