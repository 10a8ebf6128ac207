"""LoRA: the product stands beside the weight wherever the model reads it, and merging it changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from situs.backbones import create_backbone
from situs.backbones.base import Backbone
from situs.backbones.lora import add_lora, low_rank_names, merge_lora, merged_state
from situs.errors import SitusError

NAMES = {
    "plain": ("vit_tiny_patch16_224", {}),
    "eva": ("eva02_tiny_patch14_224", {}),
    "no bias": ("vit_tiny_patch16_224", {"qkv_bias": False}),
}


def made(kind: str = "plain") -> Backbone:
    torch.manual_seed(0)
    name, more = NAMES[kind]
    args = {"depth": 2, "embed_dim": 24, "num_heads": 2, **more}
    return create_backbone(name, img_size=28, patch_size=14, num_classes=5, model_args=args).double().eval()


def moved(backbone: Backbone) -> Backbone:
    """With products that are not zero, as after some training."""
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            if name in low_rank_names(backbone):
                parameter.normal_(std=0.3)
    return backbone


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("targets", [("qkv",), ("blocks",), ("proj", "fc1")])
def test_the_forward_is_that_of_weights_with_the_product_added_by_hand(kind: str, targets: tuple[str, ...]) -> None:
    if kind == "eva" and "fc1" in targets:
        targets = ("proj",)  # its MLP calls its layers otherwise
    images = torch.randn(2, 3, 28, 28, dtype=torch.float64)
    plain, tuned = made(kind), made(kind)
    layers = add_lora(tuned, rank=3, alpha=6.0, targets=targets)
    assert layers
    torch.testing.assert_close(tuned(images), plain(images), rtol=0, atol=0)  # up is zero at first
    moved(tuned)
    given = dict(tuned.named_parameters())
    with torch.no_grad():
        for name in layers:
            up, down = (given[f"{name}.parametrizations.weight.0.{part}"] for part in ("up", "down"))
            plain.get_submodule(name).weight += 6.0 / 3 * torch.einsum("or,ri->oi", up, down)
    torch.testing.assert_close(tuned(images), plain(images), rtol=1e-12, atol=1e-12)
    before = made(kind)(images)
    assert float((tuned(images) - before).norm() / before.norm()) > 0.01


def test_merging_gives_the_same_logits_under_the_models_own_names() -> None:
    tuned, images = made(), torch.randn(2, 3, 28, 28, dtype=torch.float64)
    names = {*tuned.state_dict()}
    add_lora(tuned, 3, 6.0, ("blocks",))
    before, together = moved(tuned)(images), merged_state(tuned.state_dict())
    merge_lora(tuned)
    assert {*tuned.state_dict()} == names == {*together}
    assert all(torch.equal(value, together[name]) for name, value in tuned.state_dict().items())
    assert torch.equal(tuned(images), before)
    assert all(parameter.requires_grad for parameter in tuned.parameters())
    assert merged_state(tuned.state_dict()).keys() == tuned.state_dict().keys()


def test_the_gradient_of_the_products_is_that_of_the_weight_through_them() -> None:
    tuned, plain = made(), made()
    images, labels = torch.randn(2, 3, 28, 28, dtype=torch.float64), torch.tensor([1, 3])
    (layer, *_) = add_lora(tuned, 3, 6.0, ("qkv",))
    moved(tuned)
    plain.load_state_dict(merged_state(tuned.state_dict()))
    F.cross_entropy(plain(images), labels).backward()
    F.cross_entropy(tuned(images), labels).backward()
    whole, given = plain.get_submodule(layer).weight.grad, dict(tuned.named_parameters())
    up, down = (given[f"{layer}.parametrizations.weight.0.{part}"] for part in ("up", "down"))
    torch.testing.assert_close(up.grad, 2.0 * whole @ down.T, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(down.grad, 2.0 * up.T @ whole, rtol=1e-9, atol=1e-12)


def test_a_target_that_no_matrix_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(SitusError, match=r"nope.*qkv, blocks, fc1, fc2, proj") as error:
        add_lora(made(), 3, 6.0, ("qkv", "nope"))
    assert error.value.field == "tuning.targets"
    flat = create_backbone("resnet10t", num_classes=5)
    with pytest.raises(SitusError, match="its blocks have no matrices"):
        add_lora(flat, 3, 6.0, ("qkv",))
