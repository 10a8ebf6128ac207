"""A plain ViT of timm as transformers' own: the same outputs under the other names, or a reason."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
import torch
from builders import small_swin, small_vit
from torch import nn

from situs.backbones.hf.convert import as_transformers
from situs.errors import SitusError

transformers = pytest.importorskip("transformers")

CASES: dict[str, dict[str, Any]] = {
    "square": dict(img_size=12, num_classes=3),
    "one class": dict(img_size=12, num_classes=1),
    "rectangle": dict(img_size=(8, 12), num_classes=3),
    "flat patches": dict(img_size=(8, 12), patch_size=(2, 4), in_chans=1, num_classes=0),
    "no biases of queries": dict(img_size=8, num_classes=0, model_args={"qkv_bias": False, "mlp_ratio": 2}),
    "no table": dict(img_size=8, num_classes=0, positions="none"),
}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_it_is_the_same_function(case: str) -> None:
    torch.manual_seed(0)
    ours = small_vit(**CASES[case]).eval()
    for parameter in ours.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    theirs = as_transformers(ours)
    x = torch.randn(2, ours.input.channels, *(ours.input.shape or ()))
    model: Any = theirs.model
    tokens = model(x, output_hidden_states=True)
    if ours.num_classes:
        assert type(model).__name__ == "ViTForImageClassification" and model.config.num_labels == ours.num_classes
        torch.testing.assert_close(tokens.logits, ours.model(x), rtol=0, atol=1e-5)
    else:
        assert type(model).__name__ == "ViTModel"
        torch.testing.assert_close(tokens.last_hidden_state, ours.model.forward_features(x), rtol=0, atol=1e-5)
    torch.testing.assert_close(theirs(x), ours(x), rtol=0, atol=1e-5)
    assert as_transformers(theirs) is theirs


def with_part(name: str, part: nn.Module, **fields: Any) -> Any:
    backbone = small_vit(**fields)
    backbone.model.set_submodule(name, part)
    return backbone


REFUSED: dict[str, tuple[Any, str]] = {
    "registers": (lambda: small_vit(model_args={"reg_tokens": 2}), "has 3 prefix tokens instead of CLS alone"),
    "mean": (
        lambda: small_vit(model_args={"global_pool": "avg", "fc_norm": False}),
        "a head whose input is not only the CLS token",
    ),
    "epsilon": (lambda: with_part("norm", nn.LayerNorm(16, eps=1e-3)), "has norms with different epsilons"),
    "no bias": (lambda: with_part("blocks.0.mlp.fc1", nn.Linear(16, 64, bias=False)), "has layers without a bias"),
    "scale": (lambda: small_vit(model_args={"init_values": 0.1}), "has LayerScale"),
    "norm of queries": (lambda: small_vit(model_args={"qk_norm": True}), "has norms of queries and keys"),
    "first norm, so no bias of patches": (
        lambda: small_vit(model_args={"pre_norm": True, "init_values": 0.1}),
        "has a norm before its blocks and LayerScale and layers without a bias",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_transformers_does_not_have_is_the_reason(case: str) -> None:
    make, reason = REFUSED[case]
    backbone = make()
    with pytest.raises(SitusError) as caught:
        as_transformers(backbone)
    said = str(caught.value)
    assert said.startswith(f"{backbone.name}: has ") and f"{reason}, which transformers' ViT does not have; " in said
    assert caught.value.field == "form"


def test_another_family_and_a_missing_library_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SitusError, match="is not a plain ViT"):
        as_transformers(small_swin())
    vit, real = small_vit(), builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "transformers":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SitusError, match=r"^An export to transformers .*pip install 'situs\[hf\]'"):
        as_transformers(vit)
