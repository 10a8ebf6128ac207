"""Tiny models of every architecture that can be locked, in float64, with weights far from any symmetry."""

from __future__ import annotations

import inspect
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from timm.models.eva import Eva

from situs.backbones import Backbone, create_backbone
from situs.locks.key import Key
from situs.locks.owner import unlocking
from situs.models import open_model

SMALL: dict[str, Any] = {"depth": 2, "embed_dim": 24, "num_heads": 3}
WIDE = {"img_size": (32, 48), "model_args": SMALL}


def eva(**arguments: Any) -> dict[str, Any]:
    return {"img_size": (28, 42), "model_args": SMALL | arguments}


TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", WIDE),
    "vit_qk_norm": ("vit_tiny_patch16_224", {**WIDE, "model_args": {**SMALL, "qk_norm": True, "init_values": 0.1}}),
    "vit_inner_norm": (
        "vit_tiny_patch16_224",
        {**WIDE, "model_args": {**SMALL, "scale_mlp_norm": True, "scale_attn_norm": True}},
    ),
    "deit_distilled": ("deit_tiny_distilled_patch16_224", WIDE),
    "deit3": ("deit3_small_patch16_224", WIDE),
    "registers": ("vit_base_patch16_reg4_gap_256", WIDE),
    "dinov2_swiglu": ("vit_giant_patch14_dinov2", {"img_size": (28, 42), "model_args": {**SMALL, "mlp_ratio": 2.0}}),
    "res_post": ("vit_relpos_small_patch16_rpn_224", WIDE),
    "eva": ("eva02_tiny_patch14_224", eva()),
    "eva_inner_norms": ("eva02_base_patch14_224", eva(scale_mlp=True, scale_attn_inner=True, init_values=0.1)),
    "eva_post_norm": ("eva02_tiny_patch14_224", eva(use_post_norm=True)),
    "rope_mixed": ("vit_small_patch16_rope_mixed_224", WIDE),
    "dinov3": ("vit_small_patch16_dinov3", WIDE),
    "relpos": ("vit_relpos_small_patch16_224", WIDE),
    "relpos_table": ("vit_relpos_small_patch16_224", {**WIDE, "model_args": {**SMALL, "rel_pos_type": "bias"}}),
    "relpos_shared": ("vit_srelpos_small_patch16_224", WIDE),
    "beit": ("beit_base_patch16_224", WIDE),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {
            "img_size": (32, 48),
            "model_args": {"embed_dim": 12, "depths": (1, 2), "num_heads": (2, 3), "window_size": 4},
        },
    ),
    "swin_v2": (
        "swinv2_tiny_window8_256",
        {
            "img_size": (32, 48),
            "model_args": {"embed_dim": 12, "depths": (1, 2), "num_heads": (2, 3), "window_size": (2, 3)},
        },
    ),
}
if "num_kv_heads" in inspect.signature(Eva).parameters:  # not in the oldest timm we support
    grouped = eva(embed_dim=32, num_heads=4, num_kv_heads=2, attn_type="rope", qkv_fused=False, qk_norm=True)
    TIMM["eva_grouped"] = ("eva02_tiny_patch14_224", grouped)
ENCODER = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
WORDS = {"vocab_size": 31, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TEXT = {**ENCODER, **WORDS, "intermediate_size": 32, "max_position_embeddings": 16}
LLAMA = {**TEXT, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
HALF_TURNED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
HF: dict[str, tuple[str, dict[str, Any]]] = {
    "hf_vit": ("ViTForImageClassification", {**ENCODER, "intermediate_size": 32, "image_size": 16, "patch_size": 4}),
    "hf_dinov2": ("Dinov2Model", {**ENCODER, "image_size": 16, "patch_size": 4, "mlp_ratio": 2}),
    "hf_dinov2_swiglu": (
        "Dinov2WithRegistersModel",
        {**ENCODER, "image_size": 16, "patch_size": 4, "use_swiglu_ffn": True, "num_register_tokens": 2},
    ),
    "bert": ("BertForSequenceClassification", TEXT),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 16, **WORDS}),
    "llama": ("LlamaForCausalLM", LLAMA),
    "mistral": ("MistralForCausalLM", {**LLAMA, "sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", LLAMA),
    "gpt_neox": ("GPTNeoXForCausalLM", {**TEXT, "rope_parameters": HALF_TURNED}),
    "distilbert": (
        "DistilBertForSequenceClassification",
        {"dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 32, "max_position_embeddings": 16, **WORDS},
    ),
    "electra": ("ElectraForMaskedLM", {**TEXT, "embedding_size": 12}),
    "albert": ("AlbertForMaskedLM", {**TEXT, "embedding_size": 12, "num_hidden_layers": 3, "num_hidden_groups": 2}),
}
ZOO = [*TIMM, *HF]
CAUSAL = ["gpt2", "llama", "mistral", "qwen2", "qwen3", "gpt_neox"]
ROTARY = [
    "eva",
    *(["eva_grouped"] if "eva_grouped" in TIMM else []),
    "eva_inner_norms",
    "eva_post_norm",
    "rope_mixed",
    "dinov3",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gpt_neox",
]
RELATIVE = ["res_post", "relpos", "relpos_table", "relpos_shared", "beit"]
NO_ROWS = [*CAUSAL, *RELATIVE, "swin", "swin_v2"]


def make(name: str, dtype: torch.dtype = torch.float64) -> Backbone:
    """A backbone whose every weight is random: the ones and zeros of an initialisation would hide mistakes."""
    made, chance = _made(name)
    torch.set_rng_state(chance)
    backbone = deepcopy(made).to(dtype)
    if name == "rope_mixed":
        backbone.model.rope.float()  # timm computes mixed frequencies in float32 whatever the model's type
    return backbone.eval()


@cache
def _made(name: str) -> tuple[Backbone, torch.Tensor]:
    """It in float32, and the state of torch's chance behind it."""
    torch.manual_seed(0)
    if name in TIMM:
        architecture, arguments = TIMM[name]
        backbone = create_backbone(architecture, num_classes=5, **arguments)
    else:
        import transformers

        kind, entries = HF[name]
        cls = getattr(transformers, kind)
        backbone = create_backbone(cls(cls.config_class(**entries)))
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return backbone, torch.get_rng_state()


def inputs(backbone: Backbone, batch: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if backbone.input.shape is None:
        return torch.randint(3, 31, (batch, 9), generator=generator)
    dtype = next(backbone.parameters()).dtype
    return torch.randn(batch, 3, *backbone.input.shape, generator=generator, dtype=torch.float64).to(dtype)


def opened_model(locked: Path, key: Key, withheld: Path | None = None) -> Backbone:
    """The model in a locked folder, opened in memory."""
    return open_model(locked, unlock=unlocking(key, withheld)).backbone


def keyed_model(locked: Path, key: Key, withheld: Path | None = None) -> Backbone:
    """The same with its weights left locked, the owner permuting the stream around the blocks."""
    return open_model(locked, unlock=unlocking(key, withheld, keyed=True)).backbone
