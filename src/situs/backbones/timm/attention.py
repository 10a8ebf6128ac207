"""timm's attention and block classes, run over their own weights with one addition: a context.

timm's `Attention.forward` computes keys and values for every token. Here each exact class that we know gets a small
projection, and one `attend` serves them all; a class we do not know is refused by name rather than guessed.
With `keys`, keys and values are computed for the first `keys` tokens alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from timm.layers.attention import Attention, AttentionRope
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models.eva import EvaAttention, EvaBlock, EvaBlockPostNorm
from timm.models.vision_transformer import Block, ResPostBlock
from timm.models.vision_transformer_relpos import RelPosAttention, RelPosBlock, ResPostRelPosBlock
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from situs.backbones.base import Stream, Taps, called
from situs.backbones.timm.joined import joined_parts
from situs.core.attention import attend_context, attend_own
from situs.core.joined import run_joined
from situs.errors import SitusError

# Compiling `_of_first` makes torch ask, over four lines of a log, that nothing in it works in place; nothing does.
logging.getLogger("torch._higher_order_ops.wrap").addFilter(lambda record: "context_fn" not in record.getMessage())


def attend(attn: Any, x: Tensor, stream: Stream, depth: int, keys: int | None) -> Tensor:
    """One attention layer: x [B, S, D] -> [B, S, D]. Queries are all tokens; keys the first `keys` (None: all)."""
    if type(attn) is Attention and _plain(attn, stream):
        mixed = _attend_plain(attn, x, keys)
    else:
        mixed = _attend_any(attn, x, stream, depth, keys)
    if not isinstance(attn, RelPosAttention):
        mixed = attn.norm(mixed)
        if attn.gate is not None:
            mixed = mixed * attn.gate(x).sigmoid()
    return attn.proj_drop(attn.proj(mixed))


def _plain(attn: Any, stream: Stream) -> bool:
    """Whether queries, keys and values are used as their products give them, by every query and every key alike."""
    added = (stream.rotary, stream.bias, stream.mask)
    normed = not isinstance(attn.q_norm, nn.Identity) or not isinstance(attn.k_norm, nn.Identity)
    return all(part is None for part in added) and not normed and not (attn.training and attn.attn_drop.p > 0)


def _attend_plain(attn: Any, x: Tensor, keys: int | None) -> Tensor:
    if keys is None:
        return attend_own(F.linear(x, attn.qkv.weight, attn.qkv.bias), attn.num_heads)
    return attend_context(*_queries_and_context(attn.qkv.weight, attn.qkv.bias, x, keys), attn.num_heads)


def _attend_any(attn: Any, x: Tensor, stream: Stream, depth: int, keys: int | None) -> Tensor:
    queries, key_heads, values = PROJECTIONS[type(attn)](attn, x, x if keys is None else x[:, :keys])
    q = attn.q_norm(_heads(queries, attn.num_heads))
    # timm 1.0.29 has no grouped-query attention and no attribute for it.
    groups = getattr(attn, "num_kv_groups", 1)
    k = attn.k_norm(_heads(key_heads, attn.num_heads // groups))
    v = _heads(values, attn.num_heads // groups)
    if stream.rotary is not None:
        turn = stream.rotary[depth if stream.rotary.shape[0] > 1 else 0]
        half = bool(getattr(attn, "rotate_half", False))
        q = _rotate(q, turn, stream.prefix, half).type_as(v)
        k = _rotate(k, turn[..., : k.shape[2] - stream.prefix, :], stream.prefix, half).type_as(v)
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    mixed = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=_logit_bias(stream, depth, k, q.dtype),
        dropout_p=attn.attn_drop.p if attn.training else 0.0,
    )
    return mixed.transpose(1, 2).flatten(2)


def _heads(x: Tensor, count: int) -> Tensor:
    """[B, S, H * d] -> [B, H, S, d]."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def _rotate(x: Tensor, turn: Tensor, prefix: int, half: bool) -> Tensor:
    """Turns the patch tokens' heads by `turn` [B or 1, H or 1, N, 2d]; prefix tokens have no place and stay."""
    return torch.cat([x[:, :, :prefix], apply_rot_embed_cat(x[:, :, prefix:], turn, half=half)], dim=2)


def _logit_bias(stream: Stream, depth: int, k: Tensor, dtype: torch.dtype) -> Tensor | None:
    """What is added to the attention logits: relative bias, -inf on padding, or None (so that flash kernels apply)."""
    keys = k.shape[2]
    bias = None if stream.bias is None else stream.bias.layer(depth)[..., :keys].to(dtype)
    if stream.mask is None:
        return bias
    visible = stream.mask[:, None, None, :keys]
    return visible if bias is None else bias.masked_fill(~visible, float("-inf"))


