"""Names are found by behaviour, on every layout; where there is nothing to solve, the reason is the true one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import small_swin
from tiny_texts import write_folder

from situs.audit.stem import Stem, find_embedding, find_stem, flat_weight, require_stem, table_rows
from situs.backbones import create_backbone
from situs.core.tokens import patchify
from situs.errors import SitusError

SMALL = {"depth": 1, "embed_dim": 32, "num_heads": 2}


def small(name: str = "vit_tiny_patch16_224", **fields: Any) -> Any:
    args = fields.pop("model_args", {})
    return create_backbone(name, img_size=32, patch_size=8, num_classes=5, model_args={**SMALL, **args}, **fields)


@pytest.mark.parametrize(
    ("name", "fields", "first"),
    [
        ("vit_tiny_patch16_224", {}, 1),
        ("deit_tiny_distilled_patch16_224", {}, 2),
        ("vit_small_patch14_reg4_dinov2", {}, 0),
        ("vit_base_patch16_clip_224", {}, 1),  # a norm after the table
        ("vit_tiny_patch16_224", {"model_args": {"class_token": False, "global_pool": "avg"}}, 0),
        ("vit_tiny_patch16_224", {"in_chans": 1}, 1),
    ],
)
def test_names_of_timm(name: str, fields: dict[str, Any], first: int) -> None:
    backbone = small(name, **fields)
    stem = find_stem(backbone)
    assert isinstance(stem, Stem), stem
    assert (stem.weight, stem.table) == ("model.patch_embed.proj.weight", "model.pos_embed")
    assert (stem.first, stem.patch_size) == (first, (8, 8))
    assert stem.bias == (None if "clip" in name else "model.patch_embed.proj.bias")


def test_names_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8
    )
    stem = require_stem(create_backbone(config, num_classes=3))
    assert stem.weight.endswith("patch_embeddings.projection.weight")
    assert stem.table.endswith("position_embeddings")
    assert stem.first == 1


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: small(positions="sincos"), "fixed or frozen"),
        (lambda: small(positions="none"), "adds no positions"),
        (lambda: small("vit_relpos_small_patch16_224"), "position bias to pairs"),
        (lambda: small("vit_small_patch16_rope_224"), "rotates queries"),
        (lambda: create_backbone("test_resnet"), "convolutional"),
        (lambda: small_swin(positions="learned"), "not a single linear map"),
        (lambda: small(model_args={"embed_norm_layer": torch.nn.LayerNorm}), "not a single linear map"),
    ],
)
def test_reasons(make: Any, reason: str) -> None:
    backbone = make()
    found = find_stem(backbone)
    assert isinstance(found, str)
    assert reason in found
    with pytest.raises(SitusError, match=r"^[a-z]"):
        require_stem(backbone)


def test_a_model_of_words_and_one_that_scales_its_tokens_have_no_stem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = create_backbone(str(write_folder(tmp_path / "bert", "bert")))
    assert find_embedding(words) == find_stem(words) == "the model takes no images"
    backbone = small()
    whole = type(backbone).assemble
    monkeypatch.setattr(
        type(backbone), "assemble", lambda self, tokens, places, **more: whole(self, 2 * tokens, places, **more)
    )
    assert find_stem(backbone) == "the position table is not simply added to the patch tokens"


def test_a_frozen_patch_embedding_is_told() -> None:
    backbone = small()
    backbone.model.patch_embed.proj.weight.requires_grad_(False)
    assert "frozen" in str(find_stem(backbone))


def test_finding_touches_neither_weights_gradients_nor_generator() -> None:
    backbone = small().train()
    before = {name: p.clone() for name, p in backbone.named_parameters()}
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    find_stem(backbone)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in backbone.named_parameters())
    assert backbone.training


def test_the_flat_weight_is_the_convolution() -> None:
    backbone = small().double()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    convolution = backbone.model.patch_embed.proj
    expected = convolution(images).flatten(2).transpose(1, 2) - convolution.bias
    torch.testing.assert_close(patchify(images, 8) @ flat_weight(convolution.weight).T, expected)


def test_rows_of_the_table() -> None:
    stem = Stem("w", None, "t", 2, (8, 8))
    table = torch.arange(10.0).view(1, 5, 2)
    assert table_rows(table, stem).tolist() == [[4, 5], [6, 7], [8, 9]]
    assert table_rows(table, stem, prefix=True).shape == (5, 2)
