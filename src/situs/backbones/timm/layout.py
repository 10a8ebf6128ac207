"""How timm's transformers are written down as groups, and how they call their tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from situs.backbones.layout import AttentionLayer, LayoutBuilder, Member, Names, Projection
from situs.errors import SitusError, unknown_name

NAMES = Names(
    embedding=("patch_embed", "norm_pre"),
    table=("pos_embed", "table"),
    position=("rope", "rel_pos", "shared_rel_pos", "relative_position_bias_table", "relative_position_index"),
    prefix=("cls_token", "dist_token", "reg_token"),
    qkv=("qkv", "q_proj", "k_proj", "v_proj"),
    head=("norm", "fc_norm", "attn_pool", "head", "head_dist"),
)


def write_flat(layout: LayoutBuilder, model: Any, dim: int) -> None:
    """VisionTransformer, Eva and VisionTransformerRelPos: one residual key for all blocks."""
    layout.open("residual", "residual", dim)
    for depth, block in enumerate(model.blocks):
        name = f"blocks.{depth}"
        _norms_and_scales(layout, "residual", block)
        layout.attention(name, "residual", _attention(layout, model, block.attn, depth))
        _mlp(layout, name, "residual", block.mlp)


def _norms_and_scales(layout: LayoutBuilder, residual: str, block: Any) -> None:
    """Pre-norms read the stream; post-norms write to it: either way they are as wide as it and move with it."""
    for layer in (block.norm1, block.norm2):
        layout.norm(residual, layer)
    names = ("gamma_1", "gamma_2", "ls1.gamma", "ls2.gamma")
    layout.vectors(residual, [layout.path(block, name) for name in names])


def _attention(layout: LayoutBuilder, model: Any, attn: Any, depth: int) -> AttentionLayer:
    q, k, v = _qkv(layout, attn)
    relative = type(attn).__name__ == "RelPosAttention"
    rope = None if relative else getattr(model, "rope", None)
    return AttentionLayer(
        q,
        k,
        v,
        layout.projection(attn.proj),
        attn.num_heads,
        attn.num_heads // getattr(attn, "num_kv_groups", 1),
        rotary=rope is not None,
        head_norms=(attn.q_norm, attn.k_norm),
        inner_norm=None if relative else attn.norm,
        gates=() if relative or attn.gate is None else (layout.projection(attn.gate),),
        head_tables=_relative_tables(layout, model, attn) if relative else _rotary_tables(layout, model, rope, depth),
        shared_heads=relative and model.shared_rel_pos is not None,
    )


def _qkv(layout: LayoutBuilder, attn: Any) -> tuple[Projection, Projection, Projection]:
    if getattr(attn, "qkv", None) is None:
        q, k, v = (layout.projection(layer) for layer in (attn.q_proj, attn.k_proj, attn.v_proj))
        return q, k, v
    width = attn.qkv.out_features // 3
    q, k, v = (layout.projection(attn.qkv, third * width, width) for third in range(3))
    if getattr(attn, "q_bias", None) is not None:
        # EVA keeps the biases beside the fused weight, and the keys' as a buffer of zeros that no state dict holds.
        q = replace(q, bias=layout.path(attn, "q_bias"), own_bias=True)
        v = replace(v, bias=layout.path(attn, "v_bias"), own_bias=True)
    return q, k, v


def _rotary_tables(layout: LayoutBuilder, model: Any, rope: Any, depth: int) -> list[Member]:
    """Learned frequencies [2, L, H, d / 2], one for each layer and head; axial rotations are the same for all."""
    if rope is None or not model.rope_mixed:
        return []
    return [Member(layout.path(rope, "freqs"), 2, at=(1, depth))]


def _relative_tables(layout: LayoutBuilder, model: Any, attn: Any) -> list[Member]:
    source = attn.rel_pos if model.shared_rel_pos is None else model.shared_rel_pos
    kind = type(source).__name__
    if kind == "RelPosBias":
        return [Member(layout.path(source, "relative_position_bias_table"), 1)]
    if kind == "RelPosMlp":
        last = layout.projection(source.mlp.fc2)
        return [Member(last.weight, 0)] + ([] if last.bias is None else [Member(last.bias, 0)])
    raise unknown_name("relative position class", kind, ("RelPosBias", "RelPosMlp"))


def _mlp(layout: LayoutBuilder, block: str, residual: str, mlp: Any) -> None:
    kind = type(mlp).__name__
    down = layout.projection(mlp.fc2)
    if kind == "SwiGLU":
        up = [layout.projection(layer) for layer in (mlp.fc1_g, mlp.fc1_x)]
        hidden = layout.mlp(block, residual, up, down)
    elif kind in ("Mlp", "GluMlp"):
        packed = 2 if kind == "GluMlp" else 1
        hidden = layout.mlp(block, residual, [layout.projection(mlp.fc1)], down, packed)
    else:
        raise unknown_name("lockable MLP class", kind, ("GluMlp", "Mlp", "SwiGLU"))
    layout.norm(hidden, mlp.norm)


def write_swin(layout: LayoutBuilder, model: Any) -> None:
    """One residual key for each stage; a merge joins 4 tokens, so that it sees its stage's key 4 times over."""
    depth = 0
    for stage, layer in enumerate(model.layers):
        residual = f"residual.{stage}"
        layout.open(residual, "residual", layer.blocks[0].dim)
        if not isinstance(layer.downsample, nn.Identity):
            before, merge = f"residual.{stage - 1}", layer.downsample
            if type(merge).__name__ != "PatchMerging":
                raise unknown_name("merge between stages", type(merge).__name__, ("PatchMerging",))
            reduction = layout.projection(merge.reduction)
            layout.norm(before, merge.norm, outer=4)
            layout.reads(before, reduction, outer=4)
            layout.writes(residual, reduction)
        for block in layer.blocks:
            _swin_block(layout, f"blocks.{depth}", residual, block)
            depth += 1


def _swin_block(layout: LayoutBuilder, name: str, residual: str, block: Any) -> None:
    attn = block.attn
    if (type(block).__name__, type(attn).__name__) != ("SwinTransformerBlock", "WindowAttention"):
        raise SitusError(f"{type(block).__name__} with {type(attn).__name__} is no Swin block that Situs has read")
    _norms_and_scales(layout, residual, block)
    q, k, v = _qkv(layout, attn)
    o = layout.projection(attn.proj)
    table = Member(layout.path(attn, "relative_position_bias_table"), 1)
    layout.attention(name, residual, AttentionLayer(q, k, v, o, attn.num_heads, attn.num_heads, head_tables=[table]))
    _mlp(layout, name, residual, block.mlp)
