from __future__ import annotations

import timm
import torch
from torch import nn

from situs.backbones.shapes import shapes_alone

NAMES = (
    *("test_vit", "eva02_tiny_patch14_224", "vit_relpos_small_patch16_224"),
    *("swin_tiny_patch4_window7_224", "resnet18"),
)


def facts(model: nn.Module) -> dict[str, tuple[object, ...]]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: (t.shape, t.dtype, t.device.type, t.requires_grad) for name, t in tensors.items()}


def test_a_model_is_as_torch_makes_it_on_the_meta_device_and_draws_nothing() -> None:
    state = torch.get_rng_state()
    for name in NAMES:
        with torch.device("meta"):
            slow = timm.create_model(name)
        with shapes_alone():
            quick = timm.create_model(name)
        assert facts(quick) == facts(slow), name
    assert torch.equal(torch.get_rng_state(), state)


def test_what_has_values_is_filled_and_afterwards_everything_is() -> None:
    with shapes_alone():
        held = torch.empty(3, device="cpu").fill_(2).mul_(3)
        assert torch.empty(3).normal_().is_meta
    assert held.tolist() == [6, 6, 6]
    assert nn.init.ones_(torch.empty(2)).tolist() == [1, 1]
