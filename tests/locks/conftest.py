"""Tiny models of every kind on disk, with weights far from any symmetry; made once a session."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from situs.backbones import Backbone, create_backbone
from situs.locks.folder import write_model

sys.path.insert(0, str(Path(__file__).parent))  # so that the tests of locks can import `zoo`

TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": (
        "vit_tiny_patch16_224",
        dict(img_size=16, patch_size=8, num_classes=5, model_args=dict(embed_dim=24, depth=2, num_heads=3)),
    ),
    "eva": (
        "eva02_tiny_patch14_224",
        dict(img_size=28, num_classes=5, model_args=dict(embed_dim=24, depth=2, num_heads=3)),
    ),
    "swin": (
        "swin_tiny_patch4_window7_224",
        dict(
            img_size=32,
            num_classes=5,
            model_args=dict(embed_dim=12, depths=(1, 2), num_heads=(2, 4), window_size=4),
        ),
    ),
}
SMALL = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=32)
WORDS = dict(vocab_size=31, bos_token_id=0, eos_token_id=0, pad_token_id=0)
HF: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", "BertConfig", dict(**SMALL, **WORDS, max_position_embeddings=16)),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", dict(n_embd=24, n_layer=2, n_head=3, n_positions=16, **WORDS)),
    "llama": (
        "LlamaForCausalLM",
        "LlamaConfig",
        dict(SMALL, num_attention_heads=4, num_key_value_heads=2, head_dim=6, max_position_embeddings=16, **WORDS),
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", dict(**SMALL, **WORDS, max_position_embeddings=16)),
    "electra": (
        "ElectraForSequenceClassification",
        "ElectraConfig",
        dict(**SMALL, **WORDS, embedding_size=12, max_position_embeddings=16),
    ),
    "hf_vit": ("ViTForImageClassification", "ViTConfig", dict(**SMALL, image_size=16, patch_size=8, num_labels=5)),
}
MODELS = [*TIMM, *HF]


def make(name: str) -> Backbone:
    torch.manual_seed(0)
    if name in TIMM:
        architecture, arguments = TIMM[name]
        backbone = create_backbone(architecture, **arguments)
    else:
        transformers = pytest.importorskip("transformers")
        kind, config, entries = HF[name]
        backbone = create_backbone(getattr(transformers, kind)(getattr(transformers, config)(**entries)))
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return backbone.eval()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """name -> the folder of that model. Tests do not write to it."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            place = tmp_path_factory.mktemp(name)
            write_model(make(name), place)
            (place / "README.md").write_text(f"A tiny {name}.\n")
            (place / "tokens").mkdir()
            (place / "tokens" / "merges.txt").write_text("a b\n")
            made[name] = place
        return made[name]

    return folder
