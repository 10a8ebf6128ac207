"""The groups of transformers' models. Names of classes are compared, so that this room imports no transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from situs.errors import SitusError, unknown_name
from situs.locks.ledger import Attention, Ledger
from situs.locks.members import Group

if TYPE_CHECKING:
    from situs.backbones.base import Backbone

RESIDUAL = "residual"


def hf_groups(backbone: Backbone) -> tuple[Group, ...]:
    """The groups of a transformers model that Situs runs; embeddings, tied ones too, stay clear."""
    inner = backbone.model.base_model
    kind = type(inner).__name__
    if kind not in LAYERS:
        raise unknown_name("lockable transformers class", kind, LAYERS)
    layers, write = LAYERS[kind]
    ledger = Ledger(backbone.model)
    ledger.open(RESIDUAL, "residual", backbone.dim)
    for depth, layer in enumerate(layers(inner)):
        write(ledger, f"blocks.{depth}", layer)
    return ledger.groups()


def _vit(ledger: Ledger, name: str, layer: Any) -> None:
    for norm in (layer.layernorm_before, layer.layernorm_after):
        ledger.norm(RESIDUAL, norm)
    ledger.attention(name, RESIDUAL, _image_attention(ledger, layer.attention))
    _mlp(ledger, name, layer.mlp)


def _dinov2(ledger: Ledger, name: str, layer: Any) -> None:
    for norm in (layer.norm1, layer.norm2):
        ledger.norm(RESIDUAL, norm)
    scales = (layer.layer_scale1, layer.layer_scale2)
    ledger.vectors(RESIDUAL, [ledger.path(scale, "lambda1") for scale in scales])
    ledger.attention(name, RESIDUAL, _image_attention(ledger, layer.attention))
    _mlp(ledger, name, layer.mlp)


def _image_attention(ledger: Ledger, attn: Any) -> Attention:
    q, k, v, o = (ledger.projection(layer) for layer in (attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj))
    heads = attn.num_attention_heads
    return Attention(q, k, v, o, heads, heads, ledger.state[o.weight].shape[o.into] // heads, rotary=False)


def _mlp(ledger: Ledger, name: str, mlp: Any) -> None:
    """fc1 and fc2, or gate, up and down."""
    gated = {"Dinov2SwiGLUFFN", "Dinov2WithRegistersSwiGLUFFN", "LlamaMLP", "MistralMLP", "Qwen2MLP"}
    plain = {"ViTMLP", "Dinov2MLP", "Dinov2WithRegistersMLP"}
    kind = type(mlp).__name__
    if kind in gated:
        up, down = (mlp.gate_proj, mlp.up_proj), mlp.down_proj
    elif kind in plain:
        up, down = (mlp.fc1,), mlp.fc2
    else:
        raise unknown_name("lockable MLP class", kind, gated | plain)
    ledger.mlp(name, RESIDUAL, [ledger.projection(layer) for layer in up], ledger.projection(down))


def _bert(ledger: Ledger, name: str, layer: Any) -> None:
    """Post-norm: each sublayer's norm stands in the stream itself. The norm of the embeddings is the owner's."""
    attn = layer.attention.self
    q, k, v = (ledger.projection(part) for part in (attn.query, attn.key, attn.value))
    o = ledger.projection(layer.attention.output.dense)
    heads = attn.num_attention_heads
    width = ledger.state[o.weight].shape[o.into] // heads
    ledger.attention(name, RESIDUAL, Attention(q, k, v, o, heads, heads, width, rotary=False))
    ledger.norm(RESIDUAL, layer.attention.output.LayerNorm)
    ledger.mlp(name, RESIDUAL, [ledger.projection(layer.intermediate.dense)], ledger.projection(layer.output.dense))
    ledger.norm(RESIDUAL, layer.output.LayerNorm)


def _gpt2(ledger: Ledger, name: str, layer: Any) -> None:
    """Conv1D keeps its weights [in, out]; q, k and v lie fused on its second axis."""
    attn = layer.attn
    if attn.is_cross_attention or "crossattention" in dict(layer.named_children()):
        raise SitusError(f"{name}: cross-attention reads another model's stream, whose key is not this one's")
    width = attn.embed_dim
    q, k, v = (ledger.projection(attn.c_attn, third * width, width) for third in range(3))
    o = ledger.projection(attn.c_proj)
    for norm in (layer.ln_1, layer.ln_2):
        ledger.norm(RESIDUAL, norm)
    heads = attn.num_heads
    ledger.attention(name, RESIDUAL, Attention(q, k, v, o, heads, heads, attn.head_dim, rotary=False))
    ledger.mlp(name, RESIDUAL, [ledger.projection(layer.mlp.c_fc)], ledger.projection(layer.mlp.c_proj))


def _llama(ledger: Ledger, name: str, layer: Any) -> None:
    """RMSNorm, RoPE (query and key channels stay), grouped queries, a gated MLP."""
    attn = layer.self_attn
    q, k, v, o = (ledger.projection(part) for part in (attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj))
    heads = ledger.state[o.weight].shape[o.into] // attn.head_dim
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        ledger.norm(RESIDUAL, norm)
    grouped = Attention(q, k, v, o, heads, heads // attn.num_key_value_groups, attn.head_dim, rotary=True)
    ledger.attention(name, RESIDUAL, grouped)
    _mlp(ledger, name, layer.mlp)


Writer = Callable[[Ledger, str, Any], None]
LAYERS: dict[str, tuple[Callable[[Any], Any], Writer]] = {
    "ViTModel": (lambda model: model.layers, _vit),
    "Dinov2Model": (lambda model: model.encoder.layer, _dinov2),
    "Dinov2WithRegistersModel": (lambda model: model.encoder.layer, _dinov2),
    "BertModel": (lambda model: model.encoder.layer, _bert),
    "GPT2Model": (lambda model: model.h, _gpt2),
    "LlamaModel": (lambda model: model.layers, _llama),
    "MistralModel": (lambda model: model.layers, _llama),
    "Qwen2Model": (lambda model: model.layers, _llama),
}
"""The model without its head, exactly -> where its layers are, and how one is written down."""
