"""The weights seen are those the wrapped library itself computes when it is told to compute them.

timm's attentions have a slow path that forms softmax(QKᵀ) and sends it through `attn_drop`; transformers has its
eager path and `output_attentions`. Neither takes part in ours.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from situs.backbones import create_backbone
from situs.backbones.attention_maps import has_cls, watch_attention
from situs.core.attention import attention_weights
from situs.errors import SitusError

EXACT = 1e-10
SMALL: dict[str, Any] = {"depth": 3, "embed_dim": 64, "num_heads": 4}
TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": dict(img_size=(64, 96), model_args=SMALL),
    "vit_tiny_patch16_224 with q/k norms": dict(img_size=(64, 96), model_args={**SMALL, "qk_norm": True}),
    "deit_tiny_distilled_patch16_224": dict(img_size=(64, 96), model_args=SMALL),
    "vit_base_patch16_reg4_gap_256": dict(img_size=(64, 48), model_args=SMALL),
    "vit_small_patch14_reg4_dinov2": dict(img_size=(56, 84), model_args=SMALL),
    "eva02_tiny_patch14_224": dict(img_size=(56, 84), model_args=SMALL),
    "vit_small_patch16_rope_ape_224": dict(img_size=(64, 96), model_args=SMALL),
    "vit_small_patch16_rope_mixed_224": dict(img_size=(64, 96), model_args=SMALL),
    "vit_small_patch16_dinov3": dict(img_size=(64, 96), model_args=SMALL),
    "vit_relpos_small_patch16_224": dict(img_size=(64, 96), model_args=SMALL),
    "vit_relpos_base_patch16_clsgap_224": dict(img_size=(64, 48), model_args=SMALL),
    "vit_srelpos_small_patch16_224": dict(img_size=(64, 96), model_args=SMALL),
}
CLS = {
    "vit_tiny_patch16_224": True,
    "deit_tiny_distilled_patch16_224": True,
    "vit_base_patch16_reg4_gap_256": False,  # four registers, and none of them is CLS
    "vit_small_patch14_reg4_dinov2": True,
    "eva02_tiny_patch14_224": True,
    "vit_relpos_small_patch16_224": False,
    "vit_relpos_base_patch16_clsgap_224": True,
}


def make_timm(name: str) -> Any:
    torch.manual_seed(0)
    backbone = create_backbone(name.partition(" ")[0], **TIMM[name]).double().eval()
    if "mixed" in name:
        backbone.model.rope.float()  # timm computes mixed frequencies in float32 whatever the model's type
    for parameter in backbone.parameters():
        if parameter.dim() <= 2:  # biases, norms and bias tables must all matter
            nn.init.normal_(parameter, std=0.2)
    return backbone


def seen_by_us(backbone: Any, tokens: Tensor) -> list[Tensor]:
    found: list[Tensor] = []

    def see(layer: int, weights: Tensor) -> None:
        assert layer == len(found)
        found.append(weights)

    with torch.no_grad():
        stream = backbone.assemble(tokens, backbone.positions())
        out = watch_attention(backbone, stream, see)
        assert torch.equal(out.z, backbone.blocks(stream).z)  # looking changes nothing
    return found


@pytest.mark.parametrize("name", TIMM)
def test_weights_are_those_of_timms_own_slow_path(name: str) -> None:
    backbone = make_timm(name)
    x = torch.randn(2, 3, *backbone.input.shape, dtype=torch.float64)
    found = seen_by_us(backbone, backbone.embed(x))
    own: list[Tensor] = []
    for block in backbone.model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda _, __, weights: own.append(weights))
    with torch.no_grad():
        backbone.model(x)
    assert len(found) == len(own) == backbone.depth
    length = backbone.num_prefix + backbone.num_tokens
    for ours, theirs in zip(found, own, strict=True):
        assert ours.shape == (2, 4, length, length)
        assert (ours - theirs).abs().max().item() < EXACT
        assert (ours.sum(dim=-1) - 1).abs().max().item() < EXACT
    assert (found[0] - found[1]).abs().max().item() > 1e-3  # the order of the layers matters


@pytest.mark.parametrize(
    ("kind", "entries"),
    [
        ("ViTModel", dict(image_size=16, patch_size=4, num_channels=3)),
        ("Dinov2WithRegistersModel", dict(image_size=16, patch_size=4, num_channels=3, num_register_tokens=2)),
        ("BertModel", dict(vocab_size=50, max_position_embeddings=15)),
    ],
)
def test_weights_are_those_transformers_tells(kind: str, entries: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    from situs.backbones import create_backbone

    torch.manual_seed(0)
    cls = getattr(transformers, kind)
    shape = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    model = cls(cls.config_class(**shape, **entries, attn_implementation="eager")).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    backbone = create_backbone(model)
    text = kind == "BertModel"
    x = torch.randint(3, 50, (2, 15)) if text else torch.randn(2, 3, 16, 16, dtype=torch.float64)
    found = seen_by_us(backbone, backbone.embed(x))
    with torch.no_grad():
        own = model(x, output_attentions=True).attentions
    tolerance = 1e-6 if kind == "ViTModel" else EXACT  # its eager softmax is float32 whatever the model's type
    for ours, theirs in zip(found, own, strict=True):
        assert (ours - theirs).abs().max().item() < tolerance
    assert has_cls(backbone) is not text


def test_a_mask_and_a_bias_act_on_the_logits() -> None:
    q, k = torch.randn(2, 1, 2, 3, 4, dtype=torch.float64)
    plain = attention_weights(q, k)
    seen = torch.tensor([True, False, True])
    hidden = attention_weights(q, k, seen)
    assert torch.equal(hidden[..., 1], torch.zeros(1, 2, 3, dtype=torch.float64))
    torch.testing.assert_close(hidden[..., 0] / hidden[..., 2], plain[..., 0] / plain[..., 2])
    pushed = attention_weights(q, k, torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))
    odds = (pushed[..., 1] / pushed[..., 0]) / (plain[..., 1] / plain[..., 0])
    torch.testing.assert_close(odds, torch.full_like(odds, torch.e))
    torch.testing.assert_close(attention_weights(q, k, scale=0.0), torch.full_like(plain, 1 / 3))
    assert attention_weights(q.bfloat16(), k.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("name", CLS)
def test_cls_is_told_from_other_prefix_tokens(name: str) -> None:
    assert has_cls(make_timm(name)) is CLS[name]


@pytest.mark.parametrize(("name", "why"), [("resnet18", "no tokens"), ("swin_tiny_patch4_window7_224", "its window")])
def test_a_model_without_such_attention_is_refused(name: str, why: str) -> None:
    with torch.device("meta"):  # no weights are drawn
        backbone = create_backbone(name).eval()
    with pytest.raises(SitusError, match=rf"{name}: .* not every token attends to every other token: .*{why}"):
        watch_attention(backbone, None, lambda layer, weights: None)  # pyright: ignore[reportArgumentType]


def test_a_causal_model_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    from situs.backbones import create_backbone

    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    backbone = create_backbone(config).eval()
    with pytest.raises(SitusError, match=r"GPT2Model: .* not every token attends to every other token: .*causal"):
        watch_attention(backbone, None, lambda layer, weights: None)  # pyright: ignore[reportArgumentType]


def test_training_mode_is_refused() -> None:
    backbone = make_timm("vit_tiny_patch16_224").train()
    with pytest.raises(SitusError, match=r"call eval\(\) first"):
        watch_attention(backbone, None, lambda layer, weights: None)  # pyright: ignore[reportArgumentType]
