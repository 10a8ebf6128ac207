"""How transformers' layers are written down as groups, and how its models call their tensors.

Names of classes are compared, so that nothing here imports transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from situs.backbones.hf.postnorm import PostNorm
from situs.backbones.layout import AttentionLayer, LayoutBuilder, Names
from situs.errors import SitusError, unknown_name

RESIDUAL = "residual"
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


def inner_prefix(model: Any) -> str:
    """Where the names of the model without its head begin, in a backbone's state dict."""
    return "model." if model.base_model is model else f"model.{model.base_model_prefix}."


def one_block(config: Any) -> dict[str, Any]:
    """The entries of a config that leave one layer and few words of its model."""
    held, few = config.to_dict(), 64
    lost = [name for name in ("pad_token_id", "bos_token_id", "eos_token_id") if not _among(held.get(name), few)]
    layers = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    entries = {layers: 1, "vocab_size": few, **dict.fromkeys(lost)}
    if held.get("layer_types"):
        entries["layer_types"] = held["layer_types"][:1]
    return {name: value for name, value in entries.items() if name in held}


def _among(word: Any, few: int) -> bool:
    """Whether an id is one of the first; RoBERTa numbers its places behind that of the padding."""
    return isinstance(word, int) and word < few


def _writer(one: Callable[[LayoutBuilder, str, Any], None]) -> Callable[[LayoutBuilder, int, Iterable[Any]], None]:
    """Writes all layers of a model down: one residual key, and each layer by its family."""

    def write(layout: LayoutBuilder, dim: int, layers: Iterable[Any]) -> None:
        layout.open(RESIDUAL, "residual", dim)
        for depth, layer in enumerate(layers):
            one(layout, f"blocks.{depth}", layer)

    return write


def _vit(layout: LayoutBuilder, name: str, layer: Any) -> None:
    for norm in (layer.layernorm_before, layer.layernorm_after):
        layout.norm(RESIDUAL, norm)
    layout.attention(name, RESIDUAL, _image_attention(layout, layer.attention))
    _mlp(layout, name, layer.mlp)


def _dinov2(layout: LayoutBuilder, name: str, layer: Any) -> None:
    for norm in (layer.norm1, layer.norm2):
        layout.norm(RESIDUAL, norm)
    scales = (layer.layer_scale1, layer.layer_scale2)
    layout.vectors(RESIDUAL, [layout.path(scale, "lambda1") for scale in scales])
    layout.attention(name, RESIDUAL, _image_attention(layout, layer.attention))
    _mlp(layout, name, layer.mlp)


def _image_attention(layout: LayoutBuilder, attn: Any) -> AttentionLayer:
    q, k, v, o = (layout.projection(layer) for layer in (attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj))
    return AttentionLayer(q, k, v, o, attn.num_attention_heads, attn.num_attention_heads)


def _mlp(layout: LayoutBuilder, name: str, mlp: Any) -> None:
    """fc1 and fc2, or gate, up and down."""
    gated = {"Dinov2SwiGLUFFN", "Dinov2WithRegistersSwiGLUFFN", "LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"}
    plain = {"ASTMLP", "ViTMLP", "Dinov2MLP", "Dinov2WithRegistersMLP"}
    kind = type(mlp).__name__
    if kind in gated:
        up, down = (mlp.gate_proj, mlp.up_proj), mlp.down_proj
    elif kind in plain:
        up, down = (mlp.fc1,), mlp.fc2
    else:
        raise unknown_name("lockable MLP class", kind, gated | plain)
    layout.mlp(name, RESIDUAL, [layout.projection(layer) for layer in up], layout.projection(down))


def _post_norm(layout: LayoutBuilder, name: str, layer: PostNorm) -> None:
    """Each sublayer's norm stands in the stream itself. The norm of the embeddings is the owner's."""
    q, k, v, o = (layout.projection(part) for part in (layer.query, layer.key, layer.value, layer.out))
    layout.attention(name, RESIDUAL, AttentionLayer(q, k, v, o, layer.heads, layer.heads))
    layout.norm(RESIDUAL, layer.norm1)
    layout.mlp(name, RESIDUAL, [layout.projection(layer.fc1)], layout.projection(layer.fc2))
    layout.norm(RESIDUAL, layer.norm2)


def _gpt2(layout: LayoutBuilder, name: str, layer: Any) -> None:
    """Conv1D keeps its weights [in, out]; q, k and v lie fused on its second axis."""
    attn = layer.attn
    if attn.is_cross_attention or "crossattention" in dict(layer.named_children()):
        raise SitusError(f"{name}: cross-attention reads another model's stream, whose key is not this one's")
    width = attn.embed_dim
    q, k, v = (layout.projection(attn.c_attn, third * width, width) for third in range(3))
    o = layout.projection(attn.c_proj)
    for norm in (layer.ln_1, layer.ln_2):
        layout.norm(RESIDUAL, norm)
    layout.attention(name, RESIDUAL, AttentionLayer(q, k, v, o, attn.num_heads, attn.num_heads))
    layout.mlp(name, RESIDUAL, [layout.projection(layer.mlp.c_fc)], layout.projection(layer.mlp.c_proj))


def _llama(layout: LayoutBuilder, name: str, layer: Any) -> None:
    """RMSNorm, RoPE (query and key channels stay, and so do Qwen3's norms of them), grouped queries, a gated MLP."""
    attn = layer.self_attn
    q, k, v, o = (layout.projection(part) for part in (attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj))
    heads = layout.inputs(o) // attn.head_dim
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        layout.norm(RESIDUAL, norm)
    grouped = AttentionLayer(q, k, v, o, heads, heads // attn.num_key_value_groups, rotary=True)
    layout.attention(name, RESIDUAL, grouped)
    _mlp(layout, name, layer.mlp)


def _gpt_neox(layout: LayoutBuilder, name: str, layer: Any) -> None:
    """Each head's queries, keys and values lie one behind another in a fused matrix; RoPE holds queries and keys."""
    attn = layer.attention
    fused, o, width = layout.projection(attn.query_key_value), layout.projection(attn.dense), attn.head_size
    heads = layout.inputs(o) // width
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        layout.norm(RESIDUAL, norm)
    layout.reads(RESIDUAL, fused)
    layout.writes(RESIDUAL, o)
    if heads > 1:
        layout.open(f"{name}.heads", "heads", heads)
        layout.writes(f"{name}.heads", fused, inner=3 * width)
        layout.reads(f"{name}.heads", o, inner=width)
    layout.open(f"{name}.value", "value", width)
    for head in range(heads):
        layout.writes(f"{name}.value", layout.projection(attn.query_key_value, (3 * head + 2) * width, width))
    layout.reads(f"{name}.value", o, outer=heads)
    up, down = layout.projection(layer.mlp.dense_h_to_4h), layout.projection(layer.mlp.dense_4h_to_h)
    layout.mlp(name, RESIDUAL, [up], down)


write_vit, write_dinov2, write_post_norm, write_gpt2, write_llama, write_gpt_neox = map(
    _writer, (_vit, _dinov2, _post_norm, _gpt2, _llama, _gpt_neox)
)
"""By family; Mistral and Qwen are written as Llama is. Embeddings, tied ones too, stay clear."""
