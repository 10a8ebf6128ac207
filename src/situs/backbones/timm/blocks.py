"""The parts of timm's blocks: a reader for each exact class; unknown classes are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from timm.layers.attention import Attention as PlainAttention
from timm.layers.attention import AttentionRope
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models import beit, eva, swin_transformer, swin_transformer_v2, vision_transformer, vision_transformer_relpos
from torch import nn

from situs.backbones.block import Attention, Block, Form, HeadTable, Mlp, Read, unknown_mlp
from situs.backbones.layout import Names
from situs.errors import SitusError

NAMES = Names(
    embedding=("patch_embed", "norm_pre"),
    table=("pos_embed", "table"),
    position=(
        "rope",
        "rel_pos",
        "shared_rel_pos",
        "cpb_mlp",
        "relative_position_bias_table",
        "relative_position_index",
    ),
    prefix=("cls_token", "dist_token", "reg_token"),
    qkv=("qkv", "q_proj", "k_proj", "v_proj"),
    head=("norm", "fc_norm", "attn_pool", "head", "head_dist"),
)
"""timm's names of tensors."""


def _joined(attn: Any, **more: Any) -> Attention:
    """One layer for queries, keys and values, as in Swin and relative-position ViTs."""
    dropout = attn.attn_drop.p if attn.training else 0.0
    return Attention((attn.qkv,), attn.proj, attn.num_heads, dropout=dropout, drop=attn.proj_drop, **more)


def _plain(attn: Any, **more: Any) -> Attention:
    return _joined(attn, head_norms=(attn.q_norm, attn.k_norm), norm=attn.norm, gate=attn.gate, **more)


def _rope(attn: Any, **more: Any) -> Attention:
    # timm 1.0.29 has no grouped-query attention and no attribute for it.
    rotate = partial(apply_rot_embed_cat, half=bool(attn.rotate_half))
    whole = _plain(attn, shared=getattr(attn, "num_kv_groups", 1), rotate=rotate, **more)
    return whole if attn.qkv is not None else whole._replace(qkv=(attn.q_proj, attn.k_proj, attn.v_proj))


def _biases(attn: Any) -> Any:
    return None if attn.q_bias is None else (attn.q_bias, attn.k_bias, attn.v_bias)


def _eva(attn: Any) -> Attention:
    return _rope(attn, biases=_biases(attn))


def _relative(attn: Any) -> Attention:
    return _joined(attn, head_norms=(attn.q_norm, attn.k_norm), tables=bias_tables(attn.rel_pos))


def _beit(attn: Any) -> Attention:
    return _joined(attn, biases=_biases(attn), tables=() if attn.window_size is None else bias_tables(attn))


def _window(attn: Any) -> Attention:
    return _joined(attn, tables=bias_tables(attn))


def _cosine(attn: Any) -> Attention:
    """Swin V2: the logits are cosines times a number per head, and a small network makes the bias."""
    tables = (HeadTable(attn.logit_scale, 0), HeadTable(attn.cpb_mlp[-1].weight, 0))
    return _joined(attn, biases=_biases(attn), tables=tables)


def bias_tables(source: Any) -> tuple[HeadTable, ...]:
    """The table of a relative bias, or the last layer of the small network that makes it."""
    if source is None:
        return ()
    if type(source).__name__ == "RelPosMlp":
        last = source.mlp.fc2
        return tuple(HeadTable(tensor, 0) for tensor in (last.weight, last.bias) if tensor is not None)
    return (HeadTable(source.relative_position_bias_table, 1),)


def _mlp(mlp: Any) -> Mlp:
    kind = type(mlp).__name__
    if kind not in ("GluMlp", "Mlp", "SwiGLU"):
        return unknown_mlp(mlp)
    up = (mlp.fc1_g, mlp.fc1_x) if kind == "SwiGLU" else (mlp.fc1,)
    return Mlp(up, mlp.act, mlp.fc2, mlp, mlp.norm, packed=2 if kind == "GluMlp" else 1)


def _scaled(block: Any) -> tuple[Any, Any]:
    scales = (None if isinstance(scale, nn.Identity) else scale for scale in (block.ls1, block.ls2))
    first, second = (getattr(scale, "gamma", scale) for scale in scales)
    return first, second


def _gammas(block: Any) -> tuple[Any, Any]:
    return block.gamma_1, block.gamma_2


def _unscaled(_: Any) -> tuple[None, None]:
    return None, None


def _block(form: Form, gammas: Callable[[Any], tuple[Any, Any]], block: Any) -> Block:
    attention, mlp, drops = (
        ATTENTIONS[type(block.attn)](block.attn),
        _mlp(block.mlp),
        (block.drop_path1, block.drop_path2),
    )
    return Block(block, form, block.norm1, attention, block.norm2, mlp, gammas(block), drops)


ATTENTIONS: dict[type[nn.Module], Callable[[Any], Attention]] = {
    PlainAttention: _plain,
    AttentionRope: _rope,
    eva.EvaAttention: _eva,
    vision_transformer_relpos.RelPosAttention: _relative,
    beit.Attention: _beit,
    swin_transformer.WindowAttention: _window,
    swin_transformer_v2.WindowAttention: _cosine,
}
BLOCKS: dict[type[nn.Module], Read] = {
    vision_transformer.Block: partial(_block, "pre", _scaled),
    vision_transformer.ResPostBlock: partial(_block, "res-post", _unscaled),
    vision_transformer_relpos.RelPosBlock: partial(_block, "pre", _scaled),
    vision_transformer_relpos.ResPostRelPosBlock: partial(_block, "res-post", _unscaled),
    eva.EvaBlock: partial(_block, "pre", _gammas),
    eva.EvaBlockPostNorm: partial(_block, "res-post", _unscaled),
    beit.Block: partial(_block, "pre", _gammas),
    swin_transformer.SwinTransformerBlock: partial(_block, "pre", _unscaled),
    swin_transformer_v2.SwinTransformerV2Block: partial(_block, "res-post", _unscaled),
}


def read_block(block: Any) -> Block:
    """The parts of one of timm's blocks."""
    kind = type(block) if type(block) in BLOCKS else type(block).__bases__[-1]  # below the class that FSDP makes
    return BLOCKS[kind](block)


def check_blocks(name: str, blocks: Any) -> None:
    """Refuses a model whose block or attention class is not one of the exact classes above."""
    for block in blocks:
        for part, known in ((block, BLOCKS), (getattr(block, "attn", None), ATTENTIONS)):
            if type(part) not in known:
                names = ", ".join(sorted(kind.__name__ for kind in known))
                raise SitusError(f"{name}: its {type(part).__name__} is not among the classes that Situs runs: {names}")
