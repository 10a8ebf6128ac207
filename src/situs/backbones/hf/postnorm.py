"""The layers of BERT and its like, each by its own parts: what runs them, locks them and attacks them reads these.

z = norm1(z + drop1(out(attention(z))))
z = norm2(z + drop2(fc2(act(fc1(z)))))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn


class PostNorm(NamedTuple):
    """One layer. heads, scale, dropout: of its attention."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    out: nn.Linear
    drop1: nn.Module
    norm1: nn.LayerNorm
    fc1: nn.Linear
    act: Callable[[Tensor], Tensor]
    fc2: nn.Linear
    drop2: nn.Module
    norm2: nn.LayerNorm
    heads: int
    scale: float
    dropout: nn.Dropout


def _bert(layer: Any) -> PostNorm:
    attn, mixed, mlp = layer.attention.self, layer.attention.output, layer.output
    return PostNorm(
        *(attn.query, attn.key, attn.value),
        *(mixed.dense, mixed.dropout, mixed.LayerNorm),
        *(layer.intermediate.dense, layer.intermediate.intermediate_act_fn, mlp.dense, mlp.dropout, mlp.LayerNorm),
        *(attn.num_attention_heads, attn.scaling, attn.dropout),
    )


def _distilbert(layer: Any) -> PostNorm:
    attn, mlp = layer.attention, layer.ffn
    return PostNorm(
        *(attn.q_lin, attn.k_lin, attn.v_lin),
        *(attn.out_lin, nn.Identity(), layer.sa_layer_norm),
        *(mlp.lin1, mlp.activation, mlp.lin2, mlp.dropout, layer.output_layer_norm),
        *(attn.n_heads, attn.scaling, attn.dropout),
    )


def _albert(layer: Any) -> PostNorm:
    attn = layer.attention
    return PostNorm(
        *(attn.query, attn.key, attn.value),
        *(attn.dense, attn.output_dropout, attn.LayerNorm),
        *(layer.ffn, layer.activation, layer.ffn_output, nn.Identity(), layer.full_layer_layer_norm),
        *(attn.num_attention_heads, attn.scaling, attn.attention_dropout),
    )


POST_NORM: dict[str, Callable[[Any], PostNorm]] = {
    **dict.fromkeys(
        (f"{name}SelfAttention" for name in ("Bert", "Camembert", "Electra", "Roberta", "XLMRoberta")), _bert
    ),
    "AlbertAttention": _albert,
    "DistilBertSelfAttention": _distilbert,
}
"""Exact attention class -> the parts of the layer around it."""