def _fused(weight: Tensor, bias: Tensor | None, x: Tensor, x_keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One matrix product for all three where queries and keys are the same tokens, two where they are not."""
    if x is x_keys:
        q, k, v = F.linear(x, weight, bias).chunk(3, dim=-1)
        return q, k, v
    q, kv = _queries_and_context(weight, bias, x, x_keys.shape[1])
    k, v = kv.chunk(2, dim=-1)
    return q, k, v


def _queries_and_context(weight: Tensor, bias: Tensor | None, x: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Queries of all tokens [B, S, D], and keys and values of the first `keys`, [B, keys, 2 D]."""
    if torch.compiler.is_compiling() and torch.is_autocast_enabled(x.device.type):
        # Once for both products: x as it came would be kept beside its half.
        x = x.to(torch.get_autocast_dtype(x.device.type))
    width = weight.shape[0] // 3
    q = F.linear(x, weight[:width], None if bias is None else bias[:width])
    return q, _of_first(x, keys, weight[width:], None if bias is None else bias[width:])


def _of_first(x: Tensor, keys: int, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear of the first `keys` tokens. The product needs them side by side, and its backward needs them again.

    Compiled, that copy would be kept beside x in every layer; here it is made again from x, which is kept anyway.
    """
    if not torch.compiler.is_compiling():
        return F.linear(x[:, :keys], weight, bias)
    contexts = partial(create_selective_checkpoint_contexts, _products_alone)
    first = lambda x, weight, bias: F.linear(x[:, :keys], weight, bias)  # noqa: E731  (the compiler traces it)
    return checkpoint(first, x, weight, bias, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _products_alone(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    """Keeps what a product gives and makes all else again."""
    product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


def _project_plain(attn: Any, x: Tensor, x_keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _fused(attn.qkv.weight, attn.qkv.bias, x, x_keys)


def _project_rope(attn: Any, x: Tensor, x_keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if attn.qkv is not None:
        return _project_plain(attn, x, x_keys)
    return attn.q_proj(x), attn.k_proj(x_keys), attn.v_proj(x_keys)


def _project_eva(attn: Any, x: Tensor, x_keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if attn.qkv is None:
        return attn.q_proj(x), attn.k_proj(x_keys), attn.v_proj(x_keys)
    bias = None if attn.q_bias is None else torch.cat((attn.q_bias, attn.k_bias, attn.v_bias))
    return _fused(attn.qkv.weight, bias, x, x_keys)


Projection = Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(module, queries' tokens, keys' tokens) -> q, k, v, each [B, S, H * d]."""
PROJECTIONS: dict[type[nn.Module], Projection] = {
    Attention: _project_plain,
    AttentionRope: _project_rope,
    EvaAttention: _project_eva,
    RelPosAttention: _project_plain,
}


AttentionOf = Callable[[Tensor], Tensor]


def _pre_norm(block: Any, z: Tensor, attention: AttentionOf) -> Tensor:
    z = z + block.drop_path1(block.ls1(attention(block.norm1(z))))
    return z + block.drop_path2(block.ls2(block.mlp(block.norm2(z))))


def _post_norm(block: Any, z: Tensor, attention: AttentionOf) -> Tensor:
    z = z + block.drop_path1(block.norm1(attention(z)))
    return z + block.drop_path2(block.norm2(block.mlp(z)))


def _eva(block: Any, z: Tensor, attention: AttentionOf) -> Tensor:
    mixed = attention(block.norm1(z))
    z = z + block.drop_path1(mixed if block.gamma_1 is None else block.gamma_1 * mixed)
    mixed = block.mlp(block.norm2(z))
    return z + block.drop_path2(mixed if block.gamma_2 is None else block.gamma_2 * mixed)


BLOCKS: dict[type[nn.Module], Callable[[Any, Tensor, AttentionOf], Tensor]] = {
    Block: _pre_norm,
    RelPosBlock: _pre_norm,
    ResPostBlock: _post_norm,
    ResPostRelPosBlock: _post_norm,
    EvaBlock: _eva,
    EvaBlockPostNorm: _post_norm,
}


def run_block(block: nn.Module, z: Tensor, stream: Stream, depth: int, keys: int | None) -> Tensor:
    """One transformer block: z [B, S, D] -> [B, S, D]."""
    attn = block.attn
    kind = type(block) if type(block) in BLOCKS else type(block).__bases__[-1]  # below the class that FSDP makes
    return called(block, lambda x: BLOCKS[kind](block, x, lambda y: attend(attn, y, stream, depth, keys)), z)


def run_blocks(blocks: Iterable[nn.Module], stream: Stream, keys: int | None, taps: Taps) -> Tensor:
    """All blocks over stream.z: [B, S, D]."""
    if not taps and (parts := joined_parts(blocks, stream)):
        return run_joined(parts, stream.z, keys)
    z = stream.z
    for depth, block in enumerate(blocks):
        z = run_block(block, z, stream, depth, keys)
        for tap in taps:
            tap(depth + 1, z)
    return z


def check_blocks(name: str, blocks: Any) -> None:
    """Refuses a model whose block or attention class is not one of the exact classes above."""
    for block in blocks:
        for part, known in ((block, BLOCKS), (getattr(block, "attn", None), PROJECTIONS)):
            if type(part) not in known:
                names = ", ".join(sorted(kind.__name__ for kind in known))
                raise SitusError(f"{name}: its {type(part).__name__} is not among the classes Situs runs: {names}")
