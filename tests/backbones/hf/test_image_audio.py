"""AST against transformers' own forward stands in test_create; here its places, and who is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from situs.backbones import BackboneConfig, create_backbone
from situs.backbones.base import InputSpec
from situs.backbones.hf.image import UNPLACED
from situs.core.position import sincos
from situs.core.tokens import patchify
from situs.errors import SitusError

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "num_mel_bins": 8,
    "max_length": 12,
    "patch_size": 4,
    "frequency_stride": 4,
    "time_stride": 4,
}


def ast(**entries: Any) -> Any:
    torch.manual_seed(0)
    return transformers.ASTConfig(**SMALL | entries)


@torch.no_grad()
def test_a_token_is_its_own_patch_and_places_count_mels_then_frames() -> None:
    b = create_backbone(ast(), num_classes=5, in_chans=1).double().eval()
    assert (b.grid, b.num_prefix, b.num_classes, b.input) == ((2, 3), 2, 5, InputSpec((8, 12), 1, (4, 4)))
    x = torch.randn(2, 1, 8, 12, dtype=torch.float64)
    convolution = b.model.audio_spectrogram_transformer.embeddings.patch_embeddings.projection
    by_hand = patchify(x, 4) @ convolution.weight[:, 0].flatten(1).T + convolution.bias
    assert torch.allclose(b.embed(x), by_hand, atol=1e-12)
    features = b.encode(b.embed(x), b.positions())
    assert torch.allclose(b.model.classifier.dense(b.pooled(features)), b(x), atol=1e-12)
    assert b.head_input == "mean of the CLS and distillation tokens"
    inside = "audio_spectrogram_transformer.embeddings"
    assert b.prefix_names == (f"{inside}.cls_token", f"{inside}.distillation_token") and b.table_prefix == 2
    assert set(b.prefix_names) <= set(b.model.state_dict())


@pytest.mark.parametrize("kind", ["learned", "sincos", "none"])
@torch.no_grad()
def test_its_table_takes_other_positions_and_keeps_the_prefix_rows_apart(kind: str) -> None:
    b = create_backbone(ast(), positions=kind).double().eval()
    table = b.model.embeddings.position_embeddings
    if kind == "sincos":
        assert torch.equal(table[0, 2:], sincos((2, 3), 16).double()) and not table[0, :2].any()
    assert (b.positions().table is None) == (kind == "none")
    x = torch.randn(2, 1, 8, 12, dtype=torch.float64)
    own = b.model(x[:, 0].mT).last_hidden_state
    features = b.encode(b.embed(x), b.positions())
    assert torch.allclose(features.patches, own[:, 2:], atol=1e-12)
    b.erase_positions()
    assert not table[0, 2:].any()


def test_sizes_are_those_of_the_config_or_refused() -> None:
    assert create_backbone(ast(), img_size=(16, 8)).grid == (4, 2)
    built = transformers.ASTModel(ast())
    with pytest.raises(SitusError, match=r"img_size=16x8: must be 8x12"):
        create_backbone(built, img_size=(16, 8))
    with pytest.raises(SitusError, match="does not resample"):
        create_backbone(built).positions((4, 4))
    with pytest.raises(SitusError, match=r"frequency_stride .*, not 3 and 4"):
        create_backbone(ast(frequency_stride=3))


@pytest.mark.parametrize("kind", UNPLACED)
def test_encoders_whose_tokens_have_no_places_are_refused_with_the_reason(kind: str, tmp_path) -> None:
    """By their config and by their folder; and the reason is in transformers' own class."""
    config = transformers.AutoConfig.for_model(kind)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    convolutions = [name for name, part in model.named_modules() if isinstance(part, nn.Conv1d)]
    if kind == "whisper":
        assert {"encoder.conv1", "encoder.conv2"} <= set(convolutions)
    else:
        assert any("pos_conv_embed" in name for name in convolutions)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str), encoding="utf-8")
    for source in (config, model, tmp_path, BackboneConfig(f"hf:{tmp_path}")):
        with pytest.raises(SitusError) as caught:
            create_backbone(source)
        assert UNPLACED[kind] in str(caught.value)


def test_every_tensor_has_its_role_and_every_axis_its_group() -> None:
    b = create_backbone(ast(), num_classes=5)
    roles = b.roles()
    assert not [name for name, role in roles.items() if role.part == "unknown"]
    prefixes = {name.rpartition(".")[2] for name, role in roles.items() if role.part == "prefix"}
    assert prefixes == {"cls_token", "distillation_token"}
    sizes = {group.name: group.size for group in b.groups()}
    assert (sizes["residual"], sizes["blocks.0.mlp"], sizes["blocks.1.heads"]) == (16, 32, 2)
