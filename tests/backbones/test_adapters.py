"""Adapters: nothing changes at first, and later what the formula says."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch.nn import functional as F

from situs.backbones import create_backbone
from situs.backbones.adapters import add_adapters
from situs.errors import SitusError


def test_the_forward_is_that_of_mlps_with_the_formula_behind_them() -> None:
    torch.manual_seed(0)
    shape = {"depth": 2, "embed_dim": 24, "num_heads": 2}
    plain = create_backbone("vit_tiny_patch16_224", img_size=28, patch_size=14, num_classes=5, model_args=shape)
    plain, images = plain.double().eval(), torch.randn(2, 3, 28, 28, dtype=torch.float64)
    adapted = deepcopy(plain)
    names = add_adapters(adapted, 6)
    parameters = dict(adapted.named_parameters())
    assert len(names) == 8 and parameters.keys() - set(names) == dict(plain.named_parameters()).keys()
    assert torch.allclose(adapted(images), plain(images), atol=1e-12)
    with torch.no_grad():
        for name in names:
            parameters[name].normal_()
    copy = deepcopy(adapted)
    for number, block in enumerate(plain.model.blocks):
        down, up = (
            [parameters[f"model.blocks.{number}.mlp.fc2.adapter.{part}.{kind}"] for kind in ("weight", "bias")]
            for part in ("down", "up")
        )

        def behind(y: torch.Tensor, down: list = down, up: list = up) -> torch.Tensor:
            return y + F.linear(F.gelu(F.linear(y, *down)), *up)

        inner = block.mlp.forward
        block.mlp.forward = lambda x, inner=inner, behind=behind: behind(inner(x))
    assert torch.allclose(adapted(images), plain(images), atol=1e-9)
    assert torch.equal(copy(images), adapted(images))


def test_a_block_whose_mlp_is_not_known_is_refused() -> None:
    shape = {"depth": 1, "embed_dim": 24, "num_heads": 2}
    model = create_backbone("vit_tiny_patch16_224", img_size=28, patch_size=14, model_args=shape)
    model.model.blocks[0].mlp = torch.nn.Sequential(torch.nn.Linear(24, 24))
    with pytest.raises(SitusError, match="does not know the last layer of this model's MLP"):
        add_adapters(model, 4)
