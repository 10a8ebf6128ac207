"""The parts of transformers' layers: a reader for each exact attention class, and the names of their tensors.

Names of classes are compared, so that nothing here imports transformers. Encoders run here, with a context; attention
goes through torch's SDPA whatever the model's `attn_implementation`: the others differ in rounding only. Gradient
checkpointing, which transformers keeps in its own layer call, is not applied. Decoders run through transformers' code.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from situs.backbones.block import Attention, Block, Mlp, Read, unknown_mlp
from situs.backbones.layout import Names
from situs.errors import SitusError

NAMES = Names(
    embedding=(
        "embeddings",
        "embeddings_project",
        "encoder.embedding_hidden_mapping_in",
        "embed_tokens",
        "embed_in",
        "wte",
        "rotary_emb",
    ),
    table=("position_embeddings", "wpe"),
    prefix=("cls_token", "distillation_token", "mask_token", "register_tokens"),
    qkv=(
        *("query", "key", "value", "q_proj", "k_proj", "v_proj", "c_attn"),
        *("q_lin", "k_lin", "v_lin", "query_key_value"),
    ),
    head=("layernorm", "norm", "ln_f", "final_layer_norm", "pooler"),
)


GATED = ("Dinov2SwiGLUFFN", "Dinov2WithRegistersSwiGLUFFN", "LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")
PLAIN = ("ASTMLP", "ViTMLP", "Dinov2MLP", "Dinov2WithRegistersMLP")


def _apart(attn: Any, heads: int, **more: Any) -> Attention:
    return Attention((attn.q_proj, attn.k_proj, attn.v_proj), attn.o_proj, heads, **more)


def _image_attention(attn: Any) -> Attention:
    dropout = attn.attention_dropout if attn.training else 0.0
    return _apart(attn, attn.num_attention_heads, scale=attn.scaling, dropout=dropout)


def _mlp(mlp: Any) -> Mlp:
    """fc1 and fc2, or gate, up and down."""
    kind = type(mlp).__name__
    if kind in GATED:
        return Mlp((mlp.gate_proj, mlp.up_proj), mlp.act_fn, mlp.down_proj, mlp)
    return Mlp((mlp.fc1,), mlp.activation_fn, mlp.fc2, mlp) if kind in PLAIN else unknown_mlp(mlp)


def _vit(layer: Any) -> Block:
    norms, drops = (layer.layernorm_before, layer.layernorm_after), (layer.dropout, layer.dropout)
    return Block(layer, "pre", norms[0], _image_attention(layer.attention), norms[1], _mlp(layer.mlp), drops=drops)


def _dinov2(layer: Any) -> Block:
    attention, gammas = _image_attention(layer.attention), (layer.layer_scale1.lambda1, layer.layer_scale2.lambda1)
    drops = (layer.drop_path, layer.drop_path)
    return Block(layer, "pre", layer.norm1, attention, layer.norm2, _mlp(layer.mlp), gammas, drops)


def _words(attn: Any, layers: tuple[Any, ...], out: Any, heads: int, dropout: nn.Dropout) -> Attention:
    return Attention(layers, out, heads, scale=attn.scaling, dropout=dropout.p if dropout.training else 0.0)


def _bert(layer: Any) -> Block:
    """Post-norm layers: the norm of each sublayer is in the stream itself."""
    attn, mixed, middle, last = layer.attention.self, layer.attention.output, layer.intermediate, layer.output
    qkv = (attn.query, attn.key, attn.value)
    attention = _words(attn, qkv, mixed.dense, attn.num_attention_heads, attn.dropout)
    mlp = Mlp((middle.dense,), middle.intermediate_act_fn, last.dense)
    return Block(layer, "post", mixed.LayerNorm, attention, last.LayerNorm, mlp, drops=(mixed.dropout, last.dropout))


def _distilbert(layer: Any) -> Block:
    attn, ffn = layer.attention, layer.ffn
    attention = _words(attn, (attn.q_lin, attn.k_lin, attn.v_lin), attn.out_lin, attn.n_heads, attn.dropout)
    mlp, norms = Mlp((ffn.lin1,), ffn.activation, ffn.lin2), (layer.sa_layer_norm, layer.output_layer_norm)
    return Block(layer, "post", norms[0], attention, norms[1], mlp, drops=(nn.Identity(), ffn.dropout))


def _albert(layer: Any) -> Block:
    attn, norm = layer.attention, layer.full_layer_layer_norm
    qkv = (attn.query, attn.key, attn.value)
    attention = _words(attn, qkv, attn.dense, attn.num_attention_heads, attn.attention_dropout)
    mlp = Mlp((layer.ffn,), layer.activation, layer.ffn_output)
    return Block(layer, "post", attn.LayerNorm, attention, norm, mlp, drops=(attn.output_dropout, nn.Identity()))


def _gpt2(layer: Any) -> Block:
    """Conv1D keeps its weights [in, out]."""
    attn, mlp = layer.attn, layer.mlp
    if attn.is_cross_attention or "crossattention" in dict(layer.named_children()):
        raise SitusError(
            f"{type(layer).__name__}: has cross-attention to the features of a second model; Situs runs only "
            "self-attention"
        )
    attention = Attention((attn.c_attn,), attn.c_proj, attn.num_heads)
    return Block(layer, "pre", layer.ln_1, attention, layer.ln_2, Mlp((mlp.c_fc,), mlp.act, mlp.c_proj, mlp))


def _llama(layer: Any) -> Block:
    """Llama, Mistral and Qwen: rotated queries and keys; several queries may share keys and values."""
    attn, norms = layer.self_attn, (layer.input_layernorm, layer.post_attention_layernorm)
    heads = attn.o_proj.in_features // attn.head_dim
    attention = _apart(attn, heads, shared=attn.num_key_value_groups, rotary=True)
    return Block(layer, "pre", norms[0], attention, norms[1], _mlp(layer.mlp))


def _gpt_neox(layer: Any) -> Block:
    attn, norms, mlp = layer.attention, (layer.input_layernorm, layer.post_attention_layernorm), layer.mlp
    heads = attn.dense.in_features // attn.head_size
    attention = Attention((attn.query_key_value,), attn.dense, heads, rotary=True, by_head=True)
    both = Mlp((mlp.dense_h_to_4h,), mlp.act, mlp.dense_4h_to_h, mlp)
    return Block(layer, "parallel", norms[0], attention, norms[1], both)


READERS: dict[str, Read] = {
    **dict.fromkeys(("ASTAttention", "ViTAttention"), _vit),
    **dict.fromkeys(("Dinov2Attention", "Dinov2WithRegistersAttention"), _dinov2),
    **dict.fromkeys(
        (f"{name}SelfAttention" for name in ("Bert", "Camembert", "Electra", "Roberta", "XLMRoberta")), _bert
    ),
    "AlbertAttention": _albert,
    "DistilBertSelfAttention": _distilbert,
    "GPT2Attention": _gpt2,
    **dict.fromkeys((f"{name}Attention" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")), _llama),
    "GPTNeoXAttention": _gpt_neox,
}
"""Exact attention class -> the reader of the layer around it."""


def reader_of(name: str, layers: Any) -> Read:
    """The reader of a model's layers; refused if one has an attention of another class."""
    kinds = set()
    for layer in layers:
        inside = [type(module).__name__ for module in layer.modules()]
        known = [kind for kind in inside if kind in READERS]
        if not known:
            kind = next((kind for kind in inside if kind.endswith("Attention")), inside[0])
            names = ", ".join(sorted(READERS))
            raise SitusError(f"{name}: its {kind} is not among the attention classes that Situs runs: {names}")
        kinds.update(known)
    return READERS[kinds.pop()]
